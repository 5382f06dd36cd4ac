#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace epikv {

// The text in Unicode Normalization Form C, by utf8proc's Unicode version: it puts marks in order
// that the older tables of the `tokenizers` library do not know. Precondition: `text` is UTF-8.
std::string Nfc(absl::string_view text);

}  // namespace epikv
