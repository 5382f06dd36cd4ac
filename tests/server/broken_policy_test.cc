// A policy that breaks its contract, in the whole daemon: real services over a real engine and
// model. Its request fails with a clear error, and a neighbour in the same batch notices nothing.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "policies/registry.h"
#include "runtime/base/reason.h"
#include "runtime/runtime.h"
#include "server/base/errors.h"
#include "server/metrics/metrics_server.h"
#include "tests/fixtures/broken_policy.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/scrape.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace broken_policy_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const PolicySpec& Sliding() { return *FindPolicy(AllPolicies(), "sliding"); }

PolicyCatalog Catalog() {
  static const PolicySpec* const catalog[] = {&kBrokenPolicy, &Sliding()};
  return catalog;
}

// What main.cc composes, with a catalog of the test's.
class RealServer {
 public:
  RealServer() {
    auto loaded = LoadModel({.model_path = EPIKV_TEST_MODELS "/gqa.pt",
                             .threads = 1,
                             .kv_pool_bytes = 8 << 20,
                             .deterministic = true});
    if (!loaded.ok()) throw std::runtime_error(loaded.status().ToString());
    loaded->policies = Catalog();
    models_.Put(*MakeServedModel(*std::move(loaded), {},
                                 {.scheduler = {.fixed_chunk_tokens = 16}, .deterministic = true},
                                 absl::ZeroDuration(), cores_, metrics_));
    lifecycle_.SetState(ServerState::kServing);
    server_ = *Server::Start({}, models_, lifecycle_, courier_, frontend_);
    page_ = *MetricsServer::Start("127.0.0.1:0");
    page_->Serve(metrics_);
    stub_ = v1::GenerationService::NewStub(
        FakeServer::ConnectTo(absl::StrCat("127.0.0.1:", server_->port())));
  }
  ~RealServer() {
    models_.Drain(absl::InfinitePast());
    server_->AwaitStreams(absl::Now() + kGenerous);
    server_->Close();
  }

  v1::GenerationService::Stub& stub() { return *stub_; }
  // Requests that the policy failed: in this way, and as other series count them.
  double PolicyErrors(absl::string_view kind) {
    return Read("epikv_policy_errors_total",
                absl::StrCat(R"(kind=")", kind, R"(",policy="broken")"));
  }
  std::vector<double> Errors() {
    return {Read("epikv_policy_errors_total", R"(policy="broken")"),
            Read("epikv_requests_finished_total", R"(reason="error")"),
            Read("gen_ai_server_request_duration_seconds_count", R"(error_type="error")"),
            Read("epikv_grpc_requests_total", R"(code="INTERNAL")")};
  }
  // Steps that several sequences shared.
  double SharedSteps() {
    return Read("epikv_step_batch_sequences_count", "") -
           Read("epikv_step_batch_sequences_bucket", R"(le="1")");
  }

 private:
  double Read(absl::string_view name, absl::string_view label) {
    double sum = 0;
    for (const auto& [series, value] : SeriesOf(Scrape(page_->port()))) {
      if (absl::StartsWith(series, name) && absl::StrContains(series, label)) sum += value;
    }
    return sum;
  }

  Metrics metrics_{{.policies = Catalog()}};
  const std::unique_ptr<Authenticator> auth_ = *Authenticator::Create({});
  const std::unique_ptr<AccessLog> access_log_ = *AccessLog::Open("", [](int64_t) {});
  Traffic traffic_;
  TaskThread long_requests_;
  ClientBytes answers_{kMostClientBytes};
  const std::shared_ptr<Connections> connections_ =
      std::make_shared<Connections>(ConnectionLimits());
  const Frontend frontend_{.auth = *auth_,
                           .metrics = metrics_,
                           .access_log = *access_log_,
                           .traffic = traffic_,
                           .long_requests = long_requests_,
                           .connections = *connections_,
                           .answers = answers_};
  CoreBudget cores_{1};
  Courier courier_{absl::Seconds(5)};
  Lifecycle lifecycle_;
  Models models_{lifecycle_};
  std::unique_ptr<Server> server_;
  std::unique_ptr<MetricsServer> page_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
};

// A fault, what the client is told of it, and how it is counted.
struct Fault {
  const char* name;
  const char* sentence;
  absl::string_view kind;
};

class BrokenPolicyTest : public ::testing::TestWithParam<Fault> {
 protected:
  static void SetUpTestSuite() { server_ = new RealServer; }
  static void TearDownTestSuite() { delete std::exchange(server_, nullptr); }

