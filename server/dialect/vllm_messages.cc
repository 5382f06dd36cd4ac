#include "server/dialect/vllm_messages.h"

#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"
#include "server/base/errors.h"

namespace epikv {
namespace {

// Reads one request, and collects what cannot be said in our own words.
class VllmReader {
 public:
  v1::GenerateRequest Read(const vllm_proto::GenerateRequest& request) {
    RefuseUnknown("", request);
    RefuseUnknown("tokenized.", request.tokenized());
    RefuseUnknown("sampling_params.", request.sampling_params());
    v1::GenerateRequest read;
    read.set_request_id(request.request_id());
    ReadPrompt(request, read);
    ReadSampling(request.sampling_params(), *read.mutable_sampling());
    ReadConstraint(request.sampling_params(), *read.mutable_sampling());
    ReadStop(request.sampling_params(), *read.mutable_stop());
    ReadOutput(request.sampling_params(), *read.mutable_output());
    constexpr absl::string_view kOneEngine = "must be absent: one engine computes the whole answer";
    Refuse(request.has_kv_transfer_params(), "kv_transfer_params", kOneEngine);
    Refuse(request.has_kv_transfer_params_json(), "kv_transfer_params_json", kOneEngine);
    Refuse(request.has_mm_inputs(), "mm_inputs", "must be absent: models here read text alone");
    Refuse(request.data_parallel_rank() != 0, "data_parallel_rank",
           absl::StrCat("must be 0, the only rank, is ", request.data_parallel_rank()));
    return read;
  }

  std::vector<FieldViolation> TakeViolations() { return std::move(violations_); }

 private:
  void Refuse(bool wrong, std::string field, absl::string_view description) {
    if (wrong) violations_.push_back({std::move(field), std::string(description)});
  }

  // Fields that a newer dialect may have.
  void RefuseUnknown(absl::string_view path, const google::protobuf::Message& message) {
    const auto& fields = message.GetReflection()->GetUnknownFields(message);
    for (int i = 0; i < fields.field_count(); ++i) {
      Refuse(true, absl::StrCat(path, fields.field(i).number()),
             "no field of this number is known here");
    }
  }

  static void ReadPrompt(const vllm_proto::GenerateRequest& request, v1::GenerateRequest& read) {
    if (request.has_text()) read.set_text(request.text());
    if (!request.has_tokenized()) return;
    auto& ids = *read.mutable_token_ids()->mutable_ids();
    // An id beyond the type becomes negative, which is outside of every vocabulary, too.
    for (const uint32_t id : request.tokenized().input_ids()) ids.Add(static_cast<int32_t>(id));
  }

  // Whatever is not said has its value of the dialect: see the proto.
  static void ReadSampling(const vllm_proto::SamplingParams& params, v1::SamplingParams& read) {
    read.set_temperature(params.has_temperature() ? params.temperature() : 1);
    read.set_top_p(params.top_p() == 0 ? 1 : params.top_p());
    read.set_top_k(params.top_k());
    read.set_min_p(params.min_p());
    read.set_frequency_penalty(params.frequency_penalty());
    read.set_presence_penalty(params.presence_penalty());
    read.set_repetition_penalty(params.repetition_penalty() == 0 ? 1 : params.repetition_penalty());
    read.set_n(params.n() == 0 ? 1 : params.n());
    if (params.has_seed()) read.set_seed(static_cast<uint32_t>(params.seed()));
    *read.mutable_logit_bias() = params.logit_bias();
  }

  void ReadConstraint(const vllm_proto::SamplingParams& params, v1::SamplingParams& read) {
    // Of properties that a schema does not name ours allows none unless it says so.
    constexpr absl::string_view kAnyObject = R"({"type":"object","additionalProperties":true})";
    switch (params.constraint_case()) {
      case vllm_proto::SamplingParams::kJsonSchema:
        // How routers ask for any object.
        return read.set_json_schema(params.json_schema() == R"({"type":"object"})"
                                        ? std::string(kAnyObject)
                                        : params.json_schema());
      case vllm_proto::SamplingParams::kRegex:
        return read.set_regex(params.regex());
      case vllm_proto::SamplingParams::kGrammar:
        return read.set_grammar(params.grammar());
      case vllm_proto::SamplingParams::kChoice:
        *read.mutable_choice()->mutable_items() = params.choice().choices();
        return;
      case vllm_proto::SamplingParams::kJsonObject:
        if (params.json_object()) read.set_json_schema(std::string(kAnyObject));
        return;
      case vllm_proto::SamplingParams::kStructuralTag:
        return Refuse(true, "sampling_params.structural_tag",
                      "is not supported; json_schema, regex, grammar and choice are");
      case vllm_proto::SamplingParams::CONSTRAINT_NOT_SET:
        return;
    }
  }

  static void ReadStop(const vllm_proto::SamplingParams& params, v1::StopParams& read) {
    if (params.has_max_tokens()) read.set_max_output_tokens(params.max_tokens());
    read.set_min_output_tokens(params.min_tokens());
    *read.mutable_stop_strings() = params.stop();
    for (const uint32_t id : params.stop_token_ids()) {
      read.add_stop_token_ids(static_cast<int32_t>(id));
    }
    read.set_ignore_eos(params.ignore_eos());
    read.set_include_stop(params.include_stop_str_in_output());
  }

