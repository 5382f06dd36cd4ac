#include "server/experiments/shadow.h"

#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/figures/divergence.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace shadow_test {

using Probabilities = std::vector<double>;

// The `top` likeliest, as an engine tells them.
std::vector<TokenLogprob> Listed(const Probabilities& probabilities, size_t top) {
  std::vector<TokenLogprob> listed;
  for (size_t token = 0; token < probabilities.size(); ++token) {
    listed.push_back({.token = static_cast<int32_t>(token),
                      .logprob = static_cast<float>(std::log(probabilities[token]))});
  }
  std::stable_sort(listed.begin(), listed.end(),
                   [](const auto& a, const auto& b) { return a.logprob > b.logprob; });
  listed.resize(std::min(top, listed.size()));
  return listed;
}

double Kl(const Probabilities& full, const Probabilities& arm, size_t top = 1000) {
  return KlNats(Listed(full, top), Listed(arm, top));
}

// scipy.stats.entropy(p, q) of scipy 1.17.
TEST(DivergenceTest, AgreesWithScipyWhereAllTokensAreListed) {
  EXPECT_NEAR(Kl({.5, .25, .125, .125}, {.25, .5, .125, .125}), 0.17328679513998632, 1e-6);
  EXPECT_NEAR(Kl({.7, .2, .1}, {.1, .2, .7}), 1.167546089433188, 1e-6);
  EXPECT_NEAR(Kl({.97, .01, .01, .01}, {.94, .02, .02, .02}), 0.009679294929579228, 1e-6);
}

TEST(DivergenceTest, EqualDistributionsHaveNone) {
  const Probabilities some = {.6, .2, .1, .05, .05};
  EXPECT_EQ(Kl(some, some), 0);
  EXPECT_EQ(Kl(some, some, 2), 0);
  EXPECT_EQ(Kl({1 - 1e-9, 1e-9}, {1 - 1e-9, 1e-9}), 0);
}

// By hand: {a .5, b .3 | rest .2} and {c .5, a .2 | rest .3}. The arm may give b all of its .3.
TEST(DivergenceTest, WhatIsNotOnBothListsDivergesAsLittleAsItMay) {
  const double expected = .5 * std::log(.5 / .2) + .3 * std::log(.3 / .3) + .2 * std::log(.2 / .5);
  const std::vector<TokenLogprob> full = {{0, std::log(.5f)}, {1, std::log(.3f)}};
  const std::vector<TokenLogprob> arm = {{2, std::log(.5f)}, {0, std::log(.2f)}};
  EXPECT_NEAR(KlNats(full, arm), expected, 1e-6);
  EXPECT_NEAR(KlNats({full[1]}, {arm[0]}), 0, 1e-6) << "they have nothing in common";
}

TEST(DivergenceTest, TotalDisagreementShowsOnTheShortestLists) {
  const Probabilities full = {.96, .02, .02}, arm = {.02, .96, .02};
  EXPECT_GT(Kl(full, arm, 1), 2.5);
  EXPECT_NEAR(Kl(full, arm), .94 * std::log(48), 1e-6);
}

TEST(DivergenceTest, IsALowerBoundThatTightens) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    Probabilities full, arm;
    double exact = 0, sum_full = 0, sum_arm = 0;
    for (int token = 0; token < 200; ++token) {
      full.push_back(std::exp(3 * std::normal_distribution<>()(random)));
      arm.push_back(full.back() * std::exp(std::normal_distribution<>()(random)));
      sum_full += full.back();
      sum_arm += arm.back();
    }
    for (int token = 0; token < 200; ++token) {
      full[token] /= sum_full;
      arm[token] /= sum_arm;
      exact += full[token] * std::log(full[token] / arm[token]);
    }
    EXPECT_NEAR(Kl(full, arm), exact, 2e-6);
    for (size_t top : {1, 5, 20, 100}) {
      EXPECT_GE(Kl(full, arm, top), 0);
      EXPECT_LE(Kl(full, arm, top), exact + 2e-6) << top;
    }
    EXPECT_GT(Kl(full, arm, 100), .95 * exact);
  }
}

