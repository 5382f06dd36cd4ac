#include "server/messages/generation_messages.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/durations.h"
#include "server/messages/chat_prompt.h"
#include "server/messages/param_values.h"

namespace epikv {
namespace {

constexpr absl::Duration kLongestCoalesce = absl::Seconds(10);

PositionMode ModeOf(v1::PositionMode mode) {
  if (mode == v1::POSITION_MODE_COMPACT) return PositionMode::kCompact;
  if (mode == v1::POSITION_MODE_CACHE) return PositionMode::kCache;
  return PositionMode::kAbsolute;
}

v1::PositionMode ProtoOf(PositionMode mode) {
  switch (mode) {
    case PositionMode::kAbsolute:
      return v1::POSITION_MODE_ABSOLUTE;
    case PositionMode::kCompact:
      return v1::POSITION_MODE_COMPACT;
    case PositionMode::kCache:
      return v1::POSITION_MODE_CACHE;
  }
  return v1::POSITION_MODE_UNSPECIFIED;
}

TierDType DTypeOf(v1::TierDtype dtype) {
  if (dtype == v1::TIER_DTYPE_INT8) return TierDType::kInt8;
  if (dtype == v1::TIER_DTYPE_INT4) return TierDType::kInt4;
  return TierDType::kPool;
}

v1::TierDtype ProtoOf(TierDType dtype) {
  switch (dtype) {
    case TierDType::kPool:
      return v1::TIER_DTYPE_UNSPECIFIED;
    case TierDType::kInt8:
      return v1::TIER_DTYPE_INT8;
    case TierDType::kInt4:
      return v1::TIER_DTYPE_INT4;
  }
  return v1::TIER_DTYPE_UNSPECIFIED;
}

// Options as far as their message can say them.
struct GivenKv {
  KvOptions options;
  std::vector<FieldViolation> violations;
};

GivenKv ReadKv(const v1::KvOptions& kv) {
  GivenKv read;
  KvOptions& options = read.options;
  options = {.policy = kv.policy(), .positions = ModeOf(kv.positions())};
  if (kv.has_max_tokens()) options.budget = int64_t{kv.max_tokens()};
  if (kv.has_keep_ratio()) options.budget = kv.keep_ratio();
  if (!v1::PositionMode_IsValid(kv.positions())) {
    read.violations.push_back({"kv.positions", absl::StrCat("unknown value ", kv.positions())});
  }
  GivenParams given = FromStruct(kv.policy_params(), "kv.policy_params");
  options.params = std::move(given.params);
  for (FieldViolation& violation : given.violations) {
    read.violations.push_back(std::move(violation));
  }

  if (kv.has_equal_protection()) options.protection.equal = kv.equal_protection();
  if (kv.has_protect_prompt()) options.protection.prompt = kv.protect_prompt();
  if (kv.has_sink_tokens()) options.protection.sinks = kv.sink_tokens();
  if (kv.has_recent_tokens()) options.protection.recent = kv.recent_tokens();
  for (const v1::TokenSpan& span : kv.protected_spans()) {
    options.protection.spans.push_back({.begin = span.begin(), .end = span.end()});
  }
  options.read_tokens = kv.read_tokens();
  options.tier = {.tokens = kv.tier().tokens(),
                  .fetch = kv.tier().fetch(),
                  .doubt = kv.tier().doubt(),
                  .guard = std::nullopt,
                  .dtype = DTypeOf(kv.tier().dtype())};
  if (!v1::TierDtype_IsValid(kv.tier().dtype())) {
    read.violations.push_back({"kv.tier.dtype", absl::StrCat("unknown value ", kv.tier().dtype())});
  }
  if (kv.tier().has_guard()) {
    const v1::KvGuard& guard = kv.tier().guard();
    options.tier.guard = {.asked = guard.asked() == 0 ? GuardRule().asked : guard.asked(),
                          .follow = guard.follow(),
                          .relax_times = guard.relax_times(),
                          .relax_prob = guard.relax_prob()};
  }
  options.protection.thinking = kv.thinking().protected_tokens();
  options.evict_thinking = kv.thinking().evict();
  options.prefix_salt = kv.cache_salt();
  options.bypass_prefix_cache = kv.bypass_prefix_cache();
  return read;
}

std::optional<ConstraintText> ConstraintOf(const v1::SamplingParams& sampling) {
  using Kind = ConstraintText::Kind;
  switch (sampling.constraint_case()) {
    case v1::SamplingParams::kRegex:
      return ConstraintText{Kind::kRegex, {sampling.regex()}};
    case v1::SamplingParams::kChoice:
      return ConstraintText{Kind::kChoice,
                            {sampling.choice().items().begin(), sampling.choice().items().end()}};
    case v1::SamplingParams::kJsonSchema:
      return ConstraintText{Kind::kJsonSchema, {sampling.json_schema()}};
    case v1::SamplingParams::kGrammar:
      return ConstraintText{Kind::kGrammar, {sampling.grammar()}};
    case v1::SamplingParams::CONSTRAINT_NOT_SET:
      break;
  }
  return std::nullopt;
}

// Fills an AskedRequest from messages and collects what cannot be converted.
class Reader {
 public:
  explicit Reader(const PromptReader& prompts) : prompts_(prompts) {}