  static v1::GenerateRequest Ask(const std::string& policy, uint32_t tokens) {
    v1::GenerateRequest request;
    for (int32_t id = 1; id <= 20; ++id) request.mutable_token_ids()->add_ids(id);
    request.mutable_stop()->set_max_output_tokens(tokens);
    request.mutable_output()->set_token_ids(true);
    request.mutable_output()->set_logprobs(true);
    request.mutable_output()->set_kept(true);
    request.mutable_sampling()->set_temperature(1);
    request.mutable_sampling()->set_seed(3);
    request.mutable_kv()->set_policy(policy);
    request.mutable_kv()->set_max_tokens(40);
    return request;
  }

  // What a stream gave, however it was cut into messages.
  static std::string Given(StreamClient& client) {
    v1::GenerateResult given;
    for (const v1::GenerateResponse& message : client.AwaitMessages(0)) {
      given.set_text(absl::StrCat(given.text(), message.delta().text()));
      given.mutable_token_ids()->MergeFrom(message.delta().token_ids());
      given.mutable_logprobs()->MergeFrom(message.delta().logprobs());
      if (message.has_summary()) *given.mutable_summary() = message.summary();
    }
    given.mutable_summary()->clear_timings();
    given.mutable_summary()->mutable_usage()->clear_cached_prompt_tokens();
    return given.ShortDebugString();
  }

  static RealServer* server_;
};

RealServer* BrokenPolicyTest::server_ = nullptr;

TEST_P(BrokenPolicyTest, FailsItsRequestAlone) {
  const auto& [fault, sentence, kind] = GetParam();
  constexpr uint32_t kLong = 1000;  // most often the neighbour is still there when the other begins
  StreamClient undisturbed(server_->stub(), Ask("sliding", kLong));
  ASSERT_TRUE(undisturbed.AwaitDone().ok());
  v1::GenerateRequest request = Ask("broken", 200);
  (*request.mutable_kv()->mutable_policy_params()->mutable_fields())["fault"].set_string_value(
      fault);
  const bool opened = fault != std::string("throws_opening");

  // On a busy machine a neighbour may end before the other request arrives: then both are sent
  // again.
  bool shared = false;
  for (int attempt = 0; attempt == 0 || (opened && !shared && attempt < 20); ++attempt) {
    const double of_kind_before = server_->PolicyErrors(kind);
    std::vector<double> errors = server_->Errors();
    const double shared_before = server_->SharedSteps();
    StreamClient neighbour(server_->stub(), Ask("sliding", kLong));
    StreamClient broken(server_->stub(), request);
    const grpc::Status status = broken.AwaitDone();
    EXPECT_EQ(CodeName(status.error_code()), CodeName(grpc::INTERNAL)) << status.error_message();
    EXPECT_EQ(ReasonIn(status), "POLICY_FAILED");
    EXPECT_THAT(FieldsIn(status), IsEmpty());  // nothing was wrong with the request
    EXPECT_THAT(status.error_message(), HasSubstr(sentence));
    // Rounds begin when 41 tokens are cached; the third fails, after its token was delivered.
    EXPECT_THAT(broken.token_ids(), SizeIs(opened ? 40 - 20 + 1 + 3 : 0));

    EXPECT_TRUE(neighbour.AwaitDone().ok());
    shared = server_->SharedSteps() > shared_before;
    EXPECT_EQ(Given(neighbour), Given(undisturbed));
    EXPECT_EQ(server_->PolicyErrors(kind), of_kind_before + 1);
    for (double& count : errors) ++count;
    EXPECT_EQ(server_->Errors(), errors);
  }
  EXPECT_EQ(shared, opened);
}

INSTANTIATE_TEST_SUITE_P(
    All, BrokenPolicyTest,
    ::testing::ValuesIn(std::vector<Fault>{
        {"throws", "policy 'broken' failed: out of order", kPolicyThrew},
        {"throws_observing", "policy 'broken' failed: out of order", kPolicyThrew},
        {"nan", "is NaN", kPolicyStatus},
        {"protected", "the policy named the protected token 42", kPolicyInvalidSet},
        {"too_few", "the policy named 0 tokens to evict, but 1 must go", kPolicyInvalidSet},
        {"not_there", "the policy named a token twice, or a token that is not cached",
         kPolicyInvalidSet},
        {"twice", "the policy named a token twice, or a token that is not cached",
         kPolicyInvalidSet},
        {"too_many_lanes", "the policy answered for 2 lane groups, there are 1", kPolicyInvalidSet},
        {"throws_a_number", "policy 'broken' failed: it threw", kPolicyThrew},
        {"not_found", "policy 'broken' failed: no such thing", kPolicyStatus},
        {"throws_opening", "policy 'broken' failed: it threw", kPolicyThrew},
        {"no_answer", "the policy gave 0 answers, one was asked for", kPolicyInvalidSet}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace broken_policy_test
}  // namespace epikv