TEST(DivergenceTest, TokensThatCannotBeCostABoundedMuch) {
  const float never = -std::numeric_limits<float>::infinity();
  EXPECT_NEAR(KlNats({{0, 0}, {1, never}}, {{0, 0}, {1, never}}), 0, 1e-9);
  const double impossible = KlNats({{0, std::log(.5f)}, {1, std::log(.5f)}}, {{1, 0}, {0, never}});
  EXPECT_GT(impossible, 40);
  EXPECT_LT(impossible, 60);
}

TEST(DivergenceTest, SumsOverTokens) {
  const auto a = Listed({.6, .4}, 2), b = Listed({.3, .7}, 2);
  const Divergence found = Diverge({a, a, b}, {a, b, b});
  EXPECT_EQ(found.tokens, 3);
  EXPECT_EQ(found.agreed, 2);
  EXPECT_DOUBLE_EQ(found.kl_nats, KlNats(a, b));
  EXPECT_DOUBLE_EQ(found.mean_kl_nats(), KlNats(a, b) / 3);
  EXPECT_DOUBLE_EQ(found.agreement(), 2. / 3);
}

// Which requests are dealt to arms, and what is told of replays. Thread-safe.
class Watcher final : public Participation, public ShadowObserver {
 public:
  absl::StatusOr<Assignment> Assign(const Subject& subject) override {
    return live.Assign(subject);
  }
  void OnExcluded(const std::vector<std::string>&) override {}
  void OnBegan(v1::RequestBegan began) override {
    absl::MutexLock lock(&mu_);
    began_.push_back(std::move(began));
  }
  void OnEnded(v1::RequestEnded ended) override {}

  struct Fate {
    std::string request;
    std::string arms;
    ShadowFate fate;
    Divergence found;
  };
  void OnShadow(const v1::RequestBegan& began, ShadowFate fate, const Divergence& found) override {
    std::string arms;
    for (const auto& part : began.parts()) absl::StrAppend(&arms, part.arm());
    absl::MutexLock lock(&mu_);
    fates_.push_back({began.request_id(), arms, fate, found});
  }
  struct Pair {
    std::string request, shown, hidden;
    ShadowFate fate;
    PairFound found;
  };
  void OnPair(const v1::RequestBegan& began, ShadowFate fate, const PairFound& found) override {
    const v1::RequestBegan::Part& part = began.parts(0);
    absl::MutexLock lock(&mu_);
    pairs_.push_back({began.request_id(), part.arm(), part.pair_arm(), fate, found});
  }
  void OnShadowWaiting(int64_t requests) override {
    absl::MutexLock lock(&mu_);
    waiting_ = requests;
  }
  void OnShadowTime(absl::Duration spent, bool interrupted) override {
    absl::MutexLock lock(&mu_);
    tries_ += 1;
    interruptions_ += interrupted ? 1 : 0;
  }

  // The first so many.
  std::vector<Fate> AwaitFates(size_t count) {
    Await([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return fates_.size() >= count; });
    absl::MutexLock lock(&mu_);
    return fates_;
  }
  std::vector<Pair> AwaitPairs(size_t count) {
    Await([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return pairs_.size() >= count; });
    absl::MutexLock lock(&mu_);
    return pairs_;
  }
  // Of all requests that took part.
  std::vector<v1::RequestBegan> began() {
    absl::MutexLock lock(&mu_);
    return began_;
  }
  void AwaitTries(int tries) {
    Await([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return tries_ >= tries; });
  }
  void AwaitWaiting(int64_t requests) {
    Await([&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return waiting_ == requests; });
  }
  int interruptions() {
    absl::MutexLock lock(&mu_);
    return interruptions_;
  }

  LiveExperiments live;

 private:
  template <typename Condition>
  void Await(const Condition& condition) {
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&condition), kGenerous));
  }
  absl::Mutex mu_;
  std::vector<Fate> fates_ ABSL_GUARDED_BY(mu_);
  std::vector<Pair> pairs_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::RequestBegan> began_ ABSL_GUARDED_BY(mu_);
  int64_t waiting_ ABSL_GUARDED_BY(mu_) = 0;
  int tries_ ABSL_GUARDED_BY(mu_) = 0, interruptions_ ABSL_GUARDED_BY(mu_) = 0;
};

