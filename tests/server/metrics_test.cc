#include "server/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "runtime/admission/admission.h"
#include "runtime/base/reason.h"
#include "runtime/engine/engine.h"
#include "server/metrics/metrics_server.h"
#include "tests/fixtures/fake_executor.h"
#include "tests/fixtures/fake_model.h"
#include "tests/fixtures/scrape.h"

namespace epikv {
namespace metrics_test {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Not;

MetricsOptions Options() {
  return {.policies = FakeCatalog(),
          .config = {{"max_step_tokens", "512"}, {"deterministic", "false"}}};
}

EngineFacts Facts() {
  return {.kv = {.lanes = 4, .bytes_per_token = kFakeBytesPerToken},
          .kv_capacity_bytes = 1000 * kFakeBytesPerToken,
          .weight_bytes = 7000,
          .scratch_bytes = 900,
          .constraint_bytes = std::make_shared<const std::atomic<int64_t>>(70)};
}

// One for all tests, never stopped: the library takes two seconds for that. Serves what is alive.
MetricsServer& Page() {
  static MetricsServer& page = *MetricsServer::Start("127.0.0.1:0")->release();
  return page;
}

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() { Page().Serve(metrics_); }

  // The series by name without the label `model`, which all have.
  std::map<std::string, double> Read() {
    std::map<std::string, double> values;
    for (const auto& [name, value] : SeriesOf(Scrape(Page().port()))) {
      values[absl::StrReplaceAll(
          name, {{"model=\"fake\",", ""}, {",model=\"fake\"", ""}, {"{model=\"fake\"}", ""}})] =
          value;
    }
    return values;
  }
  // Runs a request to its end in an engine of its own.
  void Run(RequestOptions options) { Run(std::move(options), engine_); }
  void Run(RequestOptions options, EngineObserver& observer) {
    Engine engine({.kv_capacity_bytes = 1000 * kFakeBytesPerToken},
                  std::make_unique<FakeExecutor>(script_, kFakeBytesPerToken), *tokenizer_,
                  observer);
    options.arrival = absl::Now();
    engine.Submit(std::get<Request>(admission_.Resolve(std::move(options))),
                  std::make_shared<NoSink>());
    while (engine.Step()) {
    }
  }
  static RequestOptions Asked(int64_t prompt, int64_t output) {
    RequestOptions options{.id = "r", .prompt = std::vector<int32_t>(prompt, 1)};
    options.stop.max_output_tokens = output;
    return options;
  }

