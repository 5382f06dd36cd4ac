#pragma once

#include "server/experiments/metric_tally.h"

namespace epikv {

// An arm's sums after so many units with one observation each, of which `ones` are 1 and the rest
// 0.
inline ArmSums CountedUnits(double units, double ones) {
  return {.units = units,
          .s = ones,
          .n = units,
          .ss = ones,
          .sn = ones,
          .nn = units,
          .ssss = ones,
          .sssn = ones,
          .ssnn = ones,
          .snnn = ones,
          .nnnn = units,
          .squares = ones};
}

}  // namespace epikv
