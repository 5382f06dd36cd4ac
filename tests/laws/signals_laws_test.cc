// Signals: what policies are given is what the definition says, evictions and all.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "policies/lane.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"
#include "tests/fixtures/probe_policy.h"
#include "tests/fixtures/trace_replay.h"

namespace epikv {
namespace signals_laws_test {

class SignalsEqualTheDefinition : public ::testing::TestWithParam<const char*> {
 protected:
  // Scores random tokens under a policy and runs the reference over the same evictions.
  void Score(const PolicyCase& policy) {
    options_ = WithPolicy(Scoring(harness_.manifest(), 24, 120, 47), policy, 64);
    options_.output.residual_steps = true;
    transcript_ = harness_.Run(options_);
    ASSERT_TRUE(transcript_.ok()) << transcript_.finished->status;
    ASSERT_GE(transcript_.finished->kv.rounds, 39);
    TraceReplay replay(harness_.manifest(), 24 + 120);
    for (const EvictionTrace& trace : transcript_.evictions) ASSERT_TRUE(replay.Apply(trace));
    steps_ = MaskedReference(harness_.model()).Run(CachedTokens(options_), replay.dropped);
  }

  EngineHarness harness_{ModelPath(GetParam()), {.mass_interval = 1}};
  RequestOptions options_;
  Transcript transcript_;
  std::vector<MaskedReference::Step> steps_;
};

TEST_P(SignalsEqualTheDefinition, ResidualStepsAreThoseAfterEachBlock) {
  Score({"", "epikv_flat", {}});
  const size_t prompt = options_.prompt.size();
  ASSERT_EQ(transcript_.residual_steps.size(), steps_.size() - prompt);
  for (size_t t = prompt; t < steps_.size(); ++t) {
    for (size_t l = 0; l < steps_[t].residuals.size(); ++l) {
      const float expected =
          (steps_[t].residuals[l] - steps_[t - 1].residuals[l]).norm().item<float>();
      EXPECT_NEAR(transcript_.residual_steps[t - prompt][l], expected, 1e-4 * (1 + expected));
    }
  }
}

// epikv_flat drops the token whose score, from the definition's residuals, is the lowest.
TEST_P(SignalsEqualTheDefinition, FlatDropsTheLowestScoreOfItsLayers) {
  Score(
      {"", "epikv_flat", {{"layer_a", int64_t{0}}, {"layer_b", int64_t{1}}, {"sign", int64_t{1}}}});
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  std::vector<double> scores(steps_.size());
  std::vector<std::vector<double>> moved(2);
  for (int64_t t = prompt; t < static_cast<int64_t>(steps_.size()); ++t) {
    double z[2];
    for (int l : {0, 1}) {
      moved[l].push_back(
          (steps_[t].residuals[l] - steps_[t - 1].residuals[l]).norm().item<double>());
      const size_t begin = moved[l].size() > 64 ? moved[l].size() - 64 : 0;
      double mean = 0, square = 0;
      const double count = static_cast<double>(moved[l].size() - begin);
      for (size_t i = begin; i < moved[l].size(); ++i) mean += moved[l][i] / count;
      for (size_t i = begin; i < moved[l].size(); ++i) {
        square += (moved[l][i] - mean) * (moved[l][i] - mean) / count;
      }
      z[l] = count < 2 ? 0 : (moved[l].back() - mean) / (std::sqrt(square) + 1e-6);
    }
    scores[t] = z[0] - z[1];
  }
  const Request request = std::get<Request>(harness_.admission().Resolve(options_));
  std::set<int32_t> gone;
  for (const EvictionTrace& trace : transcript_.evictions) {
    ASSERT_EQ(trace.victims.size(), 1u);
    ASSERT_EQ(trace.victims[0].index.size(), 1u);
    const int32_t victim = trace.victims[0].index[0];
    for (int32_t other = 0; other <= trace.at_token; ++other) {
      if (gone.contains(other) || request.protection.Covers(other, trace.at_token)) continue;
      EXPECT_LE(scores[victim], scores[other] + 1e-3) << victim << " went instead of " << other;
    }
    gone.insert(victim);
  }
}

// h2o (model) drops the token that has received the least attention, from the first decode step.
TEST_P(SignalsEqualTheDefinition, H2oDropsTheLeastAttended) {
  Score({"", "h2o", {{"scope", "model"}}});
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  const Request request = std::get<Request>(harness_.admission().Resolve(options_));
  std::vector<double> mass(steps_.size());
  std::set<int32_t> gone;
  size_t next = 0;
  for (int64_t t = prompt; t < static_cast<int64_t>(steps_.size()); ++t) {
    for (const at::Tensor& rows : steps_[t].attention) {
      const at::Tensor mean = rows.mean(0) / static_cast<double>(steps_[t].attention.size());
      for (int64_t i = 0; i <= t; ++i) mass[i] += mean[i].item<double>();
    }
    if (next == transcript_.evictions.size() || transcript_.evictions[next].at_token != t) continue;
    const int32_t victim = transcript_.evictions[next++].victims[0].index[0];
    for (int32_t other = 0; other <= t; ++other) {
      if (gone.contains(other) || request.protection.Covers(other, t)) continue;
      EXPECT_LE(mass[victim], mass[other] * (1 + 1e-4)) << victim << " went instead of " << other;
    }
    gone.insert(victim);
  }
  EXPECT_EQ(next, transcript_.evictions.size());
}

// Of a policy that asks for no attention, one with rounds of several victims, one with a slot order
// a head, and one that is given rows of its own.
TEST_P(SignalsEqualTheDefinition, EvictedAttentionMass) {
  const std::vector<PolicyCase> cases = {{"", "sliding", {}},
                                         {"", "sliding", {{"slack", int64_t{1}}}},
                                         {"", "knorm", {{"slack", int64_t{0}}}},
                                         {"", "h2o", {{"scope", "model"}}}};
  for (const PolicyCase& policy : cases) {
    SCOPED_TRACE(policy.policy);
    const size_t before = harness_.masses().size();
    ASSERT_NO_FATAL_FAILURE(Score(policy));
    std::vector<double> expected;
    for (const EvictionTrace& trace : transcript_.evictions) {
      const MaskedReference::Step& step = steps_[trace.at_token];
      const int64_t layers = std::ssize(step.attention), heads = step.attention[0].size(0);
      double mass = 0;
      for (const EvictionTrace::Victims& victims : trace.victims) {
        for (int64_t layer = 0; layer < layers; ++layer) {
          for (int64_t head = 0; head < heads; ++head) {
            if (victims.layer.value_or(layer) != layer || victims.head.value_or(head) != head) {
              continue;
            }
            for (int32_t i : victims.index) mass += step.attention[layer][head][i].item<double>();
          }
        }
      }
      expected.push_back(mass / static_cast<double>(layers * heads));
    }
    ASSERT_EQ(harness_.masses().size() - before, expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_GT(expected[i], 0);
      EXPECT_NEAR(harness_.masses()[before + i], expected[i], 1e-4) << "round " << i;
    }
  }
}

TEST(EvictedAttentionMass, IsMeasuredNowAndThenAndChangesNothing) {
  EngineHarness without(ModelPath("gqa"), {.policies = LawPolicies()});
  EngineHarness with(ModelPath("gqa"), {.policies = LawPolicies(), .mass_interval = 16});
  const RequestOptions scoring = Scoring(with.manifest(), 24, 100, 61);
  for (const PolicyCase& policy : EvictingPolicies()) {
    SCOPED_TRACE(policy.label);
    const RequestOptions options = WithPolicy(scoring, policy, 80);
    const size_t before = with.masses().size();
    const Transcript measured = with.Run(options);
    EXPECT_EQ(measured.logprobs, without.Run(options).logprobs);
    int64_t last = -16, expected = 0;
    for (const EvictionTrace& trace : measured.evictions) {
      if (trace.at_token < 24 || trace.at_token - last < 16) continue;  // of decode tokens
      last = trace.at_token;
      ++expected;
    }
    EXPECT_GT(expected, 1);
    EXPECT_EQ(std::ssize(with.masses()) - static_cast<int64_t>(before), expected);
  }
  EXPECT_TRUE(without.masses().empty());

  // One sequence a step: neighbours wait for the next.
  std::vector<std::shared_ptr<Transcript>> together;
  const size_t before = with.masses().size();
  size_t most = 0, seen = before;
  with.OnStep([&] {
    most = std::max(most, with.masses().size() - seen);
    seen = with.masses().size();
  });
  for (int i = 0; i < 4; ++i) {
    together.push_back(with.Submit(WithPolicy(scoring, {"", "sliding", {}}, 80)));
  }
  with.RunAll();
  EXPECT_EQ(most, 1u);
  EXPECT_GE(with.masses().size() - before, 4u);
}

// What a policy that measures layer 1 alone was given of it, and how often another was withheld.
struct OneLayerRecord {
  int64_t rows = 0, withheld = 0;
};
OneLayerRecord* one_layer_record = nullptr;

class OneLayer final : public Policy {
 public:
  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) Check(step, head);
    }
  }
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    return std::vector<Eviction>(tasks.size());
  }

 private:
  static void Check(SequenceStep& step, int64_t head) {
    Lane lane(step.cache, 1, head);
    const at::Tensor pulled = lane.window_attention().mean(0);  // [w, n], of which these are last
    const at::Tensor sum = pulled.narrow(0, pulled.size(0) - step.count, step.count).sum(0);
    const absl::Span<const float> row = step.signals.attention->at(1, head);
    ASSERT_EQ(std::ssize(row), sum.numel());
    for (int64_t slot = 0; slot < sum.numel(); ++slot) {
      EXPECT_NEAR(row[slot], sum[slot].item<float>(), 1e-5);
    }
    ++one_layer_record->rows;
    for (int64_t layer : {0, 2}) {
      try {
        step.signals.attention->at(layer, head);
      } catch (const std::out_of_range&) {
        ++one_layer_record->withheld;
      }
    }
  }
};

