#include "runtime/base/steady_time.h"
#include "server/experiments/figures/report.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/definition/edits.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/distribution.h"
#include "server/experiments/store/sql_store.h"
#include "tests/fixtures/counted_units.h"
#include "tests/fixtures/experiment_records.h"
#include "tests/fixtures/temporary_folder.h"

// What a report says of records that are in a real store.

namespace epikv {
namespace experiment_report_test {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const absl::Time kStart = absl::FromUnixSeconds(1'700'000'000);
const absl::Time kNow = kStart + absl::Hours(10);

// One request and what came of it.
struct Asked {
  std::string arm = "full";
  bool exposed = true, forced = false, ended = true;
  std::string code = "OK";
  double seconds = 1;
  std::optional<double> right;
  uint32_t version = 1;
  uint32_t prompt_tokens = 100;
  std::optional<double> covariate;
  std::string subgroup = {};
};

class ReportTest : public ::testing::Test {
 protected:
  ReportTest() : store_(*OpenStore(folder_.File("store.db"))) {
    v1::Experiment draft;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
        R"pb(
          name: "lean"
          traffic_permille: 1000
          primary_metric: "right"
          arms { name: "full" weight_permille: 500 control: true }
          arms {
            name: "lean"
            weight_permille: 500
            kv { policy: "window" max_tokens: 24 }
          }
          metrics { name: "right" kind: KIND_PROPORTION }
          guardrails { metric: "failed" margin: 0.05 }
        )pb",
        &draft));
    draft = Drafted(WithDefaults(std::move(draft)), kStart);
    EXPECT_TRUE(store_->Create(draft).ok());
    experiment_ = *store_->Change("lean", [](const std::vector<v1::Experiment>& all) {
      return Started(all.front(), all, kStart);
    });
  }

  // The i-th request, of the unit `unit`, i-th of n in time.
  void Add(int i, int n, const std::string& unit, const Asked& asked) {
    const std::string id = absl::StrCat("r", i);
    const absl::Time time = kStart + (kNow - kStart) * i / n;
    v1::RequestBegan& began = *records_.emplace_back().mutable_began();
    began.set_id(id);
    began.set_request_id(id);
    began.set_unit(UnitHash("unit", 0, unit));
    *began.mutable_time() = TimestampProto(time);
    began.set_prompt_tokens(asked.prompt_tokens);
    if (asked.covariate.has_value()) began.set_covariate(*asked.covariate);
    auto& part = *began.add_parts();
    part.set_experiment("lean");
    part.set_bucket_version(asked.version);
    part.set_arm(asked.arm);
    part.set_forced(asked.forced);
    part.set_exposed(asked.exposed);
    part.set_subgroup(asked.subgroup);
    if (asked.ended) {
      v1::RequestEnded& ended = *records_.emplace_back().mutable_ended();
      ended.set_id(id);
      *ended.mutable_time() = TimestampProto(time + absl::Seconds(1));
      ended.set_code(asked.code);
      ended.set_request_seconds(asked.seconds);
    }
    if (asked.right.has_value()) {
      v1::OutcomeSeen& outcome = *records_.emplace_back().mutable_outcome();
      outcome.set_request_id(id);
      outcome.set_metric("right");
      outcome.set_value(*asked.right);
      *outcome.mutable_time() = TimestampProto(time + absl::Seconds(2));
      *outcome.mutable_received() = outcome.time();
    }
  }
  void Write() {
    for (size_t first = 0; first < records_.size(); first += 1000) {
      const auto written =
          store_->Write(absl::MakeSpan(records_).subspan(first, 1000), Source::kNow);
      ASSERT_TRUE(written.ok()) << written.status();
      EXPECT_THAT(written->records, Each(Recorded::kWritten));
    }
    records_.clear();
  }
  v1::ExperimentReport Report(const ReportOptions& options = {}) {
    const auto report = MakeReport(experiment_, *store_, options, kNow);
    EXPECT_TRUE(report.ok()) << report.status();
    return *report;
  }
  // 2n requests, of the arms in turn; `right` of each hundred of an arm are right.
  void AddPairs(int n, int right_of_full, int right_of_lean) {
    for (int i = 0; i < 2 * n; ++i) {
      const bool lean = i % 2 == 1;
      const int place = i / 2 * 37 % 100;  // spread over time
      Add(i, 2 * n, absl::StrCat("u", i),
          {.arm = lean ? "lean" : "full",
           .right = place < (lean ? right_of_lean : right_of_full) ? 1 : 0});
    }
    Write();
  }
  static const v1::MetricReport& MetricOf(const v1::ExperimentReport& report,
                                          const std::string& name) {
    for (const v1::MetricReport& metric : report.metrics()) {
      if (metric.metric().name() == name) return metric;
    }
    ADD_FAILURE() << name;
    return report.metrics(0);
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<Store> store_;
  v1::Experiment experiment_;
  std::vector<v1::ExperimentRecord> records_;
};

TEST_F(ReportTest, OfNothingSaysThatItIsTooEarly) {
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.sample_ratio().p_value(), 1);
  EXPECT_EQ(report.metrics(0).metric().name(), "right");
  EXPECT_TRUE(report.metrics(0).primary());
  EXPECT_EQ(report.metrics(0).all().effects(0).verdict(), v1::Effect::VERDICT_TOO_EARLY);
  EXPECT_EQ(report.guardrails(0).verdict(), v1::GuardrailReport::VERDICT_TOO_EARLY);
  EXPECT_EQ(report.arms_size(), 2);
}