  struct NoSink final : RequestSink {
    bool Ready() const override { return true; }
    void OnDelta(Delta) override {}
    void OnFinished(Finished) override {}
  };

  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  const std::unique_ptr<Tokenizer> tokenizer_ = *Tokenizer::FromJson(FakeTokenizerJson());
  const Admission admission_{
      FakeManifest(), FakeCatalog(), {.kv_capacity_bytes = 1000 * kFakeBytesPerToken}};
  static MetricsOptions Watched(const Lifecycle& lifecycle) {
    MetricsOptions options = Options();
    options.lifecycle = &lifecycle;
    return options;
  }
  Lifecycle lifecycle_;
  Metrics metrics_{Watched(lifecycle_)};
  EngineMetrics engine_{*metrics_.OfModel("fake"), Facts()};
};

TEST_F(MetricsTest, RequestsAreCountedByPolicyArmAndReason) {
  Run(Asked(10, 5));
  RequestOptions evicting = Asked(10, 50);
  evicting.kv = {.policy = "window", .budget = int64_t{24}};
  Run(evicting);
  const auto values = Read();
  const std::string window = R"({arm="none",policy="window")";
  EXPECT_EQ(values.at(R"(epikv_requests_finished_total{arm="none",policy="full",reason="length"})"),
            1);
  EXPECT_EQ(values.at("epikv_tokens_total{arm=\"none\",kind=\"prompt\",policy=\"full\"}"), 10);
  EXPECT_EQ(values.at("epikv_tokens_total{arm=\"none\",kind=\"output\",policy=\"window\"}"), 50);
  EXPECT_EQ(values.at("gen_ai_server_time_to_first_token_seconds_count" + window + "}"), 1);
  EXPECT_EQ(values.at("gen_ai_server_time_per_output_token_seconds_count" + window + "}"), 1);
  EXPECT_EQ(values.at("epikv_request_kv_peak_tokens_sum" + window + "}"), 25);
  EXPECT_EQ(values.at("epikv_request_kv_final_tokens_sum" + window + "}"), 25);
  // 59 tokens were cached; the step that ends a request has no round.
  const std::string decode = R"({arm="none",phase="decode",policy="window"})";
  EXPECT_EQ(values.at("epikv_kv_tokens_evicted_total" + decode), 34);
  EXPECT_EQ(values.at("epikv_kv_entries_evicted_total" + decode), 34 * 4);
  EXPECT_EQ(values.at("epikv_kv_eviction_rounds_total" + decode), 34);
  EXPECT_EQ(values.at("epikv_kv_budget_overrun_tokens_total" + window + "}"), 0);
  EXPECT_EQ(values.at(R"(epikv_kv_eviction_seconds_count{policy="window"})"), 34);
  EXPECT_EQ(values.at("epikv_request_queue_seconds_count" + window + "}"), 1);
  EXPECT_EQ(values.at("epikv_inter_token_latency_seconds_count" + window + "}"), 49);
}

TEST_F(MetricsTest, StepsAreCountedByPhaseAndStage) {
  Run(Asked(10, 5));
  const auto values = Read();
  EXPECT_EQ(values.at(R"(epikv_step_seconds_count{phase="prefill"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_step_seconds_count{phase="decode"})"), 4);
  EXPECT_EQ(values.at(R"(epikv_step_tokens_total{phase="prefill"})"), 10);
  EXPECT_EQ(values.at(R"(epikv_step_tokens_total{phase="decode"})"), 4);
  EXPECT_EQ(values.at(R"(epikv_inter_token_latency_seconds_count{arm="none",policy="full"})"), 4);
  EXPECT_EQ(values.at("epikv_step_batch_sequences_sum"), 5);
  for (const char* stage : {"schedule", "draft", "forward", "attention", "taps", "sample",
                            "deliver", "observe", "evict"}) {
    const std::string label = absl::StrCat("{stage=\"", stage, "\"}");
    EXPECT_THAT(values, Contains(Key("epikv_step_seconds_total" + label)));
    EXPECT_EQ(values.count("epikv_step_cpu_seconds_total" + label),
              stage == absl::string_view("attention") ? 0u : 1u);
  }
  EXPECT_GT(values.at("epikv_engine_cpu_seconds_total"), 0);
}

TEST_F(MetricsTest, KvStatesSumToTheCapacityAndReturnToFree) {
  engine_.OnStep({.sequences = 1,
                  .running = 2,
                  .waiting = 3,
                  .running_by_priority = {0, 2, 0},
                  .waiting_by_priority = {2, 0, 1},
                  .predicted_wait = absl::Milliseconds(1500),
                  .kv_used_bytes = 100,
                  .kv_reserved_bytes = 250,
                  .kv_capacity_bytes = 1000,
                  .kv_prefix_bytes = 300});
  auto values = Read();
  EXPECT_EQ(values.at(R"(epikv_kv_bytes{state="used"})"), 100);
  EXPECT_EQ(values.at(R"(epikv_kv_bytes{state="reserved"})"), 150);
  EXPECT_EQ(values.at(R"(epikv_kv_bytes{state="cached_prefix"})"), 300);
  EXPECT_EQ(values.at(R"(epikv_kv_bytes{state="free"})"), 450);
  EXPECT_EQ(values.at("epikv_kv_capacity_bytes"), 1000);
  EXPECT_EQ(values.at("epikv_kv_usage_ratio"), 0.1);
  EXPECT_EQ(values.at(R"(epikv_requests_running{priority="normal"})"), 2);
  EXPECT_EQ(values.at(R"(epikv_requests_running{priority="high"})"), 0);
  EXPECT_EQ(values.at(R"(epikv_requests_waiting{priority="low",reason="kv"})"), 2);
  EXPECT_EQ(values.at(R"(epikv_requests_waiting{priority="high",reason="kv"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_requests_waiting{priority="high",reason="running"})"), 0);
  EXPECT_EQ(values.at("epikv_load_running_requests"), 2);
  EXPECT_EQ(values.at("epikv_load_waiting_requests"), 3);
  EXPECT_EQ(values.at("epikv_predicted_wait_seconds"), 1.5);
  engine_.OnStep(
      {.running = 256, .waiting = 1, .waiting_by_priority = {0, 1, 0}, .kv_capacity_bytes = 1000});
  values = Read();
  EXPECT_EQ(values.at(R"(epikv_requests_waiting{priority="normal",reason="kv"})"), 0);
  EXPECT_EQ(values.at(R"(epikv_requests_waiting{priority="normal",reason="running"})"), 1);
  EXPECT_EQ(values.count("epikv_predicted_wait_seconds"), 0) << "nothing was measured";
  engine_.OnStep({.kv_capacity_bytes = 1000});
  values = Read();
  EXPECT_EQ(values.at(R"(epikv_kv_bytes{state="free"})"), 1000);
  EXPECT_EQ(values.at("epikv_kv_peak_used_bytes"), 100);
}

TEST_F(MetricsTest, FailuresSayWhoFailed) {
  RequestOptions options = Asked(10, 50);
  options.kv = {.policy = "window", .budget = int64_t{24}};
  for (absl::string_view kind : {kPolicyThrew, kPolicyStatus, kPolicyInvalidSet, kPolicyThrew}) {
    script_->on_settle = [kind](const WorkItem&) {
      return WithReason(WithPolicyError(absl::InternalError("failed"), kind), kPolicyFailed);
    };
    Run(options);
  }
  const auto values = Read();
  auto errors = [&](const char* kind) {
    return values.at(absl::StrCat(R"(epikv_policy_errors_total{arm="none",kind=")", kind,
                                  R"(",policy="window"})"));
  };
  EXPECT_EQ(errors("threw"), 2);
  EXPECT_EQ(errors("status"), 1);
  EXPECT_EQ(errors("invalid_set"), 1);
  EXPECT_EQ(
      values.at(R"(epikv_requests_finished_total{arm="none",policy="window",reason="error"})"), 4);
}