// A forward of a replay, as the engine saw it.
struct SeenPass {
  bool in_chunks = false;
  std::string policy;
  int64_t budget = 0;
  std::vector<int32_t> forced;
  uint64_t seed = 0;
  bool bypasses_prefixes = false;
  bool operator==(const SeenPass&) const = default;
};

bool IsReplay(absl::Span<const WorkItem> items) { return items[0].request->id.empty(); }

class ShadowTest : public ::testing::Test {
 protected:
  ShadowTest() {
    v1::Experiment experiment;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
        R"pb(
          name: "lean"
          traffic_permille: 1000
          arms { name: "full" weight_permille: 1 control: true }
          arms {
            name: "window"
            weight_permille: 999
            kv { policy: "window" keep_ratio: 0.5 }
          }
        )pb",
        &experiment));
    watcher_.live.Set({WithDefaults(std::move(experiment))});
    options_.participation = &watcher_;
    options_.shadow_observer = &watcher_;
    shadow_ = {.share_of_requests = 1, .share_of_time = 1, .look_every = absl::Milliseconds(1)};
  }

  void Start() {
    options_.shadow = shadow_;
    server_ = std::make_unique<FakeServer>(options_, script_);
    stub_ = v1::GenerationService::NewStub(server_->Connect());
  }
  static v1::GenerateRequest Asked(const std::string& id, uint32_t output = 30) {
    v1::GenerateRequest request;
    request.set_request_id(id);
    for (int i = 0; i < 10; ++i) request.mutable_token_ids()->add_ids(1);
    request.mutable_stop()->set_max_output_tokens(output);
    request.mutable_experiment()->set_unit_id("somebody");  // of the arm "window"
    return request;
  }
  grpc::Status Once(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    return stub_->GenerateOnce(&context, request, &result_);
  }
  // The engine stops at the next forward of a replay's second pass, which is one of many.
  void HoldReplays() {
    script_->on_forward = [this](absl::Span<const WorkItem> items) {
      gate_.Pass(IsReplay(items) && !items[0].request->force_in_chunks);
      return absl::OkStatus();
    };
  }
  void InterruptByALiveRequest() {
    ASSERT_TRUE(gate_.AwaitHeld());
    EXPECT_EQ(server_->engine().live(), 0);
    v1::GenerateRequest request = Asked("live");
    request.mutable_experiment()->set_opt_out(true);
    StreamClient live(*stub_, request);
    ASSERT_EQ(live.AwaitMessages(1).size(), 1u) << "it is accepted meanwhile";
    gate_.Open();
    EXPECT_TRUE(live.AwaitDone().ok());
  }
  double Finished() const {
    double finished = 0;
    for (const auto& family : server_->metrics().page()->Collect()) {
      if (family.name != "epikv_requests_finished_total") continue;
      for (const auto& metric : family.metric) finished += metric.counter.value;
    }
    return finished;
  }

  Watcher watcher_;
  ShadowOptions shadow_;
  FakeServerOptions options_;
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  Gate gate_;
  v1::GenerateResult result_;
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
};

