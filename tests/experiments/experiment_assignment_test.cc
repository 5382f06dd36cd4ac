#include "server/experiments/definition/assignment.h"

#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/live_experiments.h"
#include "server/experiments/seen_units.h"

// Which requests take part, with which arm, and what becomes of their options.

namespace epikv {
namespace experiment_assignment_test {

v1::Arm NewArm(const std::string& name, uint32_t weight, uint32_t budget = 0) {
  v1::Arm arm;
  arm.set_name(name);
  arm.set_weight_permille(weight);
  arm.set_control(name == "full");
  if (budget > 0) {
    arm.mutable_kv()->set_policy("sliding");
    arm.mutable_kv()->set_max_tokens(budget);
  }
  return arm;
}

v1::Experiment TwoArms(const std::string& name, uint32_t lean_permille = 500) {
  v1::Experiment experiment;
  experiment.set_name(name);
  *experiment.add_arms() = NewArm("full", 1000 - lean_permille);
  *experiment.add_arms() = NewArm("lean", lean_permille, 64);
  experiment.set_traffic_permille(1000);
  experiment.set_bucket_version(1);
  return WithDefaults(std::move(experiment));
}

std::string Unit(int i) { return absl::StrCat("user-", i); }

// sqrt of the chi-square distribution's far tail: one run in a million is beyond five.
double Sigmas(double observed, double n, double share) {
  return (observed - n * share) / std::sqrt(n * share * (1 - share));
}

TEST(UnitHash, IsWhatOtherLanguagesCompute) {
  // python3 -c "import hashlib; print(hashlib.sha256(b'lean\x00' b'1\x00'
  // b'user-7').hexdigest()[:16])"
  EXPECT_EQ(UnitHash("lean", 1, "user-7"), UINT64_C(0xfd0225c39384e565));
  EXPECT_EQ(UnitHash("layer/default", 0, ""), UINT64_C(0x3b834a4d195355d2));
}

TEST(UnitHash, KeepsItsPartsApart) {
  EXPECT_NE(UnitHash("a", 1, "1x"), UnitHash("a", 11, "x"));
  EXPECT_NE(UnitHash("a", 1, "x"), UnitHash("a", 2, "x"));
  EXPECT_NE(UnitHash("a", 1, "x"), UnitHash("b", 1, "x"));
}

TEST(BucketOf, IsTheHashAsAFraction) {
  EXPECT_EQ(BucketOf(0), 0u);
  EXPECT_EQ(BucketOf(UINT64_C(1) << 63), kNumBuckets / 2);
  EXPECT_EQ(BucketOf(~UINT64_C(0)), kNumBuckets - 1);
  EXPECT_EQ(BucketOf((UINT64_C(1) << 63) - 1), kNumBuckets / 2 - 1);
}

TEST(ArmOf, GivesEachItsWeight) {
  const v1::Experiment experiment = TwoArms("weights", 100);
  constexpr int kUnits = 200000;
  int lean = 0;
  for (int i = 0; i < kUnits; ++i) lean += ArmOf(experiment, Unit(i))->name() == "lean";
  EXPECT_LT(std::abs(Sigmas(lean, kUnits, 0.1)), 5);
}

TEST(ArmOf, TellsNothingOfAnotherExperiment) {
  const v1::Experiment one = TwoArms("one"), two = TwoArms("two");
  constexpr int kUnits = 100000;
  int both = 0;
  for (int i = 0; i < kUnits; ++i) {
    both += ArmOf(one, Unit(i))->name() == "lean" && ArmOf(two, Unit(i))->name() == "lean";
  }
  EXPECT_LT(std::abs(Sigmas(both, kUnits, 0.25)), 5);
}

TEST(ArmOf, DealsAnewUnderAnotherVersion) {
  v1::Experiment experiment = TwoArms("versions");
  constexpr int kUnits = 100000;
  int moved = 0;
  for (int i = 0; i < kUnits; ++i) {
    experiment.set_bucket_version(1);
    const std::string before = ArmOf(experiment, Unit(i))->name();
    experiment.set_bucket_version(2);
    moved += ArmOf(experiment, Unit(i))->name() != before;
  }
  EXPECT_LT(std::abs(Sigmas(moved, kUnits, 0.5)), 5);
}

TEST(ArmOf, TakesItsSliceOfTheLayer) {
  v1::Experiment first = TwoArms("first"), second = TwoArms("second");
  first.set_traffic_permille(300);
  second.set_traffic_permille(700);
  second.set_first_bucket(3000);
  constexpr int kUnits = 100000;
  int in_first = 0;
  for (int i = 0; i < kUnits; ++i) {
    const bool a = ArmOf(first, Unit(i)) != nullptr, b = ArmOf(second, Unit(i)) != nullptr;
    EXPECT_NE(a, b) << Unit(i);
    in_first += a;
  }
  EXPECT_LT(std::abs(Sigmas(in_first, kUnits, 0.3)), 5);
}

// Of golden/make_experiment_assignment.py, which asks what `epikv experiment assign` asks.
TEST(ArmOf, IsWhatPythonFinds) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/experiment_assignment.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_FALSE(golden["experiments"].empty());
  for (const nlohmann::json& row : golden["experiments"]) {
    v1::Experiment experiment;
    const std::string definition = row["experiment"].dump();
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(definition, &experiment).ok())
        << definition;
    experiment = WithDefaults(std::move(experiment));
    ASSERT_EQ(row["arms"].size(), golden["units"].size());
    for (size_t i = 0; i < golden["units"].size(); ++i) {
      const std::string unit = golden["units"][i].get<std::string>();
      const v1::Arm* const arm = ArmOf(experiment, unit);
      EXPECT_EQ(arm == nullptr ? "none" : arm->name(), row["arms"][i].get<std::string>())
          << experiment.name() << ", unit " << unit;
    }
  }
}