TEST_F(MetricsTest, AttentionMassIsCountedWhereItWasMeasured) {
  RequestOptions options = Asked(10, 50);
  options.kv = {.policy = "window", .budget = int64_t{24}};
  const Request request = std::get<Request>(admission_.Resolve(std::move(options)));
  engine_.OnEvicted({.request = request, .entries = 4});
  engine_.OnEvicted({.request = request, .entries = 4, .attention_mass = 0});
  engine_.OnEvicted({.request = request, .entries = 4, .attention_mass = .015});
  const auto values = Read();
  const std::string of = "epikv_evicted_attention_mass_ratio";
  const std::string window = R"({arm="none",policy="window")";
  EXPECT_EQ(values.at(of + "_count" + window + "}"), 2);
  EXPECT_EQ(values.at(of + "_sum" + window + "}"), .015);
  EXPECT_EQ(values.at(of + "_bucket" + window + ",le=\"0\"}"), 1);
  EXPECT_EQ(values.at(of + "_bucket" + window + ",le=\"0.01\"}"), 1);
  EXPECT_EQ(values.at(of + "_bucket" + window + ",le=\"0.02\"}"), 2);
}

TEST_F(MetricsTest, LoadTellsTokensPerSecondOfLate) {
  EXPECT_EQ((*metrics_.OfModel("fake"))->Load().output_tokens_per_second, 0);
  Run(Asked(10, 5));
  const EngineLoad load = (*metrics_.OfModel("fake"))->Load();
  EXPECT_LE(load.prompt_tokens_per_second, 10 / 10.);
  EXPECT_LE(load.output_tokens_per_second, 5 / 10.);
  EXPECT_NEAR(load.prompt_tokens_per_second / load.output_tokens_per_second, 10 / 5., 1e-3);
}

