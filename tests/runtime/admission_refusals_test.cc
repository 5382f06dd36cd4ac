#include "runtime/admission/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/fixtures/admission_fixture.h"

namespace epikv {
namespace admission_refusals_test {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::UnorderedElementsAre;

// Bad input: each alone names its field, and code and reason.

struct BadInput {
  const char* name;
  std::function<void(RequestOptions&)> spoil;
  const char* field;
  const char* says;
  const char* reason = "INVALID_REQUEST";
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

const BadInput kBadInputs[] = {
    {"EmptyPrompt", [](auto& o) { o.prompt.clear(); }, "prompt", "is empty"},
    {"PromptFillsTheContext", [](auto& o) { o.prompt.assign(2048, 1); }, "prompt",
     "more than the context length 2048", "CONTEXT_LENGTH"},
    {"OutputOverTheContext", [](auto& o) { o.stop.max_output_tokens = 2039; },
     "stop.max_output_tokens", "prompt (10) + max output (2039)", "CONTEXT_LENGTH"},
    {"OutputWithoutEnd", [](auto& o) { o.stop.max_output_tokens = kMost; },
     "stop.max_output_tokens", "more than the context length", "CONTEXT_LENGTH"},
    {"NoOutput", [](auto& o) { o.stop.max_output_tokens = 0; }, "stop.max_output_tokens",
     "at least 1"},
    {"NegativeOutput",
     [](auto& o) { o.stop.max_output_tokens = std::numeric_limits<int64_t>::min(); },
     "stop.max_output_tokens", "at least 1"},
    {"ScoredTokensOverTheContext", [](auto& o) { o.forced.assign(2039, 1); }, "continuation",
     "more than the context length", "CONTEXT_LENGTH"},
    {"ChunksUnderEviction",
     [](auto& o) {
       o.forced = {1, 2};
       o.force_in_chunks = true;
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}};
     },
     "cadence", "'full', not 'by_chunk'"},
    {"TokenBeyondTheVocabulary", [](auto& o) { o.prompt[4] = 64; }, "prompt.token_ids.ids[4]",
     "token id 64 is outside the vocabulary [0, 64)", "TOKEN_RANGE", absl::StatusCode::kOutOfRange},
    {"NegativeToken", [](auto& o) { o.prompt[0] = -1; }, "prompt.token_ids.ids[0]", "token id -1",
     "TOKEN_RANGE", absl::StatusCode::kOutOfRange},
    {"ScoredTokenBeyondTheVocabulary",
     [](auto& o) {
       o.forced = {1, 99};
     },
     "continuation[1]", "token id 99", "TOKEN_RANGE", absl::StatusCode::kOutOfRange},
    {"StopTokenBeyondTheVocabulary", [](auto& o) { o.stop.tokens = {64}; },
     "stop.stop_token_ids[0]", "token id 64", "TOKEN_RANGE", absl::StatusCode::kOutOfRange},
    {"NanTemperature", [](auto& o) { o.sampling.temperature = kNaN; }, "sampling.temperature",
     "finite number >= 0, is nan"},
    {"MinPAboveOne", [](auto& o) { o.sampling.min_p = 1.5f; }, "sampling.min_p", "[0, 1], is 1.5"},
    {"MinPNan", [](auto& o) { o.sampling.min_p = kNaN; }, "sampling.min_p", "is nan"},
    {"TypicalPZero", [](auto& o) { o.sampling.typical_p = 0; }, "sampling.typical_p", "(0, 1]"},
    {"TypicalPNan", [](auto& o) { o.sampling.typical_p = kNaN; }, "sampling.typical_p", "is nan"},
    {"RepetitionPenaltyZero", [](auto& o) { o.sampling.repetition_penalty = 0; },
     "sampling.repetition_penalty", "[0.01, 100], is 0"},
    {"RepetitionPenaltyInfinite", [](auto& o) { o.sampling.repetition_penalty = INFINITY; },
     "sampling.repetition_penalty", "is inf"},
    {"FrequencyPenalty", [](auto& o) { o.sampling.frequency_penalty = 2.5f; },
     "sampling.frequency_penalty", "[-2, 2], is 2.5"},
    {"PresencePenalty", [](auto& o) { o.sampling.presence_penalty = -3; },
     "sampling.presence_penalty", "[-2, 2], is -3"},
    {"PresencePenaltyNan", [](auto& o) { o.sampling.presence_penalty = kNaN; },
     "sampling.presence_penalty", "is nan"},
    {"LogitBias",
     [](auto& o) {
       o.sampling.logit_bias = {{5, 100.5f}};
     },
     "sampling.logit_bias[5]", "[-100, 100], is 100.5"},
    {"LogitBiasNan",
     [](auto& o) {
       o.sampling.logit_bias = {{5, kNaN}};
     },
     "sampling.logit_bias[5]", "is nan"},
    {"LogitBiasBeyondTheVocabulary",
     [](auto& o) {
       o.sampling.logit_bias = {{64, 1.0f}};
     },
     "sampling.logit_bias[64]", "token id 64 is outside", "TOKEN_RANGE",
     absl::StatusCode::kOutOfRange},
    {"TooManyLogitBiases",
     [](auto& o) {
       for (int32_t i = 0; i < 1025; ++i) o.sampling.logit_bias[i] = 0;
     },
     "sampling.logit_bias", "has 1025 items, at most 1024"},
    {"TooManyTopLogprobs", [](auto& o) { o.output.top_logprobs = 21; }, "output.top_logprobs",
     "at most 20, is 21"},
    {"TooManyTopLogprobsOfAScore",
     [](auto& o) {
       o.forced = {1};
       o.output.top_logprobs = 21;
     },
     "top_logprobs", "at most 20, is 21"},
    {"LogprobsOfAnEvictedPrompt",
     [](auto& o) {
       o.prompt.assign(100, 1);
       o.output.prompt_logprobs = true;
       o.kv = {.policy = "by_chunk", .budget = int64_t{115}};
     },
     "output.prompt_logprobs", "the smallest that works is 116", "PROMPT_EVICTED",
     absl::StatusCode::kFailedPrecondition},
    {"LeastOutputOverTheMost", [](auto& o) { o.stop.min_output_tokens = 21; },
     "stop.min_output_tokens", "is 21, more than max_output_tokens, 20"},
    {"InfiniteTemperature", [](auto& o) { o.sampling.temperature = INFINITY; },
     "sampling.temperature", "finite number"},
    {"NegativeTemperature", [](auto& o) { o.sampling.temperature = -0.5f; }, "sampling.temperature",
     "is -0.5"},
    {"TopPZero", [](auto& o) { o.sampling.top_p = 0; }, "sampling.top_p", "(0, 1], is 0"},
    {"TopPAboveOne", [](auto& o) { o.sampling.top_p = 1.5f; }, "sampling.top_p", "is 1.5"},
    {"TopPNan", [](auto& o) { o.sampling.top_p = kNaN; }, "sampling.top_p", "is nan"},
    {"NegativeTopK", [](auto& o) { o.sampling.top_k = -1; }, "sampling.top_k", "is -1"},
    {"EmptyStopString",
     [](auto& o) {
       o.stop.strings = {"a", ""};
     },
     "stop.stop_strings[1]", "1 to 256 bytes, has 0"},
    {"LongStopString", [](auto& o) { o.stop.strings = {std::string(257, 'x')}; },
     "stop.stop_strings[0]", "has 257"},
    {"ManyStopStrings", [](auto& o) { o.stop.strings.assign(17, "x"); }, "stop.stop_strings",
     "has 17 items, at most 16"},
    {"ManyStopTokens", [](auto& o) { o.stop.tokens.assign(65, 1); }, "stop.stop_token_ids",
     "has 65 items, at most 64"},
    {"LongId", [](auto& o) { o.id.assign(129, 'x'); }, "request_id", "has 129 bytes, at most 128"},
    {"LongTenant", [](auto& o) { o.scheduling.tenant.assign(65, 'x'); }, "scheduling.tenant",
     "has 65 bytes, at most 64"},
    {"UnknownPolicy", [](auto& o) { o.kv.policy = "best"; }, "kv.policy",
     "unknown policy 'best'; `epikv policies --all` lists all"},
    {"MistypedPolicy", [](auto& o) { o.kv.policy = "by_chnk"; }, "kv.policy",
     "unknown policy 'by_chnk'; did you mean by_chunk? `epikv policies --all` lists all"},
    {"PolicyWithoutBudget", [](auto& o) { o.kv.policy = "by_chunk"; }, "kv.budget",
     "needs a budget: kv.max_tokens or kv.keep_ratio"},
    {"BudgetZero", [](auto& o) { o.kv.budget = int64_t{0}; }, "kv.max_tokens", "at least 1"},
    {"NegativeBudget", [](auto& o) { o.kv.budget = int64_t{-5}; }, "kv.max_tokens", "at least 1"},
    {"RatioZero", [](auto& o) { o.kv.budget = 0.0; }, "kv.keep_ratio", "(0, 1], is 0"},
    {"RatioAboveOne", [](auto& o) { o.kv.budget = 1.25; }, "kv.keep_ratio", "is 1.25"},
    {"RatioNan", [](auto& o) { o.kv.budget = kNaN; }, "kv.keep_ratio", "is nan"},
    {"UnknownParam",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .params = {{"alpha", 1.0}}};
     },
     "kv.policy_params.alpha", "no such parameter; known: level, mode, slack"},
    {"ParamOutOfRange",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .params = {{"level", 1.5}}};
     },
     "kv.policy_params.level", "between 0 and 1, is 1.5"},
    {"ParamNan",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .params = {{"level", kNaN}}};
     },
     "kv.policy_params.level", "type float"},
    {"ParamOfAnotherType",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .params = {{"slack", std::string("1")}}};
     },
     "kv.policy_params.slack", "type int"},
    {"BudgetBelowThePrompt", [](auto& o) { o.kv = {.policy = "refuses", .budget = int64_t{12}}; },
     "kv.budget", "the smallest budget is 26", "KV_BUDGET"},
    {"BudgetBelowTheSinks",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .protection = {.sinks = 8}};
     },
     "kv.budget", "the smallest budget is 9", "KV_BUDGET"},
    {"NegativeSinks",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .protection = {.sinks = -1}};
     },
     "kv.sink_tokens", "at least 0"},
    {"NegativeRecent",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .protection = {.recent = -1}};
     },
     "kv.recent_tokens", "at least 0"},
    {"SinksWithoutEnd",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .protection = {.sinks = kMost}};
     },
     "kv.budget", "the smallest budget is 29", "KV_BUDGET"},
    {"RecentWithoutEnd",
     [](auto& o) {
       o.kv = {.policy = "by_chunk",
               .budget = int64_t{8},
               .protection = {.sinks = kMost, .recent = kMost}};
     },
     "kv.budget", "the smallest budget is 29", "KV_BUDGET"},
    {"EmptySpan",
     [](auto& o) {
       o.kv.protection.spans = {{0, 1}, {3, 3}};
     },
     "kv.protected_spans[1]", "must have end > begin"},
    {"SpanBeyondTheEnd",
     [](auto& o) {
       o.kv.protection.spans = {{3, 31}};
     },
     "kv.protected_spans[0]", "prompt + max output (30)", "SPAN_RANGE",
     absl::StatusCode::kOutOfRange},
    {"SpanBeforeTheBeginning",
     [](auto& o) {
       o.kv.protection.spans = {{-3, 2}};
     },
     "kv.protected_spans[0]", "begin >= 0"},
    {"SpanWithoutEnd",
     [](auto& o) {
       o.kv = {.policy = "by_chunk", .budget = int64_t{8}, .protection = {.spans = {{0, kMost}}}};
     },
     "kv.protected_spans[0]", "end <= prompt + max output (30)", "SPAN_RANGE",
     absl::StatusCode::kOutOfRange},
    {"ManySpans",
     [](auto& o) {
       o.kv.protection.spans.assign(65, {0, 1});
     },
     "kv.protected_spans", "has 65 items, at most 64"},
    {"ListBeyondTheContext",
     [](auto& o) {
       o.kv = {.policy = "by_chunk",
               .budget = int64_t{8},
               .params = {{"level", std::vector<int64_t>(1 << 20)}}};
     },
     "kv.policy_params.level", "has 1048576 items, at most the context length"},
    {"ResidualStepsInChunks",
     [](auto& o) {
       o.forced.assign(5, 1);
       o.force_in_chunks = true;
       o.output.residual_steps = true;
     },
     "residual_steps", "measured one token a step"},
    {"EqualProtectionAndMore", [](auto& o) { o.kv.protection = {.equal = true, .sinks = 2}; },
     "kv.equal_protection", "cannot be set together"},
};