TEST_F(ReportTest, FindsWhatIsThere) {
  AddPairs(1000, 90, 60);
  const v1::ExperimentReport report = Report();
  const v1::MetricReport& right = report.metrics(0);
  EXPECT_EQ(right.alpha(), 0.05);
  EXPECT_NEAR(right.all().arms(0).mean(), 0.9, 1e-9);
  EXPECT_NEAR(right.all().arms(1).mean(), 0.6, 1e-9);
  EXPECT_EQ(right.all().arms(0).units(), 1000u);
  EXPECT_EQ(right.all().arms(0).coverage(), 1);
  const v1::Effect& effect = right.all().effects(0);
  EXPECT_EQ(effect.arm(), "lean");
  EXPECT_NEAR(effect.difference(), -0.3, 1e-9);
  EXPECT_LT(effect.interval().upper(), 0);
  EXPECT_NEAR(effect.lift(), -1. / 3, 1e-9);
  EXPECT_EQ(effect.verdict(), v1::Effect::VERDICT_WORSE);
  EXPECT_EQ(report.guardrails(0).verdict(), v1::GuardrailReport::VERDICT_SAFE);
  EXPECT_EQ(report.blocked(), "");
}

TEST_F(ReportTest, FindsNothingWhereNothingIs) {
  AddPairs(500, 80, 80);
  EXPECT_EQ(Report().metrics(0).all().effects(0).verdict(), v1::Effect::VERDICT_UNDECIDED);
}

TEST_F(ReportTest, SeriesGrowToTheFiguresOfNow) {
  AddPairs(300, 90, 60);
  const v1::ExperimentReport report = Report({.points = 7});
  const v1::Effect& effect = report.metrics(0).all().effects(0);
  ASSERT_EQ(effect.points_size(), 7);
  EXPECT_EQ(TimeOf(effect.points(6).time()), kNow);
  EXPECT_EQ(effect.points(6).difference(), effect.difference());
  EXPECT_EQ(effect.points(6).interval().upper(), effect.interval().upper());
  ASSERT_EQ(report.arms(1).points_size(), 7);
  EXPECT_EQ(report.arms(1).points(6).units(), 300u);
  EXPECT_NEAR(static_cast<double>(report.arms(1).points(3).units()), 300 * 4 / 7., 2);
}

TEST_F(ReportTest, SaysTheSameInSeveralPasses) {
  AddPairs(200, 90, 60);
  EXPECT_EQ(Report({.memory_bytes = 1}).SerializeAsString(), Report().SerializeAsString());
}

TEST_F(ReportTest, KeepsEveryoneAndTheExposedApart) {
  for (int i = 0; i < 800; ++i) {
    const bool exposed = i % 4 < 2;
    Add(i, 800, absl::StrCat("u", i),
        {.arm = i % 2 ? "lean" : "full", .exposed = exposed, .right = exposed && i % 2 ? 0 : 1});
  }
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.arms(1).units(), 400u);
  EXPECT_EQ(report.arms(1).exposed_units(), 200u);
  EXPECT_NEAR(report.metrics(0).all().effects(0).difference(), -0.5, 1e-9);
  EXPECT_NEAR(report.metrics(0).exposed().effects(0).difference(), -1, 1e-9);
}

// All requests of a unit say no more than one that is as large.
TEST_F(ReportTest, CountsUnitsNotRequests) {
  for (int i = 0; i < 1000; ++i) {
    Add(i, 1000, absl::StrCat("u", i % 10), {.arm = i % 2 ? "lean" : "full", .right = i % 2});
  }
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.arms(0).units(), 5u);
  EXPECT_EQ(report.arms(0).requests(), 500u);
  EXPECT_EQ(report.metrics(0).all().effects(0).verdict(), v1::Effect::VERDICT_TOO_EARLY);
}

TEST_F(ReportTest, LeavesOutWhatNoHashDealt) {
  AddPairs(100, 50, 50);
  for (int i = 200; i < 240; ++i) {
    Add(i, 240, absl::StrCat("f", i), {.arm = "lean", .forced = true, .right = 0});
    Add(i + 1000, 2000, absl::StrCat("v", i), {.arm = "lean", .right = 0, .version = 2});
    Add(i + 2000, 4000, "u0", {.arm = "lean", .right = 0});  // seen under `full`
  }
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.forced_requests(), 40u);
  EXPECT_EQ(report.other_version_requests(), 40u);
  EXPECT_EQ(report.crossed_requests(), 40u);
  EXPECT_EQ(report.arms(1).requests(), 100u);
  EXPECT_EQ(report.metrics(0).all().arms(1).observations(), 100u);
  EXPECT_THAT(report.notes(), Contains(HasSubstr("another arm")));
}

