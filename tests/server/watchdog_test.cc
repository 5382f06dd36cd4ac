// What is said of a daemon whose forward hangs.

#include "server/daemon/watchdog.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "epikv/v1/admin.grpc.pb.h"
#include "epikv/v1/generation.grpc.pb.h"
#include "server/probe/health_check.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace watchdog_test {

class WatchdogTest : public ::testing::Test {
 protected:
  WatchdogTest() {
    script_->on_forward = [this](absl::Span<const WorkItem>) {
      gate_.Pass(true);
      return absl::OkStatus();
    };
    server_.emplace(FakeServerOptions{}, script_);
    channel_ = server_->Connect();
    stub_ = v1::GenerationService::NewStub(channel_);
  }
  ~WatchdogTest() override { gate_.Open(); }  // before the server ends

  void Watch(absl::Duration limit) {
    watchdog_.emplace(WatchdogOptions{.limit = limit, .poll = absl::Milliseconds(5)},
                      server_->models(), server_->lifecycle(), log_);
  }
  static v1::GenerateRequest Request() {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(5);
    request.mutable_stop()->set_max_output_tokens(3);
    return request;
  }
  // Whether health comes to say so of this name.
  bool AwaitHealth(const std::string& name, bool serves) {
    for (const absl::Time end = absl::Now() + kGenerous; absl::Now() < end;) {
      const absl::Status status =
          CheckHealth({.listen = server_->address(), .tls = {}, .service = name});
      if (status.ok() == serves) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }

  Gate gate_;
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  const Log log_{LogLevel::kError};
  std::optional<FakeServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
  std::optional<Watchdog> watchdog_;
};

TEST_F(WatchdogTest, HealthTellsOfAStepThatHangsUntilItEnds) {
  Watch(absl::Milliseconds(50));
  EXPECT_TRUE(AwaitHealth("liveness", true));
  StreamClient hung(*stub_, Request());
  ASSERT_TRUE(gate_.AwaitHeld());
  for (const char* name : {"liveness", "", "models/fake"}) EXPECT_TRUE(AwaitHealth(name, false));
  gate_.Open();
  for (const char* name : {"liveness", "", "models/fake"}) EXPECT_TRUE(AwaitHealth(name, true));
  EXPECT_TRUE(hung.AwaitDone().ok());
}

TEST_F(WatchdogTest, AnIdleEngineDoesNotHang) {
  Watch(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_TRUE(AwaitHealth("liveness", true));
  EXPECT_EQ(server_->engine().StepAge(), absl::ZeroDuration());
}

TEST_F(WatchdogTest, OperatorsAreAnsweredWhileAStepHangs) {
  StreamClient hung(*stub_, Request());
  ASSERT_TRUE(gate_.AwaitHeld());
  v1::AdminService::Stub admin(server_->ConnectAdmin());
  grpc::ClientContext context, other;
  v1::ListActiveRequestsResponse requests;
  EXPECT_TRUE(admin.ListActiveRequests(&context, {}, &requests).ok());
  EXPECT_EQ(requests.requests_size(), 0);  // nobody can say
  v1::DumpStateResponse dump;
  EXPECT_TRUE(admin.DumpState(&other, {}, &dump).ok());
  gate_.Open();
  EXPECT_TRUE(hung.AwaitDone().ok());
}

TEST(EndByForceTest, EndsAProcessThatHangs) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  auto hang = [] {
    static const Log log;
    EndByForce(absl::Milliseconds(20), log);
    absl::SleepFor(kGenerous);
  };
  EXPECT_EXIT(hang(), ::testing::ExitedWithCode(1), "ended by force");
}

}  // namespace watchdog_test
}  // namespace epikv