TEST_F(ShadowTest, AFinishedRequestIsReplayedUnderTheFullCacheAndAsItRan) {
  std::vector<SeenPass> passes;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    const Request& request = *items[0].request;
    if (!IsReplay(items)) return absl::OkStatus();
    SeenPass pass{.in_chunks = request.force_in_chunks,
                  .policy = std::string(request.spec->name),
                  .budget = request.budget,
                  .forced = request.forced,
                  .seed = request.sampling.seed,
                  .bypasses_prefixes = request.bypass_prefix_cache};
    if (passes.empty() || passes.back() != pass) passes.push_back(std::move(pass));
    return absl::OkStatus();
  };
  Start();
  v1::GenerateRequest request = Asked("r-1", 30);
  request.mutable_sampling()->set_seed(77);
  request.mutable_stop()->add_stop_token_ids(20);  // it ends sooner than it may
  ASSERT_TRUE(Once(request).ok());
  const std::vector<Watcher::Fate> fates = watcher_.AwaitFates(1);
  EXPECT_EQ(fates[0].request, "r-1");
  EXPECT_EQ(fates[0].arms, "window");
  EXPECT_EQ(fates[0].fate, ShadowFate::kCompared);
  EXPECT_EQ(fates[0].found.tokens, 19);
  EXPECT_EQ(fates[0].found.agreed, 19);
  EXPECT_EQ(fates[0].found.kl_nats, 0);
  std::vector<int32_t> outputs;
  for (int32_t token = 2; token <= 20; ++token) outputs.push_back(token);
  ASSERT_EQ(passes.size(), 2u);
  EXPECT_TRUE(passes[0].in_chunks);
  EXPECT_EQ(passes[0].policy, "full");
  EXPECT_FALSE(passes[1].in_chunks);
  EXPECT_EQ(passes[1].policy, "window");
  EXPECT_EQ(passes[1].budget, 20) << "half of 10 and 30, as it was when it ran";
  EXPECT_EQ(passes[1].seed, 77u);
  for (const SeenPass& pass : passes) {
    EXPECT_EQ(pass.forced, outputs);
    EXPECT_TRUE(pass.bypasses_prefixes);
  }
  EXPECT_TRUE(server_->AwaitEmpty());
  EXPECT_EQ(Finished(), 1) << "replays are no requests";
  watcher_.AwaitWaiting(0);
}

TEST_F(ShadowTest, WhereTheArmFindsOthersLikelierTheyDisagree) {
  bool in_chunks = false;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    in_chunks = IsReplay(items) && items[0].request->force_in_chunks;
    return absl::OkStatus();
  };
  script_->next = [&](int32_t token) { return (token + (in_chunks ? 2 : 1)) % 60; };
  Start();
  ASSERT_TRUE(Once(Asked("r-1")).ok());
  const Divergence found = watcher_.AwaitFates(1)[0].found;
  EXPECT_EQ(found.tokens, 30);
  EXPECT_EQ(found.agreed, 0);
  EXPECT_GT(found.mean_kl_nats(), .1);
}

TEST_F(ShadowTest, WhatTakesNoPartOrDidNotEndWellIsNotReplayed) {
  Start();
  v1::GenerateRequest forced = Asked("forced");
  forced.mutable_experiment()->set_force_arm("lean/window");
  v1::GenerateRequest none = Asked("none");
  none.mutable_experiment()->set_opt_out(true);
  v1::GenerateRequest several = Asked("several");
  several.mutable_sampling()->set_n(2);
  several.mutable_sampling()->set_temperature(1);
  for (const v1::GenerateRequest& request : {forced, none, several}) {
    ASSERT_TRUE(Once(request).ok());
  }
  script_->on_item = [](const WorkItem& item) {
    return item.draw == 5 ? absl::InternalError("boom") : absl::OkStatus();
  };
  EXPECT_FALSE(Once(Asked("failed")).ok());
  script_->on_item = nullptr;
  ASSERT_TRUE(Once(Asked("last")).ok());
  EXPECT_EQ(watcher_.AwaitFates(1)[0].request, "last");
}

TEST_F(ShadowTest, ALiveRequestInterruptsAReplayWhichIsTriedAgain) {
  HoldReplays();
  Start();
  ASSERT_TRUE(Once(Asked("sampled")).ok());
  ASSERT_NO_FATAL_FAILURE(InterruptByALiveRequest());
  const Watcher::Fate fate = watcher_.AwaitFates(1)[0];
  EXPECT_EQ(fate.fate, ShadowFate::kCompared);
  EXPECT_EQ(watcher_.interruptions(), 1);
}

TEST_F(ShadowTest, WhatIsAlwaysInterruptedIsGivenUp) {
  shadow_.max_tries = 2;
  script_->on_forward = [this](absl::Span<const WorkItem> items) {
    if (IsReplay(items)) server_->engine().EndIdle();  // as a live request does
    return absl::OkStatus();
  };
  Start();
  ASSERT_TRUE(Once(Asked("sampled", 3000)).ok());
  EXPECT_EQ(watcher_.AwaitFates(1)[0].fate, ShadowFate::kInterrupted);
  EXPECT_EQ(watcher_.interruptions(), 2);
  watcher_.AwaitWaiting(0);
}

