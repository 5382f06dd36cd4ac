#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace epikv {

// The text in Unicode Normalization Form C. Precondition: `text` is UTF-8.
std::string Nfc(absl::string_view text);

}  // namespace epikv
