#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/participation.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"
#include "tests/fixtures/temporary_folder.h"

// What experiments do to requests, and what they are told of them.

namespace epikv {
namespace experiment_requests_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Keeps what it is told. Thread-safe.
class FakeExperiments final : public Participation {
 public:
  absl::StatusOr<Assignment> Assign(const Subject& subject) override {
    return live.Assign(subject);
  }
  void OnExcluded(const std::vector<std::string>& experiments) override {
    absl::MutexLock lock(&mu_);
    excluded_.insert(excluded_.end(), experiments.begin(), experiments.end());
  }
  void OnBegan(v1::RequestBegan began) override {
    absl::MutexLock lock(&mu_);
    began_.push_back(std::move(began));
  }
  void OnEnded(v1::RequestEnded ended) override {
    absl::MutexLock lock(&mu_);
    ended_[ended.id()].push_back(std::move(ended));
  }

  std::vector<v1::RequestBegan> began() const {
    absl::MutexLock lock(&mu_);
    return began_;
  }
  std::vector<std::string> excluded() const {
    absl::MutexLock lock(&mu_);
    return excluded_;
  }
  // Of the one request that took part.
  v1::RequestEnded AwaitEnd() const {
    absl::MutexLock lock(&mu_);
    auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !ended_.empty(); };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&ended), kGenerous));
    EXPECT_EQ(began_.size(), 1u);
    EXPECT_EQ(ended_.size(), 1u);
    EXPECT_EQ(ended_.begin()->first, began_.front().id());
    EXPECT_EQ(ended_.begin()->second.size(), 1u) << "ended once";
    return ended_.begin()->second.front();
  }

  LiveExperiments live;

 private:
  mutable absl::Mutex mu_;
  std::vector<std::string> excluded_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::RequestBegan> began_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, std::vector<v1::RequestEnded>> ended_ ABSL_GUARDED_BY(mu_);
};

class ExperimentRequestsTest : public ::testing::Test {
 protected:
  ExperimentRequestsTest() {
    v1::Experiment experiment;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
        R"pb(
          name: "lean"
          traffic_permille: 1000
          arms { name: "full" weight_permille: 500 control: true }
          arms {
            name: "window"
            weight_permille: 500
            kv { policy: "window" max_tokens: 24 }
          }
        )pb",
        &experiment));
    experiments_.live.Set({WithDefaults(std::move(experiment))});
  }
  v1::GenerationService::Stub& stub() {
    if (server_ == nullptr) {
      options_.participation = &experiments_;
      server_ = std::make_unique<FakeServer>(options_, script_);
      stub_ = v1::GenerationService::NewStub(server_->Connect());
    }
    return *stub_;
  }
  static v1::GenerateRequest Asked(uint32_t prompt, uint32_t output, const std::string& arm) {
    v1::GenerateRequest request;
    for (uint32_t i = 0; i < prompt; ++i) request.mutable_token_ids()->add_ids(1);
    request.mutable_stop()->set_max_output_tokens(output);
    request.mutable_experiment()->set_force_arm(arm);
    return request;
  }
  grpc::Status Once(const v1::GenerateRequest& request, const std::string& token = "") {
    grpc::ClientContext context;
    if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
    return stub().GenerateOnce(&context, request, &result_);
  }

  FakeExperiments experiments_;
  FakeServerOptions options_;
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  v1::GenerateResult result_;
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
};

