// The header `traceparent`: what is read is what it says, and nothing else is read.

#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/call/trace_context.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

bool IsLowerHex(absl::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == text.npos;
}

void CheckHeader(absl::string_view header) {
  const std::optional<TraceContext> trace = ParseTraceParent(header);
  const TraceContext span = NewSpan(trace);
  const std::optional<TraceContext> again = ParseTraceParent(span.ToHeader());
  Require(again.has_value() && again->trace_id == span.trace_id && again->span_id == span.span_id,
          "what we send can be read", span.ToHeader());
  if (!trace.has_value()) {
    // The standard's form of today, which must be read.
    const bool is_form = header.size() == 55 && header.substr(0, 3) == "00-" && header[35] == '-' &&
                         header[52] == '-' && IsLowerHex(header.substr(3, 32)) &&
                         IsLowerHex(header.substr(36, 16)) && IsLowerHex(header.substr(53));
    const bool has_ids = is_form && header.substr(3, 32).find_first_not_of('0') != header.npos &&
                         header.substr(36, 16).find_first_not_of('0') != header.npos;
    Require(!has_ids, "a header by the standard is read", header);
    return;
  }
  Require(IsLowerHex(trace->trace_id) && IsLowerHex(trace->span_id), "ids are hex", header);
  Require(trace->ToHeader().substr(0, 53) == absl::StrCat("00", header.substr(2, 51)),
          "the ids are the header's", header);
  Require(span.trace_id == trace->trace_id && span.span_id != trace->span_id &&
              span.sampled == trace->sampled,
          "a call is a new span of the caller's trace", header);
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckHeader({reinterpret_cast<const char*>(data), size});
  return 0;
}
