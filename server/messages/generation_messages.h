#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "epikv/v1/experiment_record.pb.h"
#include "epikv/v1/generation.pb.h"
#include "runtime/admission/admission.h"
#include "runtime/admission/forecast.h"
#include "runtime/constraints/constraint.h"
#include "runtime/request/request.h"
#include "runtime/text/chat/chat_format.h"
#include "runtime/text/tokenizer.h"
#include "server/stream/outbox.h"

// The messages of GenerationService, to and from the types of the runtime.

namespace epikv {

// A request as far as its message can say it. Ranges and limits are checked by Admission;
// `violations` holds only what does not survive the conversion: unknown enum values, parameters of
// impossible kinds, text that the tokenizer refuses.
struct AskedRequest {
  RequestOptions options;
  DeltaOptions deltas;
  bool has_seed = false;
  std::optional<ConstraintText> constraint;  // what the text has to be; absent: anything
  std::vector<FieldViolation> violations;
  std::optional<Rejection> refusal;  // the model cannot have such a prompt
};

// The field that says what the text has to be.
std::string ConstraintField(const ConstraintText& constraint);

// What a model makes of texts and conversations. Both outlive the call.
struct PromptReader {
  const Tokenizer& tokenizer;
  const ChatFormats& chat;
  // The prompt is the middle of what the model reads: text gets nothing that marks a beginning.
  bool goes_on = false;
};
AskedRequest FromProto(const v1::GenerateRequest& request, const PromptReader& prompts);
AskedRequest FromProto(const v1::ScoreRequest& request, const PromptReader& prompts);

// Options that replace those that were asked for, and what was wrong with them.
void SetKv(const v1::KvOptions& kv, AskedRequest& asked);
void SetSteering(const v1::Steering& steering, AskedRequest& asked);

// Admission's answer, with the violations of the conversion beside its own.
std::variant<Request, Rejection> Resolve(AskedRequest asked, const Admission& admission);

struct AskedSession;  // request_preparer.h

// A request that can be queued, and what only its messages need.
struct Prepared {
  Request request;
  DeltaOptions deltas;
  std::optional<v1::RequestBegan> began;  // where it takes part in experiments
  // What another arm makes of it, where both are to answer (RequestBegan.Part.pair_arm).
  std::optional<Request> hidden;
  std::shared_ptr<AskedSession> session;  // where it is of one; else null
};

// `queue_position` and `predicted_wait` are not set yet.
v1::Accepted AcceptedOf(const Prepared& prepared, const std::string& model);
void SetPredictedWait(const Forecast& forecast, v1::Accepted& accepted);
v1::SamplingParams ToProto(const SamplingParams& params);  // what is absent as it is used
v1::Delta ToProto(const Delta& delta);
v1::AnswerDelta ToProto(const AnswerDelta& delta);
void AddAnswer(const AnswerDelta& delta, v1::Answer& answer);
v1::EvictionEvent ToProto(const EvictionTrace& trace);
v1::Progress ToProto(const PromptProgress& progress);
v1::PromptLogprobs ToProto(const PromptLogprobs& prompt);
// lanes: layers x KV heads.
v1::Finished FinishedOf(const v1::Accepted& accepted, const CompletionEnd& end, int64_t lanes);
v1::Summary SummaryOf(const v1::Accepted& accepted, const Finished& finished, int64_t lanes);

}  // namespace epikv