constexpr ParamSpec kOneLayerParams[] = {SlackParam(0)};
const PolicySpec kOneLayer{
    .name = "one_layer",
    .params = kOneLayerParams,
    .traits =
        [](const Params&, const ModelShape&) {
          return PolicyTraits{.signals = Signal::kAttentionRow | Signal::kPromptAttention |
                                         Signal::kKeys | Signal::kQueries,
                              .attention_layers = {1},
                              .window = 20,
                              .slack = 8};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<OneLayer>();
    },
};

// Attention that policies make of queries and keys is that of the layer, which `probe` was pushed;
// it fails where they differ.
TEST(Signals, AttentionOfQueriesAndKeysHeedsWindowsAndSoftCaps) {
  EngineHarness harness(ModelPath("bent"), {.policies = LawPolicies()});
  const LayerFacts& layer = harness.manifest().layers.front();
  ASSERT_TRUE(layer.soft_cap.has_value());
  ASSERT_LT(*layer.window, 40);
  const RequestOptions options =
      WithPolicy(Scoring(harness.manifest(), 60, 80, 5), {"", "probe", {}}, 48);
  EXPECT_TRUE(Evicted(harness.Run(options), harness.manifest()));
}

// Each policy on its own finds nothing amiss where windows hide much of what it ranks.
TEST(Signals, EveryPolicyRunsUnderWindowsAndSoftCaps) {
  EngineHarness harness(ModelPath("bent"), {.policies = LawPolicies()});
  for (const PolicyCase& policy : EvictingPolicies()) {
    SCOPED_TRACE(policy.policy);
    const RequestOptions options = WithPolicy(Scoring(harness.manifest(), 20, 120, 5), policy, 64);
    EXPECT_TRUE(Evicted(harness.Run(options), harness.manifest()));
  }
}