TEST_F(ReportTest, IsBlockedUntilASplitIsExplained) {
  for (int i = 0; i < 1000; ++i) {
    Add(i, 1000, absl::StrCat("u", i), {.arm = i % 5 < 3 ? "full" : "lean", .right = i % 2});
  }
  Write();
  v1::ExperimentReport report = Report();
  EXPECT_TRUE(report.sample_ratio().alarm());
  EXPECT_THAT(report.blocked(), HasSubstr("sample_ratio_explanation"));
  for (const v1::MetricReport& metric : report.metrics()) {
    EXPECT_THAT(metric.all().effects(), IsEmpty());
    EXPECT_THAT(metric.exposed().effects(), IsEmpty());
  }
  EXPECT_EQ(report.metrics(0).all().arms_size(), 2);
  experiment_.set_sample_ratio_explanation("one replica dropped its records");
  report = Report();
  EXPECT_EQ(report.blocked(), "");
  EXPECT_EQ(report.metrics(0).all().effects_size(), 1);
  EXPECT_THAT(report.notes(), Contains(HasSubstr("one replica dropped its records")));
}

TEST_F(ReportTest, BreachesAGuardrail) {
  for (int i = 0; i < 800; ++i) {
    Add(i, 800, absl::StrCat("u", i),
        {.arm = i % 2 ? "lean" : "full", .code = i % 2 && i % 3 ? "INTERNAL" : "OK"});
  }
  Write();
  const v1::ExperimentReport report = Report({.guardrails_only = true});
  ASSERT_EQ(report.guardrails_size(), 1);
  EXPECT_EQ(report.guardrails(0).arm(), "lean");
  EXPECT_EQ(report.guardrails(0).verdict(), v1::GuardrailReport::VERDICT_BREACHED);
  EXPECT_GT(report.guardrails(0).interval().lower(), 0.05);
  EXPECT_EQ(report.metrics_size(), 1) << "nothing else was read";
}

// Failures, cancels and missed deadlines are outcomes, and not of one kind.
TEST_F(ReportTest, TellsEndsApart) {
  const std::vector<std::string> codes = {"OK", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL",
                                          "INVALID_ARGUMENT"};
  for (int i = 0; i < 500; ++i) Add(i, 500, absl::StrCat("u", i), {.code = codes[i % 5]});
  Add(500, 501, "still", {.ended = false});
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.arms(0).running_requests(), 1u);
  EXPECT_EQ(MetricOf(report, "completed").all().arms(0).observations(), 500u);
  EXPECT_NEAR(MetricOf(report, "completed").all().arms(0).mean(), 0.2, 1e-9);
  EXPECT_NEAR(MetricOf(report, "cancelled").all().arms(0).mean(), 0.2, 1e-9);
  EXPECT_NEAR(MetricOf(report, "deadline_missed").all().arms(0).mean(), 0.2, 1e-9);
  EXPECT_NEAR(MetricOf(report, "failed").all().arms(0).mean(), 0.4, 1e-9);
}

// A daemon that an arm takes down ends none of its requests.
TEST_F(ReportTest, WhatIsLostWithItsServerHasFailed) {
  for (int i = 0; i < 800; ++i) {
    const bool lean = i % 2 == 1;
    Add(i, 1000, absl::StrCat("u", i),
        {.arm = lean ? "lean" : "full", .ended = !lean || i % 3 != 0});
  }
  for (int i = 990; i < 1000; ++i) Add(i, 1000, absl::StrCat("u", i), {.ended = false});
  Write();
  const absl::Duration since = (kNow - kStart) / 50;  // the last 20 of 1000 may still run
  const v1::ExperimentReport report = Report({.lost_after = since});
  EXPECT_EQ(report.arms(0).running_requests(), 10u);
  EXPECT_EQ(report.arms(0).lost_requests(), 0u);
  EXPECT_EQ(report.arms(1).running_requests(), 0u);
  EXPECT_EQ(report.arms(1).lost_requests(), 133u);
  EXPECT_NEAR(MetricOf(report, "failed").all().arms(1).mean(), 133. / 400, 1e-9);
  EXPECT_NEAR(MetricOf(report, "completed").all().arms(1).mean(), 267. / 400, 1e-9);
  EXPECT_EQ(MetricOf(report, "request_seconds").all().arms(1).observations(), 267u);
  EXPECT_THAT(report.notes(), Contains(HasSubstr("133 requests have no end")));
  ASSERT_EQ(report.guardrails_size(), 1);
  EXPECT_EQ(report.guardrails(0).verdict(), v1::GuardrailReport::VERDICT_BREACHED);
}

TEST_F(ReportTest, WhatStillRunsIsNotLostWhenTheClockIsSet) {
  for (int i = 0; i < 10; ++i) Add(i, 10, absl::StrCat("u", i), {.ended = false});
  Write();
  const auto report = [&](absl::Time now) {
    return *MakeReport(experiment_, *store_, {.lost_after = SteadyNow() - kStart + absl::Hours(1)},
                       now);
  };
  EXPECT_EQ(report(SteadyNow()).arms(0).running_requests(), 10u);
  EXPECT_EQ(report(SteadyNow() + absl::Hours(24)).arms(0).running_requests(), 10u);
}

// Those that are lost have no outcome, and were the arm's own loss.
TEST_F(ReportTest, WhatIsLostIsMissedInTheCoverage) {
  for (int i = 0; i < 2000; ++i) {
    const bool lost = i % 2 == 1 && i % 5 == 0;
    Add(i, 2001, absl::StrCat("u", i),
        {.arm = i % 2 ? "lean" : "full",
         .ended = !lost,
         .right = lost ? std::nullopt : std::optional<double>(1)});
  }
  Write();
  EXPECT_THAT(Report({.lost_after = absl::Milliseconds(1)}).notes(),
              Contains(HasSubstr("the share of requests with an outcome differs by arm")));
}

