#include "server/models/models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "epikv/v1/generation.grpc.pb.h"
#include "epikv/v1/model.grpc.pb.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace models_test {

using ::testing::HasSubstr;

v1::GenerateRequest Ask(const std::string& model, uint32_t tokens) {
  v1::GenerateRequest request;
  request.set_model(model);
  request.mutable_token_ids()->add_ids(1);
  request.mutable_stop()->set_max_output_tokens(tokens);
  request.mutable_output()->set_token_ids(true);
  return request;
}

class ModelsTest : public ::testing::Test {
 protected:
  static FakeServerOptions Named(const std::string& name) {
    FakeServerOptions options;
    options.manifest.name = name;
    return options;
  }
  // Of a stream that has ended.
  static grpc::Status Run(v1::GenerationService::Stub& stub, const std::string& model) {
    StreamClient client(stub, Ask(model, 3));
    return client.AwaitDone();
  }

  FakeServer server_{Named("a")};
  const std::unique_ptr<v1::GenerationService::Stub> stub_ =
      v1::GenerationService::NewStub(server_.Connect());
};

TEST_F(ModelsTest, RequestsNameTheirModel) {
  EXPECT_TRUE(Run(*stub_, "").ok()) << "the only one";
  server_.models().Put(server_.Make(Named("b")));
  EXPECT_TRUE(Run(*stub_, "a").ok());
  EXPECT_TRUE(Run(*stub_, "b").ok());
  const grpc::Status unnamed = Run(*stub_, "");
  EXPECT_EQ(unnamed.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(unnamed.error_message(), HasSubstr("'a', 'b'"));
  const grpc::Status unknown = Run(*stub_, "c");
  EXPECT_EQ(unknown.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(unknown.error_message(), HasSubstr("'a', 'b'"));
}

TEST_F(ModelsTest, WhileTheFirstIsLoadedClientsMayTryAgain) {
  server_.models().Remove("a", absl::InfinitePast());
  server_.lifecycle().SetState(ServerState::kStarting);
  const grpc::Status status = Run(*stub_, "a");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonIn(status), "STARTING");
}

TEST_F(ModelsTest, ASwapDropsNoStream) {
  Gate gate;
  server_.script().on_forward = [&gate](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].first >= 5);
    return absl::OkStatus();
  };
  StreamClient old(*stub_, Ask("a", 50));
  ASSERT_TRUE(gate.AwaitHeld());
  server_.models().Put(server_.Make(Named("a")));
  EXPECT_EQ(server_.models().Live().size(), 2u);
  gate.Open();
  EXPECT_TRUE(Run(*stub_, "a").ok()) << "by the new one";
  EXPECT_TRUE(old.AwaitDone().ok());
  EXPECT_EQ(old.token_ids().size(), 50u);
}

// Clients come all the time while a model is swapped again and again: none is refused.
TEST_F(ModelsTest, NoRequestFallsBetweenTwoVersions) {
  std::atomic<bool> swapping{true};
  std::thread swaps([&] {
    for (int i = 0; i < 50; ++i) server_.models().Put(server_.Make(Named("a")));
    swapping = false;
  });
  int64_t served = 0;
  while (swapping) {
    const grpc::Status status = Run(*stub_, "a");
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (!status.ok()) break;
    ++served;
  }
  swaps.join();
  EXPECT_GT(served, 0);
}

TEST_F(ModelsTest, AnUnloadedModelEndsWhatItHasUntilTheDeadline) {
  Gate gate;
  server_.script().on_forward = [&gate](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].first >= 5);
    absl::SleepFor(absl::Milliseconds(1));  // it would take seconds to end by itself
    return absl::OkStatus();
  };
  StreamClient stream(*stub_, Ask("a", 4000));
  ASSERT_TRUE(gate.AwaitHeld());
  EXPECT_TRUE(server_.models().Remove("a", absl::Now()));
  EXPECT_FALSE(server_.models().Remove("a", absl::Now()));
  EXPECT_EQ(Run(*stub_, "a").error_code(), grpc::StatusCode::NOT_FOUND);
  gate.Open();
  EXPECT_EQ(stream.AwaitDone().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ModelsTest, AfterADrainResumeTakesRequestsAgain) {
  server_.models().StartDraining();
  EXPECT_EQ(Run(*stub_, "a").error_code(), grpc::StatusCode::UNAVAILABLE);
  server_.models().Put(server_.Make(Named("b")));
  EXPECT_EQ(Run(*stub_, "b").error_code(), grpc::StatusCode::UNAVAILABLE);
  server_.models().Resume();
  EXPECT_TRUE(Run(*stub_, "a").ok());
  EXPECT_TRUE(Run(*stub_, "b").ok());
}

}  // namespace models_test
}  // namespace epikv