  std::vector<int32_t> Encode(const std::string& field, const std::string& text,
                              const EncodeOptions& options) {
    absl::StatusOr<std::vector<int32_t>> tokens = prompts_.tokenizer.Encode(text, options);
    if (tokens.ok()) return *std::move(tokens);
    Violate(field, std::string(tokens.status().message()));
    return {};
  }
  template <typename Message>
  std::vector<int32_t> Prompt(const Message& request) {
    if (request.has_text()) {
      return Encode("text", request.text(), {.add_special = !prompts_.goes_on});
    }
    if (request.has_chat()) return Chat(request.chat());
    return Ids(request.token_ids());
  }
  std::vector<int32_t> Chat(const v1::ChatPrompt& chat);
  static std::vector<int32_t> Ids(const v1::TokenIds& ids) {
    return {ids.ids().begin(), ids.ids().end()};
  }

  // How the answer is written, if its parts are asked for. Behind Prompt.
  std::optional<AnswerFormat> Answer(const v1::GenerateRequest& request);
  // Where it thinks. Behind Prompt.
  std::optional<ThinkingMarks> Thinking(const v1::GenerateRequest& request) const;
  // What the text has to be. Behind Prompt.
  std::optional<ConstraintText> Constraint(const v1::GenerateRequest& request);
  KvOptions Kv(const v1::KvOptions& kv);
  DeltaOptions Deltas(const v1::OutputOptions& output);
  SchedulingOptions Scheduling(const v1::SchedulingOptions& scheduling);
  int64_t GuessTokens(const v1::Speculation& speculation);
  void Violate(std::string field, std::string description) {
    violations_.push_back({std::move(field), std::move(description)});
  }
  std::vector<FieldViolation> TakeViolations() { return std::move(violations_); }
  std::optional<Rejection> TakeRefusal() { return std::move(refusal_); }