TEST(RecentMeanTest, IsOfTheLastTenSeconds) {
  RecentMean mean;
  const absl::Time begin = absl::FromUnixSeconds(1000);
  EXPECT_EQ(mean.At(begin), 0);
  mean.Set(.8, begin);
  EXPECT_EQ(mean.At(begin), 0) << "it has not lasted";
  EXPECT_NEAR(mean.At(begin + absl::Seconds(10)), .8 * (1 - std::exp(-1)), 1e-9);
  EXPECT_NEAR(mean.At(begin + absl::Minutes(10)), .8, 1e-9);
  mean.Set(0, begin + absl::Minutes(10));
  EXPECT_NEAR(mean.At(begin + absl::Minutes(10) + absl::Seconds(10)), .8 * std::exp(-1), 1e-9);
  EXPECT_EQ(mean.At(begin), mean.At(begin + absl::Minutes(10))) << "the clock was set back";
}

// What balancers divide by each other: it does not depend on how much of the load one gets.
TEST(RecentMeanTest, OverTheRateOfRequestsItIsWhatOneTakes) {
  for (const absl::Duration apart : {absl::Seconds(1), absl::Seconds(5)}) {
    RecentMean busy;
    RecentRate rate;
    absl::Time now = absl::FromUnixSeconds(1000);
    for (int request = 0; request < 60; ++request, now += apart) {
      busy.Set(.5, now);
      busy.Set(0, now + absl::Milliseconds(200));
      rate.Add(1, now + absl::Milliseconds(200));
    }
    EXPECT_NEAR(busy.At(now) / rate.At(now), .5 * .2, .002);
  }
}

TEST(RecentRateTest, ForgetsOverTenSeconds) {
  RecentRate rate;
  absl::Time now = absl::UnixEpoch();
  for (int i = 0; i < 10000; ++i) rate.Add(3, now += absl::Milliseconds(10));
  EXPECT_NEAR(rate.At(now), 300, 1) << "steady";
  EXPECT_NEAR(rate.At(now + absl::Seconds(10)), 300 * std::exp(-1), 1);
  EXPECT_NEAR(rate.At(now - absl::Seconds(10)), 300, 1) << "the clock was set back";
  EXPECT_LT(rate.At(now + absl::Minutes(5)), 1e-6);
}

TEST_F(MetricsTest, RequestDroppedFromTheQueueIsNoMissedDeadline) {
  RequestOptions options = Asked(10, 5);
  const Request request = std::get<Request>(admission_.Resolve(std::move(options)));
  engine_.OnFinished(
      request, {.reason = FinishReason::kDeadline,
                .status = WithReason(absl::DeadlineExceededError("in vain"), kDeadlineInfeasible)});
  engine_.OnFinished(request, {.reason = FinishReason::kDeadline,
                               .status = absl::DeadlineExceededError("passed")});
  const auto values = Read();
  const std::string of = R"(epikv_requests_finished_total{arm="none",policy="full",reason=)";
  EXPECT_EQ(values.at(of + R"("deadline_infeasible"})"), 1);
  EXPECT_EQ(values.at(of + R"("deadline"})"), 1);
}

TEST_F(MetricsTest, LabelsComeFromClosedSets) {
  (*metrics_.OfModel("fake"))->OnRejected("KV_BUDGET");
  (*metrics_.OfModel("fake"))->OnRejected("PROMPT_EVICTED");
  (*metrics_.OfModel("fake"))->OnRejected("DEADLINE_INFEASIBLE");
  (*metrics_.OfModel("fake"))->OnRejected("whatever a client may cause");
  metrics_.OnRejected("NOT_FOUND");
  metrics_.OnRpcFinished("GenerationService/Generate", grpc::StatusCode::OK);
  metrics_.OnRpcFinished("invented", static_cast<grpc::StatusCode>(77));
  const auto values = Read();
  EXPECT_EQ(values.at(R"(epikv_requests_rejected_total{reason="kv_budget"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_requests_rejected_total{reason="prompt_evicted"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_requests_rejected_total{reason="deadline_infeasible"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_requests_rejected_total{reason="other"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_requests_rejected_total{model="",reason="not_found"})"), 1);
  EXPECT_EQ(
      values.at(R"(epikv_grpc_requests_total{code="OK",method="GenerationService/Generate"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_grpc_requests_total{code="UNKNOWN",method="other"})"), 1);
}

