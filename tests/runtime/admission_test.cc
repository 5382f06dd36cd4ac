#include "runtime/admission/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "runtime/kv/kv_layout.h"
#include "runtime/model/model_shape.h"
#include "tests/fixtures/fake_model.h"
#include "tests/fixtures/fake_policies.h"

namespace epikv {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::UnorderedElementsAre;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kContext = 2048;
constexpr int64_t kLanes = 4;  // 2 layers x 2 KV heads

AdmissionLimits Limits() {
  return {
      .kv_capacity_bytes = 1 << 30, .prefill_chunk_tokens = 32, .defaults = {.policy = "by_chunk"}};
}

RequestOptions Ask(int64_t prompt_tokens) {
  return {.id = "r", .prompt = std::vector<int32_t>(prompt_tokens, 1)};
}
RequestOptions Ask(int64_t prompt_tokens, int64_t max_output, const std::string& policy,
                   int64_t budget) {
  RequestOptions options = Ask(prompt_tokens);
  options.stop.max_output_tokens = max_output;
  options.kv = {.policy = policy, .budget = budget};
  return options;
}

std::vector<std::string> Fields(const Rejection& rejection) {
  std::vector<std::string> fields;
  for (const FieldViolation& violation : rejection.violations) fields.push_back(violation.field);
  return fields;
}

class AdmissionTest : public testing::Test {
 protected:
  static Admission Make(AdmissionLimits limits, Manifest manifest = FakeManifest(kContext)) {
    return Admission(manifest, EveryKindOfPolicy(), std::move(limits));
  }
  Request Accept(RequestOptions options) const { return Accept(admission_, std::move(options)); }
  Rejection Refuse(RequestOptions options) const { return Refuse(admission_, std::move(options)); }
  bool Accepts(RequestOptions options) const {
    return std::holds_alternative<Request>(admission_.Resolve(std::move(options)));
  }

  static Request Accept(const Admission& admission, RequestOptions options) {
    std::variant<Request, Rejection> resolved = admission.Resolve(std::move(options));
    if (const auto* rejection = std::get_if<Rejection>(&resolved)) {
      ADD_FAILURE() << rejection->message;
      return Accept(admission, Ask(1));
    }
    return std::get<Request>(std::move(resolved));
  }
  static Rejection Refuse(const Admission& admission, RequestOptions options) {
    std::variant<Request, Rejection> resolved = admission.Resolve(std::move(options));
    if (std::holds_alternative<Request>(resolved)) {
      ADD_FAILURE() << "was accepted";
      return {};
    }
    return std::get<Rejection>(std::move(resolved));
  }

  const Admission admission_ = Make(Limits());
};

// Positions that are ranks inside the cache.

const PolicySpec kReadsKeys{
    .name = "reads_keys",
    .params = fake_policies::kParams,
    .traits = [](const Params&,
                 const ModelShape&) { return PolicyTraits{.signals = Signal::kKeys}; },
    .make = &fake_policies::Make};

TEST_F(AdmissionTest, RanksForPositionsExcludePoliciesThatReadKeys) {
  const PolicySpec* const catalog[] = {&kReadsKeys};
  const Admission admission(FakeManifest(kContext), catalog, Limits());
  RequestOptions options = Ask(10, 100, "reads_keys", 64);
  options.kv.positions = PositionMode::kCache;
  const Rejection rejection = Refuse(admission, options);
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.positions"));
  EXPECT_THAT(rejection.message, HasSubstr("'reads_keys' reads keys or queries"));
  options.kv.positions = PositionMode::kCompact;
  Accept(admission, options);
  options.kv.positions = PositionMode::kCache;
  options.kv.budget = int64_t{109};  // holds everything: nothing is read
  Accept(admission, options);
}

const PolicySpec kReadsQueries{
    .name = "reads_queries",
    .params = fake_policies::kParams,
    .traits = [](const Params&,
                 const ModelShape&) { return PolicyTraits{.signals = Signal::kQueries}; },
    .make = &fake_policies::Make};

// What a window hides goes by position, and past queries' compact positions are not kept.
TEST_F(AdmissionTest, CompactPositionsAndWindowsExcludePoliciesThatReadQueries) {
  const PolicySpec* const catalog[] = {&kReadsKeys, &kReadsQueries};
  Manifest manifest = FakeManifest(kContext);
  manifest.layers[1].window = 64;
  const Admission admission(manifest, catalog, Limits());
  RequestOptions options = Ask(10, 100, "reads_queries", 50);
  options.kv.positions = PositionMode::kCompact;
  const Rejection rejection = Refuse(admission, options);
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.positions"));
  EXPECT_THAT(rejection.message, HasSubstr("choose absolute positions"));
  options.kv.positions = PositionMode::kAbsolute;
  Accept(admission, options);
  options.kv.positions = PositionMode::kCompact;
  options.kv.policy = "reads_keys";
  Accept(admission, options);
  options.kv.policy = "reads_queries";
  options.stop.max_output_tokens = 55;  // as many tokens as the window shows
  Accept(admission, options);
}

TEST_F(AdmissionTest, RanksForPositionsReserveALayersKeysBeside) {
  RequestOptions options = Ask(10, 100, "by_chunk", 64);
  const KvDemand absolute = Accept(options).demand;
  options.kv.positions = PositionMode::kCache;
  const KvDemand ranks = Accept(options).demand;
  const ModelShape& shape = admission_.shape();
  const int64_t row = shape.num_kv_heads * shape.key_width * 4;
  EXPECT_EQ(ranks.decode, absolute.decode);
  EXPECT_EQ(ranks.decode_bytes - absolute.decode_bytes, row * absolute.decode[0]);
  EXPECT_EQ(ranks.prefill_bytes - absolute.prefill_bytes, row * absolute.prefill[0]);
}

const ParamSpec kThrows[] = {
    {.name = "number", .type = ParamType::kBool, .fallback = false, .help = "what"}};
const PolicySpec kCannotBeMade{
    .name = "cannot_be_made",
    .params = kThrows,
    .traits = [](const Params&, const ModelShape&) { return PolicyTraits{}; },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      if (params.Bool("number")) throw 42;
      throw std::runtime_error("out of order");
    }};

