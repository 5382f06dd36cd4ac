#pragma once

#include "policies/lane.h"

namespace epikv {

// Turns one lane's scores into others. Immutable.
class Decorator {
 public:
  virtual ~Decorator() = default;

  // score, result: fp32, by slot, [n].
  virtual at::Tensor Apply(const at::Tensor& score, Lane& lane) const = 0;
};

}  // namespace epikv