class LiveExperimentsTest : public testing::Test {
 protected:
  absl::StatusOr<Assignment> Assign() {
    return live_.Assign({.request = request_,
                         .request_id = "r-1",
                         .model = "sample",
                         .prompt_tokens = 40,
                         .max_output_tokens = 60});
  }
  v1::GenerateRequest request_;
  LiveExperiments live_;
};

TEST_F(LiveExperimentsTest, LeavesARequestAloneWhereNothingRuns) {
  const absl::StatusOr<Assignment> assignment = Assign();
  ASSERT_TRUE(assignment.ok());
  EXPECT_TRUE(assignment->parts.empty());
  EXPECT_EQ(assignment->arm, "none");
}

TEST_F(LiveExperimentsTest, GivesAUnitTheSameArmAgain) {
  live_.Set({TwoArms("e")});
  std::map<std::string, std::string> arms;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 50; ++i) {
      request_.mutable_experiment()->set_unit_id(Unit(i));
      const absl::StatusOr<Assignment> assignment = Assign();
      ASSERT_TRUE(assignment.ok());
      EXPECT_EQ(arms.emplace(Unit(i), assignment->arm).first->second, assignment->arm);
    }
  }
}

TEST_F(LiveExperimentsTest, ReplacesPolicyAndBudgetAsOne) {
  live_.Set({TwoArms("e")});
  request_.mutable_kv()->set_policy("h2o");
  request_.mutable_kv()->set_keep_ratio(0.5);
  (*request_.mutable_kv()->mutable_policy_params()->mutable_fields())["scope"].set_string_value(
      "model");
  request_.mutable_kv()->set_sink_tokens(2);
  request_.mutable_experiment()->set_force_arm("e/lean");
  const absl::StatusOr<Assignment> lean = Assign();
  ASSERT_TRUE(lean.ok());
  EXPECT_EQ(lean->kv.policy(), "sliding");
  EXPECT_EQ(lean->kv.max_tokens(), 64u);
  EXPECT_FALSE(lean->kv.has_policy_params());
  EXPECT_EQ(lean->kv.sink_tokens(), 2u) << "what the arm does not set stays";
  request_.mutable_experiment()->set_force_arm("e/full");
  const absl::StatusOr<Assignment> full = Assign();
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full->kv.policy(), "h2o") << "an arm that sets nothing leaves the request as it came";
}