TEST_F(AdmissionTest, APolicyThatThrowsWhenItIsMadeFailsItsRequest) {
  const PolicySpec* const catalog[] = {&kCannotBeMade};
  const Admission admission(FakeManifest(kContext), catalog, Limits());
  RequestOptions options = Ask(10, 100, "cannot_be_made", 64);
  const Rejection rejection = Refuse(admission, options);
  EXPECT_EQ(rejection.code, absl::StatusCode::kInternal);
  EXPECT_EQ(rejection.reason, "POLICY_FAILED");
  EXPECT_THAT(rejection.message, HasSubstr("'cannot_be_made' could not be set up: out of order"));
  options.kv.params["number"] = true;
  EXPECT_THAT(Refuse(admission, options).message, HasSubstr("could not be set up"));
}

const PolicySpec kSeesDistances{
    .name = "sees_distances",
    .params = fake_policies::kParams,
    .traits = [](const Params&,
                 const ModelShape&) { return PolicyTraits{.signals = Signal::kResidualDistance}; },
    .make = &fake_policies::Make};

TEST_F(AdmissionTest, ResidualsOfAllBlocksAreReservedForTheRowsOfAForward) {
  const PolicySpec* const catalog[] = {&kSeesDistances};
  const Admission admission(FakeManifest(kContext), catalog, Limits());
  const ModelShape& shape = admission.shape();
  const int64_t row = shape.num_layers * shape.hidden_size * 4;
  for (int64_t prompt : {10, 100}) {  // chunks are of 32
    SCOPED_TRACE(prompt);
    const Request request = Accept(admission, Ask(prompt, 200, "sees_distances", 128));
    const KvLayout layout = LayoutOf(shape, {DType::kFloat32}, request.traits, 0);
    const KvDemand& demand = request.demand;
    EXPECT_EQ(demand.prefill_bytes - BytesOf(layout, demand.prefill),
              std::min<int64_t>(prompt, 32) * row);
    EXPECT_EQ(demand.decode_bytes - BytesOf(layout, demand.decode), row);
  }
}

TEST_F(AdmissionTest, LogitsOfAPromptAreReservedForTheRowsOfAForward) {
  for (int64_t prompt : {10, 100}) {  // chunks are of 32
    SCOPED_TRACE(prompt);
    RequestOptions options = Ask(prompt);
    const KvDemand plain = Accept(options).demand;
    options.output.prompt_logprobs = true;
    const KvDemand demand = Accept(options).demand;
    EXPECT_EQ(demand.prefill_bytes - plain.prefill_bytes,
              std::min<int64_t>(prompt, 32) * kFakeVocab * 4);
    EXPECT_EQ(demand.decode_bytes, plain.decode_bytes);
  }
  RequestOptions scores = Ask(10);
  scores.forced.assign(60, 1);
  const KvDemand slow = Accept(scores).demand;
  scores.force_in_chunks = true;
  EXPECT_EQ(Accept(scores).demand.prefill_bytes - slow.prefill_bytes, 32 * kFakeVocab * 4);
}