 private:
  const PromptReader& prompts_;
  ChatText chat_;  // of a chat prompt
  std::vector<FieldViolation> violations_;
  std::optional<Rejection> refusal_;
};

std::vector<int32_t> Reader::Chat(const v1::ChatPrompt& chat) {
  std::variant<ChatText, Rejection> text = ChatTextOf(chat, prompts_.chat);
  if (auto* rejection = std::get_if<Rejection>(&text)) {
    refusal_ = std::move(*rejection);
    return {};
  }
  chat_ = std::get<ChatText>(std::move(text));
  return Encode("chat", chat_.text, ChatEncoding(chat, chat_));
}

std::optional<AnswerFormat> Reader::Answer(const v1::GenerateRequest& request) {
  if (!request.output().answer()) return std::nullopt;
  if (!request.has_chat()) {
    Violate("output.answer", "needs a chat prompt: other answers have no parts");
    return std::nullopt;
  }
  return AnswerFormatOf(request.chat(), chat_, prompts_.chat, prompts_.tokenizer);
}

std::optional<ThinkingMarks> Reader::Thinking(const v1::GenerateRequest& request) const {
  const std::optional<ThinkingTags>& tags = prompts_.chat.thinking_tags();
  if (!request.has_chat() || !tags.has_value()) return std::nullopt;
  return ThinkingMarks{.tags = *tags,
                       .begun = chat_.thinks,
                       .markup = AnswerMarkup(prompts_.chat, prompts_.tokenizer)};
}

std::optional<ConstraintText> Reader::Constraint(const v1::GenerateRequest& request) {
  std::optional<ConstraintText> text = ConstraintOf(request.sampling());
  const v1::ChatPrompt& chat = request.chat();
  const std::optional<CallRule> rule = CallRuleOf(chat, prompts_.chat);
  if (rule.has_value()) {
    if (text.has_value()) Violate(ConstraintField(*text), "cannot be set together with chat.tools");
    if (!request.output().answer())
      Violate("chat.tools", "needs output.answer, which has the calls");
    absl::StatusOr<ConstraintText> calls = ConstraintOfCalls(*rule);
    if (!calls.ok()) {
      Violate("chat.tools", absl::StrCat("the parameters ", calls.status().message()));
      return std::nullopt;
    }
    text = *std::move(calls);
  }
  const std::optional<ThinkingTags>& tags = prompts_.chat.thinking_tags();
  const bool thinks = !chat.has_thinking() || chat.thinking();
  if (text.has_value() && request.has_chat() && request.output().answer() && tags.has_value() &&
      thinks) {
    text->thinking = {.begin = tags->begin, .end = tags->end, .begun = chat_.thinks};
  }
  return text;
}

KvOptions Reader::Kv(const v1::KvOptions& kv) {
  GivenKv given = ReadKv(kv);
  for (FieldViolation& violation : given.violations) violations_.push_back(std::move(violation));
  return std::move(given.options);
}

DeltaOptions Reader::Deltas(const v1::OutputOptions& output) {
  const absl::Duration coalesce = DurationOf(output.coalesce());
  if (coalesce < absl::ZeroDuration() || coalesce > kLongestCoalesce) {
    Violate("output.coalesce",
            absl::StrCat("must be from 0 to ", absl::FormatDuration(kLongestCoalesce), ", is ",
                         absl::FormatDuration(coalesce)));
  }
  return {.token_ids = output.token_ids(), .coalesce = coalesce};
}

SchedulingOptions Reader::Scheduling(const v1::SchedulingOptions& scheduling) {
  SchedulingOptions options{.tenant = scheduling.tenant()};
  if (!v1::Priority_IsValid(scheduling.priority())) {
    Violate("scheduling.priority", absl::StrCat("unknown value ", scheduling.priority()));
  }
  if (scheduling.priority() == v1::PRIORITY_LOW) options.priority = Priority::kLow;
  if (scheduling.priority() == v1::PRIORITY_HIGH) options.priority = Priority::kHigh;
  return options;
}

GuessSource SourceOf(const v1::Speculation& speculation) {
  return speculation.source() == v1::SPECULATION_SOURCE_DRAFT ? GuessSource::kDraft
                                                              : GuessSource::kPrompt;
}

int64_t Reader::GuessTokens(const v1::Speculation& speculation) {
  constexpr int64_t kByDefault = 8;
  if (!v1::SpeculationSource_IsValid(speculation.source())) {
    Violate("speculation.source", absl::StrCat("unknown value ", speculation.source()));
  }
  const bool off = speculation.source() != v1::SPECULATION_SOURCE_NGRAM &&
                   speculation.source() != v1::SPECULATION_SOURCE_DRAFT;
  if (off && speculation.max_tokens() > 0) {
    Violate("speculation.max_tokens", "means nothing without a source: NGRAM, say");
  }
  if (off) return 0;
  return speculation.max_tokens() == 0 ? kByDefault : speculation.max_tokens();
}

SamplingParams FromProto(const v1::SamplingParams& proto) {
  SamplingParams params;
  if (proto.has_temperature()) params.temperature = proto.temperature();
  if (proto.has_top_p()) params.top_p = proto.top_p();
  if (proto.has_top_k()) {
    // No vocabulary is larger.
    constexpr uint32_t kMost = std::numeric_limits<int32_t>::max();
    params.top_k = static_cast<int32_t>(std::min(proto.top_k(), kMost));
  }
  if (proto.has_min_p()) params.min_p = proto.min_p();
  if (proto.has_typical_p()) params.typical_p = proto.typical_p();
  if (proto.has_repetition_penalty()) params.repetition_penalty = proto.repetition_penalty();
  if (proto.has_frequency_penalty()) params.frequency_penalty = proto.frequency_penalty();
  if (proto.has_presence_penalty()) params.presence_penalty = proto.presence_penalty();
  params.logit_bias = {proto.logit_bias().begin(), proto.logit_bias().end()};
  params.seed = proto.seed();
  return params;
}

SteeringOptions FromProto(const v1::Steering& proto) {
  SteeringOptions options;
  if (proto.has_coefficient()) options.coefficient = proto.coefficient();
  if (proto.has_growth()) options.growth = proto.growth();
  return options;
}

std::optional<SteeringOptions> SteeringOf(const v1::SamplingParams& proto) {
  if (!proto.has_steering()) return std::nullopt;
  return FromProto(proto.steering());
}

StopOptions FromProto(const v1::StopParams& proto) {
  StopOptions stop{.strings = {proto.stop_strings().begin(), proto.stop_strings().end()},
                   .tokens = {proto.stop_token_ids().begin(), proto.stop_token_ids().end()},
                   .include = proto.include_stop(),
                   .min_output_tokens = proto.min_output_tokens(),
                   .ignore_end = proto.ignore_eos()};
  if (proto.has_max_output_tokens()) stop.max_output_tokens = proto.max_output_tokens();
  return stop;
}

void SetConstraint(const ConstraintText& constraint, v1::SamplingParams& proto) {
  switch (constraint.kind) {
    case ConstraintText::Kind::kRegex:
      return proto.set_regex(constraint.texts.front());
    case ConstraintText::Kind::kChoice:
      proto.mutable_choice()->mutable_items()->Assign(constraint.texts.begin(),
                                                      constraint.texts.end());
      return;
    case ConstraintText::Kind::kJsonSchema:
      return proto.set_json_schema(constraint.texts.front());
    case ConstraintText::Kind::kGrammar:
      return proto.set_grammar(constraint.texts.front());
    case ConstraintText::Kind::kStructuralTag:
      return;  // of tools, which the client has given
  }
}

v1::ResolvedKv ResolvedKvOf(const Request& request) {
  v1::ResolvedKv kv;
  kv.set_policy(std::string(request.spec->name));
  kv.set_budget_tokens(request.budget);
  *kv.mutable_policy_params() = ToStruct(request.params);
  kv.set_positions(ProtoOf(request.positions));
  kv.set_protected_prompt_tokens(request.protection.prompt);
  kv.set_sink_tokens(request.protection.sinks);
  kv.set_recent_tokens(request.protection.recent);
  for (const TokenSpan& span : request.protection.spans) {
    v1::TokenSpan& added = *kv.add_protected_spans();
    added.set_begin(span.begin);
    added.set_end(span.end);
  }
  if (request.protection.thinking > 0 || request.evict_thinking) {
    kv.mutable_thinking()->set_protected_tokens(request.protection.thinking);
    kv.mutable_thinking()->set_evict(request.evict_thinking);
  }
  kv.set_reserved_bytes(request.demand.peak_bytes());
  kv.set_uncalibrated(request.traits.uncalibrated);
  kv.set_read_tokens(request.read.tokens);
  if (request.tier.tokens > 0) {
    kv.mutable_tier()->set_tokens(request.tier.tokens);
    kv.mutable_tier()->set_fetch(request.tier.fetch);
    kv.mutable_tier()->set_doubt(request.tier.doubt);
    kv.mutable_tier()->set_dtype(ProtoOf(request.tier.dtype));
    kv.set_tier_bytes(request.demand.peak_tier_bytes());
    if (request.traits.recalls) {
      v1::KvGuard& guard = *kv.mutable_tier()->mutable_guard();
      guard.set_asked(request.tier.guard->asked);
      guard.set_follow(request.tier.guard->follow);
      guard.set_relax_times(request.tier.guard->relax_times);
      guard.set_relax_prob(request.tier.guard->relax_prob);
    }
  }
  return kv;
}

v1::StopParams StopOf(const Request& request) {
  v1::StopParams stop;
  stop.set_max_output_tokens(request.max_output_tokens);
  for (const std::string& text : request.stop_strings) stop.add_stop_strings(text);
  stop.mutable_stop_token_ids()->Add(request.stop_tokens.begin(), request.stop_tokens.end());
  stop.set_include_stop(request.include_stop);
  stop.set_min_output_tokens(request.min_output_tokens);
  stop.set_ignore_eos(request.ignore_end);
  return stop;
}

v1::OutputOptions OutputOf(const Prepared& prepared) {
  const OutputOptions& output = prepared.request.output;
  v1::OutputOptions proto;
  proto.set_text(output.text);
  proto.set_token_ids(prepared.deltas.token_ids);
  proto.set_logprobs(output.logprobs);
  proto.set_kv_trace(output.kv_trace);
  proto.set_residual_steps(output.residual_steps);
  proto.set_kept(output.kept);
  proto.set_top_logprobs(output.top_logprobs);
  proto.set_prompt_logprobs(output.prompt_logprobs);
  proto.set_progress(output.progress);
  proto.set_answer(prepared.request.answer.has_value());
  if (prepared.deltas.coalesce > absl::ZeroDuration()) {
    *proto.mutable_coalesce() = DurationProto(prepared.deltas.coalesce);
  }
  return proto;
}

// The wire's form of likeliest tokens at several places.
google::protobuf::RepeatedPtrField<v1::TopLogprobs> ToProto(
    const std::vector<std::vector<TokenLogprob>>& top) {
  google::protobuf::RepeatedPtrField<v1::TopLogprobs> proto;
  for (const std::vector<TokenLogprob>& place : top) {
    v1::TopLogprobs& added = *proto.Add();
    for (const TokenLogprob& token : place) {
      added.add_token_ids(token.token);
      added.add_logprobs(token.logprob);
    }
  }
  return proto;
}

v1::Timings ToProto(const Timings& timings) {
  v1::Timings proto;
  *proto.mutable_queue() = DurationProto(timings.queue);
  *proto.mutable_prefill() = DurationProto(timings.prefill);
  *proto.mutable_time_to_first_token() = DurationProto(timings.time_to_first_token);
  *proto.mutable_decode() = DurationProto(timings.decode);
  *proto.mutable_eviction() = DurationProto(timings.eviction);
  *proto.mutable_scratch_pass() = DurationProto(timings.pass);
  return proto;
}

v1::KvUsage KvUsageOf(const v1::ResolvedKv& kv, const KvUsage& usage, int64_t lanes) {
  v1::KvUsage proto;
  proto.set_policy(kv.policy());
  proto.set_budget_tokens(kv.budget_tokens());
  proto.set_uncalibrated(kv.uncalibrated());
  proto.set_peak_tokens((usage.peak_entries + lanes - 1) / lanes);
  proto.set_final_tokens((usage.final_entries + lanes - 1) / lanes);
  proto.set_evicted_entries(usage.evicted_entries);
  proto.set_evicted_tokens(usage.evicted_entries / lanes);
  proto.set_rounds(usage.rounds);
  proto.set_peak_bytes(usage.peak_bytes);
  proto.set_packed_bytes(usage.packed_bytes);
  if (usage.reads.cached > 0) {
    proto.set_read_share(static_cast<double>(usage.reads.read) /
                         static_cast<double>(usage.reads.cached));
  }
  proto.set_demoted_entries(usage.tier.demoted);
  proto.set_recalled_entries(usage.tier.recalled);
  proto.set_forgotten_entries(usage.tier.forgotten);
  proto.set_fetched_entries(usage.tier.fetched);
  proto.set_tier_failed(usage.tier.failed);
  proto.set_doubted_steps(usage.tier.doubted_steps);
  proto.mutable_kept()->Add(usage.kept.begin(), usage.kept.end());
  return proto;
}

v1::FinishReason ToProto(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return v1::FINISH_REASON_LENGTH;
    case FinishReason::kEnd:
      return v1::FINISH_REASON_END;
    case FinishReason::kStopToken:
      return v1::FINISH_REASON_STOP_TOKEN;
    case FinishReason::kStopString:
      return v1::FINISH_REASON_STOP_STRING;
    case FinishReason::kCancelled:
    case FinishReason::kDeadline:
    case FinishReason::kError:
      break;  // these end the RPC with a status, not with a summary
  }
  return v1::FINISH_REASON_UNSPECIFIED;
}

template <typename Message>
void SetReason(const Finished& finished, Message& proto) {
  proto.set_finish_reason(ToProto(finished.reason));
  if (finished.reason == FinishReason::kStopString) proto.set_stop_string(finished.stop_string);
  if (finished.stop_token.has_value()) proto.set_stop_token_id(*finished.stop_token);
}

bool Mentions(const std::vector<FieldViolation>& violations, const std::string& field) {
  return std::any_of(violations.begin(), violations.end(),
                     [&](const FieldViolation& v) { return v.field == field; });
}

// The runtime names parts of a request, clients know fields of a message.
std::string WirePath(absl::string_view field) {
  if (absl::ConsumePrefix(&field, "prompt.")) return std::string(field);
  if (absl::ConsumePrefix(&field, "continuation[")) {
    return absl::StrCat("continuation_ids.ids[", field);
  }
  return std::string(field);
}

}  // namespace