TEST_F(LiveExperimentsTest, ExposesOnlyWhereEvictionCouldAct) {
  live_.Set({TwoArms("e")});
  auto exposed = [&](int64_t prompt, int64_t output) {
    const absl::StatusOr<Assignment> assignment = live_.Assign({.request = request_,
                                                                .request_id = "r-1",
                                                                .model = "sample",
                                                                .prompt_tokens = prompt,
                                                                .max_output_tokens = output});
    return assignment->parts.at(0).exposed();
  };
  EXPECT_FALSE(exposed(32, 32));
  EXPECT_TRUE(exposed(32, 33));
  EXPECT_TRUE(exposed(65, 1));
}

TEST_F(LiveExperimentsTest, ReplacesSteeringAsOne) {
  v1::Experiment experiment = TwoArms("e");
  experiment.mutable_arms(0)->clear_kv();
  experiment.mutable_arms(1)->clear_kv();
  experiment.mutable_arms(1)->mutable_steering()->set_coefficient(2);
  live_.Set({experiment});
  request_.mutable_sampling()->mutable_steering()->set_growth(1);
  for (const v1::Arm& arm : experiment.arms()) {
    request_.mutable_experiment()->set_force_arm("e/" + arm.name());
    const absl::StatusOr<Assignment> assignment = Assign();
    ASSERT_TRUE(assignment.ok());
    EXPECT_EQ(assignment->steering.has_value(), arm.has_steering());
    EXPECT_TRUE(assignment->parts.at(0).exposed()) << "a request with room for all may differ, too";
    if (!arm.has_steering()) continue;
    EXPECT_EQ(assignment->steering->coefficient(), 2);
    EXPECT_FALSE(assignment->steering->has_growth());
  }
}

TEST_F(LiveExperimentsTest, ExposesAllWhereRowsAreRounded) {
  v1::Experiment experiment = TwoArms("e");
  v1::KvOptions& kv = *experiment.mutable_arms(1)->mutable_kv();
  kv.set_policy("thinkv_tbe");
  kv.set_keep_ratio(1);
  auto exposed = [&] {
    live_.Set({experiment});
    return Assign()->parts.at(0).exposed();
  };
  EXPECT_FALSE(exposed());
  auto& bits = *(*kv.mutable_policy_params()->mutable_fields())["bits"].mutable_list_value();
  EXPECT_FALSE(exposed());
  for (int i = 0; i < 3; ++i) bits.add_values()->set_number_value(4);
  EXPECT_TRUE(exposed());
}

TEST_F(LiveExperimentsTest, TakesEligibleRequestsOnly) {
  v1::Experiment experiment = TwoArms("e");
  experiment.mutable_eligibility()->set_min_prompt_tokens(41);
  live_.Set({experiment});
  EXPECT_EQ(Assign()->excluded, std::vector<std::string>{"e"});
  experiment.mutable_eligibility()->set_min_prompt_tokens(40);
  experiment.mutable_eligibility()->set_model("other");
  live_.Set({experiment});
  EXPECT_TRUE(Assign()->parts.empty());
  experiment.mutable_eligibility()->set_model("sample");
  (*experiment.mutable_eligibility()->mutable_labels())["tier"] = "free";
  live_.Set({experiment});
  EXPECT_TRUE(Assign()->parts.empty());
  (*request_.mutable_labels())["tier"] = "free";
  EXPECT_EQ(Assign()->parts.size(), 1u);
  request_.mutable_experiment()->set_opt_out(true);
  EXPECT_EQ(Assign()->excluded, std::vector<std::string>{"e"});
}