TEST_F(AdmissionTest, PromptLogprobsNeedThePromptWhole) {
  const auto accepts = [this](const std::string& policy, int64_t prompt, int64_t budget) {
    RequestOptions options = Ask(prompt, 500, policy, budget);
    options.output.prompt_logprobs = true;
    return std::holds_alternative<Request>(admission_.Resolve(options));
  };
  EXPECT_TRUE(accepts("by_chunk", 100, 116));
  EXPECT_FALSE(accepts("by_chunk", 100, 115));
  EXPECT_TRUE(accepts("at_end", 100, 40)) << "its round comes after the figures";
  EXPECT_FALSE(accepts("ragged", 100, 116)) << "its leanest lane has half";
  EXPECT_TRUE(accepts("ragged", 100, 232));
}

// Artefacts.

const PolicySpec kMeasured{
    .name = "measured",
    .params = fake_policies::kParams,
    .read_data = [](absl::string_view, const ModelShape&)
        -> absl::StatusOr<std::shared_ptr<const PolicyData>> { return nullptr; },
    .traits = [](const Params&, const ModelShape&) { return PolicyTraits{}; },
    .make = &fake_policies::Make};

TEST_F(AdmissionTest, APolicyWithoutItsArtefactIsRefused) {
  const PolicySpec* const catalog[] = {&kMeasured};
  const Manifest manifest = FakeManifest(kContext);
  const RequestOptions options = Ask(10, 100, "measured", 64);
  const Rejection rejection = Refuse(Admission(manifest, catalog, Limits()), options);
  EXPECT_EQ(rejection.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rejection.reason, "ARTEFACT_MISSING");
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.policy"));
  EXPECT_THAT(rejection.message, HasSubstr("`epikv calibrate measured`"));

  ModelShape shape = ShapeOf(manifest);
  shape.artefacts["measured"] = std::make_shared<PolicyData>();
  Accept(Admission(manifest, std::move(shape), catalog, Limits()), options);
}

// Defaults.

TEST_F(AdmissionTest, MaxOutputIs1024OrWhatTheContextLeaves) {
  EXPECT_EQ(Accept(Ask(10)).max_output_tokens, 1024);
  EXPECT_EQ(Accept(Ask(2000)).max_output_tokens, 48);
  EXPECT_EQ(Accept(Ask(2047)).max_output_tokens, 1);
}

TEST_F(AdmissionTest, IgnoredEndTokensEndNothing) {
  RequestOptions options = Ask(3);
  options.stop.ignore_end = true;
  options.stop.tokens = {9};
  const Request request = Accept(options);
  EXPECT_THAT(request.end_tokens, IsEmpty());
  EXPECT_THAT(request.stop_tokens, ElementsAre(9));
  EXPECT_TRUE(request.ignore_end);
}

TEST_F(AdmissionTest, SamplingThatIsLeftOutIsTheModels) {
  Manifest manifest = FakeManifest(kContext);
  manifest.sampling = {.temperature = .5f, .top_p = .75f, .top_k = 3, .repetition_penalty = 1.5f};
  const Admission admission = Make(Limits(), manifest);
  RequestOptions options = Ask(3);
  options.sampling.top_k = 0;
  options.sampling.seed = 7;
  options.completions = 2;  // for which greedy would be refused
  const SamplingParams drawn = Accept(admission, options).sampling;
  EXPECT_EQ(drawn.temperature, .5f);
  EXPECT_EQ(drawn.top_p, .75f);
  EXPECT_EQ(drawn.top_k, 0);
  EXPECT_EQ(drawn.min_p, std::nullopt);
  EXPECT_EQ(drawn.repetition_penalty, 1.5f);
  EXPECT_EQ(drawn.seed, 7u);
  options.completions = 1;
  options.sampling.temperature = 0;
  EXPECT_TRUE(Accept(admission, options).sampling.greedy());
  options.sampling.temperature = std::nullopt;
  options.forced = {1};  // nothing is drawn
  EXPECT_EQ(Accept(admission, options).sampling.temperature, std::nullopt);
}

TEST_F(AdmissionTest, DefaultMaxOutputIsASetting) {
  AdmissionLimits limits = Limits();
  limits.defaults.max_output_tokens = 7;
  EXPECT_EQ(Accept(Make(limits), Ask(10)).max_output_tokens, 7);
}

TEST_F(AdmissionTest, NeitherBudgetNorPolicyKeepsTheWholeCache) {
  const Request request = Accept(Ask(10));
  EXPECT_EQ(request.spec->name, "full");
  EXPECT_FALSE(request.traits.evicts);
  EXPECT_EQ(request.budget, 10 + 1024);
  EXPECT_THAT(request.demand.decode, Each(10 + 1023));
}

TEST_F(AdmissionTest, BudgetAloneMeansTheServersPolicy) {
  RequestOptions options = Ask(10);
  options.kv.budget = int64_t{64};
  EXPECT_EQ(Accept(options).spec->name, "by_chunk");
}

