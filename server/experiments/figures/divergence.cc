#include "server/experiments/figures/divergence.h"

#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_map.h"

namespace epikv {
namespace {

// What a sum of float32 probabilities leaves to 1, and less, is rounding.
constexpr double kLeastRest = 1e-6;
// A token that cannot be (-inf) counts as one of e^-100.
constexpr double kLeastLogprob = -100;

// p log(p / q) - p + q: summed over distributions that is the divergence, and no term is negative,
// so that equal distributions have one of 0 whatever is rounded.
double Term(double p, double q, double log_ratio) { return p * log_ratio - p + q; }

}  // namespace

double KlNats(absl::Span<const TokenLogprob> full, absl::Span<const TokenLogprob> arm) {
  absl::flat_hash_map<int32_t, double> of_arm;
  of_arm.reserve(arm.size());
  double arm_unlisted = 1;
  for (const TokenLogprob& token : arm) {
    const double log_q = std::max(double{token.logprob}, kLeastLogprob);
    of_arm.emplace(token.token, log_q);
    arm_unlisted -= std::exp(log_q);
  }
  double sum = 0, full_unlisted = 1, full_alone = 0, arm_elsewhere = 1;
  for (const TokenLogprob& token : full) {
    const double log_p = std::max(double{token.logprob}, kLeastLogprob);
    const double p = std::exp(log_p);
    full_unlisted -= p;
    const auto other = of_arm.find(token.token);
    if (other == of_arm.end()) {
      full_alone += p;
      continue;
    }
    const double q = std::exp(other->second);
    sum += Term(p, q, log_p - other->second);
    arm_elsewhere -= q;
  }
  full_unlisted = std::max(full_unlisted, kLeastRest);
  arm_unlisted = std::max(arm_unlisted, kLeastRest);
  arm_elsewhere = std::max(arm_elsewhere, arm_unlisted);
  if (full_alone > 0) {
    // The likeliest that they can be under the arm: what it does not list, unless less is enough.
    const double enough = arm_elsewhere * full_alone / (full_alone + full_unlisted);
    const double q = std::min(enough, arm_unlisted);
    sum += Term(full_alone, q, std::log(full_alone / q));
    arm_elsewhere = std::max(arm_elsewhere - q, kLeastRest);
  }
  return sum + Term(full_unlisted, arm_elsewhere, std::log(full_unlisted / arm_elsewhere));
}

Divergence Diverge(const std::vector<std::vector<TokenLogprob>>& full,
                   const std::vector<std::vector<TokenLogprob>>& arm) {
  Divergence found{.tokens = static_cast<int64_t>(full.size())};
  for (size_t i = 0; i < full.size(); ++i) {
    found.agreed += full[i].front().token == arm[i].front().token ? 1 : 0;
    found.kl_nats += KlNats(full[i], arm[i]);
  }
  return found;
}

}  // namespace epikv
