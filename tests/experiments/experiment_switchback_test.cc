#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/definition/edits.h"
#include "server/experiments/definition/windows.h"
#include "server/experiments/figures/report.h"
#include "server/experiments/figures/throughput.h"
#include "server/experiments/live_experiments.h"
#include "tests/fixtures/store_places.h"

// Experiments that put the whole server on one arm for a window of time: which window a request is
// of, its arm, and what a report says of windows.

namespace epikv {
namespace experiment_switchback_test {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A window begins here; those of 10 s have whole numbers.
const absl::Time kStart = absl::FromUnixSeconds(1'800'000'000);
constexpr int64_t kFirst = 180'000'000;

v1::Experiment Parsed(const std::string& text) {
  v1::Experiment experiment;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &experiment));
  return WithDefaults(std::move(experiment));
}

// Windows of 10 s, from the first on: lean, full, full, lean, lean, full, lean.
v1::Experiment Switchback() {
  return Parsed(R"pb(
    name: "switch"
    salt: "s172"
    traffic_permille: 1000
    bucket_version: 1
    primary_metric: "output_tokens_per_second"
    arms { name: "full" weight_permille: 500 control: true }
    arms {
      name: "lean"
      weight_permille: 500
      kv { policy: "window" max_tokens: 24 }
    }
    metrics { name: "right" kind: KIND_PROPORTION }
    guardrails { metric: "output_tokens_per_second" margin: 1 }
    switchback {
      window { seconds: 10 }
      wash_out { seconds: 2 }
    }
  )pb");
}

// Of golden/make_experiment_assignment.py, which asks what `epikv experiment assign` asks.
TEST(Windows, AreWhatPythonFinds) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/experiment_assignment.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_EQ(golden["switchbacks"].size(), 4u);
  for (const nlohmann::json& row : golden["switchbacks"]) {
    v1::Experiment experiment;
    const std::string definition = row["experiment"].dump();
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(definition, &experiment).ok());
    experiment = WithDefaults(std::move(experiment));
    const Windows windows(experiment.switchback());
    ASSERT_GT(row["times"].size(), 100u);
    for (const nlohmann::json& at : row["times"]) {
      const absl::Time time = absl::FromUnixMicros(at[0].get<int64_t>());
      const int64_t window = windows.At(time);
      EXPECT_EQ(window, at[1].get<int64_t>()) << experiment.name() << ", " << time;
      EXPECT_EQ(windows.IsWashedOut(time), at[2].get<bool>()) << experiment.name() << ", " << time;
      EXPECT_EQ(ArmOf(experiment, WindowUnit(window))->name(), at[3].get<std::string>());
    }
  }
}

TEST(Windows, AreTheSameOfATimeAsAStoreKeepsIt) {
  const Windows windows(Switchback().switchback());
  for (const absl::Duration edge : {absl::Seconds(2), absl::Seconds(10)}) {
    const absl::Time before = kStart + edge - absl::Nanoseconds(1);
    const absl::Time kept = absl::FromUnixMicros(absl::ToUnixMicros(before));
    EXPECT_EQ(windows.At(kept), windows.At(before));
    EXPECT_EQ(windows.IsWashedOut(kept), windows.IsWashedOut(before));
  }
}

class LiveSwitchbackTest : public ::testing::Test {
 protected:
  LiveSwitchbackTest() { live_.Set({Switchback()}); }
  Assignment At(absl::Duration since_start) {
    const absl::StatusOr<Assignment> assignment = live_.Assign({.request = request_,
                                                                .request_id = "r-1",
                                                                .model = "sample",
                                                                .prompt_tokens = 40,
                                                                .max_output_tokens = 60,
                                                                .began = kStart + since_start});
    EXPECT_TRUE(assignment.ok()) << assignment.status();
    return assignment.value_or(Assignment());
  }
  v1::GenerateRequest request_;
  LiveExperiments live_;
};

TEST_F(LiveSwitchbackTest, PutsEveryUnitOnTheArmOfTheWindow) {
  std::vector<std::string> arms;
  for (int window = 0; window < 7; ++window) {
    for (const char* unit : {"", "ann", "bob"}) {
      request_.mutable_experiment()->set_unit_id(unit);
      for (double second : {0., 5., 9.999}) {
        const std::string arm = At(absl::Seconds(10 * window + second)).arm;
        if (arms.size() == static_cast<size_t>(window)) arms.push_back(arm);
        EXPECT_EQ(arm, arms.back());
      }
    }
  }
  EXPECT_THAT(arms, ElementsAre("switch/lean", "switch/full", "switch/full", "switch/lean",
                                "switch/lean", "switch/full", "switch/lean"));
}

