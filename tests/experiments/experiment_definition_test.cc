#include "server/experiments/definition/definition.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "server/experiments/definition/subgroups.h"

// What an experiment may be, what its defaults are, and what would move its units.

namespace epikv {
namespace experiment_definition_test {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr char kSound[] = R"(
  name: "lean-1" traffic_permille: 100
  arms { name: "full" weight_permille: 500 control: true }
  arms { name: "lean" weight_permille: 500 kv { policy: "sliding" max_tokens: 64 } }
  metrics { name: "right" kind: KIND_PROPORTION }
  primary_metric: "right"
  guardrails { metric: "failed" margin: 0.01 }
)";

// The sound one, with what is in `more` beside it or instead.
v1::Experiment Sound(const std::string& more = "") {
  v1::Experiment experiment;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(kSound, &experiment));
  EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(more, &experiment));
  return WithDefaults(std::move(experiment));
}

std::vector<std::string> Faults(const v1::Experiment& experiment) {
  std::vector<std::string> fields;
  for (const FieldViolation& violation : CheckDefinition(experiment)) {
    fields.push_back(violation.field);
  }
  return fields;
}

TEST(Definition, OfADraftIsCompletedAndSound) {
  const v1::Experiment experiment = Sound();
  EXPECT_THAT(Faults(experiment), IsEmpty());
  EXPECT_EQ(experiment.layer(), "default");
  EXPECT_EQ(experiment.salt(), "lean-1");
  EXPECT_EQ(experiment.alpha(), 0.05);
  EXPECT_EQ(experiment.outcome_window().seconds(), 86400);
  EXPECT_EQ(experiment.metrics(0).direction(), v1::Metric::DIRECTION_HIGHER_IS_BETTER);
}

// A fault, and the fields that are named for it.
struct Fault {
  std::string text;
  std::vector<std::string> fields;
};

class DefinitionFault : public testing::TestWithParam<Fault> {};

TEST_P(DefinitionFault, IsNamed) { EXPECT_EQ(Faults(Sound(GetParam().text)), GetParam().fields); }

INSTANTIATE_TEST_SUITE_P(
    , DefinitionFault,
    testing::Values(
        Fault{R"(name: "Lean")", {"experiment.name"}},
        Fault{R"(name: "lean/1" salt: "s")", {"experiment.name"}},
        Fault{R"(salt: "S")", {"experiment.salt"}}, Fault{R"(layer: "a b")", {"experiment.layer"}},
        Fault{R"(traffic_permille: 1001)", {"experiment.traffic_permille"}},
        Fault{R"(traffic_permille: 0)", {"experiment.traffic_permille"}},
        Fault{R"(arms { name: "lean" weight_permille: 1 })",
              {"experiment.arms[2].name", "experiment.arms"}},
        Fault{R"(arms { name: "none" weight_permille: 0 control: true })",
              {"experiment.arms[2].name", "experiment.arms[2].weight_permille", "experiment.arms"}},
        Fault{R"(metrics { name: "failed" })", {"experiment.metrics[1].name"}},
        Fault{R"(metrics { name: "right" kind: 9 })",
              {"experiment.metrics[1].name", "experiment.metrics[1].kind"}},
        Fault{R"(primary_metric: "wrong")", {"experiment.primary_metric"}},
        Fault{R"(guardrails { metric: "wrong" margin: -1 })",
              {"experiment.guardrails[1].metric", "experiment.guardrails[1].margin"}},
        Fault{R"(guardrails { metric: "failed" })", {"experiment.guardrails[1].metric"}},
        Fault{R"(guardrails { metric: "kv_evicted_tokens" })", {"experiment.guardrails[1].metric"}},
        Fault{R"(eligibility { labels { key: "" value: "x" } })",
              {"experiment.eligibility.labels"}},
        Fault{R"(alpha: 0.5)", {"experiment.alpha"}},
        Fault{R"(end_time { seconds: 999999999999 })", {"experiment.end_time"}},
        Fault{R"(outcome_window { seconds: 0 })", {"experiment.outcome_window"}},
        Fault{R"(outcome_window { seconds: 999999999 })", {"experiment.outcome_window"}}));