TEST_F(AdmissionTest, BudgetAloneMeansTheModelsPolicyWhereItsCalibrationIsConfirmed) {
  Manifest manifest = FakeManifest(kContext);
  manifest.calibration = {.policy = "at_end", .layer_a = 0, .layer_b = 1};
  RequestOptions options = Ask(10);
  options.kv.budget = int64_t{64};
  EXPECT_EQ(Accept(Make(Limits(), manifest), options).spec->name, "by_chunk");
  manifest.calibration->confirmed = true;
  EXPECT_EQ(Accept(Make(Limits(), manifest), options).spec->name, "at_end");
}

TEST_F(AdmissionTest, BudgetAloneIsRefusedWhereThereIsNoDefault) {
  AdmissionLimits limits = Limits();
  limits.defaults.policy.clear();
  RequestOptions options = Ask(10);
  options.kv.budget = int64_t{64};
  const Rejection rejection = Refuse(Make(limits), options);
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.policy"));
  EXPECT_THAT(rejection.message, HasSubstr("this model has no default policy"));
}

TEST_F(AdmissionTest, DefaultsOfParamsAreFilledIn) {
  const Request request = Accept(Ask(10, 10, "by_chunk", 8));
  EXPECT_EQ(request.params.Float("level"), 0.5);
  EXPECT_EQ(request.params.Choice("mode"), "mean");
  EXPECT_EQ(request.params.Int("slack"), 0);
}

TEST_F(AdmissionTest, WhatWasAskedArrives) {
  RequestOptions options = Ask(3, 20, "refuses", 30);
  options.id = "mine";
  options.sampling = {.temperature = 0.7f,
                      .top_p = 0.9f,
                      .top_k = 5,
                      .min_p = 0.1f,
                      .typical_p = 0.8f,
                      .repetition_penalty = 1.1f,
                      .frequency_penalty = -2.0f,
                      .presence_penalty = 2.0f,
                      .logit_bias = {{0, -100.0f}, {63, 100.0f}},
                      .seed = 42};
  options.stop.strings = {"x"};
  options.stop.tokens = {9};
  options.stop.include = true;
  options.stop.min_output_tokens = 20;
  options.output.logprobs = true;
  options.kv.positions = PositionMode::kCompact;
  options.kv.protection.spans = {{5, 7}};
  options.arrival = absl::FromUnixSeconds(1);
  options.deadline = absl::FromUnixSeconds(2);
  const Request request = Accept(options);
  EXPECT_EQ(request.id, "mine");
  EXPECT_EQ(request.prompt, options.prompt);
  EXPECT_EQ(request.sampling.seed, 42u);
  EXPECT_EQ(request.sampling.logit_bias, options.sampling.logit_bias);
  EXPECT_EQ(request.min_output_tokens, 20);
  EXPECT_THAT(request.stop_strings, ElementsAre("x"));
  EXPECT_THAT(request.stop_tokens, ElementsAre(9));
  EXPECT_THAT(request.end_tokens, ElementsAre(63));
  EXPECT_TRUE(request.include_stop);
  EXPECT_TRUE(request.output.logprobs);
  EXPECT_EQ(request.positions, PositionMode::kCompact);
  EXPECT_EQ(request.budget, 30);
  EXPECT_EQ(request.protection.prompt, 3);
  EXPECT_EQ(request.protection.sinks, 4);
  EXPECT_EQ(request.protection.spans, options.kv.protection.spans);
  EXPECT_EQ(request.arrival, options.arrival);
  EXPECT_EQ(request.deadline, options.deadline);
}

TEST_F(AdmissionTest, ScoringForcesAllGivenTokens) {
  RequestOptions options = Ask(10);
  options.forced = {1, 2, 3};
  options.stop.max_output_tokens = 1000;  // has no meaning here
  EXPECT_EQ(Accept(options).max_output_tokens, 3);
  EXPECT_EQ(Accept(options).prefill_tokens(), 10);
  options.force_in_chunks = true;
  EXPECT_EQ(Accept(options).prefill_tokens(), 12);
  options.forced.clear();
  EXPECT_EQ(Accept(options).prefill_tokens(), 10) << "nothing to force: it generates";
}

TEST_F(AdmissionTest, TapsAreThePolicysOrAllWhereStepsAreAskedFor) {
  RequestOptions options = Ask(3, 50, "refuses", 30);
  EXPECT_THAT(Accept(options).tap_layers, ElementsAre(1));
  options.output.residual_steps = true;
  EXPECT_THAT(Accept(options).tap_layers, ElementsAre(0, 1));
  EXPECT_THAT(Accept(Ask(3)).tap_layers, IsEmpty());
}

TEST_F(AdmissionTest, UnderABudgetThatHoldsEverythingNothingIsMeasured) {
  const Request request = Accept(Ask(3, 20, "refuses", 30));
  EXPECT_FALSE(request.traits.evicts);
  EXPECT_TRUE(request.traits.signals.Names().empty());
  EXPECT_TRUE(request.traits.columns.empty());
  EXPECT_EQ(request.spec->name, "refuses");
}

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