TEST_F(LiveSwitchbackTest, SaysWhatBeginsInAWashOut) {
  EXPECT_TRUE(At(absl::Seconds(10)).parts.at(0).washed_out());
  EXPECT_TRUE(At(absl::Seconds(12) - absl::Nanoseconds(1)).parts.at(0).washed_out());
  EXPECT_FALSE(At(absl::Seconds(12)).parts.at(0).washed_out());
  EXPECT_EQ(At(absl::Seconds(11)).arm, "switch/full") << "it runs under the arm all the same";
}

TEST_F(LiveSwitchbackTest, LeavesOutAndForcesAsOthersDo) {
  request_.mutable_experiment()->set_opt_out(true);
  EXPECT_EQ(At(absl::Seconds(15)).arm, "none");
  request_.mutable_experiment()->set_opt_out(false);
  request_.mutable_experiment()->set_force_arm("switch/lean");
  EXPECT_EQ(At(absl::Seconds(15)).arm, "switch/lean");
  EXPECT_TRUE(At(absl::Seconds(15)).parts.at(0).forced());
}

TEST_F(LiveSwitchbackTest, KeepsTheUnitForOtherExperiments) {
  request_.mutable_experiment()->set_unit_id("ann");
  const Subject subject = {.request = request_,
                           .request_id = "r-1",
                           .model = "sample",
                           .prompt_tokens = 40,
                           .max_output_tokens = 60,
                           .began = kStart};
  const v1::RequestBegan began = BeganOf(subject, *live_.Assign(subject));
  EXPECT_EQ(began.unit(), UnitHash("unit", 0, "ann"));
  EXPECT_EQ(TimeOf(began.time()), kStart);
}

// A request and what came of it.
struct Asked {
  double at = 0;  // seconds from the start
  std::string arm;
  int tokens = 0;
  double seconds = 1;
  bool ended = true, forced = false, exposed = true;
  uint32_t version = 1;
};

class SwitchbackReportTest : public ::testing::TestWithParam<StoreKind> {
 protected:
  SwitchbackReportTest() : place_(GetParam().make()), store_(place_->Open()) {
    EXPECT_TRUE(store_->Create(Drafted(Switchback(), kStart)).ok());
    experiment_ = *store_->Change("switch", [](const std::vector<v1::Experiment>& all) {
      return Started(all.front(), all, kStart);
    });
  }
  void Add(const Asked& asked) {
    const std::string id = absl::StrCat("r", records_.size());
    const absl::Time time = kStart + absl::Seconds(asked.at);
    v1::RequestBegan& began = *records_.emplace_back().mutable_began();
    began.set_id(id);
    began.set_request_id(id);
    began.set_unit(7);  // one user asks all of it
    *began.mutable_time() = TimestampProto(time);
    v1::RequestBegan::Part& part = *began.add_parts();
    part.set_experiment("switch");
    part.set_bucket_version(asked.version);
    part.set_arm(asked.arm);
    part.set_forced(asked.forced);
    part.set_exposed(asked.exposed);
    if (!asked.ended) return;
    v1::RequestEnded& ended = *records_.emplace_back().mutable_ended();
    ended.set_id(id);
    *ended.mutable_time() = TimestampProto(time + absl::Seconds(asked.seconds));
    ended.set_code("OK");
    ended.set_request_seconds(asked.seconds);
    ended.set_output_tokens(static_cast<uint32_t>(asked.tokens));
  }
  v1::ExperimentReport Report(double now, const ReportOptions& options = {}) {
    for (size_t first = 0; first < records_.size(); first += 1000) {
      const auto written =
          store_->Write(absl::MakeSpan(records_).subspan(first, 1000), Source::kNow);
      EXPECT_TRUE(written.ok()) << written.status();
    }
    const auto report = MakeReport(experiment_, *store_, options, kStart + absl::Seconds(now));
    EXPECT_TRUE(report.ok()) << report.status();
    return *report;
  }
  static v1::MetricReport MetricOf(const v1::ExperimentReport& report, const std::string& name) {
    for (const v1::MetricReport& metric : report.metrics()) {
      if (metric.metric().name() == name) return metric;
    }
    ADD_FAILURE() << name;
    return {};
  }
  // Windows 0 to 6, the last of which is running at 65 s.
  void AddSeven() {
    Add({.at = 5, .arm = "lean", .tokens = 99});
    Add({.at = 11.9, .arm = "full", .tokens = 500});
    Add({.at = 12, .arm = "full", .tokens = 100, .seconds = 2});
    Add({.at = 19.5, .arm = "full", .tokens = 60, .seconds = 4});
    Add({.at = 33, .arm = "lean", .tokens = 40});
    Add({.at = 34, .arm = "full", .tokens = 1000, .forced = true});
    Add({.at = 35, .arm = "full", .tokens = 1000});
    Add({.at = 42, .arm = "lean", .tokens = 80, .exposed = false});
    Add({.at = 43, .arm = "lean", .ended = false, .exposed = false});
    Add({.at = 55, .arm = "full", .tokens = 800});
    Add({.at = 64, .arm = "lean", .tokens = 800});
  }