TEST_F(ExperimentRequestsTest, AnArmReplacesWhatWasAskedForAndSaysSo) {
  v1::GenerateRequest request = Asked(10, 50, "lean/window");
  request.set_request_id("r-1");
  request.mutable_experiment()->set_unit_id("user-1");
  request.mutable_experiment()->set_covariate(0.5);
  ASSERT_TRUE(Once(request).ok());
  EXPECT_EQ(result_.accepted().arm(), "lean/window");
  EXPECT_EQ(result_.accepted().kv().policy(), "window");
  EXPECT_EQ(result_.accepted().kv().budget_tokens(), 24u);
  EXPECT_EQ(result_.summary().arm(), "lean/window");
  const v1::RequestEnded ended = experiments_.AwaitEnd();
  EXPECT_EQ(ended.code(), "OK");
  EXPECT_EQ(ended.finish_reason(), "length");
  EXPECT_EQ(ended.output_tokens(), 50u);
  EXPECT_EQ(ended.kv_peak_tokens(), 25u);
  EXPECT_EQ(ended.kv_evicted_tokens(), result_.summary().kv().evicted_tokens());
  EXPECT_GT(ended.kv_evicted_tokens(), 0u);
  EXPECT_TRUE(ended.has_ttft_seconds());
  EXPECT_TRUE(ended.has_time_per_output_token_seconds());
  const v1::RequestBegan began = experiments_.began().front();
  EXPECT_EQ(began.request_id(), "r-1");
  EXPECT_NE(began.id(), "r-1") << "clients may use an id again";
  EXPECT_FALSE(began.unit_is_request());
  EXPECT_EQ(began.covariate(), 0.5);
  EXPECT_EQ(began.prompt_tokens(), 10u);
  EXPECT_EQ(began.max_output_tokens(), 50u);
  ASSERT_EQ(began.parts_size(), 1);
  EXPECT_EQ(began.parts(0).arm(), "window");
  EXPECT_TRUE(began.parts(0).forced());
  EXPECT_TRUE(began.parts(0).exposed());
}

TEST_F(ExperimentRequestsTest, EveryRequestTakesPartByItsUnit) {
  std::map<std::string, int> arms;
  for (int i = 0; i < 64; ++i) {
    v1::GenerateRequest request = Asked(2, 3, "");
    request.mutable_experiment()->set_unit_id("user-" + std::to_string(i % 8));
    ASSERT_TRUE(Once(request).ok());
    ++arms[result_.accepted().arm()];
  }
  EXPECT_EQ(arms.size(), 2u);
  EXPECT_EQ(arms["lean/full"] + arms["lean/window"], 64);
  EXPECT_EQ(arms["lean/full"] % 8, 0) << "a unit keeps its arm";
  EXPECT_EQ(experiments_.began().size(), 64u);
}

TEST_F(ExperimentRequestsTest, ARequestWithoutAUnitIsItsOwn) {
  v1::GenerateRequest request = Asked(2, 3, "");
  request.clear_experiment();
  ASSERT_TRUE(Once(request).ok());
  EXPECT_TRUE(experiments_.began().front().unit_is_request());
  EXPECT_FALSE(experiments_.began().front().parts(0).exposed()) << "5 tokens never pass 24";
}

TEST_F(ExperimentRequestsTest, OptingOutIsCountedOnceItIsTakenAndLeavesNoOtherTrace) {
  v1::GenerateRequest request = Asked(10, 50, "");
  request.mutable_experiment()->set_opt_out(true);
  request.mutable_sampling()->set_temperature(-1);
  EXPECT_FALSE(Once(request).ok());
  EXPECT_THAT(experiments_.excluded(), IsEmpty());
  request.clear_sampling();
  ASSERT_TRUE(Once(request).ok());
  EXPECT_EQ(result_.accepted().arm(), "none");
  EXPECT_EQ(result_.accepted().kv().policy(), "full");
  EXPECT_TRUE(experiments_.began().empty());
  EXPECT_THAT(experiments_.excluded(), ElementsAre("lean"));
}

