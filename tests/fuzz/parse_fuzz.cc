// Requests below the transport, and so many more of them: from the wire to what the engine would be
// given, or to everything that is wrong.

#include "runtime/text/utf8.h"
#include "server/base/errors.h"
#include "server/call/wire.h"
#include "server/messages/generation_messages.h"
#include "tests/fixtures/fake_model.h"
#include "tests/fixtures/fake_policies.h"
#include "tests/fuzz/calls.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

void CheckRejection(const Rejection& rejection) {
  Require(!rejection.reason.empty() && !rejection.message.empty(), "a rejection says why");
  Require(rejection.code != absl::StatusCode::kOk && rejection.code != absl::StatusCode::kInternal,
          "a rejection is the request's fault", rejection.message);
  Require(!FirstInvalidUtf8(rejection.message).has_value(), "clients can read it");
  Require(rejection.violations.size() <= 2 * kMaxViolations, "it is bounded");
  Require(ToGrpc(rejection).error_details().size() < 6144, "it fits into the trailers",
          rejection.message);
}

// What the ledger and the scheduler rely on.
void CheckRequest(const Request& request, const Admission& admission) {
  const int64_t context = admission.manifest().context_length;
  Require(
      !request.prompt.empty() && request.max_output_tokens >= 1 && request.most_tokens() <= context,
      "it fits into the context");
  Require(request.demand.peak_bytes() > 0 &&
              request.demand.peak_bytes() <= admission.limits().kv_capacity_bytes,
          "it fits into the pool");
  Require(request.demand.budget.size() == request.demand.decode.size() &&
              request.demand.budget.size() == request.demand.prefill.size(),
          "every lane has a demand");
  for (size_t lane = 0; lane < request.demand.budget.size(); ++lane) {
    Require(request.demand.budget[lane] >= 1 && request.demand.decode[lane] >= 1 &&
                request.demand.prefill[lane] >= request.demand.decode[lane] &&
                request.demand.prefill[lane] <= context,
            "a lane holds something, and no more than the context");
  }
  Require(request.spec != nullptr && (!request.traits.evicts || request.budget >= 1), "a policy");
  const v1::Accepted accepted = AcceptedOf({.request = request, .deltas = {}}, "fake");
  v1::Accepted read;
  Require(read.ParseFromString(accepted.SerializeAsString()), "clients can read what is accepted");
}

template <typename Message>
void Check(const grpc::ByteBuffer& bytes) {
  static const Admission& admission =
      *new Admission(FakeManifest(/*context_length=*/512), EveryKindOfPolicy(),
                     {.kv_capacity_bytes = 256 * kFakeBytesPerToken,
                      .prefill_chunk_tokens = 16,
                      .defaults = {.max_output_tokens = 64, .policy = "by_chunk"}});
  static const Tokenizer& tokenizer = *Tokenizer::FromJson(FakeTokenizerJson()).value().release();
  static const ChatFormats& chat = *new ChatFormats(*ChatFormats::FromJson(kFakeChatJson));
  const std::variant<Message, Rejection> parsed = Parse<Message>(bytes);
  if (const auto* rejection = std::get_if<Rejection>(&parsed)) return CheckRejection(*rejection);
  AskedRequest asked = FromProto(std::get<Message>(parsed), {.tokenizer = tokenizer, .chat = chat});
  const std::variant<Request, Rejection> resolved = Resolve(std::move(asked), admission);
  if (const auto* rejection = std::get_if<Rejection>(&resolved)) return CheckRejection(*rejection);
  CheckRequest(std::get<Request>(resolved), admission);
}

void CheckInput(absl::string_view input) {
  for (const FuzzCall& call : ParseCalls(input)) {
    const auto message = call.wire ? nullptr : call.ParseBody();
    grpc::Slice slice(message != nullptr ? message->SerializeAsString() : call.body);
    const grpc::ByteBuffer bytes(&slice, 1);
    if (call.method->name() == "Score") Check<v1::ScoreRequest>(bytes);
    if (call.method->name() == "Generate") Check<v1::GenerateRequest>(bytes);
  }
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
