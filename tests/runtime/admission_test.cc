#include "runtime/admission/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "runtime/kv/kv_layout.h"
#include "runtime/model/model_shape.h"
#include "tests/fixtures/admission_fixture.h"

namespace epikv {
namespace admission_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

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

// What is demoted lies further back than any window.
TEST_F(AdmissionTest, WhereAllLayersHaveWindowsNothingIsFetched) {
  Manifest manifest = FakeManifest(kContext);
  for (LayerFacts& layer : manifest.layers) layer.window = 64;
  RequestOptions options = Ask(10, 100, "by_chunk", 64);
  options.kv.tier = {.tokens = 32, .fetch = 32};
  AdmissionLimits limits = Limits();
  limits.tier_capacity_bytes = 1 << 20;
  const Rejection rejection = Refuse(Admission(manifest, EveryKindOfPolicy(), limits), options);
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.tier.fetch"));
  EXPECT_THAT(rejection.message, HasSubstr("all of this model's have one"));
  manifest.layers[0].window.reset();
  Accept(Admission(manifest, EveryKindOfPolicy(), limits), options);
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
    .read_data = [](const ArtefactData&, const ModelShape&)
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

TEST_F(AdmissionTest, SteeringNeedsItsArtefact) {
  const Manifest manifest = FakeManifest(kContext);
  RequestOptions options = Ask(10);
  options.steering = {.coefficient = 2, .growth = 0};
  const Rejection rejection = Refuse(options);
  EXPECT_EQ(rejection.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(rejection.reason, "ARTEFACT_MISSING");
  EXPECT_THAT(Fields(rejection), ElementsAre("sampling.steering"));

  ModelShape shape = ShapeOf(manifest);
  const auto vector = std::make_shared<SteeringVector>();
  shape.artefacts[std::string(kSteering)] = vector;
  const Request request =
      Accept(Admission(manifest, std::move(shape), EveryKindOfPolicy(), Limits()), options);
  EXPECT_EQ(request.steering->vector, vector);
  EXPECT_EQ(request.steering->options.coefficient, 2);
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

}  // namespace admission_test
}  // namespace epikv
