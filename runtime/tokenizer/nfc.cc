#include "runtime/tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

namespace epikv {
namespace {

// Code points after canonical decomposition, marks not yet in order.
std::vector<utf8proc_int32_t> Decompose(absl::string_view text) {
  constexpr utf8proc_ssize_t kLongest = 8;  // of one code point; Unicode's is 4
  std::vector<utf8proc_int32_t> result;
  result.reserve(text.size());
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  const auto size = static_cast<utf8proc_ssize_t>(text.size());
  for (utf8proc_ssize_t i = 0; i < size;) {
    utf8proc_int32_t code_point;
    i += utf8proc_iterate(bytes + i, size - i, &code_point);
    utf8proc_int32_t parts[kLongest];
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(code_point, parts, kLongest, UTF8PROC_DECOMPOSE, nullptr);
    result.insert(result.end(), parts, parts + count);
  }
  return result;
}

// With each run of marks in canonical order. utf8proc's own ordering takes time quadratic in a
// run's length, which a client chooses.
std::vector<utf8proc_int32_t> WithOrderedMarks(std::vector<utf8proc_int32_t> code_points) {
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

std::string Nfc(absl::string_view text) {
  const bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return (c & 0x80) == 0; });
  if (ascii) return std::string(text);
  std::vector<utf8proc_int32_t> code_points = WithOrderedMarks(Decompose(text));
  const utf8proc_ssize_t count = utf8proc_normalize_utf32(
      code_points.data(), static_cast<utf8proc_ssize_t>(code_points.size()),
      static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  std::string result;
  result.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t length = utf8proc_encode_char(code_points[i], bytes);
    result.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
  }
  return result;
}

}  // namespace epikv
