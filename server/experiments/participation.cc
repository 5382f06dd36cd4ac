#include "server/experiments/participation.h"

#include "absl/time/clock.h"
#include "server/base/durations.h"

namespace epikv {

v1::RequestEnded EndOf(const std::string& id, const v1::AccessLogEntry& entry) {
  v1::RequestEnded ended;
  ended.set_id(id);
  *ended.mutable_time() = TimestampProto(absl::Now());
  ended.set_code(entry.code());
  ended.set_reason(entry.reason());
  ended.set_finish_reason(entry.finish_reason());
  ended.set_request_seconds(entry.seconds());
  ended.set_output_tokens(entry.output_tokens());
  if (entry.peak_tokens() > 0) {
    ended.set_kv_peak_tokens(entry.peak_tokens());
    ended.set_kv_evicted_tokens(entry.evicted_tokens());
    ended.set_queue_seconds(entry.queue_seconds());
  }
  if (entry.output_tokens() > 0) ended.set_ttft_seconds(entry.ttft_seconds());
  if (entry.output_tokens() > 1) {
    ended.set_time_per_output_token_seconds(entry.decode_seconds() / (entry.output_tokens() - 1));
  }
  return ended;
}

}  // namespace epikv
