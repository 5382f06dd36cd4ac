#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace epikv {

// The JSON value as Python's json.dumps(value, ensure_ascii=False, indent=indent) writes it, which
// is how chat templates do; numbers stay as they are spelt. Keys keep their order. INVALID_ARGUMENT
// for what is no JSON, is nested deeper than 64, has a key twice, or would be longer than 16 MiB.
absl::StatusOr<std::string> PythonJson(absl::string_view json,
                                       std::optional<int> indent = std::nullopt);

// A JSON string of the text, which is UTF-8.
std::string PythonJsonString(absl::string_view text);

}  // namespace epikv