TEST_F(MetricsTest, MemoryIsOfEachKind) {
  engine_.OnStep({.kv_capacity_bytes = 1000, .kv_touched_bytes = 300, .signal_bytes = 40});
  const auto values = Read();
  EXPECT_EQ(values.at(R"(epikv_resident_memory_bytes{kind="kv_touched"})"), 300);
  EXPECT_EQ(values.at(R"(epikv_resident_memory_bytes{kind="signals"})"), 40);
  EXPECT_EQ(values.at(R"(epikv_resident_memory_bytes{kind="constraints"})"), 70);
  EXPECT_EQ(values.at(R"(epikv_torch_memory_bytes{kind="weights"})"), 7000);
  EXPECT_EQ(values.at(R"(epikv_torch_memory_bytes{kind="kv_pool"})"), 1000);
  EXPECT_EQ(values.at(R"(epikv_torch_memory_bytes{kind="scratch"})"), 900);
}

TEST_F(MetricsTest, BoundHoldsForEverySeries) {
  Run(Asked(10, 5));
  engine_.OnStep({.predicted_wait = absl::Seconds(1), .kv_capacity_bytes = 1000});
  const auto values = Read();
  EXPECT_EQ(values.at("epikv_metrics_series"), metrics_.series_bound());
  int64_t gauges = 0;
  for (const auto& [name, value] : values) {
    gauges +=
        absl::StartsWith(name, "epikv_kv_bytes{") || absl::StartsWith(name, "epikv_tier_bytes{") ||
        absl::StartsWith(name, "epikv_kv_capacity_bytes") ||
        absl::StartsWith(name, "epikv_kv_peak_used_bytes") ||
        absl::StartsWith(name, "epikv_kv_usage_ratio") ||
        absl::StartsWith(name, "epikv_torch_memory_bytes") ||
        absl::StartsWith(name, "epikv_resident_memory_bytes") ||
        absl::StartsWith(name, "epikv_kv_reserved_ratio") ||
        absl::StartsWith(name, "epikv_requests_running") ||
        absl::StartsWith(name, "epikv_requests_waiting") || absl::StartsWith(name, "epikv_load_") ||
        absl::StartsWith(name, "epikv_predicted_wait_seconds");
  }
  EXPECT_EQ(gauges, FillGauges::kNumSeries) << "what the bound allows for them";
  EXPECT_LE(values.size(), static_cast<size_t>(metrics_.series_bound()));
  int64_t http = 0;
  for (const auto& [name, value] : values) http += absl::StartsWith(name, "exposer_") ? 1 : 0;
  EXPECT_EQ(http, 7) << "what the bound allows for them";
  int64_t process = 0;
  for (const auto& [name, value] : values) process += absl::StartsWith(name, "process_") ? 1 : 0;
  EXPECT_EQ(process, ProcessMetrics::kNumSeries);
}

TEST_F(MetricsTest, TheLifecycleIsOneOfItsStates) {
  for (const ServerState state :
       {ServerState::kStarting, ServerState::kServing, ServerState::kDraining}) {
    lifecycle_.SetState(state);
    const auto values = Read();
    for (const char* name : {"starting", "serving", "draining"}) {
      EXPECT_EQ(values.at(absl::StrCat("epikv_lifecycle_state{state=\"", name, "\"}")),
                absl::AsciiStrToLower(ServerStateName(state)) == name ? 1 : 0);
    }
  }
  EXPECT_EQ(Read().at("epikv_tls_certificate_expiry_timestamp_seconds"),
            std::numeric_limits<double>::infinity());
}

TEST_F(MetricsTest, SettingsAreLabels) {
  metrics_.SetConfig({{"max_step_tokens", "64"}});
  EXPECT_EQ(Read().at(R"(epikv_config_info{max_step_tokens="64"})"), 1);
  EXPECT_EQ(Read().count(R"(epikv_config_info{deterministic="false",max_step_tokens="512"})"), 0u);
  metrics_.SetConfig(Options().config);
  EXPECT_EQ(Read().at(R"(epikv_config_info{deterministic="false",max_step_tokens="512"})"), 1);
}

