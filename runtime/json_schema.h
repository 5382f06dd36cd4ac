#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace epikv {

// A JSON schema of which every keyword will hold: INVALID_ARGUMENT, with the place and the keyword,
// for one that xgrammar does not know, or leaves out where it stands. What merely describes (title,
// default ...) may be anywhere.
absl::Status CheckJsonSchema(absl::string_view schema);

// Its regexes. Precondition: the check was OK.
std::vector<std::string> PatternsOf(absl::string_view schema);

}  // namespace epikv
