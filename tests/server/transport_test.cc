// Limits of the port, over real channels.

#include "server/port/transport.h"

#include <gmock/gmock.h>
#include <grpcpp/create_channel.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>

#include "epikv/v1/generation.grpc.pb.h"
#include "epikv/v1/model.grpc.pb.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace transport_test {

using ::testing::HasSubstr;

class TransportTest : public ::testing::Test {
 protected:
  void TearDown() override { gate_.Open(); }  // before the server ends

  // With these limits, and each decode step held back until the gate is open.
  void Start(const TransportLimits& limits) {
    script_->on_forward = [this](absl::Span<const WorkItem> items) {
      gate_.Pass(items[0].decode);
      return absl::OkStatus();
    };
    server_.emplace(FakeServerOptions{.transport = limits}, script_);
    channel_ = server_->Connect();
    stub_ = v1::GenerationService::NewStub(channel_);
  }
  static v1::GenerateRequest Request(int tokens) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(5);
    request.mutable_stop()->set_max_output_tokens(tokens);
    return request;
  }
  grpc::Status ListModels() {
    v1::ModelService::Stub models(channel_);
    grpc::ClientContext context;
    v1::ListModelsResponse response;
    return models.ListModels(&context, {}, &response);
  }
  // Until the server has told the client to leave this connection.
  bool AwaitGoAway() {
    return channel_->WaitForStateChange(GRPC_CHANNEL_READY,
                                        absl::ToChronoTime(absl::Now() + kGenerous));
  }

  Gate gate_;
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  std::optional<FakeServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
};

TEST_F(TransportTest, StreamsBeyondTheLimitWait) {
  Start({.max_concurrent_streams = 2});
  StreamClient first(*stub_, Request(3)), second(*stub_, Request(3));
  first.AwaitMessages(1);
  second.AwaitMessages(1);
  StreamClient third(*stub_, Request(3));
  // Another connection is not held back by this one.
  const auto other = v1::GenerationService::NewStub(server_->Connect());
  StreamClient elsewhere(*other, Request(3));
  EXPECT_EQ(elsewhere.AwaitMessages(1).size(), 1u);
  EXPECT_EQ(third.AwaitMessages(0).size(), 0u);
  gate_.Open();
  for (StreamClient* client : {&first, &second, &third, &elsewhere}) {
    EXPECT_TRUE(client->AwaitDone().ok());
    EXPECT_GT(client->AwaitMessages(0).size(), 0u);
  }
}

// gRPC's client pings once a second at most.
TEST_F(TransportTest, OnlyPingsFasterThanTheFloorEndTheConnection) {
  Start({.keepalive_floor = absl::Milliseconds(100)});
  FakeServer strict({.transport = {.keepalive_floor = absl::Seconds(10)}}, script_);
  grpc::ChannelArguments often;
  often.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  often.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10);
  often.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit of the client's own
  auto pinging = [&often](const FakeServer& server) {
    return v1::GenerationService::NewStub(
        grpc::CreateCustomChannel(server.address(), grpc::InsecureChannelCredentials(), often));
  };
  const auto to_lenient = pinging(*server_), to_strict = pinging(strict);
  StreamClient lives(*to_lenient, Request(3));
  lives.AwaitMessages(1);
  StreamClient ends(*to_strict, Request(3));
  const grpc::Status status = ends.AwaitDone();
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("Too many pings"));
  gate_.Open();
  EXPECT_TRUE(lives.AwaitDone().ok());
}

TEST_F(TransportTest, OldConnectionTakesNoNewCallsAndEndsItsOwn) {
  Start({.max_connection_age = absl::Milliseconds(50)});
  StreamClient running(*stub_, Request(3));
  running.AwaitMessages(1);
  ASSERT_TRUE(AwaitGoAway());
  EXPECT_TRUE(ListModels().ok());
  gate_.Open();
  EXPECT_TRUE(running.AwaitDone().ok());
}

TEST_F(TransportTest, CallThatOutlivesTheGraceIsCut) {
  Start({.max_connection_age = absl::Milliseconds(50),
         .max_connection_age_grace = absl::Milliseconds(50)});
  StreamClient running(*stub_, Request(3));
  EXPECT_EQ(running.AwaitDone().error_code(), grpc::UNAVAILABLE);
  gate_.Open();
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(TransportTest, IdleConnectionIsClosed) {
  Start({.max_connection_idle = absl::Milliseconds(50)});
  ASSERT_TRUE(ListModels().ok());
  EXPECT_TRUE(AwaitGoAway());
  EXPECT_TRUE(ListModels().ok());  // over a new one
}

TEST_F(TransportTest, MessageThatIsTooLargeIsRefused) {
  Start({.max_message_bytes = 1024});
  v1::GenerateRequest request = Request(3);
  request.set_request_id(std::string(2048, 'x'));
  grpc::ClientContext context;
  v1::GenerateResult result;
  EXPECT_EQ(stub_->GenerateOnce(&context, request, &result).error_code(), grpc::RESOURCE_EXHAUSTED);
}

TEST_F(TransportTest, AnswerThatIsTooLargeIsRefusedWithItsSize) {
  std::atomic<int> tokens = 0;
  script_->next = [&tokens](int32_t) {
    ++tokens;
    return 5;
  };
  Start({.max_sent_message_bytes = 1024});
  gate_.Open();
  v1::GenerateRequest request = Request(3000);
  request.mutable_output()->set_token_ids(true);
  grpc::ClientContext context;
  v1::GenerateResult result;
  const grpc::Status status = stub_->GenerateOnce(&context, request, &result);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonIn(status), "ANSWER_TOO_LARGE");
  EXPECT_EQ(Detail<v1::ErrorInfo>(status, "ErrorInfo")->metadata().at("limit"), "1024");
  EXPECT_THAT(status.error_message(), HasSubstr("--max_sent_message_bytes"));
  EXPECT_LT(tokens, 2900) << "what nobody can have is not computed";
}

TEST_F(TransportTest, TextThatIsTooLargeIsNotMade) {
  Start({.max_sent_message_bytes = 1024});
  v1::DetokenizeRequest request;
  for (int i = 0; i < 3000; ++i) request.mutable_tokens()->add_ids(5);
  grpc::ClientContext context;
  v1::DetokenizeResponse text;
  const auto tokenization = v1::TokenizationService::NewStub(channel_);
  const grpc::Status status = tokenization->Detokenize(&context, request, &text);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonIn(status), "ANSWER_TOO_LARGE");
  EXPECT_EQ(Detail<v1::ErrorInfo>(status, "ErrorInfo")->metadata().at("limit"), "1024");
}

}  // namespace transport_test
}  // namespace epikv