TEST(MetricsLimitTest, RefusesAModelWhoseSeriesWouldExceedIt) {
  MetricsOptions options = Options();
  Metrics unbounded(options);
  const int64_t without = unbounded.series_bound();
  const auto model = *unbounded.OfModel("a");
  const int64_t bound = unbounded.series_bound();
  options.max_series = bound;
  Metrics exact(options);
  const auto first = exact.OfModel("a");
  EXPECT_TRUE(first.ok());
  EXPECT_EQ(exact.OfModel("a")->get(), first->get()) << "a swap has the series of its name";
  const auto second = exact.OfModel("b");
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr(absl::StrCat("raise it to at least ", bound + bound - without)));
}

TEST_F(MetricsTest, PoliciesBeyondTheLimitShareTheSeriesOfOther) {
  MetricsOptions options = Options();
  const int64_t before = metrics_.series_bound();
  Run(Asked(10, 5));
  const int64_t of_a_policy = metrics_.series_bound() - before;
  EXPECT_GT(of_a_policy, 100);

  options.max_series = before + of_a_policy;  // one policy
  Metrics small(options);
  EngineMetrics engine(*small.OfModel("small"), Facts());
  Run(Asked(10, 5), engine);
  RequestOptions evicting = Asked(10, 50);
  evicting.kv = {.policy = "window", .budget = int64_t{24}};
  Run(evicting, engine);
  EXPECT_EQ(small.series_bound(), options.max_series);
  const auto values = SeriesOf(prometheus::TextSerializer().Serialize(small.page()->Collect()));
  const std::string labels = R"({model="small",arm="none",policy=")";
  EXPECT_EQ(values.at("epikv_requests_finished_total" + labels + "full\",reason=\"length\"}"), 1);
  EXPECT_EQ(values.at("epikv_requests_finished_total" + labels + "other\",reason=\"length\"}"), 1);
  EXPECT_EQ(values.at(R"(epikv_kv_eviction_seconds_count{model="small",policy="other"})"), 34);
  EXPECT_EQ(values.at(R"(epikv_metrics_label_overflow_total{model="small"})"), 1);
}

TEST_F(MetricsTest, AnArmHasSeriesOfItsOwnUntilItIsRetired) {
  RequestOptions options = Asked(10, 5);
  options.arm = "lean/a";
  const int64_t before = metrics_.series_bound();
  Run(options);
  const std::string lean =
      R"(epikv_requests_finished_total{arm="lean/a",policy="full",reason="length"})";
  EXPECT_EQ(Read().at(lean), 1);
  EXPECT_GT(metrics_.series_bound(), before);
  metrics_.KeepArms({"lean/a"});
  EXPECT_EQ(Read().at(lean), 1);
  metrics_.KeepArms({});
  EXPECT_FALSE(Read().contains(lean));
  EXPECT_EQ(metrics_.series_bound(), before);
}

TEST(MetricsLimitTest, ArmsBeyondItShareTheSeriesOfOther) {
  MetricsOptions options = Options();
  options.max_series = 1 << 20;
  const int64_t enough = [&] {
    Metrics metrics(options);
    const auto model = *metrics.OfModel("fake");
    return metrics.series_bound();
  }();
  options.max_series = enough;
  Metrics metrics(options);
  EngineMetrics engine(*metrics.OfModel("fake"), Facts());
  RequestOptions asked{.id = "r", .prompt = {1, 1}, .arm = "lean/a"};
  asked.stop.max_output_tokens = 3;
  const Admission admission{
      FakeManifest(), FakeCatalog(), {.kv_capacity_bytes = 1000 * kFakeBytesPerToken}};
  const Request request = std::get<Request>(admission.Resolve(asked));
  engine.OnFinished(request, Finished{.output_tokens = 3});
  const auto values = SeriesOf(prometheus::TextSerializer().Serialize(metrics.page()->Collect()));
  EXPECT_EQ(values.at(R"(epikv_requests_finished_total{model="fake",arm="other",policy="other",)"
                      R"(reason="length"})"),
            1);
  EXPECT_EQ(values.at(R"(epikv_metrics_label_overflow_total{model="fake"})"), 1);
}