TEST_F(ReportTest, NobodyNeedWaitForAReportThatIsNotWantedAnyMore) {
  AddPairs(3000, 50, 50);
  int asked = 0;
  ReportOptions options;
  options.cancelled = [&asked] { return ++asked == 3; };
  EXPECT_TRUE(absl::IsCancelled(MakeReport(experiment_, *store_, options, kNow).status()));
}

TEST_F(ReportTest, SaysWhichFiguresAreConfounded) {
  const v1::ExperimentReport report = Report();
  EXPECT_TRUE(MetricOf(report, "ttft_seconds").confounded());
  EXPECT_TRUE(MetricOf(report, "request_seconds").confounded());
  EXPECT_FALSE(MetricOf(report, "kv_peak_tokens").confounded());
  EXPECT_FALSE(MetricOf(report, "right").confounded());
  EXPECT_THAT(report.notes(), Contains(HasSubstr("share one queue")));
}

TEST_F(ReportTest, NoticesThatOneArmsUsersAnswerLess) {
  for (int i = 0; i < 2000; ++i) {
    Asked asked{.arm = i % 2 ? "lean" : "full", .right = 1};
    if (i % 2 && i % 3 == 0) asked.right.reset();
    Add(i, 2000, absl::StrCat("u", i), asked);
  }
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_NEAR(report.metrics(0).all().arms(1).coverage(), 2 / 3., 0.01);
  EXPECT_THAT(report.notes(),
              Contains(HasSubstr("the share of requests with an outcome differs by arm")));
}

TEST_F(ReportTest, SharesAlphaAmongArms) {
  v1::Arm& third = *experiment_.add_arms();
  third.set_name("leaner");
  experiment_.mutable_arms(0)->set_weight_permille(400);
  experiment_.mutable_arms(1)->set_weight_permille(300);
  third.set_weight_permille(300);
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.metrics(0).alpha(), 0.025);
  EXPECT_EQ(report.metrics(1).alpha(), 0.05);
  EXPECT_EQ(report.metrics(0).all().effects_size(), 2);
}

TEST_F(ReportTest, SpreadsOfTimesHaveTheSameBounds) {
  for (int i = 0; i < 1000; ++i) {
    Add(i, 1000, absl::StrCat("u", i), {.arm = i % 2 ? "lean" : "full", .seconds = 1 + i / 1000.});
  }
  Write();
  const v1::ExperimentReport report = Report();
  auto of = [&](int arm) {
    for (const v1::Distribution& distribution : report.arms(arm).distributions()) {
      if (distribution.metric() == "request_seconds") return distribution;
    }
    return v1::Distribution();
  };
  const v1::Distribution full = of(0), lean = of(1);
  EXPECT_EQ(full.count(), 500u);
  EXPECT_NEAR(full.quantiles(2), 1.5, 0.03);
  EXPECT_EQ(full.bounds_size(), lean.bounds_size());
  EXPECT_EQ(full.counts_size(), full.bounds_size() + 1);
  uint64_t sum = 0;
  for (uint64_t count : full.counts()) sum += count;
  EXPECT_EQ(sum, 500u);
}

TEST_F(ReportTest, TellsWhatReplaysOfASampleHaveShown) {
  for (int i = 0; i < 2000; ++i) {
    const bool lean = i % 2 == 1;
    Add(i, 2000, absl::StrCat("u", i), {.arm = lean ? "lean" : "full"});
    if (i % 20 > 1) continue;
    v1::ShadowSeen& shadow = *records_.emplace_back().mutable_shadow();
    shadow.set_id(absl::StrCat("r", i));
    shadow.set_tokens(50);
    shadow.set_agreed_tokens(lean ? 44 + i % 7 : 50);
    shadow.set_kl_nats(lean ? 50 * (0.2 + 0.01 * (i % 9)) : 1e-7);
  }
  Write();
  const v1::ExperimentReport report = Report();
  const v1::MetricReport& kl = MetricOf(report, "shadow_kl_nats");
  EXPECT_TRUE(kl.measured());
  EXPECT_FALSE(kl.confounded());
  for (const v1::ArmValue& arm : kl.all().arms()) {
    EXPECT_EQ(arm.observations(), 100u);
    EXPECT_NEAR(arm.coverage(), 0.1, 1e-9);
  }
  EXPECT_NEAR(kl.all().arms(0).mean(), 2e-9, 1e-12) << "of a token";
  EXPECT_NEAR(kl.all().arms(1).mean(), 0.24, 0.01);
  EXPECT_EQ(kl.all().effects(0).verdict(), v1::Effect::VERDICT_WORSE);
  const v1::MetricReport& agreement = MetricOf(report, "shadow_top1_agreement");
  EXPECT_EQ(agreement.all().arms(0).mean(), 1);
  EXPECT_NEAR(agreement.all().arms(1).mean(), 0.94, 0.01);
  EXPECT_EQ(agreement.all().effects(0).verdict(), v1::Effect::VERDICT_WORSE);
  EXPECT_THAT(report.notes(), Each(Not(HasSubstr("differs by arm"))));
}

