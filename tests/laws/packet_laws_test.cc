// Packets: what one request had cached, others begin with, wherever it comes to lie.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace packet_laws_test {

using ::testing::HasSubstr;

// The packet of `tokens`, cached alone under these options.
std::shared_ptr<const Packet> PacketFrom(EngineHarness& harness, std::vector<int32_t> tokens,
                                         KvOptions kv = {}) {
  RequestOptions options;
  options.prompt = std::move(tokens);
  options.stop.max_output_tokens = 1;
  options.output.packet = true;
  options.kv = std::move(kv);
  const Transcript run = harness.Run(options);
  EXPECT_TRUE(run.ok()) << run.finished->status;
  return run.finished->packet;
}

std::vector<int32_t> Part(const std::vector<int32_t>& text, int64_t begin, int64_t end) {
  return {text.begin() + begin, text.begin() + end};
}

bool IsMeasured(const PolicyTraits& traits) {
  return traits.signals.Has(Signal::kLogitEntropy) ||
         traits.signals.Has(Signal::kResidualDistance) || traits.signals.Has(Signal::kGate) ||
         traits.signals.Has(Signal::kFinalHidden);
}

class EveryPolicyWithPackets : public EveryPolicy {};

// At the place at which it was cached, a packet is as if its tokens were computed; and a policy
// that does not measure how they are computed does the same with them.
TEST_P(EveryPolicyWithPackets, AtItsPlaceItGivesTheBitsOfComputing) {
  EngineHarness harness = Harness({.deterministic = true, .end_tokens = false});
  const std::vector<int32_t> text = Text(harness.manifest(), 80, 41);
  RequestOptions options;
  options.prompt = text;
  options.stop.max_output_tokens = 120;
  options.sampling = {.temperature = 0.8f, .seed = 5};
  options.output.logprobs = true;
  options.output.kept = true;
  options = WithPolicy(options, policy(), 96);
  const Request plain = std::get<Request>(harness.admission().Resolve(options));

  RequestOptions asked = options;
  asked.packets = {PacketFrom(harness, Part(text, 0, 60))};
  asked.prompt = Part(text, 60, 80);
  if (IsMeasured(plain.traits)) {
    EXPECT_THAT(harness.Refusal(asked).message, HasSubstr("measures tokens"));
    return;
  }
  const Transcript loaded = harness.Run(asked);
  ASSERT_TRUE(loaded.ok()) << loaded.finished->status;
  ASSERT_TRUE(Evicted(loaded, harness.manifest()));
  EXPECT_EQ(loaded.finished->prompt_tokens, 80);
  EXPECT_EQ(loaded.finished->cached_prompt_tokens, 0) << "of the prefix cache";
  if (MeasuresPrompt(plain.traits)) return;
  const Transcript computed = harness.Run(options);
  EXPECT_EQ(loaded.tokens, computed.tokens);
  EXPECT_EQ(loaded.logprobs, computed.logprobs);
  EXPECT_EQ(loaded.finished->kv.kept, computed.finished->kv.kept);
}

