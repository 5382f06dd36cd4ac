#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "policies/spec.h"

namespace epikv {

// What to tell who named a policy that the catalog lacks: the names that may have been meant, and
// what lists all.
std::string UnknownPolicy(PolicyCatalog catalog, absl::string_view name);

}  // namespace epikv
