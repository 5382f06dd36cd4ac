#include "server/experiments/definition/edits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "runtime/base/reason.h"
#include "server/base/durations.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"

// What may become of an experiment, and what keeps two apart.

namespace epikv {
namespace experiment_edits_test {

using ::testing::HasSubstr;

const absl::Time kNow = absl::FromUnixSeconds(1'800'000'000);

v1::Experiment Draft(const std::string& name, uint32_t traffic = 1000,
                     const std::string& layer = "") {
  v1::Experiment experiment;
  experiment.set_name(name);
  experiment.set_layer(layer);
  experiment.set_traffic_permille(traffic);
  experiment.set_primary_metric("completed");
  for (const char* arm : {"full", "lean"}) {
    v1::Arm& added = *experiment.add_arms();
    added.set_name(arm);
    added.set_weight_permille(500);
    added.set_control(added.name() == "full");
  }
  experiment.mutable_arms(1)->mutable_kv()->set_max_tokens(64);
  return Drafted(WithDefaults(std::move(experiment)), kNow);
}

// A store of definitions in memory.
class Experiments {
 public:
  absl::Status Start(const v1::Experiment& draft) {
    absl::StatusOr<v1::Experiment> started = Started(draft, all_, kNow);
    if (started.ok()) all_.push_back(*started);
    return started.status();
  }
  void Stop(const std::string& name) {
    for (v1::Experiment& experiment : all_) {
      if (experiment.name() == name) experiment = *Stopped(experiment, "done", kNow);
    }
  }
  absl::StatusOr<v1::Experiment> Change(const v1::Experiment& wanted, bool allow_rebucket) {
    return Changed(*FindExperiment(all_, wanted.name()), wanted, allow_rebucket, all_);
  }
  v1::Experiment Get(const std::string& name) { return *FindExperiment(all_, name); }

 private:
  std::vector<v1::Experiment> all_;
};

TEST(Started, RunsFromThenOnInItsSlice) {
  const absl::StatusOr<v1::Experiment> started = Started(Draft("a", 300), {}, kNow);
  ASSERT_TRUE(started.ok());
  EXPECT_EQ(started->state(), v1::Experiment::STATE_RUNNING);
  EXPECT_EQ(started->bucket_version(), 1u);
  EXPECT_EQ(started->first_bucket(), 0u);
  EXPECT_EQ(TimeOf(started->start_time()), kNow);
}

TEST(Changed, MovesUnitsWhereASwitchbackComesOrChanges) {
  Experiments experiments;
  ASSERT_TRUE(experiments.Start(Draft("a")).ok());
  v1::Experiment wanted = experiments.Get("a");
  wanted.mutable_switchback()->mutable_window()->set_seconds(300);
  EXPECT_EQ(ReasonOf(experiments.Change(wanted, false).status()), "REBUCKET");
  const absl::StatusOr<v1::Experiment> changed = experiments.Change(wanted, true);
  ASSERT_TRUE(changed.ok());
  EXPECT_EQ(changed->bucket_version(), 2u);
  EXPECT_EQ(changed->switchback().window().seconds(), 300);
}

TEST(Started, TakesTheFirstSliceThatIsWideEnough) {
  Experiments experiments;
  ASSERT_TRUE(experiments.Start(Draft("a", 300)).ok());
  ASSERT_TRUE(experiments.Start(Draft("b", 300)).ok());
  ASSERT_TRUE(experiments.Start(Draft("c", 300)).ok());
  EXPECT_EQ(experiments.Get("c").first_bucket(), 6000u);
  const absl::Status full = experiments.Start(Draft("d", 101));
  EXPECT_EQ(ReasonOf(full), "LAYER_FULL");
  EXPECT_THAT(std::string(full.message()), HasSubstr("leave at most 100 permille in one piece"));
  EXPECT_TRUE(experiments.Start(Draft("d", 100)).ok());
  experiments.Stop("b");
  ASSERT_TRUE(experiments.Start(Draft("e", 200)).ok());
  EXPECT_EQ(experiments.Get("e").first_bucket(), 3000u);
  EXPECT_EQ(ReasonOf(experiments.Start(Draft("f", 101))), "LAYER_FULL");
}

TEST(Started, KeepsUnitsOfOneLayerApart) {
  Experiments experiments;
  ASSERT_TRUE(experiments.Start(Draft("a", 500)).ok());
  ASSERT_TRUE(experiments.Start(Draft("b", 500)).ok());
  const v1::Experiment a = experiments.Get("a"), b = experiments.Get("b");
  for (int i = 0; i < 1000; ++i) {
    const std::string unit = std::to_string(i);
    EXPECT_NE(ArmOf(a, unit) == nullptr, ArmOf(b, unit) == nullptr);
  }
}

TEST(Started, RefusesArmsThatAnotherLayerSets) {
  Experiments experiments;
  ASSERT_TRUE(experiments.Start(Draft("a")).ok());
  const absl::Status conflict = experiments.Start(Draft("b", 1000, "second"));
  EXPECT_EQ(ReasonOf(conflict), "ARMS_CONFLICT");
  EXPECT_THAT(std::string(conflict.message()), HasSubstr("policy and budget"));
  v1::Experiment other = Draft("b", 1000, "second");
  other.mutable_arms(1)->clear_kv();
  other.mutable_arms(1)->mutable_kv()->set_recent_tokens(8);
  EXPECT_TRUE(experiments.Start(other).ok());
}

TEST(Started, RefusesATierOrAReadingThatAnotherLayerSets) {
  for (const bool tier : {true, false}) {
    Experiments experiments;
    auto set = [&](v1::Experiment draft) {
      draft.mutable_arms(1)->clear_kv();
      v1::KvOptions& kv = *draft.mutable_arms(1)->mutable_kv();
      tier ? kv.mutable_tier()->set_tokens(64) : kv.set_read_tokens(64);
      return draft;
    };
    ASSERT_TRUE(experiments.Start(set(Draft("a"))).ok());
    const absl::Status conflict = experiments.Start(set(Draft("b", 1000, "second")));
    EXPECT_EQ(ReasonOf(conflict), "ARMS_CONFLICT");
    EXPECT_THAT(std::string(conflict.message()), HasSubstr(tier ? "tier" : "what is read"));
    EXPECT_TRUE(experiments.Start(Draft("c", 1000, "second")).ok());
  }
}

TEST(Started, NeedsToKnowWhatDecides) {
  v1::Experiment draft = Draft("a");
  draft.clear_primary_metric();
  EXPECT_EQ(ReasonOf(Started(draft, {}, kNow).status()), "EXPERIMENT_STATE");
  draft = Draft("a");
  *draft.mutable_end_time() = TimestampProto(kNow);
  EXPECT_EQ(ReasonOf(Started(draft, {}, kNow).status()), "EXPERIMENT_STATE");
}

TEST(Started, IsNeverStartedAgain) {
  const v1::Experiment running = *Started(Draft("a"), {}, kNow);
  EXPECT_EQ(Started(running, {running}, kNow + absl::Hours(1))->start_time().seconds(),
            running.start_time().seconds())
      << "a second call changes nothing";
  const v1::Experiment over = *Stopped(running, "done", kNow);
  EXPECT_EQ(ReasonOf(Started(over, {over}, kNow).status()), "EXPERIMENT_STATE");
  EXPECT_EQ(over.stop_reason(), "done");
  EXPECT_EQ(Stopped(over, "again", kNow)->stop_reason(), "done");
  EXPECT_EQ(ReasonOf(Stopped(Draft("b"), "", kNow).status()), "EXPERIMENT_STATE");
}

TEST(Changed, MovesNoUnitUnasked) {
  Experiments experiments;
  ASSERT_TRUE(experiments.Start(Draft("a", 500)).ok());
  v1::Experiment wanted = experiments.Get("a");
  wanted.set_hypothesis("leaner is as good");
  EXPECT_EQ(experiments.Change(wanted, false)->bucket_version(), 1u);
  wanted.mutable_arms(0)->set_weight_permille(400);
  wanted.mutable_arms(1)->set_weight_permille(600);
  EXPECT_EQ(ReasonOf(experiments.Change(wanted, false).status()), "REBUCKET");
  EXPECT_EQ(experiments.Change(wanted, true)->bucket_version(), 2u);
}

TEST(Changed, LeavesWhatWasDecidedBeforeItStarted) {
  v1::Experiment draft = Draft("a");
  draft.add_metrics()->set_name("right");
  v1::Experiment wanted = draft;
  wanted.set_alpha(0.01);
  EXPECT_TRUE(Changed(draft, wanted, false, {draft}).ok());
  const v1::Experiment running = *Started(draft, {}, kNow);
  auto refused = [&](const v1::Experiment& next) {
    return ReasonOf(Changed(running, next, true, {running}).status());
  };
  wanted = running;
  wanted.set_alpha(0.01);
  EXPECT_EQ(refused(wanted), "DECIDED");
  wanted = running;
  wanted.set_primary_metric("right");
  EXPECT_EQ(refused(wanted), "DECIDED");
  wanted = running;
  wanted.mutable_metrics(0)->set_tau(1);
  EXPECT_EQ(refused(wanted), "DECIDED");
  wanted = running;
  wanted.mutable_pairs()->set_permille(1);
  EXPECT_EQ(refused(wanted), "DECIDED");
  wanted = running;
  wanted.add_metrics()->set_name("also");
  wanted.set_sample_ratio_explanation("one replica was away");
  EXPECT_EQ(refused(wanted), "");
}

TEST(Changed, FindsRoomToGrow) {
  Experiments experiments;
  ASSERT_TRUE(experiments.Start(Draft("a", 300)).ok());
  ASSERT_TRUE(experiments.Start(Draft("b", 300)).ok());
  v1::Experiment wanted = experiments.Get("a");
  wanted.set_traffic_permille(400);
  EXPECT_EQ(experiments.Change(wanted, true)->first_bucket(), 6000u);
  wanted.set_traffic_permille(800);
  EXPECT_EQ(ReasonOf(experiments.Change(wanted, true).status()), "LAYER_FULL");
}

TEST(Changed, LeavesWhatIsOverAsItWas) {
  const v1::Experiment over = *Stopped(*Started(Draft("a"), {}, kNow), "done", kNow);
  v1::Experiment wanted = over;
  wanted.set_hypothesis("h");
  EXPECT_TRUE(Changed(over, wanted, true, {over}).ok());
  wanted.set_salt("s");
  EXPECT_EQ(ReasonOf(Changed(over, wanted, true, {over}).status()), "EXPERIMENT_STATE");
}

TEST(CheckEtag, AcceptsItsOwnOrNone) {
  v1::Experiment experiment = Draft("a");
  experiment.set_etag("7");
  EXPECT_TRUE(CheckEtag(experiment, "").ok());
  EXPECT_TRUE(CheckEtag(experiment, "7").ok());
  EXPECT_EQ(CheckEtag(experiment, "6").code(), absl::StatusCode::kAborted);
}

}  // namespace experiment_edits_test
}  // namespace epikv