// Of units, whose prompts are short and long in turn, half are right; of long ones under `lean` an
// eighth.
class SubgroupReportTest : public ReportTest {
 protected:
  SubgroupReportTest() {
    v1::Subgroups& subgroups = *experiment_.mutable_subgroups();
    subgroups.add_prompt_token_edges(256);
    subgroups.mutable_label()->set_key("tier");
    subgroups.mutable_label()->add_values("free");
  }
  void AddUnits(int n) {
    for (int i = 0; i < n; ++i) {
      const bool lean = i % 2 == 1, is_long = i % 4 >= 2;
      Add(i, n, absl::StrCat("u", i),
          {.arm = lean ? "lean" : "full",
           .right = i / 4 % (lean && is_long ? 8 : 2) == 0 ? 1 : 0,
           .prompt_tokens = is_long ? 256u : 255u,
           .subgroup = i / 64 % 2 == 0 ? "free" : ""});
    }
    Write();
  }
};

TEST_F(SubgroupReportTest, FindsWhatDiffersBetweenClassesOfPrompts) {
  AddUnits(4000);
  const v1::ExperimentReport report = Report();
  ASSERT_EQ(report.subgroups_size(), 2);
  const v1::SubgroupAnalysis& by_prompt = report.subgroups(0);
  EXPECT_EQ(by_prompt.by(), "prompt_tokens");
  EXPECT_FALSE(by_prompt.by_label());
  EXPECT_EQ(by_prompt.alpha(), 0.05);
  ASSERT_EQ(by_prompt.subgroups_size(), 2);
  const v1::Subgroup &few = by_prompt.subgroups(0), &many = by_prompt.subgroups(1);
  EXPECT_EQ(few.name(), "0-255");
  EXPECT_EQ(many.name(), "256+");
  EXPECT_EQ(few.analysis().arms(1).units(), 1000u);
  EXPECT_EQ(few.analysis().effects(0).verdict(), v1::Effect::VERDICT_UNDECIDED);
  EXPECT_EQ(many.analysis().effects(0).verdict(), v1::Effect::VERDICT_WORSE);
  EXPECT_NEAR(many.analysis().effects(0).difference(), -0.375, 1e-9);
  EXPECT_EQ(many.analysis().effects(0).points_size(), 0);
  ASSERT_EQ(by_prompt.heterogeneity_size(), 1);
  EXPECT_EQ(by_prompt.heterogeneity(0).arm(), "lean");
  EXPECT_EQ(by_prompt.heterogeneity(0).verdict(), v1::Heterogeneity::VERDICT_DIFFERS);
}

TEST_F(SubgroupReportTest, FindsNothingBetweenClassesThatAreAlike) {
  AddUnits(4000);
  const v1::ExperimentReport report = Report();
  const v1::SubgroupAnalysis& by_label = report.subgroups(1);
  EXPECT_EQ(by_label.by(), "tier");
  EXPECT_TRUE(by_label.by_label());
  EXPECT_EQ(by_label.subgroups(0).name(), "free");
  EXPECT_EQ(by_label.subgroups(1).name(), "other");
  EXPECT_EQ(by_label.heterogeneity(0).verdict(), v1::Heterogeneity::VERDICT_UNDECIDED);
}

TEST_F(SubgroupReportTest, HasWiderIntervalsThanAnExperimentOfThatSize) {
  AddUnits(4000);
  const v1::ExperimentReport report = Report();
  const v1::Interval& subgroup = report.subgroups(0).subgroups(0).analysis().effects(0).interval();
  AnalysisOptions options = {.kind = MetricKind::kProportion};
  const std::vector<ArmSums> arms = {CountedUnits(1000, 500), CountedUnits(1000, 500)};
  options.alpha = 0.05;
  EXPECT_GT(subgroup.upper(), 1.1 * Compare({.arms = arms}, 0, 1, options).interval.upper);
  options.alpha = 0.05 / 4;
  EXPECT_NEAR(subgroup.upper(), Compare({.arms = arms}, 0, 1, options).interval.upper, 1e-9);
}

TEST_F(SubgroupReportTest, SaysTooEarlyOfFew) {
  AddUnits(40);
  EXPECT_EQ(Report().subgroups(0).heterogeneity(0).verdict(), v1::Heterogeneity::VERDICT_TOO_EARLY);
}

// By then an arm may have written what the prompt holds.
TEST_F(SubgroupReportTest, LaterRequestsAreInTheClassOfTheFirst) {
  Add(0, 10, "u", {.right = 1, .prompt_tokens = 10});
  Add(1, 10, "u", {.right = 1, .prompt_tokens = 1000, .subgroup = "free"});
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_EQ(report.subgroups(0).subgroups(0).analysis().arms(0).observations(), 2u);
  EXPECT_EQ(report.subgroups(0).subgroups(1).analysis().arms(0).observations(), 0u);
  EXPECT_EQ(report.subgroups(1).subgroups(1).analysis().arms(0).observations(), 2u);
}

