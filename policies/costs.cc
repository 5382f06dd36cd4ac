#include "policies/costs.h"

#include <initializer_list>

namespace epikv {
namespace {

#include "policies/costs.inc"

}  // namespace

const PolicyCost* FindCost(absl::string_view policy) {
  for (const PolicyCost& cost : kCosts) {
    if (cost.policy == policy) return &cost;
  }
  return nullptr;
}

absl::string_view CostLevel(double share_of_step) {
  if (share_of_step < 0.02) return "cheap";
  return share_of_step < 0.15 ? "moderate" : "heavy";
}

absl::string_view CostsMadeWith() { return kMadeWith; }

}  // namespace epikv