  const std::unique_ptr<StorePlace> place_;
  const std::unique_ptr<Store> store_;
  v1::Experiment experiment_;
  std::vector<v1::ExperimentRecord> records_;
};

INSTANTIATE_TEST_SUITE_P(Stores, SwitchbackReportTest, ::testing::Values(kSqlite, kPostgres),
                         NameOf);

// Analysed are 8 s of each window. Windows 1 and 2, of `full`, put out 160 tokens and nothing; 3
// and 4, of `lean`, 40 and 80. The first may have seen the start, the sixth is followed by one that
// is running.
TEST_P(SwitchbackReportTest, CountsTokensByWindow) {
  AddSeven();
  const v1::ExperimentReport report = Report(65);
  const v1::MetricReport output = MetricOf(report, "output_tokens_per_second");
  EXPECT_TRUE(output.primary());
  EXPECT_EQ(output.all().arms(0).units(), 2u);
  EXPECT_EQ(output.all().arms(0).mean(), (20. + 0) / 2);
  EXPECT_EQ(output.all().arms(1).units(), 2u);
  EXPECT_EQ(output.all().arms(1).mean(), (5. + 10) / 2);
  EXPECT_EQ(output.all().arms(1).coverage(), 1);
  EXPECT_EQ(output.all().effects(0).difference(), 7.5 - 10);
  EXPECT_EQ(output.exposed().arms(0).units(), 1u) << "a window without a request exposes nobody";
  EXPECT_EQ(output.exposed().arms(0).mean(), 20);
  EXPECT_EQ(output.exposed().arms(1).mean(), 5);
  EXPECT_EQ(report.guardrails(0).difference(), -2.5);
}

TEST_P(SwitchbackReportTest, CountsWindowsNotUnits) {
  AddSeven();
  const v1::ExperimentReport report = Report(65);
  EXPECT_EQ(report.washed_out_requests(), 1u);
  EXPECT_EQ(report.forced_requests(), 1u);
  EXPECT_EQ(report.crossed_requests(), 1u) << "of a replica that did not know the window";
  EXPECT_EQ(report.arms(0).units(), 2u);  // windows 1 and 5
  EXPECT_EQ(report.arms(0).requests(), 3u);
  EXPECT_EQ(report.arms(1).units(), 4u);  // windows 0, 3, 4 and 6
  EXPECT_EQ(report.arms(1).exposed_units(), 3u);
  const v1::ArmValue full = MetricOf(report, "request_seconds").all().arms(0);
  EXPECT_EQ(full.units(), 2u);
  EXPECT_EQ(full.observations(), 3u);
  EXPECT_NEAR(full.mean(), (2 + 4 + 1) / 3., 1e-12);
}

TEST_P(SwitchbackReportTest, ConfoundsNothing) {
  const v1::ExperimentReport report = Report(65);
  for (const v1::MetricReport& metric : report.metrics()) EXPECT_FALSE(metric.confounded());
  EXPECT_THAT(report.notes(), Contains(HasSubstr("in windows of 10s")));
  EXPECT_THAT(report.notes(), Contains(HasSubstr("the first 2s of a window")));
  EXPECT_THAT(report.notes(), Each(Not(HasSubstr("share one queue"))));
}