TEST_F(ShadowTest, WhatWaitsIsBoundedAndTheNewestStay) {
  shadow_.max_requests = 2;
  shadow_.share_of_time = 1e-9;  // no second one in this test's time
  Start();
  ASSERT_TRUE(Once(Asked("first")).ok());
  EXPECT_EQ(watcher_.AwaitFates(1)[0].fate, ShadowFate::kCompared);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Once(Asked(absl::StrCat(i))).ok());
  const std::vector<Watcher::Fate> fates = watcher_.AwaitFates(3);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(fates[1 + i].request, absl::StrCat(i));
    EXPECT_EQ(fates[1 + i].fate, ShadowFate::kDisplaced);
  }
  watcher_.AwaitWaiting(2);
}

TEST_F(ShadowTest, TokensAreBoundedToo) {
  shadow_.max_tokens = 100;
  shadow_.longest = 70;
  shadow_.share_of_time = 1e-9;
  Start();
  ASSERT_TRUE(Once(Asked("first")).ok());
  watcher_.AwaitFates(1);
  ASSERT_TRUE(Once(Asked("too long", 61)).ok());
  EXPECT_EQ(watcher_.AwaitFates(2)[1].fate, ShadowFate::kFailed);
  ASSERT_TRUE(Once(Asked("40 tokens", 30)).ok());
  ASSERT_TRUE(Once(Asked("60 tokens", 50)).ok());
  watcher_.AwaitWaiting(2);
  ASSERT_TRUE(Once(Asked("70 tokens", 60)).ok());
  const std::vector<Watcher::Fate> fates = watcher_.AwaitFates(4);
  EXPECT_EQ(fates[2].request, "40 tokens");
  EXPECT_EQ(fates[3].request, "60 tokens");
}

TEST_F(ShadowTest, APoolWithoutRoomForTheFullCacheIsAFailure) {
  options_.kv_capacity_tokens = 32;
  Start();
  ASSERT_TRUE(Once(Asked("long", 40)).ok());
  EXPECT_EQ(watcher_.AwaitFates(1)[0].fate, ShadowFate::kFailed);
}

TEST_F(ShadowTest, NeitherDrainNorSwapWaitsForAReplay) {
  HoldReplays();
  Start();
  ASSERT_TRUE(Once(Asked("replayed")).ok());
  ASSERT_TRUE(gate_.AwaitHeld());
  const std::weak_ptr<const ServedModel> model = server_->models().Named("fake");
  server_->models().Put(server_->Make({}));  // the one before it goes once nothing runs there
  gate_.Open();
  EXPECT_EQ(watcher_.AwaitFates(1)[0].fate, ShadowFate::kFailed) << "its model has gone";
  EXPECT_EQ(watcher_.interruptions(), 1);
  server_->models().Drain(absl::InfiniteFuture());
}

TEST_F(ShadowTest, WhatWaitsOutlastsADrain) {
  shadow_.max_tries = 2;
  HoldReplays();
  Start();
  ASSERT_TRUE(Once(Asked("sampled")).ok());
  ASSERT_TRUE(gate_.AwaitHeld());
  server_->models().StartDraining();
  gate_.Open();
  watcher_.AwaitTries(4);  // of which all but the first could not begin
  ASSERT_TRUE(server_->models().Resume());
  EXPECT_EQ(watcher_.AwaitFates(1)[0].fate, ShadowFate::kCompared);
  EXPECT_EQ(watcher_.interruptions(), 1);
}

TEST_F(ShadowTest, EndingDoesNotWaitForAReplay) {
  HoldReplays();
  Start();
  ASSERT_TRUE(Once(Asked("replayed", 4000)).ok());
  ASSERT_TRUE(gate_.AwaitHeld());
  std::thread end([this] { server_.reset(); });
  gate_.Open();
  end.join();
  EXPECT_EQ(script_->open_sequences, 0);
}