TEST_F(AdmissionTest, LimitsAndValuesAreMetadata) {
  RequestOptions options = Ask(3000);
  EXPECT_THAT(Refuse(options).metadata,
              UnorderedElementsAre(Pair("context_length", "2048"), Pair("prompt_tokens", "3000"),
                                   Pair("max_output_tokens", "1")));
  EXPECT_THAT(Refuse(Ask(100, 50, "refuses", 60)).metadata,
              UnorderedElementsAre(Pair("budget", "60"), Pair("min", "116")));
}

// Budgets.

TEST_F(AdmissionTest, RatioIsOfPromptAndMaxOutputRoundedUp) {
  auto budget = [&](int64_t prompt, int64_t output, double ratio) {
    RequestOptions options = Ask(prompt, output, "by_chunk", 1);
    options.kv.budget = ratio;
    return Accept(options).budget;
  };
  EXPECT_EQ(budget(60, 40, 0.5), 50);
  EXPECT_EQ(budget(60, 41, 0.5), 51);
  EXPECT_EQ(budget(60, 40, 1.0), 100);
  EXPECT_EQ(budget(60, 40, 0.001), 1);
  EXPECT_EQ(budget(60, 40, 0.071), 8);
  // In doubles 0.07 x 100 is a little over 7, and so for many others.
  for (int64_t percent = 1; percent <= 100; ++percent) {
    for (int64_t hundreds : {1, 3, 7, 20}) {
      EXPECT_EQ(budget(hundreds * 60, hundreds * 40, percent / 100.0), percent * hundreds)
          << percent << " % of " << hundreds * 100;
    }
  }
}

TEST_F(AdmissionTest, BudgetOfFullIsEverything) {
  for (int64_t enough : {29, 500}) {
    const Request request = Accept(Ask(10, 20, "full", enough));
    EXPECT_EQ(request.budget, 30);
    EXPECT_THAT(request.demand.decode, Each(29));
  }
}

TEST_F(AdmissionTest, FullRefusesABudgetThatItCannotKeep) {
  const Rejection rejection = Refuse(Ask(10, 20, "full", 28));
  EXPECT_EQ(rejection.reason, "KV_BUDGET");
  EXPECT_EQ(rejection.code, absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(rejection.message, HasSubstr("evicts nothing and may cache 29 tokens"));
  EXPECT_THAT(rejection.metadata, UnorderedElementsAre(Pair("budget", "28"), Pair("min", "29")));
  RequestOptions ratio = Ask(10, 20, "full", 1);
  ratio.kv.budget = 0.5;
  EXPECT_FALSE(Accepts(ratio));
  ratio.kv.budget = 1.0;
  EXPECT_TRUE(Accepts(ratio));
}

TEST_F(AdmissionTest, BudgetThatHoldsEverythingRefusesNothing) {
  // 104 tokens are ever cached: the last output token is not.
  EXPECT_FALSE(Accepts(Ask(100, 5, "refuses", 103)));
  const Request request = Accept(Ask(100, 5, "refuses", 104));
  EXPECT_THAT(request.demand.budget, Each(104));
  EXPECT_THAT(request.demand.prefill, Each(104));
  EXPECT_TRUE(Accepts(Ask(100, 5, "refuses", kMost)));
}

// Whatever a refusal names as the smallest budget is accepted, and one token less is refused.
TEST_F(AdmissionTest, SmallestBudgetNamedIsTheSmallest) {
  std::mt19937 random(1);
  auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int64_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const char* const policies[] = {"by_chunk", "at_end", "refuses", "ragged"};
    RequestOptions options = Ask(draw(1, 120), draw(1, 200), policies[draw(0, 3)], draw(1, 80));
    ProtectionOptions& protection = options.kv.protection;
    const int64_t total = options.prompt.size() + *options.stop.max_output_tokens;
    if (draw(0, 4) == 0) {
      protection.equal = true;
    } else {
      if (draw(0, 2) == 0) protection.prompt = draw(0, 1) == 1;
      if (draw(0, 2) == 0) protection.sinks = draw(0, 40);
      if (draw(0, 2) == 0) protection.recent = draw(0, 60);
      for (int64_t spans = draw(0, 3); spans > 0; --spans) {
        const int64_t begin = draw(0, total - 1);
        protection.spans.push_back({begin, std::min(total, begin + draw(1, 50))});
      }
    }
    const auto resolved = admission_.Resolve(options);
    const auto* rejection = std::get_if<Rejection>(&resolved);
    if (rejection == nullptr) continue;
    ASSERT_THAT(Fields(*rejection), ElementsAre("kv.budget"));
    ++refused;
    const int64_t smallest = std::stoll(rejection->metadata.at("min"));
    ASSERT_GT(smallest, std::get<int64_t>(options.kv.budget));
    options.kv.budget = smallest;
    ASSERT_TRUE(Accepts(options)) << "round " << round << ": " << rejection->message;
    options.kv.budget = smallest - 1;
    ASSERT_FALSE(Accepts(options)) << "round " << round << ": " << rejection->message;
  }
  EXPECT_GT(refused, 2000);
}