v1::SamplingParams ToProto(const SamplingParams& params) {
  v1::SamplingParams proto;
  proto.set_temperature(params.temperature.value_or(0));
  proto.set_top_p(params.top_p.value_or(1));
  proto.set_top_k(params.top_k.value_or(0));
  proto.set_seed(params.seed);
  proto.set_min_p(params.min_p.value_or(0));
  proto.set_typical_p(params.typical_p.value_or(1));
  proto.set_repetition_penalty(params.repetition_penalty.value_or(1));
  proto.set_frequency_penalty(params.frequency_penalty.value_or(0));
  proto.set_presence_penalty(params.presence_penalty.value_or(0));
  proto.mutable_logit_bias()->insert(params.logit_bias.begin(), params.logit_bias.end());
  if (params.constraint != nullptr) SetConstraint(params.constraint->text(), proto);
  return proto;
}

std::string ConstraintField(const ConstraintText& constraint) {
  switch (constraint.kind) {
    case ConstraintText::Kind::kRegex:
      return "sampling.constraint.regex";
    case ConstraintText::Kind::kChoice:
      return "sampling.constraint.choice";
    case ConstraintText::Kind::kJsonSchema:
      return "sampling.constraint.json_schema";
    case ConstraintText::Kind::kStructuralTag:
      return "chat.tools";
    case ConstraintText::Kind::kGrammar:
      break;
  }
  return "sampling.constraint.grammar";
}