// A lean arm may refuse what the other takes: that is an outcome.
TEST_F(ExperimentRequestsTest, WhatAnArmRefusesIsAnEnd) {
  v1::Experiment experiment = experiments_.live.running()->front();
  experiment.mutable_arms(1)->mutable_kv()->set_policy("full");
  experiments_.live.Set({experiment});
  const grpc::Status status = Once(Asked(30, 40, "lean/window"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const v1::RequestEnded ended = experiments_.AwaitEnd();
  EXPECT_EQ(ended.code(), "INVALID_ARGUMENT");
  EXPECT_EQ(ended.reason(), "KV_BUDGET");
  EXPECT_FALSE(ended.has_kv_peak_tokens());
}

// The model has no vector, or has lost it since the arm was judged.
TEST_F(ExperimentRequestsTest, SteeringThatIsRefusedIsAnEndOfTheArmThatSetIt) {
  v1::GenerateRequest request = Asked(10, 20, "lean/full");
  request.mutable_sampling()->mutable_steering();
  EXPECT_EQ(Once(request).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(experiments_.began().empty()) << "who asked for it himself is refused in any arm";

  v1::Experiment experiment = experiments_.live.running()->front();
  experiment.mutable_arms(1)->mutable_steering();
  experiments_.live.Set({experiment});
  EXPECT_EQ(Once(Asked(10, 20, "lean/window")).error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(experiments_.AwaitEnd().reason(), "ARTEFACT_MISSING");
}

// In the arm that replaces it, it is no fault: who is counted must not depend on the arm.
TEST_F(ExperimentRequestsTest, SteeringThatAnArmWouldReplaceIsAnEndInEachArm) {
  v1::Experiment experiment = experiments_.live.running()->front();
  experiment.mutable_arms(1)->mutable_steering();
  experiments_.live.Set({experiment});
  v1::GenerateRequest request = Asked(10, 20, "lean/full");
  request.mutable_sampling()->mutable_steering()->set_coefficient(101);
  EXPECT_EQ(Once(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(experiments_.AwaitEnd().code(), "INVALID_ARGUMENT");
}

TEST_F(ExperimentRequestsTest, WhatIsRefusedWhateverItsArmTakesNoPart) {
  v1::GenerateRequest request = Asked(10, 50, "lean/window");
  request.mutable_sampling()->set_temperature(-1);
  EXPECT_EQ(Once(request).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_TRUE(experiments_.began().empty());
}

TEST_F(ExperimentRequestsTest, ACancelIsAnEnd) {
  // It goes on for seconds: the server hears of a cancel later than the client has made it.
  script_->on_forward = [](absl::Span<const WorkItem>) {
    absl::SleepFor(absl::Milliseconds(10));
    return absl::OkStatus();
  };
  StreamClient client(stub(), Asked(10, 1000, "lean/full"));
  client.AwaitMessages(1);
  client.Cancel();
  EXPECT_FALSE(client.AwaitDone().ok());
  EXPECT_EQ(experiments_.AwaitEnd().code(), "CANCELLED");
}

TEST_F(ExperimentRequestsTest, AnUnknownArmIsAFault) {
  const grpc::Status status = Once(Asked(10, 5, "lean/none"));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("experiment.force_arm"));
  EXPECT_TRUE(experiments_.began().empty());
}

TEST_F(ExperimentRequestsTest, ForcingAnArmNeedsTheRole) {
  const TemporaryFolder folder;
  // Digests of "one" and "two".
  options_.auth.tokens_file = folder.Write(
      "tokens",
      "user ann 7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed\n"
      "experimenter eve 3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3\n");
  const grpc::Status refused = Once(Asked(10, 5, "lean/full"), "one");
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_TRUE(experiments_.began().empty());
  EXPECT_TRUE(Once(Asked(10, 5, "lean/full"), "two").ok());
  EXPECT_EQ(experiments_.began().front().tenant(), "eve");
}

TEST_F(ExperimentRequestsTest, AScoreTakesNoPart) {
  v1::ScoreRequest request;
  request.mutable_token_ids()->add_ids(1);
  request.mutable_continuation_ids()->add_ids(2);
  v1::ScoreResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub().Score(&context, request, &response).ok());
  EXPECT_EQ(response.accepted().arm(), "none");
  EXPECT_TRUE(experiments_.began().empty());
}

}  // namespace experiment_requests_test
}  // namespace epikv
