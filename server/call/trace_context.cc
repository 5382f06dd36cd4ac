#include "server/call/trace_context.h"

#include <algorithm>
#include <cstdint>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

// "00-<trace id>-<span id>-<flags>"
constexpr size_t kVersionEnd = 2, kTraceIdEnd = 35, kSpanIdEnd = 52, kEnd = 55;

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

bool IsHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return HexDigit(c) >= 0; });
}

bool IsId(absl::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != text.npos;
}

std::string RandomId() {  // 16 digits
  thread_local absl::BitGen random;
  return absl::StrCat(absl::Hex(
      absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, UINT64_MAX), absl::kZeroPad16));
}

}  // namespace

std::string TraceContext::ToHeader() const {
  return absl::StrCat("00-", trace_id, "-", span_id, sampled ? "-01" : "-00");
}

std::optional<TraceContext> ParseTraceParent(absl::string_view header) {
  if (header.size() < kEnd || header[kVersionEnd] != '-' || header[kTraceIdEnd] != '-' ||
      header[kSpanIdEnd] != '-') {
    return std::nullopt;
  }
  const absl::string_view version = header.substr(0, kVersionEnd);
  const absl::string_view trace_id = header.substr(3, 32), span_id = header.substr(36, 16);
  const absl::string_view flags = header.substr(53, 2);
  if (!IsHex(version) || version == "ff" || !IsId(trace_id) || !IsId(span_id) || !IsHex(flags)) {
    return std::nullopt;
  }
  // Later versions may append fields.
  if (header.size() > kEnd && (version == "00" || header[kEnd] != '-')) return std::nullopt;
  return TraceContext{.trace_id = std::string(trace_id),
                      .span_id = std::string(span_id),
                      .sampled = (HexDigit(flags[1]) & 1) != 0};
}

TraceContext NewSpan(const std::optional<TraceContext>& caller) {
  return {.trace_id = caller.has_value() ? caller->trace_id : RandomId() + RandomId(),
          .span_id = RandomId(),
          .sampled = caller.has_value() && caller->sampled};
}

}  // namespace epikv