TEST_F(ShadowTest, OfManyRequestsAShareIsSampled) {
  shadow_.share_of_requests = .25;
  shadow_.max_requests = 10000;
  shadow_.max_tokens = 1 << 30;
  Start();
  for (int i = 0; i < 400; ++i) ASSERT_TRUE(Once(Asked(absl::StrCat(i), 1)).ok());
  ASSERT_TRUE(server_->AwaitEmpty());
  watcher_.AwaitWaiting(0);
  const size_t replayed = watcher_.AwaitFates(0).size();
  EXPECT_GT(replayed, 50u);  // six standard deviations
  EXPECT_LT(replayed, 150u);
}

// Both arms answer each unit's first request. `full` says one token after another, `window` every
// second one.
class PairTest : public ShadowTest {
 protected:
  PairTest() {
    v1::Experiment experiment = watcher_.live.running()->front();
    for (v1::Arm& arm : *experiment.mutable_arms()) arm.set_weight_permille(500);
    experiment.mutable_pairs()->set_permille(1000);
    watcher_.live.Set({experiment});
    shadow_.share_of_requests = 1e-9;
    script_->next = [this](int32_t token) { return (token + (by_window_ ? 2 : 1)) % 60; };
    script_->on_forward = [this](absl::Span<const WorkItem> items) {
      const Request& request = *items[0].request;
      by_window_ = request.spec->name == "window";
      if (hook_) hook_(request);
      return absl::OkStatus();
    };
  }
  // The first request of a unit of this arm.
  v1::GenerateRequest Of(const std::string& arm, uint32_t output = 30) {
    for (;;) {
      const std::string unit = absl::StrCat("unit-", ++units_);
      const v1::Experiment& experiment = watcher_.live.running()->front();
      if (ArmOf(experiment, unit)->name() != arm) continue;
      v1::GenerateRequest request = Asked(unit, output);
      request.mutable_experiment()->set_unit_id(unit);
      return request;
    }
  }
  static bool IsHidden(const Request& request) {
    return request.id.empty() && request.forced.empty();
  }
  std::string PairArm() { return watcher_.began().back().parts(0).pair_arm(); }

  // Before a forward of this request. Set before Start.
  std::function<void(const Request&)> hook_;

 private:
  std::atomic<bool> by_window_ = false;
  int units_ = 0;
};

TEST_F(PairTest, BothAnswersAreScoredWhicheverIsShown) {
  std::vector<SeenPass> passes;
  hook_ = [&](const Request& request) {
    if (!request.id.empty()) return;
    SeenPass pass{.in_chunks = request.force_in_chunks,
                  .policy = std::string(request.spec->name),
                  .budget = request.budget,
                  .forced = request.forced,
                  .seed = request.sampling.seed,
                  .bypasses_prefixes = request.bypass_prefix_cache};
    if (passes.empty() || passes.back() != pass) passes.push_back(std::move(pass));
  };
  Start();
  std::vector<std::vector<int32_t>> shown;
  for (const std::string arm : {"full", "window"}) {
    v1::GenerateRequest request = Of(arm);
    request.mutable_sampling()->set_seed(77);
    request.mutable_output()->set_token_ids(true);
    ASSERT_TRUE(Once(request).ok());
    EXPECT_EQ(result_.accepted().arm(), "lean/" + arm);
    shown.emplace_back(result_.token_ids().begin(), result_.token_ids().end());
    const Watcher::Pair pair = watcher_.AwaitPairs(shown.size()).back();
    EXPECT_EQ(pair.request, request.request_id());
    EXPECT_EQ(pair.fate, ShadowFate::kCompared);
    EXPECT_EQ(pair.shown, arm);
    EXPECT_NE(pair.hidden, arm);
    EXPECT_EQ(PairArm(), pair.hidden);
    const bool shows_full = arm == "full";
    const Divergence full = shows_full ? pair.found.shown : pair.found.hidden;
    const Divergence window = shows_full ? pair.found.hidden : pair.found.shown;
    EXPECT_EQ(full.tokens, 30);
    EXPECT_EQ(full.agreed, 30);
    EXPECT_EQ(full.kl_nats, 0);
    EXPECT_EQ(window.tokens, 30);
    EXPECT_EQ(window.agreed, 0);
    EXPECT_GT(window.mean_kl_nats(), .1);
  }
  ASSERT_EQ(passes.size(), 10u);
  for (size_t first : {0, 5}) {  // shown: full and as it ran; hidden: it runs, full, as it ran
    const std::string arm = first == 0 ? "full" : "window", other = first == 0 ? "window" : "full";
    const std::vector<std::string> policies = {"full", arm, other, "full", other};
    for (size_t i = 0; i < 5; ++i) {
      const SeenPass& pass = passes[first + i];
      EXPECT_EQ(pass.policy, policies[i]);
      EXPECT_EQ(pass.in_chunks, i == 0 || i == 3);
      EXPECT_TRUE(pass.bypasses_prefixes);
      if (pass.in_chunks) continue;
      EXPECT_EQ(pass.seed, 77u);
      EXPECT_EQ(pass.budget, pass.policy == "window" ? 20 : 40) << "half of 10 and 30, or all";
    }
    EXPECT_EQ(passes[first].forced, shown[first / 5]);
    EXPECT_TRUE(passes[first + 2].forced.empty());
    EXPECT_EQ(passes[first + 3].forced, shown[1 - first / 5]) << "as its arm would have said it";
  }
  EXPECT_TRUE(server_->AwaitEmpty());
  EXPECT_EQ(Finished(), 2) << "what is hidden is no request";
  EXPECT_TRUE(watcher_.AwaitFates(0).empty()) << "it was not sampled";
}