TEST_F(SubgroupReportTest, WithholdsASubgroupThatAnArmHasFilled) {
  for (int i = 0; i < 2000; ++i) {
    const bool lean = i % 2 == 1;
    Add(i, 2000, absl::StrCat("u", i),
        {.arm = lean ? "lean" : "full",
         .right = i / 2 % 2,
         .prompt_tokens = lean && i % 3 == 0 ? 300u : 100u});
  }
  Write();
  v1::ExperimentReport report = Report();
  EXPECT_EQ(report.blocked(), "");
  const v1::Subgroup& filled = report.subgroups(0).subgroups(1);
  EXPECT_TRUE(filled.sample_ratio().alarm());
  EXPECT_THAT(filled.analysis().effects(), IsEmpty());
  EXPECT_THAT(report.notes(), Contains(HasSubstr("subgroup '256+'")));
  EXPECT_EQ(report.subgroups(0).heterogeneity(0).verdict(), v1::Heterogeneity::VERDICT_TOO_EARLY);
  experiment_.set_sample_ratio_explanation("lean's router sends long prompts elsewhere");
  report = Report();
  EXPECT_EQ(report.subgroups(0).subgroups(1).analysis().effects_size(), 1);
}

TEST_F(SubgroupReportTest, SaysTheSameInSeveralPasses) {
  AddUnits(800);
  EXPECT_EQ(Report({.memory_bytes = 1}).SerializeAsString(), Report().SerializeAsString());
  EXPECT_EQ(Report({.guardrails_only = true}).subgroups_size(), 0);
}

// Both arms' answers to the same prompts.
class PairReportTest : public ReportTest {
 protected:
  PairReportTest() { experiment_.mutable_pairs()->set_permille(1000); }
  struct Pair {
    std::string unit = {};  // else its own
    bool lean = false;      // is shown
    std::string code = "OK";
    bool ended = true;
    bool dealt = true;
    absl::Duration ago = absl::Hours(2);
  };
  // A request that has a pair; its id.
  std::string AddOne(const Pair& pair) {
    const int i = next_++;
    Add(i, 1, pair.unit.empty() ? absl::StrCat("u", i) : pair.unit,
        {.arm = pair.lean ? "lean" : "full", .ended = pair.ended, .code = pair.code});
    v1::RequestBegan& began = *records_[records_.size() - (pair.ended ? 2 : 1)].mutable_began();
    *began.mutable_time() = TimestampProto(kNow - pair.ago + absl::Microseconds(i));
    if (pair.dealt) began.mutable_parts(0)->set_pair_arm(pair.lean ? "full" : "lean");
    return began.id();
  }
  // By arm: prompts differ by far more than the arms do.
  void AddKls(double of_full, double of_lean, bool lean) {
    const std::string id = AddOne({.lean = lean});
    records_.push_back(Paired(id, 0, lean ? of_lean : of_full, lean ? of_full : of_lean));
  }
  void AddMany(int n, double lean_more) {
    for (int i = 0; i < n; ++i) {
      const double of_prompt = .02 + .2 * (i / 2 * 37 % 100);
      AddKls(of_prompt, of_prompt + lean_more + .002 * (i / 2 % 3), i % 2 == 1);
    }
    Write();
  }

 private:
  int next_ = 0;
};

TEST_F(PairReportTest, EachUnitIsItsOwnControl) {
  AddMany(300, .003);
  const v1::ExperimentReport report = Report();
  const v1::PairsReport& pairs = report.pairs();
  ASSERT_EQ(pairs.shown_size(), 2);
  EXPECT_EQ(pairs.shown(0).arm(), "full");
  for (const v1::ShownArm& shown : pairs.shown()) {
    EXPECT_EQ(shown.units(), 150u);
    EXPECT_EQ(shown.compared(), 150u);
    EXPECT_EQ(shown.lost() + shown.waiting(), 0u);
  }
  EXPECT_EQ(pairs.losses().p_value(), 1);
  EXPECT_EQ(pairs.alpha(), 0.05);
  ASSERT_EQ(pairs.metrics_size(), 2);
  const v1::PairedMetric& kl = pairs.metrics(0);
  EXPECT_EQ(kl.metric().name(), "shadow_kl_nats");
  EXPECT_NEAR(kl.arm_mean() - kl.control_mean(), .005, 1e-9);
  EXPECT_NEAR(kl.difference_sd(), .002 * std::sqrt(2. / 3 * 300 / 299), 1e-9);
  EXPECT_EQ(kl.effect().arm(), "lean");
  EXPECT_NEAR(kl.effect().difference(), .005, 1e-9);
  EXPECT_EQ(kl.effect().verdict(), v1::Effect::VERDICT_WORSE);
  EXPECT_FALSE(kl.effect().has_lift());
  EXPECT_EQ(pairs.metrics(1).metric().name(), "shadow_top1_agreement");
  EXPECT_EQ(pairs.metrics(1).control_mean(), pairs.metrics(1).arm_mean());
  EXPECT_EQ(pairs.metrics(1).effect().verdict(), v1::Effect::VERDICT_TOO_EARLY)
      << "no answer differs";
  EXPECT_FALSE(Report({.guardrails_only = true}).has_pairs());
}

TEST_F(PairReportTest, BothMetricsShareAlpha) {
  AddMany(300, .003);
  MetricTally differences(1);
  for (int i = 0; i < 300; ++i) {
    const double of_prompt = .02 + .2 * (i / 2 * 37 % 100);
    const double of_lean = of_prompt + .003 + .002 * (i / 2 % 3);
    differences.Add(0, static_cast<uint64_t>(i), of_lean - of_prompt);
  }
  EXPECT_NEAR(Report().pairs().metrics(0).effect().interval().lower(),
              ComparePairs(differences.sums(), .025).interval.lower, 1e-9);
}

