#include "server/generation/collect_call.h"

#include "absl/strings/str_cat.h"

namespace epikv {

grpc::Status AnswerTooLarge(int64_t bytes, int64_t limit) {
  return ToGrpc(Rejection{
      .code = absl::StatusCode::kResourceExhausted,
      .reason = "ANSWER_TOO_LARGE",
      .message = absl::StrCat("the answer has at least ", bytes,
                              " bytes, more than --max_sent_message_bytes allows (", limit,
                              "); use Generate, which streams the answer in parts"),
      .metadata = {{"limit", absl::StrCat(limit)}, {"bytes", absl::StrCat(bytes)}}});
}

}  // namespace epikv
