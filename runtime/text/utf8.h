#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace epikv {

// Offset of the first byte that belongs to no well-formed code point; absent if there is none.
std::optional<size_t> FirstInvalidUtf8(absl::string_view text);

// The text with U+FFFD for what is not well-formed, as Utf8Repair makes it: fit to be told to
// clients, whatever bytes of a file a library has quoted in its error.
std::string ValidUtf8(absl::string_view text);

// Makes well-formed UTF-8 of bytes that come in pieces, cut anywhere. Each longest run that starts
// a code point but cannot end it becomes one U+FFFD, as soon as that is known. The concatenated
// output does not depend on the cuts.
class Utf8Repair {
 public:
  std::string Append(absl::string_view bytes);

  // What the end of the bytes settles: a code point begun and never completed.
  std::string Flush();

 private:
  std::string pending_;  // the beginning of a code point, less than all of it
};

}  // namespace epikv
