#include "server/experiments/experiment_service.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>
#include <prometheus/text_serializer.h>
#include <sqlite3.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/experiments/figures/planner.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/scrape.h"
#include "tests/fixtures/temporary_folder.h"

// Experiments over real gRPC, kept in a real SQLite store.

namespace epikv {
namespace experiment_service_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kLean[] = R"(
  name: "lean" traffic_permille: 1000
  arms { name: "full" weight_permille: 500 control: true }
  arms { name: "window" weight_permille: 500 kv { policy: "window" max_tokens: 24 } }
  metrics { name: "right" kind: KIND_PROPORTION }
  metrics { name: "score" }
  primary_metric: "right"
)";

class ExperimentServiceTest : public ::testing::Test {
 protected:
  ExperimentServiceTest() { Start(); }
  void Start(absl::Duration series_outlive = absl::Minutes(10)) {
    server_ = nullptr;
    server_ = std::make_unique<FakeServer>(
        FakeServerOptions{.experiments = folder_.File(""), .series_outlive = series_outlive});
    stub_ = v1::ExperimentService::NewStub(server_->Connect());
    generation_ = v1::GenerationService::NewStub(server_->Connect());
  }

  static v1::Experiment Lean(const std::string& more = "") {
    v1::Experiment experiment;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(kLean, &experiment));
    EXPECT_TRUE(google::protobuf::TextFormat::MergeFromString(more, &experiment));
    return experiment;
  }
  grpc::Status Create(const v1::Experiment& experiment, bool validate_only = false) {
    v1::CreateExperimentRequest request;
    *request.mutable_experiment() = experiment;
    request.set_validate_only(validate_only);
    return Ask(&v1::ExperimentService::Stub::CreateExperiment, request, &experiment_);
  }
  grpc::Status Update(const v1::Experiment& experiment, const std::vector<std::string>& mask = {},
                      bool allow_rebucket = false) {
    v1::UpdateExperimentRequest request;
    *request.mutable_experiment() = experiment;
    for (const std::string& path : mask) request.mutable_update_mask()->add_paths(path);
    request.set_allow_rebucket(allow_rebucket);
    return Ask(&v1::ExperimentService::Stub::UpdateExperiment, request, &experiment_);
  }
  grpc::Status Begin(const std::string& name, const std::string& etag = "") {
    v1::StartExperimentRequest request;
    request.set_name(name);
    request.set_etag(etag);
    return Ask(&v1::ExperimentService::Stub::StartExperiment, request, &experiment_);
  }
  grpc::Status Stop(const std::string& name) {
    v1::StopExperimentRequest request;
    request.set_name(name);
    request.set_reason("enough");
    return Ask(&v1::ExperimentService::Stub::StopExperiment, request, &experiment_);
  }
  grpc::Status Get(const std::string& name) {
    v1::GetExperimentRequest request;
    request.set_name(name);
    return Ask(&v1::ExperimentService::Stub::GetExperiment, request, &experiment_);
  }
  // Of a request of 10 tokens of prompt; returns its arm.
  std::string Generate(const std::string& id, const std::string& unit, uint32_t output = 50) {
    v1::GenerateRequest request;
    for (int i = 0; i < 10; ++i) request.mutable_token_ids()->add_ids(1);
    request.set_request_id(id);
    request.mutable_stop()->set_max_output_tokens(output);
    request.mutable_experiment()->set_unit_id(unit);
    grpc::ClientContext context;
    v1::GenerateResult result;
    EXPECT_TRUE(generation_->GenerateOnce(&context, request, &result).ok());
    return result.accepted().arm();
  }
  static v1::RecordOutcomeRequest Outcome(const std::string& id, const std::string& metric,
                                          double value, const std::string& key = "") {
    v1::RecordOutcomeRequest request;
    request.set_request_id(id);
    request.set_metric(metric);
    request.set_value(value);
    request.set_idempotency_key(key);
    return request;
  }
  grpc::Status Record(const v1::RecordOutcomeRequest& request) {
    return Ask(&v1::ExperimentService::Stub::RecordOutcome, request, &recorded_);
  }
  std::string Page() {
    return prometheus::TextSerializer().Serialize(server_->metrics().page()->Collect());
  }
  std::vector<RequestRow> Rows() {
    std::vector<RequestRow> rows;
    const absl::Status status = server_->experiments().store().ReadRequests(
        {.experiment = "lean"}, [&](const RequestRow& row) {
          rows.push_back(row);
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    return rows;
  }

  template <typename Method, typename Request, typename Response>
  grpc::Status Ask(Method method, const Request& request, Response* response) {
    grpc::ClientContext context;
    return (*stub_.*method)(&context, request, response);
  }

  const TemporaryFolder folder_;
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<v1::ExperimentService::Stub> stub_;
  std::unique_ptr<v1::GenerationService::Stub> generation_;
  v1::Experiment experiment_;
  v1::RecordOutcomeResponse recorded_;
};

TEST_F(ExperimentServiceTest, ADraftIsCompletedAndKept) {
  ASSERT_TRUE(Create(Lean()).ok());
  EXPECT_EQ(experiment_.state(), v1::Experiment::STATE_DRAFT);
  EXPECT_EQ(experiment_.layer(), "default");
  EXPECT_FALSE(experiment_.etag().empty());
  const std::string etag = experiment_.etag();
  ASSERT_TRUE(Get("lean").ok());
  EXPECT_EQ(experiment_.etag(), etag);
  v1::ListExperimentsResponse all;
  ASSERT_TRUE(
      Ask(&v1::ExperimentService::Stub::ListExperiments, v1::ListExperimentsRequest(), &all).ok());
  EXPECT_EQ(all.experiments_size(), 1);
}

TEST_F(ExperimentServiceTest, WhatIsWrongIsSaidAtOnce) {
  v1::Experiment wrong = Lean(R"(name: "Lean" salt: "s" alpha: 0.7)");
  wrong.mutable_arms(1)->mutable_kv()->set_policy("windows");
  const grpc::Status status = Create(wrong, true);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(FieldsIn(status),
              ElementsAre("experiment.name", "experiment.alpha", "experiment.arms[1].kv.policy"));
}

TEST_F(ExperimentServiceTest, ValidatingKeepsNothing) {
  EXPECT_TRUE(Create(Lean(), true).ok());
  EXPECT_EQ(Get("lean").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ExperimentServiceTest, ANameIsTakenOnce) {
  EXPECT_TRUE(Create(Lean()).ok());
  EXPECT_EQ(Create(Lean()).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(Begin("fat").error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ExperimentServiceTest, AnUpdateOfWhatHasChangedIsAborted) {
  ASSERT_TRUE(Create(Lean()).ok());
  v1::Experiment read = experiment_;
  read.set_hypothesis("one");
  ASSERT_TRUE(Update(read).ok());
  read.set_hypothesis("two");
  const grpc::Status stale = Update(read);
  EXPECT_EQ(stale.error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(ReasonIn(stale), "ETAG");
  EXPECT_EQ(Begin("lean", read.etag()).error_code(), grpc::StatusCode::ABORTED);
  ASSERT_TRUE(Get("lean").ok());
  EXPECT_EQ(experiment_.hypothesis(), "one");
}

TEST_F(ExperimentServiceTest, AMaskSaysWhatIsSet) {
  ASSERT_TRUE(Create(Lean()).ok());
  v1::Experiment change;
  change.set_name("lean");
  change.set_hypothesis("leaner is as good");
  ASSERT_TRUE(Update(change, {"hypothesis"}).ok());
  EXPECT_EQ(experiment_.arms_size(), 2);
  EXPECT_EQ(experiment_.hypothesis(), "leaner is as good");
  EXPECT_EQ(FieldsIn(Update(change, {"state", "name"})).size(), 2u);
}

TEST_F(ExperimentServiceTest, RequestsTakePartFromItsStartToItsStop) {
  ASSERT_TRUE(Create(Lean()).ok());
  EXPECT_EQ(Generate("r-0", "u"), "none");
  ASSERT_TRUE(Begin("lean").ok());
  const std::string arm = Generate("r-1", "u");
  EXPECT_THAT(arm, HasSubstr("lean/"));
  ASSERT_TRUE(Stop("lean").ok());
  EXPECT_EQ(experiment_.stop_reason(), "enough");
  EXPECT_EQ(Generate("r-2", "u"), "none");
  EXPECT_EQ(ReasonIn(Begin("lean")), "EXPERIMENT_STATE");
}

TEST_F(ExperimentServiceTest, UnitsMoveOnlyWhereThatIsAllowed) {
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  v1::Experiment wanted = experiment_;
  wanted.mutable_arms(1)->mutable_kv()->set_max_tokens(32);
  const grpc::Status refused = Update(wanted);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(refused), "REBUCKET");
  ASSERT_TRUE(Update(wanted, {}, true).ok());
  EXPECT_EQ(experiment_.bucket_version(), 2u);
}

TEST_F(ExperimentServiceTest, AnOutcomeJoinsItsRequest) {
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  const std::string arm = Generate("r-1", "u");
  ASSERT_TRUE(Record(Outcome("r-1", "right", 1)).ok());
  EXPECT_FALSE(recorded_.duplicate());
  ASSERT_TRUE(Record(Outcome("r-1", "right", 1)).ok());
  EXPECT_TRUE(recorded_.duplicate());
  ASSERT_TRUE(Record(Outcome("r-1", "score", 2.5, "a")).ok());
  ASSERT_TRUE(Record(Outcome("r-1", "score", 3.5, "b")).ok());
  const std::vector<RequestRow> rows = Rows();
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ("lean/" + rows[0].arm, arm);
  EXPECT_TRUE(rows[0].exposed);
  EXPECT_FALSE(rows[0].unit_is_request);
  ASSERT_EQ(rows[0].outcomes.size(), 3u);
  ASSERT_TRUE(rows[0].end.has_value());
  EXPECT_EQ(rows[0].end->code, "OK");
  EXPECT_EQ(rows[0].end->output_tokens, 50);
}

TEST_F(ExperimentServiceTest, AnOutcomeThatCannotCountIsRefused) {
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  Generate("r-1", "u");
  ASSERT_TRUE(Record(Outcome("r-1", "right", 1)).ok());
  const grpc::Status conflict = Record(Outcome("r-1", "right", 0));
  EXPECT_EQ(conflict.error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(ReasonIn(conflict), "OUTCOME_CONFLICT");
  const grpc::Status unknown = Record(Outcome("r-2", "right", 1));
  EXPECT_EQ(unknown.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(Detail<v1::RetryInfo>(unknown, "RetryInfo").has_value())
      << "its request may be on its way";
  EXPECT_THAT(FieldsIn(Record(Outcome("r-1", "wrong", 1))), ElementsAre("metric"));
  EXPECT_THAT(FieldsIn(Record(Outcome("r-1", "right", 0.5))), ElementsAre("value"));
  EXPECT_THAT(FieldsIn(Record(Outcome("", "score", std::nan("")))),
              ElementsAre("request_id", "value"));
  EXPECT_THAT(FieldsIn(Record(Outcome("r-1", "score", 1, std::string(65, 'k')))),
              ElementsAre("idempotency_key"));
  v1::RecordOutcomeRequest longest = Outcome(std::string(129, 'r'), "score", 1);
  longest.set_tenant(std::string(65, 't'));
  EXPECT_THAT(FieldsIn(Record(longest)), ElementsAre("request_id", "tenant"));
  v1::RecordOutcomeRequest late = Outcome("r-1", "score", 1);
  late.mutable_time()->set_seconds(std::numeric_limits<int64_t>::max());
  EXPECT_THAT(FieldsIn(Record(late)), ElementsAre("time"));
}

TEST_F(ExperimentServiceTest, ABatchKeepsWhatItCan) {
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  Generate("r-1", "u");
  v1::BatchRecordOutcomesRequest request;
  *request.add_outcomes() = Outcome("r-1", "right", 1);
  *request.add_outcomes() = Outcome("r-2", "right", 1);
  *request.add_outcomes() = Outcome("r-1", "score", 2);
  v1::BatchRecordOutcomesResponse response;
  ASSERT_TRUE(Ask(&v1::ExperimentService::Stub::BatchRecordOutcomes, request, &response).ok());
  ASSERT_EQ(response.results_size(), 3);
  EXPECT_EQ(response.results(0).code(), grpc::StatusCode::OK);
  EXPECT_EQ(response.results(1).code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(response.results(1).reason(), "NOT_FOUND");
  EXPECT_EQ(response.results(2).code(), grpc::StatusCode::OK);
  EXPECT_EQ(Rows().at(0).outcomes.size(), 2u);
  for (int i = 0; i < 1001; ++i) *request.add_outcomes() = Outcome("r-1", "right", 1);
  EXPECT_THAT(FieldsIn(Ask(&v1::ExperimentService::Stub::BatchRecordOutcomes, request, &response)),
              ElementsAre("outcomes"));
  request.clear_outcomes();
  EXPECT_EQ(Ask(&v1::ExperimentService::Stub::BatchRecordOutcomes, request, &response).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(ExperimentServiceTest, WhatRanRunsAfterARestart) {
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  const std::string arm = Generate("r-1", "u");
  server_.reset();
  Start();
  EXPECT_EQ(Generate("r-2", "u"), arm);
  EXPECT_TRUE(Record(Outcome("r-1", "right", 1)).ok());
  EXPECT_EQ(Rows().size(), 2u);
}

TEST_F(ExperimentServiceTest, AReportIsOfWhatHasBeenFound) {
  v1::GetExperimentReportRequest request;
  request.set_name("lean");
  v1::ExperimentReport report;
  auto ask = [&] {
    return Ask(&v1::ExperimentService::Stub::GetExperimentReport, request, &report);
  };
  EXPECT_EQ(ask().error_code(), grpc::StatusCode::NOT_FOUND);
  ASSERT_TRUE(Create(Lean()).ok());
  EXPECT_EQ(ReasonIn(ask()), "EXPERIMENT_STATE");
  ASSERT_TRUE(Begin("lean").ok());
  for (int i = 0; i < 8; ++i) {
    const std::string id = absl::StrCat("r-", i);
    Generate(id, absl::StrCat("u", i % 4));
    ASSERT_TRUE(Record(Outcome(id, "right", i % 2)).ok());
  }
  ASSERT_TRUE(ask().ok());
  EXPECT_EQ(report.arms(0).requests() + report.arms(1).requests(), 8u);
  EXPECT_EQ(report.arms(0).units() + report.arms(1).units(), 4u);
  EXPECT_EQ(report.metrics(0).metric().name(), "right");
  request.set_points(201);
  EXPECT_THAT(FieldsIn(ask()), ElementsAre("points"));
}

TEST_F(ExperimentServiceTest, ABreachedGuardrailStopsIt) {
  v1::Experiment experiment = Lean();
  experiment.mutable_arms(0)->set_control(false);
  experiment.mutable_arms(1)->set_control(true);  // `full` then holds more than the control
  v1::Guardrail& guardrail = *experiment.add_guardrails();
  guardrail.set_metric("kv_peak_tokens");
  guardrail.set_margin(1);
  ASSERT_TRUE(Create(experiment).ok());
  ASSERT_TRUE(Begin("lean").ok());
  const absl::Time give_up = absl::Now() + kGenerous;
  for (int i = 0; absl::Now() < give_up; ++i) {
    // Values that are all the same say nothing of how they vary.
    const uint32_t output = 40 + static_cast<uint32_t>(i % 9);
    if (Generate(absl::StrCat("r-", i), absl::StrCat("u", i), output) == "none") break;
  }
  ASSERT_TRUE(Get("lean").ok());
  EXPECT_EQ(experiment_.state(), v1::Experiment::STATE_STOPPED);
  EXPECT_EQ(experiment_.stop_reason(), "guardrail/kv_peak_tokens/full");
  EXPECT_THAT(Page(), HasSubstr("epikv_experiment_guardrail_breaches_total{experiment=\"lean\","
                                "arm=\"full\",guardrail=\"kv_peak_tokens\"} 1"));
}

TEST_F(ExperimentServiceTest, ItIsOverAtItsEnd) {
  v1::Experiment experiment = Lean();
  const absl::Time end = absl::Now() + absl::Milliseconds(500);
  experiment.mutable_end_time()->set_seconds(absl::ToUnixSeconds(end));
  experiment.mutable_end_time()->set_nanos(
      static_cast<int32_t>(absl::ToUnixNanos(end) % 1000000000));
  ASSERT_TRUE(Create(experiment).ok());
  ASSERT_TRUE(Begin("lean").ok());
  const absl::Time give_up = absl::Now() + kGenerous;
  for (int i = 0; absl::Now() < give_up; ++i) {
    if (Generate(absl::StrCat("r-", i), "u") == "none") break;
  }
  ASSERT_TRUE(Get("lean").ok());
  EXPECT_EQ(experiment_.stop_reason(), "end_time");
}

// While another program has the store's write lock, one call is under way, and others of its client
// wait behind it: a few. Of those whose client has gone nothing is done.
TEST_F(ExperimentServiceTest, CallsWaitInABoundedQueueAndGoWithTheirClients) {
  constexpr int kCalls = 24, kWait = 16;
  struct Call {
    grpc::ClientContext context;
    v1::CreateExperimentRequest request;
    v1::Experiment response;
    grpc::Status status;
    absl::Notification done;
  };
  std::vector<Call> calls(kCalls);
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open(folder_.File("store.db").c_str(), &other), SQLITE_OK);
  sqlite3_busy_timeout(other, 10'000);
  ASSERT_EQ(sqlite3_exec(other, "BEGIN EXCLUSIVE", nullptr, nullptr, nullptr), SQLITE_OK);
  for (int i = 0; i < kCalls; ++i) {
    Call& call = calls[i];
    *call.request.mutable_experiment() = Lean();
    call.request.mutable_experiment()->set_name(absl::StrCat("lean-", i));
    stub_->async()->CreateExperiment(&call.context, &call.request, &call.response,
                                     [&call](grpc::Status status) {
                                       call.status = std::move(status);
                                       call.done.Notify();
                                     });
  }
  const auto ended = [&calls] {
    return std::count_if(calls.begin(), calls.end(),
                         [](const Call& call) { return call.done.HasBeenNotified(); });
  };
  // All came before the first was begun, or not; and gRPC's threads may both have found room for
  // one.
  while (ended() < kCalls - kWait - 2) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(200));
  const auto refused = static_cast<int>(ended());
  EXPECT_LE(refused, kCalls - kWait);
  std::vector<Call*> gone;
  for (Call& call : calls) {
    if (call.done.HasBeenNotified()) {
      EXPECT_EQ(call.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_THAT(call.status.error_message(), HasSubstr("the queue is full: 16"));
    } else if (gone.size() < kWait / 2) {
      gone.push_back(&call);
      call.context.TryCancel();
    }
  }
  for (Call* call : gone) call->done.WaitForNotification();
  absl::SleepFor(absl::Milliseconds(200));  // the server hears of it later
  sqlite3_close(other);
  for (Call& call : calls) call.done.WaitForNotification();
  int done = 0;
  for (const Call& call : calls) done += call.status.ok();
  EXPECT_EQ(done, kCalls - refused - static_cast<int>(gone.size()));
  // One of them may have been under way.
  int kept = 0;
  for (const Call* call : gone) kept += Get(call->request.experiment().name()).ok();
  EXPECT_LE(kept, 1);
}

TEST_F(ExperimentServiceTest, APlanSaysHowManyUnitsItTakes) {
  v1::PlanExperimentRequest request;
  request.set_kind(v1::Metric::KIND_PROPORTION);
  request.set_rate(0.1);
  request.set_effect(0.03);
  v1::ExperimentPlan plan;
  auto ask = [&] { return Ask(&v1::ExperimentService::Stub::PlanExperiment, request, &plan); };
  ASSERT_TRUE(ask().ok());
  EXPECT_NEAR(static_cast<double>(plan.units()), 6186, 100);
  EXPECT_GE(plan.power(), 0.8);
  EXPECT_NEAR(plan.effect_up(), 0.03, 0.001);
  EXPECT_GT(plan.sample_ratio_units(), 100000u);
  request.set_units(plan.units());
  ASSERT_TRUE(ask().ok());
  EXPECT_NEAR(plan.effect_up(), 0.03, 0.001);
  request.set_power(2);
  EXPECT_THAT(FieldsIn(ask()), ElementsAre("plan"));
  request.set_power(0);
  request.clear_aim();
  EXPECT_THAT(FieldsIn(ask()), ElementsAre("plan"));
  request.set_units(std::numeric_limits<uint64_t>::max());
  EXPECT_THAT(FieldsIn(ask()), ElementsAre("plan"));
}

TEST_F(ExperimentServiceTest, APlanOfPairsSharesAlphaAmongTheirMetrics) {
  v1::PlanExperimentRequest request;
  request.set_kind(v1::Metric::KIND_MEAN);
  request.set_sd(1);
  request.set_effect(.1);
  request.set_pairs(true);
  v1::ExperimentPlan plan;
  auto ask = [&] { return Ask(&v1::ExperimentService::Stub::PlanExperiment, request, &plan); };
  ASSERT_TRUE(ask().ok());
  const Design design = {.alpha = .025, .paired = true};
  EXPECT_EQ(plan.units(), static_cast<uint64_t>(PlanUnits({.sd = 1}, .1, design)->units));
  EXPECT_EQ(plan.tau(), 0) << "no metric has it";
  EXPECT_EQ(plan.sample_ratio_units(), 0u);
  request.set_arms(3);
  EXPECT_THAT(FieldsIn(ask()), ElementsAre("plan"));
  request.set_arms(0);
  request.set_covariate_r2(.5);
  EXPECT_THAT(FieldsIn(ask()), ElementsAre("plan"));
}

TEST_F(ExperimentServiceTest, WithoutReplaysThereAreNoPairs) {
  v1::Experiment experiment = Lean();
  experiment.mutable_pairs()->set_permille(10);
  EXPECT_THAT(FieldsIn(Create(experiment)), ElementsAre("experiment.pairs"));
}

TEST_F(ExperimentServiceTest, SeriesTellWhoTakesPart) {
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  const std::string arm = Generate("r-1", "u").substr(5);
  Record(Outcome("r-1", "score", 7.5));
  Record(Outcome("r-2", "right", 1));
  const auto values = SeriesOf(Page());
  EXPECT_EQ(values.at(absl::StrCat("epikv_experiment_assignments_total{experiment=\"lean\",arm=\"",
                                   arm, "\",source=\"hash\"}")),
            1);
  EXPECT_EQ(values.at(absl::StrCat("epikv_experiment_exposures_total{experiment=\"lean\",arm=\"",
                                   arm, "\"}")),
            1);
  EXPECT_EQ(values.at("epikv_outcomes_orphaned_total{reason=\"unknown_request\"}"), 1);
  const std::string of = absl::StrCat("{experiment=\"lean\",arm=\"", arm, "\",metric=\"score\"}");
  EXPECT_EQ(values.at("epikv_experiment_outcomes_total" + of), 1);
  EXPECT_EQ(values.at("epikv_experiment_outcome_value_sum" + of), 7.5);
  EXPECT_EQ(values.at("epikv_experiments_running"), 1);
}

TEST_F(ExperimentServiceTest, SeriesGoAWhileAfterTheirExperiment) {
  Start(/*series_outlive=*/absl::Seconds(1));
  ASSERT_TRUE(Create(Lean()).ok());
  ASSERT_TRUE(Begin("lean").ok());
  const std::string arm = Generate("r-1", "u");
  const std::string series = "epikv_experiment_srm_p_value", labels = "arm=\"" + arm + "\"";
  ASSERT_TRUE(Stop("lean").ok());
  EXPECT_THAT(Page(), AllOf(HasSubstr(series), HasSubstr(labels)));
  const absl::Time give_up = absl::Now() + kGenerous;
  while (absl::StrContains(Page(), series) || absl::StrContains(Page(), labels)) {
    ASSERT_LT(absl::Now(), give_up);
    absl::SleepFor(absl::Milliseconds(10));
  }
}

TEST(ExperimentServiceOffTest, SaysHowToSwitchItOn) {
  FakeServer server;
  v1::ExperimentService::Stub stub(server.Connect());
  grpc::ClientContext context;
  v1::ListExperimentsResponse all;
  const grpc::Status status = stub.ListExperiments(&context, {}, &all);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(status), "EXPERIMENTS_OFF");
  EXPECT_THAT(status.error_message(), HasSubstr("--experiment_store"));
}

}  // namespace experiment_service_test
}  // namespace epikv
