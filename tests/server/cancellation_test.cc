// Clients that leave, in every state of a request and in every way: whatever they do, the ledger is
// whole afterwards and the next request runs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"
#include "tests/fixtures/tcp_relay.h"

namespace epikv {
namespace cancellation_test {

enum class State { kQueued, kPrefilling, kDecoding, kEvicting, kOutboxFull, kDraining };
enum class Way { kCancel, kDisconnect, kDeadline };

constexpr const char* kStateNames[] = {"queued",   "prefilling",  "decoding",
                                       "evicting", "outbox_full", "draining"};
constexpr const char* kWayNames[] = {"cancel", "disconnect", "deadline"};

constexpr int kClients = 40, kRounds = 14;  // 10,080 in all, 1,680 in each state

// A server that is held while `kClients` requests are in the given state.
class Stage {
 public:
  explicit Stage(State state) : state_(state) {
    script_->next = [](int32_t token) { return token % 60 + 1; };  // never ends by itself
    script_->on_forward = [this](absl::Span<const WorkItem> items) {
      gathering_.Pass(state_ != State::kQueued);
      gate_.Pass(HoldsForward(items));
      return absl::OkStatus();
    };
    script_->on_settle = [this](const WorkItem& item) {
      gate_.Pass(state_ == State::kEvicting && item.decode && item.first > 40);
      return absl::OkStatus();
    };
    FakeServerOptions options{.kv_capacity_tokens = 100'000};
    options.engine.scheduler = {.max_step_tokens = 16 * kClients, .prefill_chunk_tokens = 16};
    options.engine.max_running_requests = state == State::kQueued ? 1 : 256;
    if (state == State::kOutboxFull) {
      options.word_bytes = 8192;
      options.outbox = {.max_messages = 4, .max_bytes = 16384};
    }
    server_ = std::make_unique<FakeServer>(std::move(options), script_);
  }

  // What a client asks for.
  static v1::GenerateRequest Request() {
    v1::GenerateRequest request;
    for (int i = 0; i < 40; ++i) request.mutable_token_ids()->add_ids(1);
    request.mutable_stop()->set_max_output_tokens(1000);
    request.mutable_kv()->set_policy("window");
    request.mutable_kv()->set_max_tokens(32);
    return request;
  }

  // Before the clients.
  void Prepare() {
    if (state_ != State::kQueued) return;
    auto stub = v1::GenerationService::NewStub(server_->Connect());
    blocker_ = std::make_unique<StreamClient>(*stub, Request());
    ASSERT_TRUE(gate_.AwaitHeld());
  }
  // Once the clients' requests are queued: until they are in the state. False: they are not, in
  // this time.
  bool Await(absl::Duration timeout) {
    gathering_.Open();
    if (state_ == State::kQueued) return true;  // they are Accepted, and the engine is held
    if (state_ == State::kOutboxFull) {
      return server_->observer().AwaitStep(
          [](const StepStats& step) { return step.sequences == 0 && step.running == kClients; },
          timeout);
    }
    if (!gate_.AwaitHeld(timeout)) return false;
    if (state_ == State::kDraining) server_->engine().StartDraining();
    return true;
  }
  // After the clients have left.
  void LetGo() {
    gate_.Open();
    if (blocker_ != nullptr) {
      blocker_->Cancel();
      blocker_->AwaitDone();
    }
  }

  State state() const { return state_; }
  FakeServer& server() { return *server_; }

 private:
  bool HoldsForward(absl::Span<const WorkItem> items) const {
    switch (state_) {
      case State::kQueued:
        return true;
      case State::kPrefilling:
        return items.size() == kClients && !items[0].decode && items.back().first > 0;
      case State::kDecoding:
      case State::kDraining:
        return items.size() == kClients && items[0].decode && items[0].first > 40;
      case State::kEvicting:
      case State::kOutboxFull:
        return false;
    }
    return false;
  }

  const State state_;
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  Gate gathering_;  // open once all have come, so that they go on in step
  Gate gate_;
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<StreamClient> blocker_;
};

class CancellationTest : public ::testing::TestWithParam<std::tuple<State, Way>> {
 protected:
  // One batch of clients. False: their deadline came before the state.
  bool RunBatch(absl::Duration deadline) {
    const auto [state, way] = GetParam();
    Stage stage(state);
    stage.Prepare();
    TcpRelay relay(stage.server().server().port());
    const auto stub = v1::GenerationService::NewStub(way == Way::kDisconnect
                                                         ? FakeServer::ConnectTo(relay.address())
                                                         : stage.server().Connect());
    std::vector<std::unique_ptr<StreamClient>> clients;
    for (int i = 0; i < kClients; ++i) {
      // A client with a full outbox does not read on; the others do.
      const auto reads = state == State::kOutboxFull ? std::optional<int64_t>(1) : std::nullopt;
      clients.push_back(std::make_unique<StreamClient>(*stub, Stage::Request(), reads, deadline));
    }
    for (auto& client : clients) client->AwaitMessages(1);
    const bool reached = stage.Await(way == Way::kDeadline ? deadline : kGenerous);
    if (way == Way::kCancel) {
      for (auto& client : clients) client->Cancel();
    }
    if (way == Way::kDisconnect) relay.Cut();
    for (auto& client : clients) CheckStatus(client->AwaitDone(), way);
    stage.LetGo();
    ExpectWhole(stage);
    return reached;
  }