constexpr char kSubgroups[] = R"(
  subgroups { prompt_token_edges: [256, 1024] label { key: "tier" values: ["free", "paid"] } }
)";

TEST(Subgroups, HaveAClassBetweenEdgesAndOneOfAllOthers) {
  const v1::Experiment experiment = Sound(kSubgroups);
  EXPECT_THAT(Faults(experiment), IsEmpty());
  const Subgroups subgroups(experiment);
  ASSERT_EQ(subgroups.divisions().size(), 2u);
  EXPECT_THAT(subgroups.divisions()[0].names, ElementsAre("0-255", "256-1023", "1024+"));
  EXPECT_THAT(subgroups.divisions()[1].names, ElementsAre("free", "paid", "other"));
  EXPECT_EQ(subgroups.num_classes(), 6u);
  const auto of = [&](int64_t tokens, const std::string& label) {
    return subgroups.ClassesOf({.prompt_tokens = tokens, .label = label});
  };
  EXPECT_THAT(of(0, "free"), ElementsAre(0, 0));
  EXPECT_THAT(of(255, "paid"), ElementsAre(0, 1));
  EXPECT_THAT(of(256, ""), ElementsAre(1, 2));
  EXPECT_THAT(of(1 << 20, "gold"), ElementsAre(2, 2));
}

TEST(Subgroups, KeepOfLabelsWhatTheyName) {
  const v1::Experiment experiment = Sound(kSubgroups);
  google::protobuf::Map<std::string, std::string> labels;
  EXPECT_EQ(SubgroupLabelOf(experiment, labels), "");
  labels["name"] = "Ann";
  labels["tier"] = "paid";
  EXPECT_EQ(SubgroupLabelOf(experiment, labels), "paid");
  labels["tier"] = "a secret";
  EXPECT_EQ(SubgroupLabelOf(experiment, labels), "");
  EXPECT_EQ(SubgroupLabelOf(Sound(), labels), "");
}

INSTANTIATE_TEST_SUITE_P(
    OfSubgroups, DefinitionFault,
    testing::Values(
        Fault{"subgroups {}", {"experiment.subgroups"}},
        Fault{"subgroups { prompt_token_edges: [0] }", {"experiment.subgroups.prompt_token_edges"}},
        Fault{"subgroups { prompt_token_edges: [9, 9] }",
              {"experiment.subgroups.prompt_token_edges"}},
        Fault{"subgroups { prompt_token_edges: [1, 2, 3, 4, 5, 6, 7, 8] }",
              {"experiment.subgroups.prompt_token_edges"}},
        Fault{R"(subgroups { label { values: "a" } })", {"experiment.subgroups.label.key"}},
        Fault{R"(subgroups { label { key: "k" } })", {"experiment.subgroups.label.values"}},
        Fault{R"(subgroups { label { key: "k" values: ["a", "a"] } })",
              {"experiment.subgroups.label.values"}},
        Fault{R"(subgroups { label { key: "k" values: "other" } })",
              {"experiment.subgroups.label.values"}},
        Fault{R"(subgroups { label { key: "k" values: "a\000" } })",
              {"experiment.subgroups.label.values"}}));

TEST(Redecides, IsAnotherCut) {
  const v1::Experiment before = Sound(kSubgroups);
  EXPECT_FALSE(Redecides(before, before));
  EXPECT_TRUE(Redecides(before, Sound()));
  EXPECT_TRUE(
      Redecides(before, Sound(kSubgroups + std::string("subgroups { prompt_token_edges: 4096 }"))));
}

constexpr char kPairs[] = "pairs { permille: 250 }";

TEST(Pairs, AreOfTwoArms) {
  EXPECT_THAT(Faults(Sound(kPairs)), IsEmpty());
  EXPECT_THAT(Faults(Sound(kPairs + std::string(kSubgroups))), IsEmpty());
  const v1::Experiment three = Sound(kPairs + std::string(R"(arms { name: "x" })"));
  EXPECT_THAT(Faults(three), Contains("experiment.pairs"));
}