AskedRequest FromProto(const v1::GenerateRequest& request, const PromptReader& prompts) {
  Reader reader(prompts);
  const v1::OutputOptions& output = request.output();
  AskedRequest asked = {
      .options = {.id = request.request_id(),
                  .prompt = reader.Prompt(request),
                  .sampling = FromProto(request.sampling()),
                  .steering = SteeringOf(request.sampling()),
                  .completions = request.sampling().has_n() ? int64_t{request.sampling().n()} : 1,
                  .stop = FromProto(request.stop()),
                  .output = {.text = !output.has_text() || output.text(),
                             .logprobs = output.logprobs(),
                             .top_logprobs = output.top_logprobs(),
                             .prompt_logprobs = output.prompt_logprobs(),
                             .progress = output.progress(),
                             .kv_trace = output.kv_trace(),
                             .residual_steps = output.residual_steps(),
                             .kept = output.kept()},
                  .kv = reader.Kv(request.kv()),
                  .scheduling = reader.Scheduling(request.scheduling()),
                  .guess_tokens = reader.GuessTokens(request.speculation()),
                  .guess_source = SourceOf(request.speculation())},
      .deltas = reader.Deltas(output),
      .has_seed = request.sampling().has_seed(),
      .violations = {},
      .refusal = std::nullopt};
  asked.constraint = reader.Constraint(request);
  asked.options.chat = request.has_chat();
  asked.options.answer = reader.Answer(request);
  asked.options.thinking = reader.Thinking(request);
  asked.violations = reader.TakeViolations();
  asked.refusal = reader.TakeRefusal();
  return asked;
}