TEST_F(PairReportTest, SaysTooEarlyOfFewAndNothingOfNone) {
  EXPECT_FALSE(Report().pairs().metrics(0).has_control_mean());
  AddMany(99, .02);
  const v1::PairedMetric kl = Report().pairs().metrics(0);
  EXPECT_EQ(kl.effect().verdict(), v1::Effect::VERDICT_TOO_EARLY);
  EXPECT_NEAR(kl.effect().difference(), .022, .001);
  experiment_.clear_pairs();
  EXPECT_FALSE(Report().has_pairs());
}

TEST_F(PairReportTest, APairIsLostInAnyWay) {
  records_.push_back(Paired(AddOne({}), 0));  // the rest of it was not done
  AddOne({.code = "CANCELLED"});
  AddOne({.lean = true, .code = "RESOURCE_EXHAUSTED"});
  AddOne({.lean = true});                                           // with its server, once shown
  AddOne({.ended = false});                                         // with its server, before
  AddOne({.lean = true, .ago = absl::Minutes(1)});                  // waits for its turn
  AddOne({.lean = true, .ended = false, .ago = absl::Seconds(1)});  // runs
  AddOne({.dealt = false});
  AddKls(.1, .2, false);
  Write();
  const v1::PairsReport pairs = Report().pairs();
  EXPECT_EQ(pairs.shown(0).units(), 4u);
  EXPECT_EQ(pairs.shown(0).compared(), 1u);
  EXPECT_EQ(pairs.shown(0).lost(), 3u);
  EXPECT_EQ(pairs.shown(0).waiting(), 0u);
  EXPECT_EQ(pairs.shown(1).units(), 4u);
  EXPECT_EQ(pairs.shown(1).lost(), 2u);
  EXPECT_EQ(pairs.shown(1).waiting(), 2u);
}

TEST_F(PairReportTest, OnlyTheFirstRequestOfAUnitCounts) {
  records_.push_back(Paired(AddOne({.unit = "a"}), 0, .1, .1));
  records_.push_back(Paired(AddOne({.unit = "a"}), 0, .9, .1));  // of another replica
  AddOne({.unit = "b", .dealt = false});
  records_.push_back(Paired(AddOne({.unit = "b"}), 0, .9, .1));
  Write();
  const v1::PairsReport pairs = Report().pairs();
  EXPECT_EQ(pairs.shown(0).units(), 1u);
  EXPECT_EQ(pairs.later_requests(), 2u);
  EXPECT_NEAR(pairs.metrics(0).control_mean(), .1, 1e-9);
}

TEST_F(PairReportTest, IsWithheldWhereOneArmLosesMore) {
  for (int i = 0; i < 400; ++i) {
    const bool lean = i % 2 == 1;
    if (lean && i % 10 == 1)
      records_.push_back(Paired(AddOne({.lean = true}), 0));
    else
      AddKls(.02 * (i % 7), .02 * (i % 7) + .01 * (i % 3), lean);
  }
  Write();
  v1::ExperimentReport report = Report();
  EXPECT_EQ(report.blocked(), "");
  EXPECT_EQ(report.pairs().shown(1).lost(), 40u);
  EXPECT_TRUE(report.pairs().losses().alarm());
  for (const v1::PairedMetric& metric : report.pairs().metrics()) {
    EXPECT_FALSE(metric.has_effect());
    EXPECT_TRUE(metric.has_arm_mean());
  }
  EXPECT_THAT(report.notes(), Contains(HasSubstr("their comparison is withheld")));
  experiment_.set_sample_ratio_explanation("lean's prompts were too long for idle time");
  report = Report();
  EXPECT_TRUE(report.pairs().metrics(0).has_effect());
  EXPECT_THAT(report.notes(), Not(Contains(HasSubstr("withheld"))));
}

TEST_F(PairReportTest, IsWithheldWhereUnitsAreNotSplitAsTheWeightsSay) {
  for (int i = 0; i < 400; ++i) AddKls(.02 * (i % 7), .02 * (i % 7) + .01 * (i % 3), i % 4 == 0);
  Write();
  const v1::ExperimentReport report = Report();
  EXPECT_NE(report.blocked(), "");
  EXPECT_FALSE(report.pairs().losses().alarm());
  EXPECT_FALSE(report.pairs().metrics(0).has_effect());
}

// Whether a unit is right is known before, by its covariate.
TEST_F(ReportTest, TellsHowMuchVarianceACovariateTakesOut) {
  experiment_.mutable_metrics(0)->set_covariate(v1::Metric::COVARIATE_CLIENT);
  for (int i = 0; i < 2000; ++i) {
    const int right = i / 2 * 37 % 100 < 70 ? 1 : 0;
    Add(i, 2000, absl::StrCat("u", i),
        {.arm = i % 2 ? "lean" : "full", .right = right, .covariate = right + 0.5 * (i / 2 % 3)});
  }
  Write();
  const v1::MetricReport right = Report().metrics(0);
  EXPECT_EQ(right.all().arms(1).covariate_units(), 1000u);
  // Of a variance of .21 + .25 * 2/3 the covariate has .21 in common with the outcome.
  EXPECT_NEAR(right.all().effects(0).variance_saved(), .21 / (.21 + .25 * 2 / 3), .02);
}

