#pragma once

#include "policies/spec.h"

namespace epikv {

// Every policy of this build, sorted by name.
PolicyCatalog AllPolicies();

}  // namespace epikv
