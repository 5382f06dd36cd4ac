#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"

// Classes of characters as the Rust `regex` crate has them. Precondition of all: `text` is UTF-8.

namespace epikv {

// \w: letters, marks, numbers, connecting punctuation and joiners.
bool BeginsWithWord(absl::string_view text);
bool EndsWithWord(absl::string_view text);

// \s: bytes of white space at the beginning, or the end, of the text.
size_t LeadingSpace(absl::string_view text);
size_t TrailingSpace(absl::string_view text);

}  // namespace epikv
