#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "epikv/v1/experiment.pb.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/subgroups.h"
#include "server/experiments/definition/windows.h"

namespace epikv {

// The arms of an experiment, by place.
class Arms {
 public:
  explicit Arms(const v1::Experiment& experiment) : experiment_(experiment) {
    for (int i = 0; i < experiment.arms_size(); ++i) {
      if (experiment.arms(i).control()) control_ = static_cast<size_t>(i);
    }
  }
  size_t size() const { return static_cast<size_t>(experiment_.arms_size()); }
  size_t control() const { return control_; }
  const v1::Arm& at(size_t place) const { return experiment_.arms(static_cast<int>(place)); }
  std::optional<size_t> Find(const std::string& name) const {
    for (size_t i = 0; i < size(); ++i) {
      if (at(i).name() == name) return i;
    }
    return std::nullopt;
  }

  // That a window was dealt.
  std::optional<size_t> OfWindow(int64_t window) const {
    const v1::Arm* const arm = ArmOf(experiment_, WindowUnit(window));
    return arm == nullptr ? std::nullopt : Find(arm->name());
  }

 private:
  const v1::Experiment& experiment_;
  size_t control_ = 0;
};

// Whose an observation is.
struct Owner {
  size_t arm = 0;
  uint64_t unit = 0;  // a hash, or a window
  // Of the unit's first request that is analysed, which no arm has had a hand in.
  int64_t prompt_tokens = 0;
  std::optional<double> covariate;  // the client's
  Classes classes = {};
  bool first = false;  // this is that request
};

}  // namespace epikv