TEST_F(PairTest, ARequestMayBeSampledBesides) {
  shadow_.share_of_requests = 1;
  Start();
  ASSERT_TRUE(Once(Of("window")).ok());
  EXPECT_EQ(watcher_.AwaitPairs(1)[0].fate, ShadowFate::kCompared);
  const Watcher::Fate fate = watcher_.AwaitFates(1)[0];
  EXPECT_EQ(fate.fate, ShadowFate::kCompared);
  EXPECT_EQ(fate.found.tokens, 30);
  ASSERT_TRUE(Once(Of("full")).ok());
  watcher_.AwaitPairs(2);
}

TEST_F(PairTest, WhatHasNoPairIsNotMarked) {
  Start();
  v1::GenerateRequest several = Of("window");
  several.mutable_sampling()->set_n(2);
  several.mutable_sampling()->set_temperature(1);
  ASSERT_TRUE(Once(several).ok());
  EXPECT_EQ(PairArm(), "");
  v1::GenerateRequest forced = Of("window");
  forced.mutable_experiment()->set_force_arm("lean/window");
  ASSERT_TRUE(Once(forced).ok());
  EXPECT_EQ(PairArm(), "");
  v1::GenerateRequest again = Of("window");
  ASSERT_TRUE(Once(again).ok());
  EXPECT_EQ(PairArm(), "full");
  again.set_request_id("again");
  ASSERT_TRUE(Once(again).ok());
  EXPECT_EQ(PairArm(), "") << "a later request";
  const size_t began = watcher_.began().size();
  v1::GenerateRequest none = Of("window");
  none.mutable_experiment()->set_opt_out(true);
  ASSERT_TRUE(Once(none).ok());
  EXPECT_EQ(watcher_.began().size(), began);
  ASSERT_TRUE(Once(Of("full")).ok());
  EXPECT_EQ(watcher_.AwaitPairs(2).size(), 2u);
}

TEST_F(PairTest, WhereOneArmRefusesNoneHasAPair) {
  v1::Experiment experiment = watcher_.live.running()->front();
  experiment.mutable_arms(1)->mutable_kv()->set_policy("full");  // which takes no such budget
  watcher_.live.Set({experiment});
  Start();
  EXPECT_FALSE(Once(Of("window")).ok());
  EXPECT_EQ(PairArm(), "");
  EXPECT_TRUE(Once(Of("full")).ok());
  EXPECT_EQ(PairArm(), "");
}

TEST_F(PairTest, WithoutReplaysThereAreNone) {
  options_.participation = &watcher_;
  server_ = std::make_unique<FakeServer>(options_, script_);
  stub_ = v1::GenerationService::NewStub(server_->Connect());
  ASSERT_TRUE(Once(Of("window")).ok());
  EXPECT_EQ(PairArm(), "");
}