TEST_F(LiveExperimentsTest, RecordsOfALabelWhatSubgroupsName) {
  v1::Experiment experiment = TwoArms("e");
  experiment.mutable_subgroups()->mutable_label()->set_key("tier");
  experiment.mutable_subgroups()->mutable_label()->add_values("free");
  live_.Set({experiment});
  EXPECT_EQ(Assign()->parts.at(0).subgroup(), "");
  (*request_.mutable_labels())["tier"] = "free";
  EXPECT_EQ(Assign()->parts.at(0).subgroup(), "free");
  (*request_.mutable_labels())["tier"] = "gold";
  EXPECT_EQ(Assign()->parts.at(0).subgroup(), "");
}

v1::Experiment WithPairs(v1::Experiment experiment, uint32_t permille = 1000) {
  experiment.mutable_pairs()->set_permille(permille);
  return experiment;
}

TEST_F(LiveExperimentsTest, BothArmsAnswerTheFirstRequestOfAUnit) {
  live_.Set({WithPairs(TwoArms("e"))});
  request_.mutable_kv()->set_sink_tokens(2);
  int shown_lean = 0;
  for (int i = 0; i < 40; ++i) {
    request_.mutable_experiment()->set_unit_id(Unit(i));
    const absl::StatusOr<Assignment> first = Assign();
    ASSERT_TRUE(first->pairing.has_value());
    const bool lean = first->arm == "e/lean";
    shown_lean += lean;
    EXPECT_EQ(first->pairing->arm, lean ? "full" : "lean");
    EXPECT_EQ(first->pairing->part, 0);
    EXPECT_EQ(first->kv.max_tokens(), lean ? 64u : 0u);
    EXPECT_EQ(first->pairing->kv.max_tokens(), lean ? 0u : 64u);
    EXPECT_EQ(first->pairing->kv.sink_tokens(), 2u) << "what no arm sets stays";
    EXPECT_EQ(first->parts[0].pair_arm(), "") << "not before its other arm takes it";
    EXPECT_FALSE(Assign()->pairing.has_value()) << "a later prompt may hold what an arm wrote";
  }
  EXPECT_GT(shown_lean, 5);
  EXPECT_LT(shown_lean, 35);
}

TEST_F(LiveExperimentsTest, PairsAreDealtApartFromArms) {
  live_.Set({WithPairs(TwoArms("e"), 300)});
  std::map<std::string, int> units, pairs;
  for (int i = 0; i < 4000; ++i) {
    request_.mutable_experiment()->set_unit_id(Unit(i));
    const absl::StatusOr<Assignment> assignment = Assign();
    ++units[assignment->arm];
    pairs[assignment->arm] += assignment->pairing.has_value();
  }
  for (const auto& [arm, count] : units) EXPECT_LT(std::abs(Sigmas(pairs[arm], count, .3)), 5);
}

TEST_F(LiveExperimentsTest, ARequestWithoutEvictionHasNoPairAndNorDoLaterOnes) {
  live_.Set({WithPairs(TwoArms("e"))});
  const auto assign = [&](int64_t output) {
    return live_.Assign({.request = request_,
                         .request_id = "r-1",
                         .model = "sample",
                         .prompt_tokens = 32,
                         .max_output_tokens = output});
  };
  EXPECT_FALSE(assign(32)->pairing.has_value());
  EXPECT_FALSE(assign(320)->pairing.has_value()) << "the unit's first request decides";
}

TEST_F(LiveExperimentsTest, AForcedArmHasNoPair) {
  live_.Set({WithPairs(TwoArms("e")), TwoArms("other")});
  request_.mutable_experiment()->set_force_arm("other/full");
  EXPECT_FALSE(Assign()->pairing.has_value());
  request_.mutable_experiment()->clear_force_arm();
  EXPECT_TRUE(Assign()->pairing.has_value()) << "that request was of no unit's first";
}