TEST(Signals, AttentionIsMeasuredInTheLayersDeclaredAlone) {
  static const PolicySpec* const kCatalog[] = {&kOneLayer};
  EngineHarness harness(ModelPath("gqa"), {.policies = kCatalog});
  OneLayerRecord record;
  one_layer_record = &record;
  RequestOptions options = Scoring(harness.manifest(), 20, 30, 3);
  options.kv.policy = "one_layer";
  options.kv.budget = 48;  // of 49
  EXPECT_TRUE(harness.Run(options).ok());
  EXPECT_EQ(record.rows, 2 * (1 + 28));  // the prompt, and each decode step but the last
  EXPECT_EQ(record.withheld, 2 * record.rows);
}

// What information-aware policies are given of every token, of the prompt and decoded.
TEST_P(SignalsEqualTheDefinition, EntropiesDistancesAndQueryMoments) {
  EngineHarness harness(ModelPath(GetParam()), {.policies = LawPolicies()});
  ProbeRecord record;
  std::vector<std::vector<at::Tensor>> queries(harness.manifest().num_layers());  // before RoPE
  harness.model().SetMeddle([&](const at::Tensor&, at::Tensor& q, at::Tensor&, at::Tensor&,
                                int64_t layer) { queries[layer].push_back(q.clone()); });
  RecordProbe(&record);
  RequestOptions options =
      WithPolicy(Scoring(harness.manifest(), 24, 120, 47), {"", "probe", {}}, 64);
  const Transcript transcript = harness.Run(options);
  RecordProbe(nullptr);
  harness.model().SetMeddle(nullptr);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  TraceReplay replay(harness.manifest(), 24 + 120);
  for (const EvictionTrace& trace : transcript.evictions) ASSERT_TRUE(replay.Apply(trace));
  const auto steps = MaskedReference(harness.model()).Run(CachedTokens(options), replay.dropped);
  // The last step is settled with its request.
  const size_t observed = record.logit_entropy.size();
  ASSERT_EQ(observed, steps.size() - 1);
  for (size_t t = 0; t < observed; ++t) {
    const at::Tensor likely = std::get<0>(steps[t].logits.flatten().sort(-1, true))
                                  .narrow(0, 0, std::min<int64_t>(256, steps[t].logits.numel()))
                                  .to(at::kDouble)
                                  .softmax(-1);
    EXPECT_NEAR(record.logit_entropy[t], -(likely * likely.log()).sum().item<double>(), 1e-3);
    for (size_t l = 0; l < steps[t].residuals.size(); ++l) {
      const at::Tensor a = steps[t].residuals[l].flatten().to(at::kDouble);
      const at::Tensor b = steps[t].residuals.back().flatten().to(at::kDouble);
      const double cosine = (a.dot(b) / (a.norm() * b.norm())).item<double>();
      EXPECT_NEAR(record.residual_distance[t][l], 1 - cosine, 1e-4) << "token " << t;
    }
  }
  // The probe's gate says of each head a channel of what the layer's attention is given.
  ASSERT_EQ(record.gate.size(), observed);
  const int64_t heads = harness.manifest().num_kv_heads;
  for (size_t t = 0; t < observed; ++t) {
    for (size_t lane = 0; lane < record.gate[t].size(); ++lane) {
      const int64_t layer = static_cast<int64_t>(lane) / heads;
      const float given = steps[t].inputs[layer][static_cast<int64_t>(lane) % heads].item<float>();
      EXPECT_NEAR(record.gate[t][lane], given + static_cast<float>(layer), 1e-4 * (1 + layer))
          << "token " << t;
    }
  }
  // x / rms(x), by the weight that the norm gives ones.
  const double eps = harness.manifest().final_norm->eps;
  const at::Tensor weight =
      harness.model().FinalNormed(at::ones({1, harness.manifest().hidden_size}))[0].to(
          at::kDouble) *
      std::sqrt(1 + eps);
  const std::vector<int32_t> tokens = CachedTokens(options);
  ASSERT_EQ(record.final_hidden.size(), observed);
  for (size_t t = 0; t < observed; ++t) {
    EXPECT_EQ(record.tokens[t], tokens[t]);
    const at::Tensor x = steps[t].residuals.back().flatten().to(at::kDouble);
    const at::Tensor expected = x / (x.square().mean() + eps).sqrt() * weight;
    EXPECT_TRUE(
        at::allclose(at::tensor(record.final_hidden[t]).to(at::kDouble), expected, 1e-4, 1e-4))
        << "token " << t;
  }
  // Of the decode tokens alone.
  ASSERT_EQ(record.residual.size(), observed - 24);
  for (size_t t = 24; t < observed; ++t) {
    const at::Tensor expected = steps[t].residuals[kProbedBlock].to(at::kFloat);
    EXPECT_TRUE(at::allclose(at::tensor(record.residual[t - 24]), expected, 1e-4, 1e-4))
        << "token " << t;
  }
  // Other blocks are looked at as well, for the client.
  ProbeRecord beside;
  RecordProbe(&beside);
  options.output.residual_steps = true;
  ASSERT_TRUE(harness.Run(options).ok());
  RecordProbe(nullptr);
  EXPECT_EQ(beside.residual, record.residual);
  for (size_t l = 0; l < queries.size(); ++l) {
    const at::Tensor all =  // [tokens, heads, width]
        at::cat(queries[l]).narrow(0, 0, static_cast<int64_t>(observed)).to(at::kDouble);
    const at::Tensor measured = all.narrow(0, 4, all.size(0) - 4);
    const at::Tensor centred = (measured - measured.mean(0)).permute({1, 2, 0});
    const at::Tensor covariance =
        at::matmul(centred, centred.transpose(1, 2)) / static_cast<double>(measured.size(0));
    EXPECT_EQ(record.moments[l].count, measured.size(0));
    EXPECT_TRUE(at::allclose(record.moments[l].mean.to(at::kDouble), measured.mean(0), 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(record.moments[l].covariance.to(at::kDouble), covariance, 1e-3, 1e-5));
  }
}

// A policy is told at which position the next query will ask.
TEST_P(SignalsEqualTheDefinition, NextPosition) {
  for (PositionMode positions : {PositionMode::kAbsolute, PositionMode::kCompact}) {
    EngineHarness harness(ModelPath(GetParam()), {.policies = LawPolicies()});
    ProbeRecord record;
    RecordProbe(&record);
    RequestOptions options =
        WithPolicy(Scoring(harness.manifest(), 24, 60, 47), {"", "probe", {}}, 40);
    options.kv.positions = positions;
    const Transcript transcript = harness.Run(options);
    RecordProbe(nullptr);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    ASSERT_GT(record.positions.size(), 50u);
    for (const auto& [newest, cached, next] : record.positions) {
      EXPECT_EQ(next, positions == PositionMode::kAbsolute ? newest + 1 : cached);
    }
    EXPECT_LT(record.positions.back().cached, record.positions.back().newest);  // it did evict
  }
}

// h2o drops, in every lane, the token that has received the least attention since it was cached,
// that of the prompt's queries included.
TEST_P(SignalsEqualTheDefinition, H2oCountsThePromptsAttention) {
  Score({"", "h2o", {}});
  const int64_t heads = harness_.manifest().num_kv_heads;
  const int64_t lanes = harness_.manifest().num_layers() * heads;
  const Request request = std::get<Request>(harness_.admission().Resolve(options_));
  std::vector<std::vector<double>> mass(lanes, std::vector<double>(steps_.size()));
  std::vector<std::set<int32_t>> gone(lanes);
  size_t next = 0;
  for (int64_t t = 0; t < static_cast<int64_t>(steps_.size()); ++t) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const at::Tensor row = steps_[t].attention[lane / heads][lane % heads];
      for (int64_t i = 0; i <= t; ++i) mass[lane][i] += row[i].item<double>();
    }
    if (next == transcript_.evictions.size() || transcript_.evictions[next].at_token != t) continue;
    for (const EvictionTrace::Victims& victims : transcript_.evictions[next++].victims) {
      const int64_t lane = *victims.layer * heads + *victims.head;
      const int32_t victim = victims.index.at(0);
      for (int32_t other = 0; other <= t; ++other) {
        if (gone[lane].contains(other) || request.protection.Covers(other, t)) continue;
        EXPECT_LE(mass[lane][victim], mass[lane][other] * (1 + 1e-4))
            << "lane " << lane << ": " << victim << " went instead of " << other;
      }
      gone[lane].insert(victim);
    }
  }
  EXPECT_EQ(next, transcript_.evictions.size());
}