// An accepted budget always leaves enough unprotected tokens for a round, whenever it comes.
TEST_F(AdmissionTest, ProtectedTokensFitEveryLane) {
  std::mt19937 random(2);
  auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 3000; ++round) {
    const char* const policies[] = {"by_chunk", "at_end", "refuses", "ragged"};
    RequestOptions options = Ask(draw(1, 60), draw(1, 60), policies[draw(0, 3)], draw(1, 90));
    ProtectionOptions& protection = options.kv.protection;
    if (draw(0, 2) == 0) protection.sinks = draw(0, 20);
    if (draw(0, 2) == 0) protection.recent = draw(0, 20);
    if (draw(0, 1) == 0) protection.spans = {{4, 4 + draw(1, 20)}};
    const auto resolved = admission_.Resolve(options);
    if (!std::holds_alternative<Request>(resolved)) continue;
    const Request& request = std::get<Request>(resolved);
    const int64_t least =
        *std::min_element(request.demand.budget.begin(), request.demand.budget.end());
    const int64_t longest = options.prompt.size() + *options.stop.max_output_tokens - 1;
    for (int64_t newest = 0; newest < longest; ++newest) {
      int64_t covered = 0;
      for (int64_t i = 0; i <= newest; ++i) covered += request.protection.Covers(i, newest);
      ASSERT_LE(covered, least) << "round " << round << " newest " << newest;
    }
  }
}

// Demand.

// Tokens in a cache, step by step: what the engine will do, without any formula. Budgets by lane.
class TokenCounts {
 public:
  TokenCounts(const Request& request, int64_t chunk, std::mt19937& random)
      : request_(request), live_(request.demand.budget.size()) {
    prefill_peak = decode_peak = live_;
    const int64_t prompt = static_cast<int64_t>(request.prompt.size());
    while (cached_ < prompt) {
      // The scheduler may cut a chunk anywhere.
      const int64_t most = std::min(prompt - cached_, chunk - cached_ % chunk);
      Cache(std::uniform_int_distribution<int64_t>(1, most)(random), prefill_peak);
      const bool at_end = cached_ == prompt;
      if (at_end && request.max_output_tokens == 1) break;  // ends before it settles
      const bool round =
          request.traits.prompt == PromptEviction::kAtEnd ? at_end : at_end || cached_ % chunk == 0;
      if (round) Evict(0);
    }
    for (int64_t output = 1; output < request.max_output_tokens; ++output) {
      Cache(1, decode_peak);
      Evict(request.traits.slack);
    }
  }

  std::vector<int64_t> prefill_peak, decode_peak;
  int64_t rounds = 0;

 private:
  void Cache(int64_t count, std::vector<int64_t>& peak) {
    cached_ += count;
    for (size_t lane = 0; lane < live_.size(); ++lane) {
      live_[lane] += count;
      peak[lane] = std::max(peak[lane], live_[lane]);
    }
  }
  void Evict(int64_t slack) {
    if (!request_.traits.evicts) return;
    bool over = false;
    for (size_t lane = 0; lane < live_.size(); ++lane) {
      over |= live_[lane] > request_.demand.budget[lane] + slack;
    }
    if (!over) return;
    ++rounds;
    for (size_t lane = 0; lane < live_.size(); ++lane) {
      live_[lane] = std::min(live_[lane], request_.demand.budget[lane]);
    }
  }

  const Request& request_;
  int64_t cached_ = 0;
  std::vector<int64_t> live_;
};

