#pragma once

#include "policies/spec.h"

namespace epikv {

// Evicts by chance in every lane, and fails a request for which one signal contradicts another: the
// attention that is pushed must be what the pulled queries give over the pulled keys.
extern const PolicySpec kProbePolicy;

}  // namespace epikv