// Attention runs as under `full` whatever the policy, and once more for those who declared its rows
// alone.
TEST(AttentionCounts, OnlyWhoAsksForRowsIsMeasured) {
  constexpr int64_t kPrompt = 40, kForced = 100;
  EngineHarness harness(ModelPath("gqa"), {.policies = LawPolicies()});
  const int64_t lanes = harness.manifest().num_layers() * harness.manifest().num_kv_heads;
  const RequestOptions scoring = Scoring(harness.manifest(), kPrompt, kForced, 59);
  std::vector<PolicyCase> cases = EvictingPolicies();
  for (const PolicyCase& variant : PolicyVariants()) cases.push_back(variant);
  int64_t asking = 0;
  for (const PolicyCase& policy : cases) {
    SCOPED_TRACE(policy.label);
    const RequestOptions options = WithPolicy(scoring, policy, 80);
    const SignalSet signals =
        std::get<Request>(harness.admission().Resolve(options)).traits.signals;
    const AttentionCounts before = harness.executor().attention_counts();
    ASSERT_TRUE(Evicted(harness.Run(options), harness.manifest()));
    const AttentionCounts& after = harness.executor().attention_counts();
    const int64_t decode = kForced - 1;  // the last token is not cached
    EXPECT_EQ(after.attended - before.attended, (kPrompt + decode) * lanes);
    EXPECT_EQ(after.measured - before.measured,
              ((signals.Has(Signal::kPromptAttention) ? kPrompt : 0) +
               (signals.Has(Signal::kAttentionRow) ? decode : 0)) *
                  lanes);
    asking += after.measured > before.measured ? 1 : 0;
  }
  EXPECT_GT(asking, 5);
  EXPECT_GT(static_cast<int64_t>(cases.size()) - asking, 5);

  const AttentionCounts before = harness.executor().attention_counts();
  ASSERT_TRUE(harness.Run(scoring).ok());
  EXPECT_EQ(harness.executor().attention_counts().attended - before.attended,
            (kPrompt + kForced - 1) * lanes);
  EXPECT_EQ(harness.executor().attention_counts().measured, before.measured);
}

INSTANTIATE_TEST_SUITE_P(Laws, SignalsEqualTheDefinition,
                         ::testing::Values("mha", "gqa", "mqa", "sample"));

}  // namespace signals_laws_test
}  // namespace epikv
