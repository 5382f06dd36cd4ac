#include "policies/head_profile.h"

#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace epikv {

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadHeadProfile(const ArtefactData& artefact,
                                                                  const ModelShape& shape) {
  const nlohmann::json data = nlohmann::json::parse(artefact.json.begin(), artefact.json.end());
  const absl::Status bad = absl::InvalidArgumentError(
      absl::StrCat("scores must be numbers [", shape.num_layers, "][", shape.num_kv_heads,
                   "], none below 0 and one above it"));
  if (!data.is_object()) return absl::InvalidArgumentError("must be an object");
  const nlohmann::json layers = data.value("scores", nlohmann::json());
  if (!layers.is_array() || std::ssize(layers) != shape.num_layers) return bad;
  auto profile = std::make_shared<HeadProfile>();
  for (const nlohmann::json& heads : layers) {
    if (!heads.is_array() || std::ssize(heads) != shape.num_kv_heads) return bad;
    for (const nlohmann::json& score : heads) {
      if (!score.is_number() || score.get<double>() < 0) return bad;
      profile->scores.push_back(score.get<double>());
    }
  }
  const double sum = std::reduce(profile->scores.begin(), profile->scores.end());
  if (!std::isfinite(sum) || sum == 0) return bad;
  return profile;
}

const HeadProfile* FindHeadProfile(absl::string_view policy, const ModelShape& shape) {
  const auto found = shape.artefacts.find(policy);
  return found == shape.artefacts.end() ? nullptr
                                        : static_cast<const HeadProfile*>(found->second.get());
}

std::vector<int64_t> BudgetsByWeight(absl::Span<const double> weights, int64_t least,
                                     int64_t budget) {
  const double sum = std::reduce(weights.begin(), weights.end());
  const double rest = static_cast<double>((budget - least) * std::ssize(weights));
  std::vector<int64_t> budgets;
  int64_t spent = 0;  // of all lanes so far
  double owed = 0;
  for (const double weight : weights) {
    owed += static_cast<double>(least) + rest * weight / sum;
    const int64_t rounded = std::llround(owed) - spent;  // sums stay exact
    spent += rounded;
    budgets.push_back(rounded);
  }
  return budgets;
}

}  // namespace epikv
