#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"

namespace epikv {

// Least number of inserted, deleted and replaced bytes.
size_t EditDistance(absl::string_view a, absl::string_view b);

// Whether who wrote `name` may have meant `known`.
bool IsClose(absl::string_view name, absl::string_view known);

}  // namespace epikv
