#include "runtime/text/utf8.h"

#include <cstdint>

namespace epikv {
namespace {

constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";

struct Prefix {
  enum class Kind {
    kWhole,       // a code point
    kIncomplete,  // all of the input, the beginning of a code point
    kInvalid,     // the beginning of a code point, followed by what cannot continue it
  };
  Kind kind;
  size_t length;  // bytes, >= 1
};

// What the bytes begin with (Unicode 3.9, table 3-7). Precondition: not empty.
Prefix FirstOf(absl::string_view bytes) {
  const auto at = [bytes](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {Prefix::Kind::kWhole, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Prefix::Kind::kInvalid, 1};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range keeps out overlong forms, surrogates and what is past U+10FFFF.
  uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Prefix::Kind::kIncomplete, i};
    if (at(i) < low || at(i) > high) return {Prefix::Kind::kInvalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Prefix::Kind::kWhole, length};
}

}  // namespace

std::optional<size_t> FirstInvalidUtf8(absl::string_view text) {
  size_t offset = 0;
  while (offset < text.size()) {
    const Prefix prefix = FirstOf(text.substr(offset));
    if (prefix.kind != Prefix::Kind::kWhole) return offset;
    offset += prefix.length;
  }
  return std::nullopt;
}

std::string ValidUtf8(absl::string_view text) {
  Utf8Repair repair;
  std::string valid = repair.Append(text);
  return valid + repair.Flush();
}

std::string Utf8Repair::Append(absl::string_view bytes) {
  pending_.append(bytes.data(), bytes.size());
  absl::string_view rest = pending_;
  std::string text;
  while (!rest.empty()) {
    const Prefix prefix = FirstOf(rest);
    if (prefix.kind == Prefix::Kind::kIncomplete) break;
    const absl::string_view whole = rest.substr(0, prefix.length);
    const bool valid = prefix.kind == Prefix::Kind::kWhole;
    const absl::string_view out = valid ? whole : kReplacement;
    text.append(out.data(), out.size());
    rest.remove_prefix(prefix.length);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return text;
}

std::string Utf8Repair::Flush() {
  if (pending_.empty()) return "";
  pending_.clear();
  return std::string(kReplacement);
}

}  // namespace epikv