AskedRequest FromProto(const v1::ScoreRequest& request, const PromptReader& prompts) {
  Reader reader(prompts);
  if (!v1::ScoreCadence_IsValid(request.cadence())) {
    reader.Violate("cadence", absl::StrCat("unknown value ", request.cadence()));
  }
  std::vector<int32_t> prompt = reader.Prompt(request);
  // In the middle of a text: nothing that marks a beginning is added.
  std::vector<int32_t> forced =
      request.has_continuation_text()
          ? reader.Encode("continuation_text", request.continuation_text(), {.add_special = false})
          : reader.Ids(request.continuation_ids());
  KvOptions kv = reader.Kv(request.kv());
  SchedulingOptions scheduling = reader.Scheduling(request.scheduling());
  std::vector<FieldViolation> violations = reader.TakeViolations();
  if (forced.empty() && !Mentions(violations, "continuation_text")) {
    violations.push_back({"continuation", "is empty; at least one token is needed"});
  }
  return {.options = {.id = request.request_id(),
                      .prompt = std::move(prompt),
                      .sampling = {.seed = request.seed()},
                      .output = {.text = false,
                                 .logprobs = true,
                                 .top_logprobs = request.top_logprobs(),
                                 .kv_trace = request.kv_trace(),
                                 .residual_steps = request.residual_steps(),
                                 .kept = request.kept()},
                      .kv = std::move(kv),
                      .scheduling = std::move(scheduling),
                      .forced = std::move(forced),
                      .force_in_chunks = request.cadence() == v1::SCORE_CADENCE_CHUNK},
          .deltas = {.token_ids = true},
          .has_seed = request.has_seed(),
          .violations = std::move(violations),
          .refusal = reader.TakeRefusal()};
}

void SetKv(const v1::KvOptions& kv, AskedRequest& asked) {
  std::erase_if(asked.violations, [](const FieldViolation& violation) {
    return absl::StartsWith(violation.field, "kv.");
  });
  GivenKv given = ReadKv(kv);
  asked.options.kv = std::move(given.options);
  for (FieldViolation& violation : given.violations) {
    asked.violations.push_back(std::move(violation));
  }
}