class DemandLaw : public AdmissionTest, public testing::WithParamInterface<const char*> {
 protected:
  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  // Calls `check` with random accepted requests and what they come to hold.
  void ForRandomRequests(int rounds,
                         const std::function<void(const Request&, const TokenCounts&)>& check) {
    int accepted = 0, evicting = 0;
    for (int round = 0; round < rounds; ++round) {
      AdmissionLimits limits = Limits();
      limits.prefill_chunk_tokens = Draw(1, 64);
      RequestOptions options =
          Ask(Draw(1, 200), Draw(0, 3) == 0 ? Draw(1, 4) : Draw(1, 80), GetParam(), Draw(1, 250));
      if (options.kv.policy != "full") {
        options.kv.params["slack"] = Draw(0, 1) * Draw(0, 70);
      } else {
        options.kv.budget = {};
      }
      const auto resolved = Make(limits).Resolve(options);
      if (!std::holds_alternative<Request>(resolved)) continue;
      const Request& request = std::get<Request>(resolved);
      const TokenCounts counts(request, limits.prefill_chunk_tokens, random_);
      check(request, counts);
      ++accepted;
      evicting += counts.rounds > 0;
      if (HasFailure()) {
        FAIL() << "prompt " << options.prompt.size() << " output "
               << *options.stop.max_output_tokens << " budget " << request.budget << " slack "
               << request.traits.slack << " chunk " << limits.prefill_chunk_tokens;
      }
    }
    EXPECT_GT(accepted, rounds / 10);
    if (std::string(GetParam()) != "full") {
      EXPECT_GT(evicting, rounds / 20);
    }
  }
  std::mt19937 random_{3};
};

