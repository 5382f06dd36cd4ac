#pragma once

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace epikv {

// A place in a distributed trace, as W3C's header `traceparent` carries it. In lower-case hex.
struct TraceContext {
  std::string trace_id;  // 32 digits, not all 0
  std::string span_id;   // 16 digits, not all 0: who calls, or this call
  bool sampled = false;

  std::string ToHeader() const;
};

// Nothing where the header breaks a rule of the standard.
std::optional<TraceContext> ParseTraceParent(absl::string_view header);

// A span of this server: in the caller's trace, or, without one, in a new trace.
TraceContext NewSpan(const std::optional<TraceContext>& caller);

}  // namespace epikv
