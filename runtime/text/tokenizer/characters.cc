#include "runtime/text/tokenizer/characters.h"

#include <utf8proc.h>

#include <cstdint>

namespace epikv {
namespace {

struct Character {
  int32_t code_point;
  size_t length;  // bytes
};

// Precondition: not empty.
Character First(absl::string_view text) {
  utf8proc_int32_t code_point;
  const utf8proc_ssize_t length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                       static_cast<utf8proc_ssize_t>(text.size()), &code_point);
  return {code_point, static_cast<size_t>(length)};
}

// Precondition: not empty.
Character Last(absl::string_view text) {
  size_t begin = text.size() - 1;
  while ((text[begin] & 0xC0) == 0x80) --begin;
  return First(text.substr(begin));
}

// The property White_Space.
bool IsSpace(int32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsWord(int32_t c) {
  // Alphabetic symbols (circled and squared letters) and the joiners have no category of their own.
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
      (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189)) {
    return true;
  }
  if (c == 0x200C || c == 0x200D) return true;
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool BeginsWithWord(absl::string_view text) {
  return !text.empty() && IsWord(First(text).code_point);
}

bool EndsWithWord(absl::string_view text) { return !text.empty() && IsWord(Last(text).code_point); }

size_t LeadingSpace(absl::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const Character next = First(text.substr(length));
    if (!IsSpace(next.code_point)) break;
    length += next.length;
  }
  return length;
}

size_t TrailingSpace(absl::string_view text) {
  size_t length = 0;
  while (length < text.size()) {
    const Character next = Last(text.substr(0, text.size() - length));
    if (!IsSpace(next.code_point)) break;
    length += next.length;
  }
  return length;
}

}  // namespace epikv