INSTANTIATE_TEST_SUITE_P(OfPairs, DefinitionFault,
                         testing::Values(Fault{"pairs {}", {"experiment.pairs.permille"}},
                                         Fault{"pairs { permille: 1001 }",
                                               {"experiment.pairs.permille"}}));

TEST(Redecides, IsAnotherShareOfPairs) {
  const v1::Experiment before = Sound(kPairs);
  EXPECT_FALSE(Redecides(before, before));
  EXPECT_TRUE(Redecides(before, Sound()));
  EXPECT_TRUE(Redecides(Sound(), before));
  EXPECT_TRUE(Redecides(before, Sound("pairs { permille: 251 }")));
}

constexpr char kSwitchback[] = R"(traffic_permille: 1000
  switchback { window { seconds: 300 } wash_out { seconds: 30 } }
)";

TEST(Switchback, IsOfTheWholeServerAndMeasuresOutput) {
  EXPECT_THAT(Faults(Sound(kSwitchback)), IsEmpty());
  const std::string output = R"(guardrails { metric: "output_tokens_per_second" margin: 5 }
                                primary_metric: "output_tokens_per_second")";
  EXPECT_THAT(Faults(Sound(kSwitchback + output)), IsEmpty());
  EXPECT_THAT(Faults(Sound(kSwitchback + std::string(R"(eligibility { model: "m" })"))), IsEmpty());
  EXPECT_THAT(Faults(Sound(output)),
              ElementsAre("experiment.primary_metric", "experiment.guardrails[1].metric"))
      << "where arms share the server it is no arm's";
}

TEST(Switchback, LeavesATenthOutUnlessToldOtherwise) {
  const v1::Experiment experiment =
      Sound("traffic_permille: 1000 switchback { window { seconds: 1 nanos: 5000000 } }");
  EXPECT_EQ(experiment.switchback().wash_out().nanos(), 100'000'000);
  EXPECT_THAT(Faults(experiment), IsEmpty());
  const v1::Experiment none =
      Sound("traffic_permille: 1000 switchback { window { seconds: 1 } wash_out {} }");
  EXPECT_EQ(none.switchback().wash_out().nanos(), 0);
}

class SwitchbackFault : public testing::TestWithParam<Fault> {};

TEST_P(SwitchbackFault, IsNamed) {
  EXPECT_EQ(Faults(Sound(kSwitchback + GetParam().text)), GetParam().fields);
}

INSTANTIATE_TEST_SUITE_P(
    , SwitchbackFault,
    testing::Values(
        Fault{"switchback { window { seconds: 86401 } }", {"experiment.switchback.window"}},
        Fault{"switchback { window { nanos: 1 } }", {"experiment.switchback.window"}},
        Fault{"switchback { wash_out { nanos: 1 } }", {"experiment.switchback.wash_out"}},
        Fault{"switchback { wash_out { seconds: 300 } }", {"experiment.switchback.wash_out"}},
        Fault{"switchback { wash_out { seconds: -1 } }", {"experiment.switchback.wash_out"}},
        Fault{"traffic_permille: 999", {"experiment.traffic_permille"}},
        Fault{"eligibility { min_prompt_tokens: 9 }", {"experiment.eligibility.min_prompt_tokens"}},
        Fault{R"(eligibility { labels { key: "a" value: "b" } })",
              {"experiment.eligibility.labels"}},
        Fault{"subgroups { prompt_token_edges: 256 }", {"experiment.subgroups"}},
        Fault{"pairs { permille: 1 }", {"experiment.pairs"}},
        Fault{R"(metrics { name: "score" covariate: COVARIATE_CLIENT })",
              {"experiment.metrics[1].covariate"}}));

TEST(Switchback, HasWindowsOfASecondOrMore) {
  for (const char* window :
       {"", "seconds: -5", "nanos: 999000000", "seconds: 9223372036854775807"}) {
    const v1::Experiment experiment =
        Sound(std::string("traffic_permille: 1000 switchback { window { ") + window + " } }");
    EXPECT_THAT(Faults(experiment), Contains("experiment.switchback.window")) << window;
  }
}