void SetSteering(const v1::Steering& steering, AskedRequest& asked) {
  asked.options.steering = FromProto(steering);
}

std::variant<Request, Rejection> Resolve(AskedRequest asked, const Admission& admission) {
  if (asked.refusal.has_value()) return *std::move(asked.refusal);
  std::variant<Request, Rejection> resolved = admission.Resolve(std::move(asked.options));
  auto* refused = std::get_if<Rejection>(&resolved);
  if (refused == nullptr && asked.violations.empty()) return resolved;

  Rejection rejection = refused != nullptr ? std::move(*refused) : Rejection();
  std::vector<FieldViolation> violations = std::move(asked.violations);
  if (!violations.empty()) rejection.code = absl::StatusCode::kInvalidArgument;
  if (rejection.reason.empty()) rejection.reason = "INVALID_REQUEST";
  // A prompt that the tokenizer refused only looks empty.
  const bool has_prompt = Mentions(violations, "text") || Mentions(violations, "chat");
  for (FieldViolation& violation : rejection.violations) {
    if (has_prompt && violation.field == "prompt") continue;
    violations.push_back({WirePath(violation.field), std::move(violation.description)});
  }
  rejection.violations = std::move(violations);
  const FieldViolation& first = rejection.violations.front();
  rejection.message = absl::StrCat(first.field, ": ", first.description);
  if (rejection.violations.size() > 1) {
    absl::StrAppend(&rejection.message, " (and ", rejection.violations.size() - 1, " more)");
  }
  return rejection;
}

v1::SchedulingOptions ToProto(const SchedulingOptions& scheduling) {
  v1::SchedulingOptions proto;
  switch (scheduling.priority) {
    case Priority::kLow:
      proto.set_priority(v1::PRIORITY_LOW);
      break;
    case Priority::kNormal:
      proto.set_priority(v1::PRIORITY_NORMAL);
      break;
    case Priority::kHigh:
      proto.set_priority(v1::PRIORITY_HIGH);
      break;
  }
  proto.set_tenant(scheduling.tenant);
  return proto;
}

v1::Accepted AcceptedOf(const Prepared& prepared, const std::string& model) {
  const Request& request = prepared.request;
  v1::Accepted accepted;
  accepted.set_request_id(request.id);
  accepted.set_model(model);
  *accepted.mutable_kv() = ResolvedKvOf(request);
  *accepted.mutable_sampling() = ToProto(request.sampling);
  accepted.mutable_sampling()->set_n(request.completions());
  if (request.steering.has_value()) {
    v1::Steering& steering = *accepted.mutable_sampling()->mutable_steering();
    steering.set_coefficient(request.steering->options.coefficient);
    steering.set_growth(request.steering->options.growth);
  }
  accepted.set_prompt_tokens(request.prompt.size());
  accepted.set_max_output_tokens(request.max_output_tokens);
  for (const auto& tokens : {request.stop_tokens, request.end_tokens}) {
    accepted.mutable_stop_token_ids()->Add(tokens.begin(), tokens.end());
  }
  accepted.set_arm(request.arm);
  *accepted.mutable_output() = OutputOf(prepared);
  *accepted.mutable_scheduling() = ToProto(request.scheduling);
  accepted.mutable_speculation()->set_source(request.guess_tokens == 0 ? v1::SPECULATION_SOURCE_OFF
                                             : request.guess_source == GuessSource::kDraft
                                                 ? v1::SPECULATION_SOURCE_DRAFT
                                                 : v1::SPECULATION_SOURCE_NGRAM);
  accepted.mutable_speculation()->set_max_tokens(request.guess_tokens);
  if (request.forced.empty()) {
    *accepted.mutable_stop() = StopOf(request);
  } else {
    accepted.set_cadence(request.force_in_chunks ? v1::SCORE_CADENCE_CHUNK
                                                 : v1::SCORE_CADENCE_DECODE);
  }
  return accepted;
}

void SetPredictedWait(const Forecast& forecast, v1::Accepted& accepted) {
  if (forecast.wait.has_value()) *accepted.mutable_predicted_wait() = DurationProto(*forecast.wait);
}

