#pragma once

#include <string>

#include "absl/strings/string_view.h"

// By utf8proc's Unicode version, which knows characters and the order of marks that the older
// tables of the `tokenizers` library do not.

namespace epikv {

enum class UnicodeForm { kNfc, kNfd, kNfkc, kNfkd };

// The text in a Unicode normalization form. Precondition: `text` is UTF-8.
std::string ToForm(absl::string_view text, UnicodeForm form);

// Each character's lower case, whatever stands around it. Precondition: `text` is UTF-8.
std::string ToLowerCase(absl::string_view text);

}  // namespace epikv
