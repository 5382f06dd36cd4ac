#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "policies/registry.h"
#include "policies/scored_policy.h"
#include "tests/fixtures/artefacts.h"
#include "tests/fixtures/fake_sequence.h"
#include "tests/fixtures/ragged_policy.h"

// Every policy of the registry, with every choice and switch of its parameters, against the laws of
// policy.h. FakeSequence checks each answer: enough victims, cached, unprotected, none twice; and
// that nothing undeclared is read.

namespace epikv {
namespace policy_contract_test {

struct Case {
  const PolicySpec* spec;
  std::map<std::string, ParamValue> params;
};

std::string Name(const Case& c) {
  std::string name(c.spec->name);
  for (const auto& [param, value] : c.params) {
    absl::StrAppend(&name, "_", param);
    if (const auto* b = std::get_if<bool>(&value)) absl::StrAppend(&name, "_", *b);
    if (const auto* i = std::get_if<int64_t>(&value)) absl::StrAppend(&name, "_", *i);
    if (std::holds_alternative<double>(value)) absl::StrAppend(&name, "_given");
    if (const auto* s = std::get_if<std::string>(&value)) absl::StrAppend(&name, "_", *s);
    if (const auto* l = std::get_if<std::vector<std::string>>(&value)) {
      absl::StrAppend(&name, "_", absl::StrJoin(*l, "_"));
    }
  }
  return name;
}

constexpr int64_t kBudget = 40;
const Protection kProtection{.prompt = 6, .sinks = 2, .recent = 5, .spans = {{20, 24}}};

// Admission would let it run: no parameter contradicts another, and the leanest lane holds what is
// protected.
bool Possible(const Case& c) {
  const ModelShape shape = FakeSequence::Options().shape;
  const ResolvedParams resolved = ResolveParams(*c.spec, c.params, shape);
  if (!resolved.violations.empty()) return false;
  if (c.spec->lane_budgets == nullptr) return true;
  const std::vector<int64_t> budgets = c.spec->lane_budgets(resolved.params, shape, kBudget);
  return *std::min_element(budgets.begin(), budgets.end()) > kProtection.Size();
}

std::vector<Case> Cases() {
  std::vector<const PolicySpec*> specs(AllPolicies().begin(), AllPolicies().end());
  specs.push_back(&kRaggedPolicy);
  std::vector<Case> cases;
  for (const PolicySpec* spec : specs) {
    std::vector<std::map<std::string, ParamValue>> variants = {{}};
    for (const ParamSpec& param : spec->params) {
      const std::string name(param.name);
      if (param.type == ParamType::kBool) {
        for (bool value : {false, true}) variants.push_back({{name, value}});
      } else if (param.type == ParamType::kChoice) {
        for (absl::string_view v : param.choices) variants.push_back({{name, std::string(v)}});
      } else if (param.type == ParamType::kChoiceList) {
        for (absl::string_view v : param.choices) {
          variants.push_back({{name, std::vector{std::string(v)}}});
        }
      } else if (param.type == ParamType::kIntList) {
        variants.push_back({{name, std::vector<int64_t>{31, 8, 9, 55, 70, 71, 90}}});
      } else if (name == "slack") {
        for (int64_t value : {0, 7}) variants.push_back({{name, value}});
      } else if (name == "reserve") {
        variants.push_back({{name, int64_t{4}}});
      } else if (name == "temperature") {
        variants.push_back({{name, 0.5}});
      }
    }
    for (auto& params : variants) {
      for (const ParamSpec& param : spec->params) {  // as small as the sequence
        if (param.name == "window" || param.name == "lag") {
          params.try_emplace(std::string(param.name), int64_t{16});
        }
        if (param.name == "slack" && std::get<int64_t>(*param.fallback) > 0) {
          params.try_emplace("slack", int64_t{11});
        }
      }
      Case c{spec, std::move(params)};
      if (Possible(c)) cases.push_back(std::move(c));
    }
  }
  return cases;
}

PolicyTraits TraitsOf(const Case& c) {
  const ModelShape shape = FakeSequence::Options().shape;
  return c.spec->traits(ResolveParams(*c.spec, c.params, shape).params, shape);
}

class PolicyContract : public testing::TestWithParam<Case> {
 protected:
  // A prompt of 10, of which 6 are protected, and room for 30 more.
  FakeSequence::Options Options() const {
    return {.spec = GetParam().spec,
            .params = GetParam().params,
            .protection = kProtection,
            .prompt_tokens = 10,
            .budget = kBudget,
            .seed = 7};
  }
  FakeSequence Sequence() const { return FakeSequence(Options(), World(3)); }
  // Few levels: equal scores are common. Not where scores are sums over slots, whose order decides
  // how they are rounded, and so which of two equals is the larger.
  static FakeWorld World(uint64_t seed) {
    const SignalSet signals = TraitsOf(GetParam()).signals;
    const auto decorate = GetParam().params.find("decorate");
    if (decorate != GetParam().params.end() &&
        decorate->second == ParamValue(std::vector<std::string>{"twin"})) {
      FakeWorld world = RandomWorld(seed, 1 << 20);
      world.key = world.value;  // of many directions
      return Consistent(std::move(world));
    }
    return Consistent(RandomWorld(seed, signals.Has(Signal::kQueries) ? 1 << 20 : 8));
  }
  // Who looks at queries and at what they gave is shown one world.
  static FakeWorld Consistent(FakeWorld world) {
    const ModelShape shape = FakeSequence::Options().shape;
    if (TraitsOf(GetParam()).signals.Has(Signal::kQueries)) {
      world.attention = AttentionOf(world, shape.num_heads / shape.num_kv_heads);
    }
    return world;
  }
};
class EvictingPolicyContract : public PolicyContract {};
class MeasuringPolicyContract : public PolicyContract {};

// Of the registry: those that rank by what the runtime measures.
std::vector<Case> MeasuringCases() {
  std::vector<Case> cases = Cases();
  std::erase_if(cases, [](const Case& c) {
    return TraitsOf(c).signals.Names().empty() || c.spec == &kRaggedPolicy;
  });
  return cases;
}

std::vector<Case> EvictingCases() {
  std::vector<Case> cases = Cases();
  std::erase_if(cases, [](const Case& c) { return !TraitsOf(c).evicts; });
  return cases;
}

using Victims = std::vector<std::vector<std::vector<int32_t>>>;  // [rounds][lanes][victims]

Victims Play(FakeSequence& sequence, int64_t tokens) {
  Victims victims;
  for (int64_t i = 0; i < tokens; ++i) {
    sequence.Decode();
    if (auto round = sequence.Round(); !round.empty()) victims.push_back(std::move(round));
  }
  return victims;
}

TEST_P(EvictingPolicyContract, AnswersAreValidInEveryRound) {
  FakeSequence sequence = Sequence();
  sequence.Prefill(10);
  const Victims victims = Play(sequence, 200);
  int64_t num_victims = 0;
  for (const auto& round : victims) num_victims += round[0].size();
  EXPECT_GE(victims.size(), 5u);
  EXPECT_GE(num_victims, 50);
}

TEST_P(PolicyContract, OrderOfSlotsDoesNotMatter) {
  FakeSequence sequence = Sequence(), shuffled = Sequence();
  std::mt19937 random(1);
  sequence.Prefill(10);
  shuffled.Prefill(10);
  for (int i = 0; i < 200; ++i) {
    shuffled.Shuffle(random);
    sequence.Decode();
    shuffled.Decode();
    shuffled.Shuffle(random);
    ASSERT_EQ(sequence.Round(), shuffled.Round()) << "after decode token " << i;
  }
}

TEST_P(PolicyContract, AskedTwiceAnswersAlike) {
  FakeSequence sequence = Sequence();
  sequence.Prefill(10);
  for (int i = 0; i < 200; ++i) {
    sequence.Decode();
    if (!sequence.OverBudget()) continue;
    FakeSequence again = sequence;
    EXPECT_EQ(again.Round(), sequence.Round());
  }
}

TEST_P(PolicyContract, CloneGoesOnAloneAndAlike) {
  FakeSequence sequence = Sequence(), undisturbed = Sequence();
  sequence.Prefill(10);
  undisturbed.Prefill(10);
  EXPECT_EQ(Play(sequence, 80), Play(undisturbed, 80));
  FakeSequence clone = sequence;
  const Victims ahead = Play(clone, 60);
  EXPECT_EQ(Play(sequence, 60), ahead);
  EXPECT_EQ(Play(undisturbed, 60), ahead);
}

TEST_P(EvictingPolicyContract, OneUnprotectedTokenIsEnough) {
  FakeSequence::Options options = Options();
  options.protection = {.prompt = 10, .recent = 30};
  if (options.spec == &kRaggedPolicy) options.params["spread"] = 0.0;
  const auto allocator = options.params.find("allocator");
  if (allocator != options.params.end() && allocator->second != ParamValue("uniform")) {
    GTEST_SKIP() << "its lanes are not alike";
  }
  if (options.spec->lane_budgets != nullptr) {
    const ModelShape shape = WithArtefacts(options.shape, {&options.spec, 1});
    const Params params = ResolveParams(*options.spec, options.params, shape).params;
    for (const int64_t budget : options.spec->lane_budgets(params, shape, kBudget)) {
      if (budget != kBudget) GTEST_SKIP() << "its lanes have budgets of their own";
    }
  }
  FakeSequence sequence(options, World(3));
  if (sequence.traits().rounds_every > 0) GTEST_SKIP() << "it drops what it likes";
  sequence.Prefill(10);
  const int64_t slack = sequence.traits().slack;
  for (int64_t i = 0; i < 100 + slack; ++i) {
    sequence.Decode();
    const auto round = sequence.Round();
    if (round.empty()) continue;
    // Only what has just left the recent window.
    for (const std::vector<int32_t>& victims : round) {
      ASSERT_EQ(static_cast<int64_t>(victims.size()), 1 + slack);
      EXPECT_EQ(victims.back(), sequence.newest() - 30);
    }
  }
}

TEST_P(EvictingPolicyContract, BatchAnswersAsOneByOne) {
  FakeSequence::Options options = Options();
  FakeSequence first(options, World(3));
  options.seed = 8;
  FakeSequence second(options, World(4));
  first.Prefill(10);
  second.Prefill(10);
  while (!first.OverBudget() || !second.OverBudget() || first.newest() < kBudget) {
    first.Decode();
    second.Decode();
  }
  FakeSequence first_alone = first, second_alone = second;
  std::vector<EvictionTask> tasks;
  tasks.push_back(first.task());
  tasks.push_back(second.task());
  const std::vector<Eviction> batch = first.policy().Evict(absl::MakeSpan(tasks));
  ASSERT_EQ(batch.size(), 2u);
  EXPECT_EQ(batch[0].victims, first_alone.Ask().victims);
  EXPECT_EQ(batch[1].victims, second_alone.Ask().victims);
}

// A number that is not one must not silently decide what is dropped, whichever signal brings it.
TEST_P(MeasuringPolicyContract, NanIsAnError) {
  constexpr int64_t kToken = 15;
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  auto poisoned = [](const auto& good) {
    return [good](int64_t layer, int64_t head, int64_t token) {
      return token == kToken ? std::vector<float>(4, kNan) : good(layer, head, token);
    };
  };
  const FakeWorld good = World(3);
  std::map<Signal, FakeWorld> worlds;
  for (Signal signal :
       {Signal::kResidualStep, Signal::kAttentionRow, Signal::kKeys, Signal::kValues,
        Signal::kPromptAttention, Signal::kQueries, Signal::kOutputProjection,
        Signal::kQueryMoments, Signal::kLogitEntropy, Signal::kResidualDistance, Signal::kResidual,
        Signal::kGate, Signal::kFinalHidden}) {
    if (TraitsOf(GetParam()).signals.Has(signal)) worlds.emplace(signal, good);
  }
  for (auto& [signal, world] : worlds) {
    SCOPED_TRACE(epikv::SignalName(signal));
    if (signal == Signal::kKeys) {
      world.key = poisoned(good.key);
      world = Consistent(world);
    }
    if (signal == Signal::kValues) world.value = poisoned(good.value);
    if (signal == Signal::kQueries || signal == Signal::kQueryMoments) {
      // From here on: some look only now and then.
      world.query = [&](int64_t layer, int64_t head, int64_t token) {
        return token > 3 * kToken ? std::vector<float>(4, kNan) : good.query(layer, head, token);
      };
      world = Consistent(world);
    }
    if (signal == Signal::kOutputProjection) {
      world.output = [&](int64_t layer, int64_t head, int64_t channel) {
        std::vector<float> row = good.output(layer, head, channel);
        row[0] = kNan;
        return row;
      };
    }
    if (signal == Signal::kPromptAttention) {
      world.attention = [&](int64_t layer, int64_t head, int64_t query,
                            absl::Span<const int32_t> index) {
        std::vector<float> row = good.attention(layer, head, query, index);
        for (size_t slot = 0; query < 10 && slot < row.size(); ++slot) {
          if (index[slot] == 8) row[slot] = kNan;
        }
        return row;
      };
    }
    if (signal == Signal::kResidualStep) {
      world.residual_step = [&](int64_t layer, int64_t token) {
        return token == kToken ? kNan : good.residual_step(layer, token);
      };
    }
    if (signal == Signal::kLogitEntropy) {
      world.logit_entropy = [&](int64_t token) {
        return token == kToken ? kNan : good.logit_entropy(token);
      };
    }
    if (signal == Signal::kResidualDistance) {
      world.residual_distance = [&](int64_t layer, int64_t token) {
        return token == kToken ? kNan : good.residual_distance(layer, token);
      };
    }
    if (signal == Signal::kResidual) {
      world.residual = [&](int64_t layer, int64_t token) {
        std::vector<float> row = good.residual(layer, token);
        if (token == kToken) row[1] = kNan;
        return row;
      };
    }
    if (signal == Signal::kGate) {
      world.attention_input = [&](int64_t layer, int64_t token) {
        constexpr int64_t kOfPass = 1000;  // from there on, tokens of scratch passes
        return token == kToken || token >= kOfPass ? std::vector<float>(4, kNan)
                                                   : good.attention_input(layer, token);
      };
    }
    if (signal == Signal::kFinalHidden) {
      world.final_hidden = [&](int64_t token) {
        return token == kToken ? std::vector<float>(4, kNan) : good.final_hidden(token);
      };
    }
    if (signal == Signal::kAttentionRow) {
      world.attention = [&](int64_t layer, int64_t head, int64_t query,
                            absl::Span<const int32_t> index) {
        std::vector<float> row = good.attention(layer, head, query, index);
        for (size_t slot = 0; slot < row.size(); ++slot) {
          if (index[slot] == kToken) row[slot] = kNan;
        }
        return row;
      };
    }
    FakeSequence::Options options = Options();
    // Who reads prompts over their budgets alone is shown one.
    const bool prompts_alone = TraitsOf(GetParam()).pass.chunk > 0;
    if (prompts_alone) options.prompt_tokens = 60;
    FakeSequence sequence(options, world);
    sequence.Prefill(options.prompt_tokens);
    absl::Status status;
    if (prompts_alone) status = sequence.Ask().status;
    while (status.ok() && sequence.newest() < 160) {  // a window hides it at first
      sequence.Decode();
      if (!sequence.OverBudget()) continue;
      const Eviction eviction = sequence.Ask();
      status = eviction.status;
      if (status.ok()) sequence.Drop(eviction);
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  }
}

// What executors rely on.
TEST_P(PolicyContract, PassesAreOfLanesAndPrompts) {
  const PolicyTraits traits = TraitsOf(GetParam());
  if (!traits.pass.any()) return;
  EXPECT_EQ(traits.granularity, Granularity::kHead);
  // What is told ahead is told at a prompt's end; segments may come behind each block of it.
  EXPECT_TRUE(traits.prompt == PromptEviction::kAtEnd ||
              (traits.prompt == PromptEviction::kByChunk && traits.pass.chunk > 0));
  EXPECT_FALSE(traits.pass.lookahead > 0 && traits.pass.chunk > 0);
  EXPECT_FALSE(traits.pass.drafts && traits.pass.chunk > 0);
}

TEST_P(PolicyContract, SpecIsWhole) {
  const PolicySpec& spec = *GetParam().spec;
  EXPECT_THAT(std::string(spec.name), testing::MatchesRegex("[a-z][a-z0-9_]*"));
  EXPECT_FALSE(spec.summary.empty());
  std::set<absl::string_view> names;
  for (const ParamSpec& param : spec.params) {
    SCOPED_TRACE(param.name);
    EXPECT_TRUE(names.insert(param.name).second) << "named twice";
    EXPECT_FALSE(param.help.empty());
    EXPECT_EQ(
        param.type == epikv::ParamType::kChoice || param.type == epikv::ParamType::kChoiceList,
        !param.choices.empty());
    if (!param.fallback.has_value()) continue;
    const ResolvedParams own =
        ResolveParams(spec, {{std::string(param.name), *param.fallback}}, Options().shape);
    EXPECT_TRUE(own.violations.empty()) << "its own default is refused";
  }
  FakeSequence sequence = Sequence();
  const PolicyTraits traits = sequence.traits();
  EXPECT_EQ(sequence.task().state != nullptr, traits.state_bytes + traits.state_bytes_per_token > 0)
      << "what it remembers is what it says it takes";
  EXPECT_EQ(spec.scores, dynamic_cast<const ScoredPolicy*>(&sequence.policy()) != nullptr)
      << "a guard goes by what the spec says, and needs its scores";
  EXPECT_EQ(traits.evicts, names.contains("slack"));
  EXPECT_EQ(traits.signals.Has(Signal::kResidualStep) || traits.signals.Has(Signal::kResidual),
            !traits.residual_layers.empty());
  EXPECT_EQ(traits.signals.Has(Signal::kQueries), traits.window > 0);
  EXPECT_TRUE(traits.attention_layers.empty() || traits.signals.Has(Signal::kAttentionRow) ||
              traits.signals.Has(Signal::kPromptAttention));
  EXPECT_TRUE(traits.pool == Pool::kLane || traits.granularity == Granularity::kHead);
  for (const std::vector<int64_t>& layers : {traits.residual_layers, traits.attention_layers}) {
    EXPECT_TRUE(std::is_sorted(layers.begin(), layers.end()));
    for (int64_t layer : layers) {
      EXPECT_GE(layer, 0);
      EXPECT_LT(layer, Options().shape.num_layers);
    }
  }
}

constexpr auto kName = [](const auto& info) { return Name(info.param); };
INSTANTIATE_TEST_SUITE_P(All, PolicyContract, testing::ValuesIn(Cases()), kName);
INSTANTIATE_TEST_SUITE_P(All, EvictingPolicyContract, testing::ValuesIn(EvictingCases()), kName);
INSTANTIATE_TEST_SUITE_P(All, MeasuringPolicyContract, testing::ValuesIn(MeasuringCases()), kName);

}  // namespace policy_contract_test
}  // namespace epikv