v1::Delta ToProto(const Delta& delta) {
  v1::Delta proto;
  proto.set_completion(delta.completion);
  proto.set_text(delta.text);
  proto.mutable_token_ids()->Add(delta.tokens.begin(), delta.tokens.end());
  proto.mutable_logprobs()->Add(delta.logprobs.begin(), delta.logprobs.end());
  for (const std::vector<float>& steps : delta.residual_steps) {
    proto.add_signals()->mutable_residual_steps()->Add(steps.begin(), steps.end());
  }
  *proto.mutable_top_logprobs() = ToProto(delta.top_logprobs);
  if (!delta.answer.empty()) *proto.mutable_answer() = ToProto(delta.answer);
  return proto;
}

v1::AnswerDelta ToProto(const AnswerDelta& delta) {
  v1::AnswerDelta proto;
  proto.set_reasoning(delta.reasoning);
  proto.set_content(delta.content);
  for (const CallDelta& call : delta.calls) {
    v1::ToolCallDelta& added = *proto.add_tool_calls();
    added.set_index(call.index);
    added.set_id(call.id);
    added.set_name(call.name);
    added.set_arguments(call.arguments);
  }
  return proto;
}

void AddAnswer(const AnswerDelta& delta, v1::Answer& answer) {
  answer.mutable_reasoning()->append(delta.reasoning);
  answer.mutable_content()->append(delta.content);
  for (const CallDelta& part : delta.calls) {
    while (answer.tool_calls_size() <= part.index) answer.add_tool_calls();
    v1::ToolCall& call = *answer.mutable_tool_calls(static_cast<int>(part.index));
    if (!part.id.empty()) call.set_id(part.id);
    if (!part.name.empty()) call.set_name(part.name);
    call.mutable_arguments()->append(part.arguments);
  }
}

v1::Progress ToProto(const PromptProgress& progress) {
  v1::Progress proto;
  proto.set_prompt_tokens_done(progress.done);
  proto.set_prompt_tokens(progress.total);
  proto.set_cached_prompt_tokens(progress.cached);
  return proto;
}

v1::PromptLogprobs ToProto(const PromptLogprobs& prompt) {
  v1::PromptLogprobs proto;
  proto.set_first(prompt.first);
  proto.mutable_token_ids()->Add(prompt.tokens.begin(), prompt.tokens.end());
  proto.mutable_logprobs()->Add(prompt.logprobs.begin(), prompt.logprobs.end());
  *proto.mutable_top_logprobs() = ToProto(prompt.top);
  return proto;
}

v1::EvictionEvent ToProto(const EvictionTrace& trace) {
  v1::EvictionEvent event;
  event.set_at_token(trace.at_token);
  event.set_completion(trace.completion);
  for (const EvictionTrace::Victims& victims : trace.victims) {
    v1::EvictionEvent::Victims& added = *event.add_victims();
    if (victims.layer.has_value()) added.set_layer(*victims.layer);
    if (victims.head.has_value()) added.set_head(*victims.head);
    added.mutable_index()->Add(victims.index.begin(), victims.index.end());
    added.mutable_recalled()->Add(victims.recalled.begin(), victims.recalled.end());
  }
  return event;
}

v1::Finished FinishedOf(const v1::Accepted& accepted, const CompletionEnd& end, int64_t lanes) {
  const Finished& finished = end.finished;
  v1::Finished proto;
  proto.set_completion(end.completion);
  SetReason(finished, proto);
  proto.set_output_tokens(finished.output_tokens);
  *proto.mutable_kv() = KvUsageOf(accepted.kv(), finished.kv, lanes);
  proto.set_kv_trace_truncated(finished.kv_trace_truncated);
  return proto;
}

v1::Summary SummaryOf(const v1::Accepted& accepted, const Finished& finished, int64_t lanes) {
  v1::Summary summary;
  SetReason(finished, summary);
  summary.mutable_usage()->set_prompt_tokens(finished.prompt_tokens);
  summary.mutable_usage()->set_cached_prompt_tokens(finished.cached_prompt_tokens);
  summary.mutable_usage()->set_packet_prompt_tokens(finished.packet_tokens);
  summary.mutable_usage()->set_thinking_tokens(finished.thinking_tokens);
  summary.mutable_usage()->set_output_tokens(finished.output_tokens);
  summary.mutable_usage()->set_guessed_tokens(finished.guessed_tokens);
  summary.mutable_usage()->set_accepted_tokens(finished.accepted_tokens);
  *summary.mutable_kv() = KvUsageOf(accepted.kv(), finished.kv, lanes);
  *summary.mutable_timings() = ToProto(finished.timings);
  summary.set_kv_trace_truncated(finished.kv_trace_truncated);
  summary.set_arm(accepted.arm());
  return summary;
}

}  // namespace epikv