  void ReadOutput(const vllm_proto::SamplingParams& params, v1::OutputOptions& read) {
    read.set_text(false);
    read.set_token_ids(true);
    Refuse(params.has_prompt_logprobs(), "sampling_params.prompt_logprobs",
           "must be absent in this dialect");
    Refuse(params.has_truncate_prompt_tokens(), "sampling_params.truncate_prompt_tokens",
           "must be absent: a prompt is read whole or refused");
    if (!params.has_logprobs()) return;
    Refuse(params.logprobs() < 0, "sampling_params.logprobs",
           absl::StrCat("must be at least 0, is ", params.logprobs()));
    read.set_logprobs(true);
    read.set_top_logprobs(params.logprobs() < 0 ? 0 : static_cast<uint32_t>(params.logprobs()));
  }

  std::vector<FieldViolation> violations_;
};

void AddLogprobs(const Delta& delta, vllm_proto::OutputLogProbs& proto) {
  proto.mutable_token_logprobs()->Add(delta.logprobs.begin(), delta.logprobs.end());
  proto.mutable_token_ids()->Add(delta.tokens.begin(), delta.tokens.end());
  for (const std::vector<TokenLogprob>& place : delta.top_logprobs) {
    vllm_proto::TopLogProbs& added = *proto.add_top_logprobs();
    for (const TokenLogprob& token : place) {
      added.add_token_ids(static_cast<uint32_t>(token.token));
      added.add_values(token.logprob);
    }
  }
}

// The keys are vLLM's own.
std::string DefaultsOf(const SamplingParams& sampling) {
  nlohmann::ordered_json defaults;
  const auto add = [&](const char* key, const auto& value) {
    if (value.has_value()) defaults[key] = *value;
  };
  add("repetition_penalty", sampling.repetition_penalty);
  add("temperature", sampling.temperature);
  add("top_k", sampling.top_k);
  add("top_p", sampling.top_p);
  add("min_p", sampling.min_p);
  return defaults.is_null() ? "" : defaults.dump();
}

}  // namespace

std::variant<v1::GenerateRequest, Rejection> FromVllm(const vllm_proto::GenerateRequest& request) {
  VllmReader reader;
  v1::GenerateRequest read = reader.Read(request);
  std::vector<FieldViolation> violations = reader.TakeViolations();
  if (!violations.empty()) return InvalidRequest(std::move(violations));
  return read;
}

vllm_proto::GetModelInfoResponse ToVllm(const ServedModel& model) {
  const Manifest& manifest = model.admission->manifest();
  vllm_proto::GetModelInfoResponse info;
  // With a colon it is no repository's name at any hub.
  info.set_model_path(absl::StrCat("epikvd:", model.name));
  info.set_is_generation(true);
  info.set_max_context_length(static_cast<uint32_t>(manifest.context_length));
  info.set_vocab_size(static_cast<uint32_t>(manifest.vocab_size));
  info.set_served_model_name(model.name);
  if (!manifest.architecture.empty()) info.add_architectures(manifest.architecture);
  info.mutable_eos_token_ids()->Add(manifest.eos_tokens.begin(), manifest.eos_tokens.end());
  info.set_bos_token_id(manifest.bos_token.value_or(0));
  info.set_max_req_input_len(static_cast<int32_t>(manifest.context_length));
  info.set_default_sampling_params_json(DefaultsOf(manifest.sampling));
  return info;
}

vllm_proto::GenerateStreamChunk ChunkOf(const Delta& delta, int64_t prompt_tokens) {
  vllm_proto::GenerateStreamChunk chunk;
  chunk.mutable_token_ids()->Add(delta.tokens.begin(), delta.tokens.end());
  chunk.set_prompt_tokens(static_cast<uint32_t>(prompt_tokens));
  chunk.set_completion_tokens(static_cast<uint32_t>(delta.tokens.size()));
  if (!delta.logprobs.empty()) AddLogprobs(delta, *chunk.mutable_output_logprobs());
  chunk.set_index(static_cast<uint32_t>(delta.completion));
  return chunk;
}

vllm_proto::GenerateComplete CompleteOf(const Finished& finished, int64_t completion) {
  vllm_proto::GenerateComplete complete;
  complete.set_finish_reason(finished.reason == FinishReason::kLength ? "length" : "stop");
  complete.set_prompt_tokens(static_cast<uint32_t>(finished.prompt_tokens));
  complete.set_completion_tokens(static_cast<uint32_t>(finished.output_tokens));
  complete.set_cached_tokens(static_cast<uint32_t>(finished.cached_prompt_tokens));
  complete.set_index(static_cast<uint32_t>(completion));
  if (finished.reason == FinishReason::kStopString) {
    complete.set_matched_stop_str(finished.stop_string);
  } else if (finished.reason == FinishReason::kStopToken && finished.stop_token.has_value()) {
    complete.set_matched_token_id(static_cast<uint32_t>(*finished.stop_token));
  }
  return complete;
}

void AddTokens(const Delta& delta, vllm_proto::GenerateComplete& complete) {
  complete.mutable_output_ids()->Add(delta.tokens.begin(), delta.tokens.end());
  if (!delta.logprobs.empty()) AddLogprobs(delta, *complete.mutable_output_logprobs());
}

}  // namespace epikv