TEST_P(DemandLaw, IsExactlyWhatTheLanesComeToHold) {
  ForRandomRequests(4000, [](const Request& request, const TokenCounts& counts) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      // A lane has one capacity while the prompt is cached, and it only shrinks.
      EXPECT_EQ(request.demand.prefill[lane],
                std::max(counts.prefill_peak[lane], counts.decode_peak[lane]));
      if (request.max_output_tokens > 1) {
        EXPECT_EQ(request.demand.decode[lane], counts.decode_peak[lane]);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, DemandLaw,
                         testing::Values("at_end", "by_chunk", "full", "refuses"),
                         [](const auto& info) { return info.param; });

// Lanes of unequal budgets have their rounds together, so some never fill: a bound, not exact.
class UnequalDemandLaw : public DemandLaw {};

TEST_P(UnequalDemandLaw, IsNeverExceededByAnyLane) {
  ForRandomRequests(4000, [](const Request& request, const TokenCounts& counts) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      EXPECT_GE(request.demand.prefill[lane], counts.prefill_peak[lane]);
      EXPECT_GE(request.demand.prefill[lane], counts.decode_peak[lane]);
      EXPECT_GE(request.demand.decode[lane], counts.decode_peak[lane]);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, UnequalDemandLaw, testing::Values("ragged"),
                         [](const auto& info) { return info.param; });

TEST_F(AdmissionTest, RoundSlackAndChunkSlackAreNotBothCharged) {
  RequestOptions options = Ask(1000, 500, "by_chunk", 100);
  options.kv.params["slack"] = int64_t{50};
  EXPECT_THAT(Accept(options).demand.prefill, Each(151));
  options.kv.params["slack"] = int64_t{10};
  EXPECT_THAT(Accept(options).demand.prefill, Each(132));
  EXPECT_THAT(Accept(options).demand.decode, Each(111));
}

TEST_F(AdmissionTest, LanesMayHaveUnequalBudgets) {
  const Request request = Accept(Ask(100, 100, "ragged", 41));
  EXPECT_THAT(request.demand.budget, ElementsAre(20, 62, 20, 62));
  EXPECT_THAT(request.demand.decode, ElementsAre(21, 63, 21, 63));
  // 96 is the last multiple of the chunk in the prompt.
  EXPECT_THAT(request.demand.prefill, ElementsAre(52, 94, 52, 94));
}

TEST_F(AdmissionTest, ScoringInChunksDemandsAllScoredTokens) {
  RequestOptions options = Ask(10);
  options.forced.assign(25, 1);
  options.force_in_chunks = true;
  EXPECT_THAT(Accept(options).demand.prefill, Each(34));
}

// Bytes.

TEST_F(AdmissionTest, BytesAreRowsTablesAndState) {
  const Request full = Accept(Ask(10, 11, "full", 20));
  // 20 tokens in 4 lanes of 4 + 4 floats; one table of index and position.
  EXPECT_EQ(full.demand.peak_bytes(), 20 * kLanes * 32 + 20 * 8);
  EXPECT_EQ(admission_.kv_bytes_per_token(), kLanes * 32);

  const Request request = Accept(Ask(10, 100, "refuses", 40));
  // 41 tokens; a table a layer with two columns; state by token; one tap of 16 floats, twice.
  EXPECT_EQ(request.demand.peak_bytes(),
            41 * kLanes * 32 + 41 * 2 * (8 + 2 * 4) + 41 * 24 + 1000 + 2 * 16 * 4);
}

// And, in decode, the logits of one layer that they are made of.
TEST_F(AdmissionTest, AttentionRowsAreCountedByTokenInTheLayersMeasured) {
  const ModelShape shape = admission_.shape();
  auto bytes = [&](const PolicyTraits& traits) {
    return LayoutOf(shape, {DType::kFloat32}, traits, 0).state_bytes_per_token;
  };
  const int64_t logits = shape.num_heads * 4;
  EXPECT_EQ(bytes({.signals = Signal::kAttentionRow}), kLanes * 4 + logits);
  EXPECT_EQ(bytes({.signals = Signal::kAttentionRow, .attention_layers = {1}}),
            shape.num_kv_heads * 4 + logits);
  EXPECT_EQ(bytes({.signals = Signal::kPromptAttention}), kLanes * 4);
}

TEST_F(AdmissionTest, TableIsAsLongAsItsLongestLane) {
  const KvLayout layout{.num_lanes = 4,
                        .row_bytes = 100,
                        .num_tables = 2,
                        .slot_bytes = 10,
                        .state_bytes_per_token = 1,
                        .state_bytes = 7};
  EXPECT_EQ(BytesOf(layout, {2, 1, 5, 3}), 11 * 100 + (2 + 5) * 10 + 5 * 1 + 7);
}

TEST_F(AdmissionTest, HalfPrecisionHalvesTheRows) {
  Manifest manifest = FakeManifest(kContext);
  manifest.dtype = DType::kBFloat16;
  EXPECT_EQ(Make(Limits(), manifest).kv_bytes_per_token(), kLanes * 16);
}

// A row is its elements and a scale; also of the keys of a layer that are turned at each step.
TEST_F(AdmissionTest, Int8RowsAreAByteAnElementAndAScale) {
  AdmissionLimits limits = Limits();
  limits.kv_dtype = KvDType::kInt8;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Manifest manifest = FakeManifest(kContext);
    manifest.dtype = dtype;
    const Admission admission = Make(limits, manifest);
    EXPECT_EQ(admission.kv_bytes_per_token(), kLanes * 2 * (4 + 4));
    RequestOptions options = Ask(10, 11, "full", 20);
    const int64_t rows = 20 * kLanes * 16 + 20 * 8;
    EXPECT_EQ(Accept(admission, options).demand.peak_bytes(), rows);
    options.kv.positions = PositionMode::kCache;
    EXPECT_EQ(Accept(admission, options).demand.peak_bytes(),
              rows + 20 * admission.shape().num_kv_heads * (4 + 4));
  }
}

TEST_F(AdmissionTest, WhatCanNeverFitIsRefusedWithTheNumbers) {
  const RequestOptions options = Ask(10, 11, "full", 20);
  AdmissionLimits limits = Limits();
  limits.kv_capacity_bytes = Accept(options).demand.peak_bytes();
  Accept(Make(limits), options);
  const std::string needed = absl::StrCat(limits.kv_capacity_bytes);
  --limits.kv_capacity_bytes;
  const Rejection rejection = Refuse(Make(limits), options);
  EXPECT_EQ(rejection.reason, "KV_POOL_TOO_SMALL");
  EXPECT_EQ(rejection.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(rejection.metadata,
              UnorderedElementsAre(Pair("needed_bytes", needed),
                                   Pair("capacity_bytes", absl::StrCat(limits.kv_capacity_bytes))));
}

// Policy objects.

TEST_F(AdmissionTest, RequestsWithTheSamePolicyAndParamsShareOneObject) {
  const Request a = Accept(Ask(10, 20, "by_chunk", 8));
  const Request b = Accept(Ask(50, 5, "by_chunk", 12));
  RequestOptions other = Ask(10, 20, "by_chunk", 8);
  other.kv.params["level"] = 0.25;
  const Request c = Accept(other);
  const Request d = Accept(Ask(10, 20, "at_end", 8));
  EXPECT_EQ(a.policy, b.policy);
  EXPECT_NE(a.policy, c.policy);
  EXPECT_NE(a.policy, d.policy);
  // A default that is spelled out is no difference, nor is the type of a whole number.
  other.kv.params = {{"level", 0.5}, {"slack", 0.0}};
  EXPECT_EQ(Accept(other).policy, a.policy);
}

TEST_F(AdmissionTest, PolicyObjectGoesWithItsLastRequest) {
  ASSERT_EQ(fake_policies::live_objects, 0);
  {
    const Request a = Accept(Ask(10, 20, "by_chunk", 8));
    {
      const Request b = Accept(Ask(10, 20, "by_chunk", 8));
      EXPECT_EQ(fake_policies::live_objects, 1);
    }
    EXPECT_EQ(fake_policies::live_objects, 1);
  }
  EXPECT_EQ(fake_policies::live_objects, 0);
  const Request again = Accept(Ask(10, 20, "by_chunk", 8));
  EXPECT_EQ(fake_policies::live_objects, 1);
}

TEST_F(AdmissionTest, RefusedRequestsMakeNoPolicyObject) {
  Refuse(Ask(100, 50, "refuses", 60));
  EXPECT_EQ(fake_policies::live_objects, 0);
}

}  // namespace
}  // namespace epikv