// The first request has no outcome: what it knew before counts all the same.
TEST_F(ReportTest, TheCovariateIsThatOfTheFirstRequestWhateverBecameOfIt) {
  experiment_.mutable_metrics(0)->set_covariate(v1::Metric::COVARIATE_PROMPT_TOKENS);
  for (int i = 0; i < 1000; ++i) {
    const std::string unit = absl::StrCat("u", i), arm = i % 2 ? "lean" : "full";
    const int right = i / 2 % 2;
    Add(i, 3000, unit, {.arm = arm, .prompt_tokens = right ? 900u : 100u});
    Add(1000 + i, 3000, unit, {.arm = arm, .right = right, .prompt_tokens = 500});
  }
  Write();
  EXPECT_NEAR(Report().metrics(0).all().effects(0).variance_saved(), 1, 1e-6);
}

TEST_F(ReportTest, ACovariateThatAnArmHasChangedIsNotUsed) {
  experiment_.mutable_metrics(0)->set_covariate(v1::Metric::COVARIATE_CLIENT);
  for (int i = 0; i < 2000; ++i) {
    const int right = i / 2 * 37 % 100 < (i % 2 ? 50 : 70) ? 1 : 0;
    Add(i, 2000, absl::StrCat("u", i),
        {.arm = i % 2 ? "lean" : "full", .right = right, .covariate = right});
  }
  Write();
  const v1::ExperimentReport report = Report();
  const v1::Effect& effect = report.metrics(0).all().effects(0);
  EXPECT_FALSE(effect.has_variance_saved());
  EXPECT_NEAR(effect.difference(), -0.2, 1e-9) << "adjusted it would be 0";
  EXPECT_THAT(report.notes(), Contains(HasSubstr("the covariate of 'right' differs")));
}

// Units' outcomes in an experiment that ran before.
class EarlierTest : public ReportTest {
 protected:
  EarlierTest() {
    experiment_.mutable_metrics(0)->set_covariate(v1::Metric::COVARIATE_EARLIER);
    v1::Experiment before = experiment_;
    before.set_name("before");
    before.set_salt("before");
    *before.mutable_start_time() = TimestampProto(kBefore);
    EXPECT_TRUE(store_->Create(before).ok());
  }
  // What each of 1000 units shows in `lean` it showed before.
  void AddUnits(absl::Time received) {
    for (int i = 0; i < 1000; ++i) {
      const std::string unit = absl::StrCat("u", i);
      const int right = i / 2 % 2;
      AddBefore(i, unit, right, received);
      Add(i, 1000, unit, {.arm = i % 2 ? "lean" : "full", .right = right});
    }
    Write();
  }
  v1::Effect Effect() { return Report().metrics(0).all().effects(0); }

  const absl::Time kBefore = kStart - absl::Hours(5);

 private:
  void AddBefore(int i, const std::string& unit, int right, absl::Time received) {
    const std::string id = absl::StrCat("before", i);
    v1::RequestBegan& began = *records_.emplace_back().mutable_began();
    began.set_id(id);
    began.set_request_id(id);
    began.set_unit(UnitHash("unit", 0, unit));
    *began.mutable_time() = TimestampProto(kBefore + absl::Seconds(i));
    auto& part = *began.add_parts();
    part.set_experiment("before");
    part.set_bucket_version(1);
    part.set_arm("full");
    v1::OutcomeSeen& outcome = *records_.emplace_back().mutable_outcome();
    outcome.set_request_id(id);
    outcome.set_metric("right");
    outcome.set_value(right);
    *outcome.mutable_time() = began.time();
    *outcome.mutable_received() = TimestampProto(received);
  }
};

TEST_F(EarlierTest, OutcomesFromBeforeTheStartAdjust) {
  AddUnits(kStart - absl::Hours(1));
  EXPECT_NEAR(Effect().variance_saved(), 1, 1e-6);
}

TEST_F(EarlierTest, OutcomesThatCameAfterTheStartDoNot) {
  AddUnits(kStart);
  EXPECT_FALSE(Effect().has_variance_saved());
}

TEST_F(EarlierTest, OutcomesOfAnExperimentWithTheSameSaltDoNot) {
  experiment_.set_salt("before");
  AddUnits(kStart - absl::Hours(1));
  EXPECT_FALSE(Effect().has_variance_saved());
}

TEST(ValueBins, AreWithinTwoPercent) {
  ValueBins bins;
  for (int i = 1; i <= 1000; ++i) bins.Add(i * 0.001);
  for (int i = 0; i < 1000; ++i) bins.Add(0);
  EXPECT_EQ(bins.Quantile(.25), 0);
  EXPECT_NEAR(bins.Quantile(.75), .5, .01);
  EXPECT_NEAR(bins.Quantile(.995), .99, .02);
  EXPECT_THAT(bins.Counts({.5}),
              ElementsAre(::testing::AllOf(::testing::Ge(1480u), ::testing::Le(1520u)),
                          ::testing::AllOf(::testing::Ge(480u), ::testing::Le(520u))));
}

}  // namespace experiment_report_test
}  // namespace epikv
