#include "runtime/text/tokenizer/unicode_form.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "absl/strings/ascii.h"

namespace epikv {
namespace {

using CodePoints = std::vector<utf8proc_int32_t>;

bool IsAscii(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
}

CodePoints ToCodePoints(absl::string_view text) {
  CodePoints result;
  result.reserve(text.size());
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const auto size = static_cast<utf8proc_ssize_t>(text.size());
  for (utf8proc_ssize_t i = 0; i < size;) {
    utf8proc_int32_t code_point;
    i += utf8proc_iterate(bytes + i, size - i, &code_point);
    result.push_back(code_point);
  }
  return result;
}

std::string ToText(const CodePoints& code_points) {
  std::string result;
  result.reserve(code_points.size() * 2);
  for (const utf8proc_int32_t code_point : code_points) {
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t length = utf8proc_encode_char(code_point, bytes);
    result.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
  }
  return result;
}

// Marks are not yet in order.
CodePoints Decomposed(const CodePoints& code_points, bool compatibility) {
  constexpr utf8proc_ssize_t kLongest = 32;  // of one code point; Unicode's is 18
  const auto options =
      static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (compatibility ? UTF8PROC_COMPAT : 0));
  CodePoints result;
  result.reserve(code_points.size());
  for (const utf8proc_int32_t code_point : code_points) {
    if (code_point < 0xA0) {  // none of these has a decomposition
      result.push_back(code_point);
      continue;
    }
    utf8proc_int32_t parts[kLongest];
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(code_point, parts, kLongest, options, nullptr);
    result.insert(result.end(), parts, parts + count);
  }
  return result;
}

// With each run of marks in canonical order. utf8proc's own ordering takes time quadratic in a
// run's length, which a client chooses.
CodePoints WithOrderedMarks(CodePoints code_points) {
  const auto combining = [](utf8proc_int32_t c) {
    return utf8proc_get_property(c)->combining_class;
  };
  auto begin = code_points.begin();
  while (begin != code_points.end()) {
    if (combining(*begin) == 0) {
      ++begin;
      continue;
    }
    const auto end = std::find_if(begin, code_points.end(),
                                  [&](utf8proc_int32_t c) { return combining(c) == 0; });
    std::stable_sort(begin, end, [&](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining(a) < combining(b);
    });
    begin = end;
  }
  return code_points;
}

}  // namespace

std::string ToForm(absl::string_view text, UnicodeForm form) {
  if (IsAscii(text)) return std::string(text);
  const bool compatibility = form == UnicodeForm::kNfkc || form == UnicodeForm::kNfkd;
  CodePoints code_points = WithOrderedMarks(Decomposed(ToCodePoints(text), compatibility));
  if (form == UnicodeForm::kNfc || form == UnicodeForm::kNfkc) {
    const utf8proc_ssize_t count = utf8proc_normalize_utf32(
        code_points.data(), static_cast<utf8proc_ssize_t>(code_points.size()),
        static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    code_points.resize(static_cast<size_t>(count));
  }
  return ToText(code_points);
}

std::string ToLowerCase(absl::string_view text) {
  if (IsAscii(text)) return absl::AsciiStrToLower(text);
  constexpr utf8proc_int32_t kDottedI = 0x130, kDotAbove = 0x307;
  CodePoints result;
  result.reserve(text.size());
  for (const utf8proc_int32_t code_point : ToCodePoints(text)) {
    if (code_point == kDottedI) {  // the one whose lower case is two
      result.insert(result.end(), {'i', kDotAbove});
    } else {
      result.push_back(utf8proc_tolower(code_point));
    }
  }
  return ToText(result);
}

}  // namespace epikv