TEST_F(LiveExperimentsTest, OneExperimentHasThePairAndOthersKeepTheirArm) {
  v1::Experiment steered = WithPairs(TwoArms("steered"));
  for (v1::Arm& arm : *steered.mutable_arms()) arm.clear_kv();
  steered.mutable_arms(0)->mutable_steering()->set_coefficient(1);
  steered.mutable_arms(1)->mutable_steering()->set_coefficient(2);
  live_.Set({WithPairs(TwoArms("budget")), steered});
  for (int i = 0; i < 20; ++i) {
    request_.mutable_experiment()->set_unit_id(Unit(i));
    const absl::StatusOr<Assignment> assignment = Assign();
    ASSERT_TRUE(assignment->pairing.has_value());
    EXPECT_EQ(assignment->parts.at(assignment->pairing->part).experiment(), "budget");
    EXPECT_NE(assignment->pairing->kv.max_tokens(), assignment->kv.max_tokens());
    EXPECT_EQ(assignment->pairing->steering->coefficient(), assignment->steering->coefficient());
  }
}

TEST(SeenUnits, RemembersTheNewest) {
  SeenUnits seen;
  constexpr uint64_t kMany = 3 * SeenUnits::kRemembered;
  for (uint64_t unit = 0; unit < kMany; ++unit) EXPECT_TRUE(seen.IsNew(unit));
  for (uint64_t unit = kMany - SeenUnits::kRemembered; unit < kMany; ++unit) {
    EXPECT_FALSE(seen.IsNew(unit));
  }
  EXPECT_TRUE(seen.IsNew(0)) << "it is bounded";
}

TEST_F(LiveExperimentsTest, ForcesAnArmWhateverTheHash) {
  live_.Set({TwoArms("e")});
  for (int i = 0; i < 20; ++i) {
    request_.mutable_experiment()->set_unit_id(Unit(i));
    request_.mutable_experiment()->set_force_arm("e/lean");
    const absl::StatusOr<Assignment> assignment = Assign();
    ASSERT_TRUE(assignment.ok());
    EXPECT_EQ(assignment->arm, "e/lean");
    EXPECT_TRUE(assignment->parts.at(0).forced());
  }
  for (const char* arm : {"e/none", "f/lean", "e", "/", "e/lean/"}) {
    request_.mutable_experiment()->set_force_arm(arm);
    EXPECT_EQ(Assign().status().code(), absl::StatusCode::kInvalidArgument) << arm;
  }
}

TEST_F(LiveExperimentsTest, SharesARequestBetweenLayersAlone) {
  v1::Experiment budget = TwoArms("budget"), positions = TwoArms("positions");
  positions.set_layer("positions");
  for (v1::Arm& arm : *positions.mutable_arms()) arm.clear_kv();
  positions.mutable_arms(0)->mutable_kv()->set_positions(v1::POSITION_MODE_COMPACT);
  positions.mutable_arms(1)->mutable_kv()->set_positions(v1::POSITION_MODE_COMPACT);
  live_.Set({positions, budget});
  const absl::StatusOr<Assignment> assignment = Assign();
  ASSERT_TRUE(assignment.ok());
  ASSERT_EQ(assignment->parts.size(), 2u);
  EXPECT_EQ(assignment->parts[0].experiment(), "budget");
  EXPECT_EQ(assignment->kv.positions(), v1::POSITION_MODE_COMPACT);
  EXPECT_EQ(std::count(assignment->arm.begin(), assignment->arm.end(), ','), 1);
}

TEST(CheckContext, NamesEachFault) {
  v1::GenerateRequest request;
  EXPECT_TRUE(CheckContext(request).empty());
  request.mutable_experiment()->set_unit_id(std::string(129, 'u'));
  request.mutable_experiment()->set_covariate(std::nan(""));
  request.mutable_experiment()->set_force_arm("e/lean");
  request.mutable_experiment()->set_opt_out(true);
  for (int i = 0; i < 9; ++i) (*request.mutable_labels())[absl::StrCat("k", i)] = "v";
  (*request.mutable_labels())[""] = "v";
  EXPECT_EQ(CheckContext(request).size(), 5u);
}

}  // namespace experiment_assignment_test
}  // namespace epikv