TEST_F(MetricsTest, SeriesGoWithTheirModel) {
  const int64_t before = metrics_.series_bound();
  {
    EngineMetrics other(*metrics_.OfModel("other"), Facts());
    EXPECT_EQ(Read().at(R"(epikv_kv_capacity_bytes{model="other"})"), 1000. * kFakeBytesPerToken);
    EXPECT_GT(metrics_.series_bound(), before);
  }
  EXPECT_THAT(Read(), Not(Contains(Key(HasSubstr("other")))));
  EXPECT_EQ(Read().at("epikv_metrics_series"), before);
}

TEST_F(MetricsTest, ASwapAddsUpPoolsAndSetsNoCounterBack) {
  Run(Asked(10, 5));
  {
    EngineMetrics next(*metrics_.OfModel("fake"), Facts());
    engine_.OnStep(
        {.running_by_priority = {0, 1, 0}, .kv_capacity_bytes = 1000, .kv_rows_moved = 7});
    next.OnStep({.sequences = 1,
                 .running_by_priority = {0, 2, 0},
                 .kv_used_bytes = 10,
                 .kv_reserved_bytes = 20,
                 .kv_capacity_bytes = 500,
                 .kv_rows_moved = 3});
    const auto values = Read();
    EXPECT_EQ(values.at("epikv_kv_capacity_bytes"), 1500);
    EXPECT_EQ(values.at(R"(epikv_kv_bytes{state="free"})"), 1480);
    EXPECT_EQ(values.at(R"(epikv_requests_running{priority="normal"})"), 3);
    EXPECT_EQ(values.at("epikv_kv_rows_moved_total"), 3);
  }
  {  // one that was loaded and never served
    EngineFacts refused = Facts();
    refused.dtype = "float16";
    EngineMetrics never(*metrics_.OfModel("fake"), refused);
    EXPECT_EQ(
        Read().at(
            R"(epikv_model_info{architecture="",decode_kernel="",dtype="float16",weights=""})"),
        1);
  }
  EXPECT_EQ(Read().at(R"(epikv_model_info{architecture="",decode_kernel="",dtype="",weights=""})"),
            1);
  const auto values = Read();
  EXPECT_EQ(values.at("epikv_kv_capacity_bytes"), 1000);
  EXPECT_EQ(values.at(R"(epikv_requests_finished_total{arm="none",policy="full",reason="length"})"),
            1);
}

// The exposition format has one HELP and one TYPE a name, whatever the number of models.
TEST_F(MetricsTest, FamiliesOfSeveralModelsAreOne) {
  EngineMetrics other(*metrics_.OfModel("other"), Facts());
  std::map<std::string, int> types;
  for (absl::string_view line : absl::StrSplit(Scrape(Page().port()), '\n')) {
    if (absl::ConsumePrefix(&line, "# TYPE ")) ++types[std::string(line.substr(0, line.find(' ')))];
  }
  EXPECT_GT(types.size(), 30u);
  for (const auto& [name, count] : types) EXPECT_EQ(count, 1) << name;
}

TEST_F(MetricsTest, AnswersWhileClientsHoldSilentConnections) {
  std::vector<int> silent;
  for (int i = 0; i < 16; ++i) silent.push_back(ConnectedSocket(Page().port()));
  const absl::Time begin = absl::Now();
  EXPECT_FALSE(Scrape(Page().port()).empty());
  EXPECT_LT(absl::Now() - begin, absl::Seconds(15));  // 30 a connection, were there no limit
  for (const int fd : silent) close(fd);
}

TEST(MetricsServerTest, RootLinksTheMetrics) {
  EXPECT_EQ(HttpGet(Page().port(), "/"), "<a href=\"/metrics\">/metrics</a>\n");
}

TEST(MetricsServerTest, PortInUseIsNamed) {
  const std::string address = absl::StrCat("127.0.0.1:", Page().port());
  const auto second = MetricsServer::Start(address);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(address));
}

}  // namespace metrics_test
}  // namespace epikv