TEST(Definition, NeedsTwoArms) {
  v1::Experiment experiment = Sound();
  experiment.mutable_arms()->DeleteSubrange(1, 1);
  EXPECT_THAT(Faults(experiment), ElementsAre("experiment.arms"));
}

TEST(Definition, LeavesACacheSaltToTheClient) {
  v1::Experiment experiment = Sound();
  experiment.mutable_arms(1)->mutable_kv()->set_cache_salt("s");
  EXPECT_THAT(Faults(experiment), ElementsAre("experiment.arms[1].kv.cache_salt"));
}

TEST(Definition, MayBeOfAnyLengthAndIsShownShort) {
  v1::Experiment experiment = Sound();
  experiment.set_name(std::string(1 << 20, 'A'));
  for (const FieldViolation& violation : CheckDefinition(experiment)) {
    EXPECT_LT(violation.description.size(), 400u);
  }
  experiment.set_alpha(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(Faults(experiment), ElementsAre("experiment.name", "experiment.alpha"));
}

TEST(Definition, OfTheTemplateIsSound) {
  v1::Experiment experiment;
  std::ifstream file(EPIKV_SOURCE_DIR "/tools/epikv/experiment/template.textproto");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &experiment));
  EXPECT_THAT(Faults(WithDefaults(experiment)), IsEmpty());
}

TEST(Rebuckets, IsWhatMovesAUnit) {
  const v1::Experiment before = Sound();
  EXPECT_FALSE(Rebuckets(before, before));
  for (const char* still :
       {R"(hypothesis: "h")", "alpha: 0.01", R"(guardrails { metric: "failed" })",
        R"(metrics { name: "tokens" })", "end_time { seconds: 9 }"}) {
    EXPECT_FALSE(Rebuckets(before, Sound(still))) << still;
  }
  for (const char* moves :
       {R"(salt: "s")", R"(layer: "l")", "traffic_permille: 200",
        "eligibility { min_prompt_tokens: 1 }", R"(arms { name: "third" weight_permille: 1 })",
        "switchback { window { seconds: 60 } }"}) {
    EXPECT_TRUE(Rebuckets(before, Sound(moves))) << moves;
  }
  const v1::Experiment windows = Sound(kSwitchback);
  EXPECT_FALSE(Rebuckets(windows, windows));
  EXPECT_TRUE(Rebuckets(
      windows, Sound(kSwitchback + std::string("switchback { wash_out { seconds: 31 } }"))));
  v1::Experiment leaner = before;
  leaner.mutable_arms(1)->mutable_kv()->set_max_tokens(32);
  EXPECT_TRUE(Rebuckets(before, leaner));
}

TEST(BudgetTokens, IsNeverMoreThanTheRequestHas) {
  v1::KvOptions kv;
  EXPECT_EQ(BudgetTokens(kv, 100), 100);
  kv.set_max_tokens(64);
  EXPECT_EQ(BudgetTokens(kv, 100), 64);
  EXPECT_EQ(BudgetTokens(kv, 40), 40);
  kv.set_keep_ratio(0.07);
  EXPECT_EQ(BudgetTokens(kv, 100), 7);
}

// An arm's tier replaces the request's whole: what it leaves out is not the request's.
TEST(Overridden, AnArmsTierIsItsOwn) {
  v1::KvOptions asked, arm;
  asked.mutable_tier()->set_tokens(64);
  asked.mutable_tier()->set_fetch(64);
  asked.mutable_tier()->set_doubt(0.5);
  asked.set_read_tokens(48);
  arm.mutable_tier()->set_tokens(128);
  arm.mutable_tier()->set_fetch(32);
  const v1::KvOptions kv = Overridden(asked, arm);
  EXPECT_EQ(kv.tier().tokens(), 128u);
  EXPECT_EQ(kv.tier().fetch(), 32u);
  EXPECT_EQ(kv.tier().doubt(), 0);
  EXPECT_EQ(kv.read_tokens(), 48u) << "the arm says nothing of it";
}

}  // namespace experiment_definition_test
}  // namespace epikv
