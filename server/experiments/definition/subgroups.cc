#include "server/experiments/definition/subgroups.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

constexpr char kByPrompt[] = "prompt_tokens";
constexpr char kOther[] = "other";

Division ByPrompt(const std::vector<int64_t>& edges) {
  Division division{.by = kByPrompt};
  int64_t first = 0;
  for (int64_t edge : edges) {
    division.names.push_back(absl::StrCat(first, "-", edge - 1));
    first = edge;
  }
  division.names.push_back(absl::StrCat(first, "+"));
  return division;
}

Division ByLabel(const std::string& key, const std::vector<std::string>& values) {
  Division division{.by = key, .by_label = true, .names = values};
  division.names.emplace_back(kOther);
  return division;
}

}  // namespace

Subgroups::Subgroups(const v1::Experiment& experiment)
    : edges_(experiment.subgroups().prompt_token_edges().begin(),
             experiment.subgroups().prompt_token_edges().end()),
      values_(experiment.subgroups().label().values().begin(),
              experiment.subgroups().label().values().end()) {
  if (!edges_.empty()) divisions_.push_back(ByPrompt(edges_));
  if (!values_.empty()) {
    divisions_.push_back(ByLabel(experiment.subgroups().label().key(), values_));
  }
}

size_t Subgroups::num_classes() const {
  size_t classes = 0;
  for (const Division& division : divisions_) classes += division.names.size();
  return classes;
}

Classes Subgroups::ClassesOf(const SubgroupFacts& facts) const {
  Classes classes = {};
  for (size_t i = 0; i < divisions_.size(); ++i) {
    const ptrdiff_t place =
        divisions_[i].by_label
            ? std::distance(values_.begin(), absl::c_find(values_, facts.label))
            : std::distance(edges_.begin(), absl::c_upper_bound(edges_, facts.prompt_tokens));
    classes[i] = static_cast<uint8_t>(place);
  }
  return classes;
}

std::string SubgroupLabelOf(const v1::Experiment& experiment,
                            const google::protobuf::Map<std::string, std::string>& labels) {
  const v1::SubgroupLabel& wanted = experiment.subgroups().label();
  const auto found = labels.find(wanted.key());
  if (found == labels.end()) return "";
  return absl::c_linear_search(wanted.values(), found->second) ? found->second : "";
}

}  // namespace epikv
