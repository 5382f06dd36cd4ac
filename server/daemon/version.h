#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace epikv {

// The commit that was built, "-dirty" behind it where files differed from it; "unknown" where
// nothing says it.
absl::string_view Commit();

// "epikvd 0.2.0 (commit 0123456789ab)"
std::string VersionText();

}  // namespace epikv
