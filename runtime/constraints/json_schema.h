#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace epikv {

// A JSON schema of which every keyword will hold.
struct JsonSchema {
  // The schema as xgrammar is to be given it: without what merely describes (title, default ...),
  // and with what it would not take to be said unless it is.
  std::string text;
  std::vector<std::string> patterns;  // its regexes
};

// INVALID_ARGUMENT, with the place and the keyword, for a schema with one that xgrammar does not
// know, or leaves out where it stands, or with a value that it cannot have.
absl::StatusOr<JsonSchema> ReadJsonSchema(absl::string_view schema);

}  // namespace epikv