  static void CheckStatus(const grpc::Status& status, Way way) {
    const grpc::StatusCode expected = way == Way::kCancel       ? grpc::CANCELLED
                                      : way == Way::kDisconnect ? grpc::UNAVAILABLE
                                                                : grpc::DEADLINE_EXCEEDED;
    EXPECT_EQ(std::string(CodeName(status.error_code())), CodeName(expected))
        << status.error_message();
  }

  // Nothing is held, and the next request runs.
  static void ExpectWhole(Stage& stage) {
    ASSERT_TRUE(stage.server().AwaitEmpty());
    EXPECT_EQ(stage.server().script().open_sequences, 0);
    EXPECT_EQ(stage.server().script().used_bytes, 0);
    if (stage.state() == State::kDraining) return;
    v1::GenerateRequest request = Stage::Request();
    request.mutable_stop()->set_max_output_tokens(20);
    grpc::ClientContext context;
    v1::GenerateResult result;
    const auto stub = v1::GenerationService::NewStub(stage.server().Connect());
    EXPECT_TRUE(stub->GenerateOnce(&context, request, &result).ok());
    EXPECT_EQ(result.summary().usage().output_tokens(), 20u);
  }
};

TEST_P(CancellationTest, LeavesTheLedgerWhole) {
  absl::Duration deadline = std::get<1>(GetParam()) == Way::kDeadline ? absl::Milliseconds(200)
                                                                      : absl::InfiniteDuration();
  for (int reached = 0; reached < kRounds;) {
    if (RunBatch(deadline)) {
      ++reached;
    } else {
      ASSERT_LT(deadline, kGenerous) << "the state is never reached";
      deadline *= 2;  // a busy machine
    }
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CancellationTest,
    ::testing::Combine(::testing::Values(State::kQueued, State::kPrefilling, State::kDecoding,
                                         State::kEvicting, State::kOutboxFull, State::kDraining),
                       ::testing::Values(Way::kCancel, Way::kDisconnect, Way::kDeadline)),
    [](const auto& info) {
      return absl::StrCat(kStateNames[static_cast<int>(std::get<0>(info.param))], "_",
                          kWayNames[static_cast<int>(std::get<1>(info.param))]);
    });

// Cancels that race with the request's own end, which no gate can stage.
TEST(CancellationRaceTest, CancelMayMeetTheEnd) {
  FakeServer server;
  const auto stub = v1::GenerationService::NewStub(server.Connect());
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  request.mutable_stop()->set_max_output_tokens(3);
  for (int i = 0; i < 300; ++i) {
    StreamClient client(*stub, request);
    client.AwaitMessages(i % 4);
    client.Cancel();
    const grpc::Status status = client.AwaitDone();
    EXPECT_TRUE(status.ok() || status.error_code() == grpc::CANCELLED);
  }
  EXPECT_TRUE(server.AwaitEmpty());
}

}  // namespace cancellation_test
}  // namespace epikv
