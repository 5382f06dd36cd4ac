#pragma once

#include <google/protobuf/map.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "epikv/v1/experiment.pb.h"

// Classes of units in which an experiment compares its primary metric, too (Experiment.subgroups).

namespace epikv {

inline constexpr size_t kMaxSubgroupEdges = 7;
inline constexpr size_t kMaxSubgroupValues = 7;
inline constexpr size_t kMaxDivisions = 2;  // by prompt tokens, by a label

// One way to put units into classes.
struct Division {
  std::string by;  // "prompt_tokens", or the label's key
  bool by_label = false;
  std::vector<std::string> names;  // of its classes, two at least
};

// What is known of a request before its arm acts.
struct SubgroupFacts {
  int64_t prompt_tokens = 0;
  std::string label;  // SubgroupLabelOf
};

// The class of a request in each division, by place in Division::names.
using Classes = std::array<uint8_t, kMaxDivisions>;

class Subgroups {
 public:
  Subgroups() = default;  // no division
  // Precondition: CheckDefinition found no fault with it.
  explicit Subgroups(const v1::Experiment& experiment);

  const std::vector<Division>& divisions() const { return divisions_; }
  size_t num_classes() const;  // of all divisions together
  Classes ClassesOf(const SubgroupFacts& facts) const;

 private:
  std::vector<int64_t> edges_;
  std::vector<std::string> values_;
  std::vector<Division> divisions_;
};

// The value of the label that the experiment's subgroups name, if it is one of theirs. Else "".
std::string SubgroupLabelOf(const v1::Experiment& experiment,
                            const google::protobuf::Map<std::string, std::string>& labels);

}  // namespace epikv