class BadInputTest : public AdmissionTest, public testing::WithParamInterface<BadInput> {};

TEST_P(BadInputTest, IsRefusedByName) {
  const BadInput& bad = GetParam();
  RequestOptions options = Ask(10);
  options.stop.max_output_tokens = 20;
  bad.spoil(options);
  const Rejection rejection = Refuse(options);
  ASSERT_THAT(Fields(rejection), ElementsAre(bad.field));
  EXPECT_THAT(rejection.violations[0].description, HasSubstr(bad.says));
  EXPECT_THAT(rejection.message, AllOf(HasSubstr(bad.field), HasSubstr(bad.says)));
  EXPECT_EQ(rejection.reason, bad.reason);
  EXPECT_EQ(rejection.code, bad.code);
}

INSTANTIATE_TEST_SUITE_P(, BadInputTest, testing::ValuesIn(kBadInputs),
                         [](const auto& info) { return info.param.name; });

TEST_F(AdmissionTest, EveryViolationIsNamedAtOnce) {
  RequestOptions options = Ask(10);
  options.id.assign(200, 'x');
  options.prompt[3] = 99;
  options.sampling = {.temperature = kNaN, .top_p = 0, .top_k = -2};
  options.stop.strings = {""};
  options.stop.tokens = {-7};
  options.kv = {.policy = "by_chunk",
                .budget = int64_t{0},
                .params = {{"alpha", 1.0}, {"level", 7.0}, {"mode", std::string("min")}}};
  options.kv.protection.spans = {{5, 5}};
  const Rejection rejection = Refuse(options);
  EXPECT_THAT(Fields(rejection),
              UnorderedElementsAre("request_id", "prompt.token_ids.ids[3]", "sampling.temperature",
                                   "sampling.top_p", "sampling.top_k", "stop.stop_strings[0]",
                                   "stop.stop_token_ids[0]", "kv.max_tokens",
                                   "kv.policy_params.alpha", "kv.policy_params.level",
                                   "kv.policy_params.mode", "kv.protected_spans[0]"));
  EXPECT_EQ(rejection.code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(rejection.reason, "TOKEN_RANGE");
  EXPECT_THAT(rejection.message, HasSubstr("request_id: has 200 bytes"));
  EXPECT_THAT(rejection.message, HasSubstr("(and 11 more)"));
}

TEST_F(AdmissionTest, ViolationsAreCollectedToABound) {
  RequestOptions options = Ask(10);
  options.kv.policy = "by_chunk";
  for (int i = 0; i < 1000; ++i) options.kv.params[absl::StrCat("p", i)] = 1.0;
  options.stop.strings.resize(1000);
  EXPECT_EQ(Refuse(options).violations.size(), kMaxViolations);
}

TEST_F(AdmissionTest, TheServerMayAskForEqualProtection) {
  AdmissionLimits limits = Limits();
  limits.defaults.equal_protection = true;
  const Admission admission = Make(limits);
  auto sinks = [&](ProtectionOptions protection) {
    RequestOptions options = Ask(10, 100, "by_chunk", 60);
    options.kv.protection = protection;
    return std::get<Request>(admission.Resolve(options)).protection.sinks;
  };
  EXPECT_EQ(sinks({}), 4);
  // Whoever says something of protection says it all.
  EXPECT_EQ(sinks({.sinks = 1}), 1);
  const int64_t published = Accept(Make(Limits()), Ask(10, 100, "by_chunk", 60)).protection.sinks;
  EXPECT_NE(published, 4);
  EXPECT_EQ(sinks({.recent = 5}), published);
  EXPECT_EQ(sinks({.equal = false}), published);
}

TEST_F(AdmissionTest, ProtectionIsCheckedWithoutAPrompt) {
  RequestOptions options = Ask(0, 5, "refuses", 60);
  options.kv.protection.equal = true;
  options.kv.protection.spans = {{5, 5}};
  EXPECT_THAT(Fields(Refuse(options)),
              UnorderedElementsAre("prompt", "kv.equal_protection", "kv.protected_spans[0]"));
}

// What follows from lengths is found beside faults that have nothing to do with them.
TEST_F(AdmissionTest, SmallBudgetIsNamedBesideOtherFaults) {
  RequestOptions options = Ask(100, 50, "refuses", 60);
  options.sampling.temperature = kNaN;
  options.prompt[0] = 64;
  options.kv.protection.spans = {{9, 9}};
  EXPECT_THAT(Fields(Refuse(options)),
              UnorderedElementsAre("sampling.temperature", "prompt.token_ids.ids[0]",
                                   "kv.protected_spans[0]"));
  options.kv.protection.spans.clear();
  EXPECT_THAT(Fields(Refuse(options)),
              UnorderedElementsAre("sampling.temperature", "prompt.token_ids.ids[0]", "kv.budget"));
}

TEST_F(AdmissionTest, LargePoolDemandIsNamedBesideOtherFaults) {
  AdmissionLimits limits = Limits();
  limits.kv_capacity_bytes = 1000;
  RequestOptions options = Ask(100);
  options.sampling.top_p = 0;
  EXPECT_THAT(Fields(Refuse(Make(limits), options)),
              UnorderedElementsAre("sampling.top_p", "kv.budget"));
}

TEST_F(AdmissionTest, OneTokenOfAKindIsEnough) {
  RequestOptions options = Ask(1000);
  options.prompt.assign(1000, 99);
  EXPECT_THAT(Fields(Refuse(options)), ElementsAre("prompt.token_ids.ids[0]"));
}

// Where positions are counted in what is cached, that alone must fit the context.
TEST_F(AdmissionTest, ARequestMayOutgrowTheContextWhoseCacheDoesNot) {
  for (const PositionMode positions : {PositionMode::kCompact, PositionMode::kCache}) {
    RequestOptions options = Ask(3000, 5000, "by_chunk", 500);
    options.kv.positions = positions;
    const Request request = Accept(options);
    EXPECT_EQ(request.max_output_tokens, 5000);
    options.stop.max_output_tokens.reset();
    EXPECT_GT(Accept(options).max_output_tokens, 1);
    options.kv.budget = int64_t{2040};  // and a chunk
    EXPECT_THAT(Refuse(options).message, HasSubstr("tokens would be cached at once"));
    EXPECT_EQ(Refuse(options).reason, "CONTEXT_LENGTH");
    options = Ask(3000, 50, "at_end", 500);
    options.kv.positions = positions;
    EXPECT_THAT(Refuse(options).message, HasSubstr("tokens would be cached at once"));
    options = Ask(100, 64 * 2048, "by_chunk", 500);
    options.kv.positions = positions;
    EXPECT_THAT(Refuse(options).message, HasSubstr("more than the context length"));
    options = Ask(3000);  // under `full`
    options.kv.positions = positions;
    EXPECT_EQ(Refuse(options).reason, "CONTEXT_LENGTH");
  }
}

TEST_F(AdmissionTest, LimitsAndValuesAreMetadata) {
  RequestOptions options = Ask(3000);
  EXPECT_THAT(Refuse(options).metadata,
              UnorderedElementsAre(Pair("context_length", "2048"), Pair("prompt_tokens", "3000"),
                                   Pair("max_output_tokens", "1")));
  EXPECT_THAT(Refuse(Ask(100, 50, "refuses", 60)).metadata,
              UnorderedElementsAre(Pair("budget", "60"), Pair("min", "116")));
}

}  // namespace admission_refusals_test
}  // namespace epikv