// The record of its end says that its pair is lost.
TEST_F(PairTest, WhatDidNotEndWellIsNotFollowed) {
  script_->on_item = [](const WorkItem& item) {
    return item.draw == 5 ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  EXPECT_FALSE(Once(Of("window")).ok());
  EXPECT_EQ(PairArm(), "full");
  script_->on_item = nullptr;
  const v1::GenerateRequest last = Of("window");
  ASSERT_TRUE(Once(last).ok());
  EXPECT_EQ(watcher_.AwaitPairs(1)[0].request, last.request_id());
}

TEST_F(PairTest, ALiveRequestInterruptsTheHiddenAnswerWhichIsTriedAgain) {
  std::atomic<int> scored = 0;
  hook_ = [&](const Request& request) {
    scored += request.force_in_chunks ? 1 : 0;
    gate_.Pass(IsHidden(request));
  };
  Start();
  ASSERT_TRUE(Once(Of("window")).ok());
  ASSERT_NO_FATAL_FAILURE(InterruptByALiveRequest());
  EXPECT_EQ(watcher_.AwaitPairs(1)[0].fate, ShadowFate::kCompared);
  EXPECT_EQ(watcher_.interruptions(), 1);
  EXPECT_EQ(scored, 2) << "what was done of the pair stays done";
}

TEST_F(PairTest, WhatIsAlwaysInterruptedIsGivenUp) {
  shadow_.max_tries = 2;
  hook_ = [this](const Request& request) {
    if (IsHidden(request)) server_->engine().EndIdle();  // as a live request does
  };
  Start();
  ASSERT_TRUE(Once(Of("window", 3000)).ok());
  EXPECT_EQ(watcher_.AwaitPairs(1)[0].fate, ShadowFate::kInterrupted);
  EXPECT_EQ(watcher_.interruptions(), 2);
  watcher_.AwaitWaiting(0);
}

TEST_F(PairTest, NewerRequestsTakeThePlaceOfOlderOnes) {
  shadow_.max_requests = 1;
  shadow_.share_of_time = 1e-9;
  Start();
  ASSERT_TRUE(Once(Of("window")).ok());
  EXPECT_EQ(watcher_.AwaitPairs(1)[0].fate, ShadowFate::kCompared);
  const v1::GenerateRequest second = Of("window");
  ASSERT_TRUE(Once(second).ok());
  watcher_.AwaitWaiting(1);
  ASSERT_TRUE(Once(Of("full")).ok());
  const Watcher::Pair displaced = watcher_.AwaitPairs(2)[1];
  EXPECT_EQ(displaced.request, second.request_id());
  EXPECT_EQ(displaced.fate, ShadowFate::kDisplaced);
}

TEST_F(PairTest, AHiddenAnswerThatFailsLosesThePair) {
  script_->on_open = [](const Request& request) {
    return IsHidden(request) ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  ASSERT_TRUE(Once(Of("full")).ok());
  EXPECT_EQ(watcher_.AwaitPairs(1)[0].fate, ShadowFate::kFailed);
}

// `full` meets the stop token after 19 tokens, `window` never.
TEST_F(PairTest, AnAnswerThatIsTooLongLosesThePairWhicheverIsShown) {
  shadow_.longest = 35;
  Start();
  for (const std::string arm : {"full", "window"}) {
    v1::GenerateRequest request = Of(arm);
    request.mutable_stop()->add_stop_token_ids(20);
    ASSERT_TRUE(Once(request).ok());
  }
  for (const Watcher::Pair& pair : watcher_.AwaitPairs(2)) {
    EXPECT_EQ(pair.fate, ShadowFate::kFailed) << pair.shown;
  }
}

TEST_F(PairTest, EndingDoesNotWaitForAHiddenAnswer) {
  hook_ = [this](const Request& request) { gate_.Pass(IsHidden(request)); };
  Start();
  ASSERT_TRUE(Once(Of("window", 4000)).ok());
  ASSERT_TRUE(gate_.AwaitHeld());
  std::thread end([this] { server_.reset(); });
  gate_.Open();
  end.join();
  EXPECT_EQ(script_->open_sequences, 0);
}

}  // namespace shadow_test
}  // namespace epikv