// What a policy has left of a text, each layer and head its own, is what the next request attends
// to, whichever policy it has.
TEST_P(EveryPolicyWithPackets, WhatWasKeptIsAttendedTo) {
  EngineHarness harness = Harness({.prefill_chunk_tokens = 32, .end_tokens = false});
  const std::vector<int32_t> text = Text(harness.manifest(), 160, 43);
  RequestOptions made;
  made.prompt = Part(text, 0, 120);
  made.stop.max_output_tokens = 1;
  made.output.packet = true;
  made.output.kv_trace = true;
  made = WithPolicy(made, policy(), 64);
  if (std::holds_alternative<Rejection>(harness.admission().Resolve(made))) {
    GTEST_SKIP() << "this policy takes no prompt over its budget";
  }
  const Transcript first = harness.Run(made);
  ASSERT_TRUE(first.ok()) << first.finished->status;
  const Packet& packet = *first.finished->packet;
  EXPECT_EQ(packet.num_tokens(), 120);
  EXPECT_EQ(packet.rows(), first.finished->kv.final_entries);
  EXPECT_LT(packet.rows(), 120 * packet.num_lanes());

  RequestOptions options;
  options.packets = {first.finished->packet};
  options.prompt = Part(text, 120, 140);
  options.forced = Part(text, 140, 160);
  harness.model().TakeLogits();
  const Transcript scored = harness.Run(options);
  ASSERT_TRUE(scored.ok()) << scored.finished->status;
  EXPECT_EQ(scored.finished->kv.final_entries, packet.rows() + 39 * packet.num_lanes());
  EXPECT_EQ(scored.finished->kv.peak_entries, scored.finished->kv.final_entries);
  if (RoundsRows(policy())) return;
  const std::vector<at::Tensor> logits = harness.model().TakeLogits();
  RequestOptions whole = options;
  whole.prompt = Part(text, 0, 140);
  const auto reference = MaskedReference(harness.model(), kv_dtype())
                             .Run(CachedTokens(whole), DroppedBy(first, harness.manifest()));
  std::vector<at::Tensor> expected;
  for (size_t t = reference.size() - logits.size(); t < reference.size(); ++t) {
    expected.push_back(reference[t].logits);
  }
  EXPECT_LT(LargestDifference(logits, expected), kv_dtype() == KvDType::kInt8 ? .1 : 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Packets, EveryPolicyWithPackets,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyPackets, EveryPolicyWithPackets,
                         ::testing::Combine(::testing::Values("gqa_int8", "sample"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

class PacketTest : public ::testing::TestWithParam<std::string> {
 protected:
  static EngineHarness Harness(const std::string& model, HarnessOptions options = {}) {
    options.end_tokens = false;
    return EngineHarness(ModelPath(model), std::move(options));
  }
};

// Documents that were cached alone, each from position 0, are as documents that do not see each
// other in one prompt: KV Packet's mask.
TEST_P(PacketTest, DocumentsSideBySideAreIndependent) {
  for (const PositionMode positions :
       {PositionMode::kAbsolute, PositionMode::kCompact, PositionMode::kCache}) {
    EngineHarness harness = Harness(GetParam());
    const std::vector<int32_t> text = Text(harness.manifest(), 150, 47);
    const int64_t lanes = harness.manifest().num_layers() * harness.manifest().num_kv_heads;
    RequestOptions options;
    // The one of other positions than the request's: keys turn, or are turned back.
    const KvOptions other{.positions = positions == PositionMode::kCache ? PositionMode::kAbsolute
                                                                         : PositionMode::kCache};
    options.packets = {PacketFrom(harness, Part(text, 0, 40)),
                       PacketFrom(harness, Part(text, 40, 90), other),
                       PacketFrom(harness, Part(text, 90, 100))};
    options.prompt = Part(text, 100, 120);
    options.forced = Part(text, 120, 150);
    options.kv.positions = positions;
    harness.model().TakeLogits();
    const Transcript scored = harness.Run(options);
    ASSERT_TRUE(scored.ok()) << scored.finished->status;
    EXPECT_EQ(scored.finished->kv.final_entries, 149 * lanes);
    const std::vector<at::Tensor> logits = harness.model().TakeLogits();

    std::vector<MaskedReference::Dropped> hidden;
    for (int64_t layer = 0; layer < harness.manifest().num_layers(); ++layer) {
      for (int64_t head = 0; head < harness.manifest().num_kv_heads; ++head) {
        for (int64_t index = 0; index < 90; ++index) {
          const int64_t end = index < 40 ? 39 : 89;  // its document's last token
          hidden.push_back({.at_token = end, .layer = layer, .head = head, .index = index});
        }
      }
    }
    for (int64_t i = 0, count = std::ssize(hidden); i < count; ++i) {
      MaskedReference::Dropped back = hidden[i];
      back.at_token = 99;
      back.back = true;
      hidden.push_back(back);
    }
    std::stable_sort(hidden.begin(), hidden.end(),
                     [](const auto& a, const auto& b) { return a.at_token < b.at_token; });
    RequestOptions whole = options;
    whole.prompt = Part(text, 0, 120);
    const auto reference = MaskedReference(harness.model()).Run(CachedTokens(whole), hidden);
    std::vector<at::Tensor> expected;
    for (size_t t = reference.size() - logits.size(); t < reference.size(); ++t) {
      expected.push_back(reference[t].logits);
    }
    EXPECT_LT(LargestDifference(logits, expected), 1e-4) << static_cast<int>(positions);
  }
}

// A paused conversation goes on with the bits that it would have had, after every token alike.
TEST_P(PacketTest, APausedSequenceGoesOn) {
  EngineHarness harness = Harness(GetParam(), {.deterministic = true});
  RequestOptions options;
  options.prompt = Text(harness.manifest(), 50, 53);
  options.stop.max_output_tokens = 40;
  options.output.logprobs = true;
  const Transcript whole = harness.Run(options);
  for (const int64_t pause : {1, 7, 39}) {
    RequestOptions begun = options;
    begun.stop.max_output_tokens = pause;
    begun.output.packet = true;
    const Transcript first = harness.Run(begun);
    ASSERT_TRUE(first.ok());
    RequestOptions rest = options;
    rest.packets = {first.finished->packet};
    rest.prompt = {first.tokens.back()};  // which no step has cached
    rest.stop.max_output_tokens = 40 - pause;
    const Transcript second = harness.Run(rest);
    ASSERT_TRUE(second.ok()) << second.finished->status;
    std::vector<int32_t> tokens = first.tokens;
    tokens.insert(tokens.end(), second.tokens.begin(), second.tokens.end());
    EXPECT_EQ(tokens, whole.tokens);
    EXPECT_TRUE(
        std::equal(second.logprobs.begin(), second.logprobs.end(), whole.logprobs.begin() + pause));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PacketTest, ::testing::Values("gqa", "mha", "sample"),
                         [](const auto& info) { return info.param; });

TEST(PacketOfABudget, NeverHoldsMoreThanWasReserved) {
  EngineHarness harness(ModelPath("gqa"), {.prefill_chunk_tokens = 32, .end_tokens = false});
  const std::vector<int32_t> text = Text(harness.manifest(), 300, 59);
  const auto packet = PacketFrom(harness, Part(text, 0, 100));
  const auto ragged =
      PacketFrom(harness, Part(text, 100, 250), {.policy = "snapkv", .budget = int64_t{48}});
  EXPECT_EQ(ragged->TableOf(0).rows(), 48);
  for (const std::string policy : {"snapkv", "keydiff", "ada_kv", "streaming_llm", "full"}) {
    if (FindPolicy(AllPolicies(), policy) == nullptr) continue;
    const bool token = policy == "streaming_llm";  // decides for all lanes alike
    RequestOptions options;
    options.packets = token ? std::vector{packet} : std::vector{packet, ragged};
    options.prompt = Part(text, 250, 300);
    options.stop.max_output_tokens = 60;
    options.kv.policy = policy;
    if (policy != "full") options.kv.budget = int64_t{80};
    harness.OnStep(
        [&] { ASSERT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved()); });
    const Request request = std::get<Request>(harness.admission().Resolve(options));
    const Transcript run = harness.Run(options);
    ASSERT_TRUE(run.ok()) << policy << ": " << run.finished->status;
    // And no more is reserved than a tenth beyond what it held: packets count as they are.
    const double held = static_cast<double>(run.finished->kv.peak_bytes);
    EXPECT_LE(request.demand.peak_bytes(), 1.1 * held) << policy;
  }
}

// Packets of any length, whole, evicted and with unequal lanes, under policies that evict while a
// prompt is cached or whose lanes share budgets.
TEST(PacketOfABudget, LeavesRoomForWhatFollows) {
  for (const bool deterministic : {false, true}) {
    EngineHarness harness(
        ModelPath("gqa"),
        {.prefill_chunk_tokens = 32, .deterministic = deterministic, .end_tokens = false});
    harness.OnStep(
        [&] { ASSERT_LE(harness.executor().used_bytes(), harness.engine().ledger().reserved()); });
    const std::vector<int32_t> text = Text(harness.manifest(), 300, 67);
    int64_t ran = 0;
    for (const int64_t size : {10, 40, 66, 130}) {
      std::vector<std::shared_ptr<const Packet>> packets = {
          PacketFrom(harness, Part(text, 0, size))};
      if (size > 60) {
        for (const std::string by : {"snapkv", "sliding", "laprox", "epicache"}) {
          packets.push_back(
              PacketFrom(harness, Part(text, 0, size), {.policy = by, .budget = int64_t{40}}));
        }
      }
      for (const std::shared_ptr<const Packet>& packet : packets) {
        for (const std::string policy : {"random_attention", "sliding", "keydiff", "laprox",
                                         "kvzip", "epicache", "snapkv", "random"}) {
          for (const int64_t budget : {48, 60, 90, 150}) {
            for (const int64_t output : {1, 8, 60}) {
              RequestOptions options;
              options.packets = {packet};
              options.prompt = Part(text, 150, 150 + (output == 8 ? 20 : 120));
              options.stop.max_output_tokens = output;
              options.kv = {.policy = policy, .budget = budget};
              options.kv.protection.prompt = false;
              if (std::holds_alternative<Rejection>(harness.admission().Resolve(options))) continue;
              const Transcript run = harness.Run(options);
              ASSERT_TRUE(run.ok())
                  << policy << " " << budget << " behind " << size << ": " << run.finished->status;
              ++ran;
            }
          }
        }
      }
    }
    EXPECT_GT(ran, 500);
  }
}

TEST(PacketRefusals, SayWhatIsWrong) {
  EngineHarness harness(ModelPath("gqa"));
  const std::vector<int32_t> text = Text(harness.manifest(), 100, 61);
  const auto packet = PacketFrom(harness, Part(text, 0, 60));
  RequestOptions options;
  options.packets = {packet};
  EXPECT_THAT(harness.Refusal(options).message, HasSubstr("at least one token is needed"));
  options.prompt = Part(text, 60, 70);
  options.output.prompt_logprobs = true;
  EXPECT_THAT(harness.Refusal(options).message, HasSubstr("no log-probabilities"));
  options.output.prompt_logprobs = false;
  options.packets.assign(65, packet);
  EXPECT_THAT(harness.Refusal(options).message, HasSubstr("has 65 items, at most 64"));
  options.stop.max_output_tokens = 8;
  options.packets.assign(64, PacketFrom(harness, Part(text, 0, 90)));
  EXPECT_THAT(harness.Refusal(options).message, HasSubstr("context length"));
  options.packets = {packet};
  options.wrap = true;
  EXPECT_EQ(harness.Refusal(options).reason, "ARTEFACT_MISSING");
  options.wrap = false;
  options.completions = 2;
  options.sampling.temperature = 1;
  options.output.packet = true;
  EXPECT_THAT(harness.Refusal(options).message, HasSubstr("one completion alone"));

  EngineHarness other(ModelPath("mha"));
  RequestOptions elsewhere;
  elsewhere.packets = {packet};
  elsewhere.prompt = {1};
  EXPECT_THAT(other.Refusal(elsewhere).message, HasSubstr("of another model"));
  EngineHarness rounded(ModelPath("gqa"), {.kv_dtype = KvDType::kInt8});
  EXPECT_THAT(rounded.Refusal(elsewhere).message, HasSubstr("another kv_dtype"));

  const auto ragged =
      PacketFrom(harness, Part(text, 0, 90), {.policy = "snapkv", .budget = int64_t{48}});
  RequestOptions coarse;
  coarse.packets = {ragged};
  coarse.prompt = Part(text, 90, 100);
  coarse.kv = {.policy = "streaming_llm", .budget = int64_t{48}};
  EXPECT_THAT(harness.Refusal(coarse).message, HasSubstr("keeps the same in all of them"));
  coarse.kv = {.policy = "kvzip", .budget = int64_t{48}};
  EXPECT_THAT(harness.Refusal(coarse).message, HasSubstr("some tokens were evicted"));
}

// Rows of soft tokens that are some tokens' embeddings make a prompt of these tokens.
TEST(SoftTokensLaw, AreReadInPlaceOfEmbeddings) {
  EngineHarness harness(ModelPath("gqa"), {.prefill_chunk_tokens = 32, .deterministic = true});
  const std::vector<int32_t> text = Text(harness.manifest(), 80, 67);
  struct Embeddings final : ForwardHooks {
    at::Tensor Block(const at::Tensor& residual, int64_t layer) override {
      if (layer == 0) rows = residual.to(at::kFloat).contiguous();
      return residual;
    }
    at::Tensor Attention(const at::Tensor& q, const at::Tensor&, const at::Tensor& v,
                         const at::Tensor&, int64_t) override {
      return at::zeros({q.size(0), q.size(1), v.size(2)}, q.options());
    }
    at::Tensor rows;
  } embeddings;
  const at::Tensor ids = at::tensor(std::vector<int64_t>(text.begin(), text.end()), at::kLong);
  LoadOnce(ModelPath("gqa"))->Forward(ids, at::arange(80), at::tensor({int64_t{79}}), embeddings);
  auto rows = [&](int64_t begin, int64_t end) {
    const float* data = embeddings.rows.const_data_ptr<float>();
    const int64_t width = harness.manifest().hidden_size;
    return std::vector<float>(data + begin * width, data + end * width);
  };
  auto soft = std::make_shared<SoftTokens>();
  soft->header = 5;
  soft->trailer = 3;
  soft->header_rows = rows(0, 5);
  soft->trailer_rows = rows(77, 80);
  RequestOptions options;
  options.prompt = text;
  options.stop.max_output_tokens = 20;
  options.output.logprobs = true;
  const Transcript plain = harness.Run(options);
  std::fill(options.prompt.begin(), options.prompt.begin() + 5, text[5]);
  std::fill(options.prompt.end() - 3, options.prompt.end(), text[76]);
  Request request = std::get<Request>(harness.admission().Resolve(options));
  request.soft = soft;
  const std::shared_ptr<Transcript> wrapped = harness.Submit(std::move(request));
  harness.RunAll();
  ASSERT_TRUE(wrapped->ok());
  EXPECT_EQ(wrapped->tokens, plain.tokens);
  EXPECT_EQ(wrapped->logprobs, plain.logprobs);
}

}  // namespace packet_laws_test
}  // namespace epikv