TEST_P(SwitchbackReportTest, CountsNoWindowThatItsStopCutShort) {
  AddSeven();
  *experiment_.mutable_stop_time() = TimestampProto(kStart + absl::Seconds(45));
  const v1::MetricReport output = MetricOf(Report(65), "output_tokens_per_second");
  EXPECT_EQ(output.all().arms(1).units(), 1u);
  EXPECT_EQ(output.all().arms(1).mean(), 5);
}

TEST_P(SwitchbackReportTest, AClockThatWasWrongMakesNoWindows) {
  AddSeven();
  Add({.at = -1.7e9, .arm = ArmOf(experiment_, WindowUnit(10'000'000))->name(), .tokens = 9});
  const v1::ExperimentReport report = Report(65);
  const v1::MetricReport output = MetricOf(report, "output_tokens_per_second");
  EXPECT_EQ(output.all().arms(0).units() + output.all().arms(1).units(), 4u);
}

TEST_P(SwitchbackReportTest, BeginsAnewWhereWindowsWereDealtAnew) {
  AddSeven();
  experiment_.set_bucket_version(2);
  // Of version 2 nothing but requests at 83 s and 95 s; windows 9 and 10 count.
  auto arm_of = [this](int64_t window) {
    return ArmOf(experiment_, WindowUnit(kFirst + window))->name();
  };
  Add({.at = 83, .arm = arm_of(8), .tokens = 80, .version = 2});
  Add({.at = 95, .arm = arm_of(9), .tokens = 16, .version = 2});
  const v1::ExperimentReport report = Report(121);
  EXPECT_EQ(report.other_version_requests(), 10u);
  double sum = 0;
  uint64_t windows = 0;
  const v1::MetricReport output = MetricOf(report, "output_tokens_per_second");
  for (const v1::ArmValue& arm : output.all().arms()) {
    windows += arm.units();
    sum += arm.mean() * static_cast<double>(arm.units());
  }
  EXPECT_EQ(windows, 2u);
  EXPECT_EQ(sum, 2);
}

// What it finds in a day and a bit of windows, each with its load; the lean arm puts out a quarter
// more and takes half the time.
TEST_P(SwitchbackReportTest, FindsWhatIsThere) {
  constexpr uint64_t kWindows = 800;
  for (int i = 0; i < static_cast<int>(kWindows); ++i) {
    const std::string arm = ArmOf(experiment_, WindowUnit(kFirst + i))->name();
    const bool lean = arm == "lean";
    const int load = 1 + i * 37 % 5;  // requests
    for (int k = 0; k < load; ++k) {
      Add({.at = 10. * i + 3 + k,
           .arm = arm,
           .tokens = lean ? 100 : 80,
           .seconds = (lean ? .5 : 1) * load});
    }
  }
  const v1::ExperimentReport report = Report(10. * kWindows, {.points = 4});
  EXPECT_FALSE(report.sample_ratio().alarm());
  EXPECT_EQ(report.arms(0).units() + report.arms(1).units(), kWindows);
  const v1::MetricReport output = MetricOf(report, "output_tokens_per_second");
  EXPECT_EQ(output.all().arms(0).units() + output.all().arms(1).units(), kWindows - 2);
  const v1::Effect& effect = output.all().effects(0);
  EXPECT_EQ(effect.verdict(), v1::Effect::VERDICT_BETTER);
  EXPECT_LT(effect.interval().lower(), 3 * (100 - 80) / 8.);
  EXPECT_GT(effect.interval().upper(), 3 * (100 - 80) / 8.);
  ASSERT_EQ(effect.points_size(), 4);
  EXPECT_EQ(effect.points(3).difference(), effect.difference());
  EXPECT_EQ(report.guardrails(0).verdict(), v1::GuardrailReport::VERDICT_SAFE);
  EXPECT_EQ(MetricOf(report, "request_seconds").all().effects(0).verdict(),
            v1::Effect::VERDICT_BETTER);
  EXPECT_EQ(Report(10. * kWindows, {.points = 4, .memory_bytes = 1}).SerializeAsString(),
            report.SerializeAsString());
}

}  // namespace experiment_switchback_test
}  // namespace epikv
