#pragma once

#include "policies/spec.h"

namespace epikv {

// Breaks the contract of policy.h in its third round in the way that its parameter `fault` names
// (throws_opening: at once); until then it drops the oldest tokens.
extern const PolicySpec kBrokenPolicy;

}  // namespace epikv
