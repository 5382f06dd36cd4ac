#include "server/daemon/admin_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "epikv/v1/admin.grpc.pb.h"
#include "epikv/v1/generation.grpc.pb.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace admin_service_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using State = v1::ActiveRequest;

class AdminServiceTest : public ::testing::Test {
 protected:
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::AdminService::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + kGenerous));
    return (admin_.get()->*method)(&context, request, response);
  }
  v1::ServerStatus Status() {
    v1::ServerStatus status;
    EXPECT_TRUE(Call(&Stub::GetServerStatus, v1::GetServerStatusRequest(), &status).ok());
    return status;
  }
  std::vector<v1::ActiveRequest> List() {
    v1::ListActiveRequestsResponse response;
    EXPECT_TRUE(Call(&Stub::ListActiveRequests, v1::ListActiveRequestsRequest(), &response).ok());
    return {response.requests().begin(), response.requests().end()};
  }
  grpc::Status Load(const std::string& path, const std::string& name, bool replace = false) {
    v1::LoadModelRequest request;
    request.mutable_source()->set_path(path);
    request.mutable_source()->set_name(name);
    request.set_replace(replace);
    v1::Model model;
    const grpc::Status status = Call(&Stub::LoadModel, request, &model);
    EXPECT_EQ(model.name(), status.ok() ? name : "");
    return status;
  }
  static v1::GenerateRequest Ask(const std::string& id, uint32_t prompt, uint32_t tokens) {
    v1::GenerateRequest request;
    request.set_request_id(id);
    for (uint32_t i = 0; i < prompt; ++i) request.mutable_token_ids()->add_ids(1);
    request.mutable_stop()->set_max_output_tokens(tokens);
    return request;
  }
  grpc::Status Generate() {
    StreamClient client(*stub_, Ask("", 1, 3));
    return client.AwaitDone();
  }

  using Stub = v1::AdminService::Stub;
  FakeServer server_{{.kv_capacity_tokens = 100, .engine = {.max_running_requests = 2}}};
  const std::unique_ptr<Stub> admin_ = v1::AdminService::NewStub(server_.ConnectAdmin());
  const std::unique_ptr<v1::GenerationService::Stub> stub_ =
      v1::GenerationService::NewStub(server_.Connect());
};

TEST_F(AdminServiceTest, SaysWhatEachRequestDoesAndWaitsFor) {
  Gate gate;
  server_.script().on_forward = [&gate](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].first >= 5);
    if (items[0].first >= 5) absl::SleepFor(absl::Milliseconds(10));  // it is asked between steps
    return absl::OkStatus();
  };
  StreamClient first(*stub_, Ask("first", 4, 40), std::nullopt, kGenerous);
  ASSERT_TRUE(gate.AwaitHeld());
  StreamClient large(*stub_, Ask("large", 1, 80));
  ASSERT_FALSE(large.AwaitMessages(1).empty());  // accepted
  StreamClient last(*stub_, Ask("last", 1, 10));
  ASSERT_FALSE(last.AwaitMessages(1).empty());
  gate.Open();
  std::vector<v1::ActiveRequest> all;
  do {
    all = List();
  } while (all.size() == 3 && all[1].state() != State::STATE_QUEUED);
  ASSERT_EQ(all.size(), 3) << "the first goes on for a third of a second";
  EXPECT_EQ(all[0].request_id(), "first");
  EXPECT_EQ(all[0].state(), State::STATE_DECODE);
  EXPECT_EQ(all[0].waits_for(), State::WAITS_FOR_UNSPECIFIED);
  EXPECT_EQ(all[0].policy(), "full");
  EXPECT_EQ(all[0].kv_reserved_bytes(), 43 * (kFakeBytesPerToken + 8)) << "K, V and their slots";
  EXPECT_GT(all[0].cached_tokens(), 4u);
  EXPECT_TRUE(all[0].has_time_left());
  EXPECT_EQ(all[1].request_id(), "large");
  EXPECT_EQ(all[1].waits_for(), State::WAITS_FOR_KV);
  EXPECT_FALSE(all[1].has_time_left());
  EXPECT_EQ(all[2].waits_for(), State::WAITS_FOR_TURN);
  for (StreamClient* client : {&first, &large, &last}) EXPECT_TRUE(client->AwaitDone().ok());
  v1::ListActiveRequestsRequest unknown;
  unknown.set_model("other");
  v1::ListActiveRequestsResponse response;
  EXPECT_EQ(Call(&Stub::ListActiveRequests, unknown, &response).error_code(), grpc::NOT_FOUND);
}

TEST_F(AdminServiceTest, DrainsAndResumes) {
  EXPECT_EQ(Status().state(), v1::ServerStatus::STATE_SERVING);
  v1::ServerStatus status;
  EXPECT_TRUE(Call(&Stub::Drain, v1::DrainRequest(), &status).ok());
  EXPECT_EQ(status.state(), v1::ServerStatus::STATE_DRAINING);
  EXPECT_EQ(Generate().error_code(), grpc::UNAVAILABLE);
  EXPECT_TRUE(Call(&Stub::Resume, v1::ResumeRequest(), &status).ok());
  EXPECT_EQ(status.state(), v1::ServerStatus::STATE_SERVING);
  EXPECT_TRUE(Generate().ok());
  server_.models().Drain(absl::InfiniteFuture());
  EXPECT_EQ(Call(&Stub::Resume, v1::ResumeRequest(), &status).error_code(),
            grpc::FAILED_PRECONDITION);
}

TEST_F(AdminServiceTest, LoadsSwapsAndUnloadsModels) {
  EXPECT_TRUE(Load("b.pt", "b").ok());
  EXPECT_EQ(Status().models_size(), 2);
  const grpc::Status taken = Load("b.pt", "b");
  EXPECT_EQ(taken.error_code(), grpc::ALREADY_EXISTS);
  EXPECT_THAT(taken.error_message(), HasSubstr("replace"));
  EXPECT_TRUE(Load("c.pt", "b", /*replace=*/true).ok());

  EXPECT_EQ(Load("missing", "x").error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(FieldsIn(Load("", "x")), ElementsAre("source.path"));

  v1::UnloadModelRequest unload;
  v1::UnloadModelResponse gone;
  unload.set_name("b");
  unload.mutable_grace()->set_seconds(-1);
  EXPECT_EQ(Call(&Stub::UnloadModel, unload, &gone).error_code(), grpc::INVALID_ARGUMENT);
  unload.mutable_grace()->set_seconds(1);
  EXPECT_TRUE(Call(&Stub::UnloadModel, unload, &gone).ok());
  EXPECT_EQ(Call(&Stub::UnloadModel, unload, &gone).error_code(), grpc::NOT_FOUND);
  EXPECT_TRUE(Generate().ok()) << "by the one that is left";
}

TEST_F(AdminServiceTest, LoadsOneModelAtATime) {
  Gate gate;
  server_.on_load = [&gate] { gate.Pass(true); };
  grpc::Status first;
  std::thread loading([&] { first = Load("b.pt", "b"); });
  ASSERT_TRUE(gate.AwaitHeld());
  const v1::ServerStatus status = Status();
  ASSERT_EQ(status.models_size(), 2);
  EXPECT_EQ(status.models(1).name(), "b");
  EXPECT_EQ(status.models(1).state(), v1::ModelStatus::STATE_LOADING);
  const grpc::Status second = Load("c.pt", "c");
  EXPECT_EQ(second.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(second), "LOADING");
  EXPECT_TRUE(Generate().ok()) << "while a model is being loaded";
  gate.Open();
  loading.join();
  EXPECT_TRUE(first.ok());
}

TEST_F(AdminServiceTest, WhoAsksForAModelThatIsBeingLoadedIsTold) {
  Gate gate;
  server_.on_load = [&gate] { gate.Pass(true); };
  std::thread loading([&] { EXPECT_TRUE(Load("b.pt", "b").ok()); });
  ASSERT_TRUE(gate.AwaitHeld());
  v1::GenerateRequest request = Ask("", 1, 3);
  request.set_model("b");
  auto generate = [&] { return StreamClient(*stub_, request).AwaitDone(); };
  const grpc::Status early = generate();
  EXPECT_EQ(early.error_code(), grpc::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonIn(early), "LOADING");
  EXPECT_TRUE(Detail<v1::PreconditionFailure>(early, "PreconditionFailure").has_value());
  gate.Open();
  loading.join();
  EXPECT_TRUE(generate().ok());
  EXPECT_EQ(Load("missing", "c").error_code(), grpc::NOT_FOUND);
  request.set_model("c");
  EXPECT_EQ(generate().error_code(), grpc::NOT_FOUND) << "it is not being loaded any more";
}

TEST_F(AdminServiceTest, ModelThatReplacesAnotherTakesOverItsPoolAndThreads) {
  v1::LoadModelRequest request;
  request.mutable_source()->set_path("b.pt");
  request.mutable_source()->set_name("b");
  request.mutable_source()->set_kv_pool_bytes(4096);
  request.mutable_source()->set_threads(2);
  v1::Model model;
  ASSERT_TRUE(Call(&Stub::LoadModel, request, &model).ok());
  ASSERT_TRUE(Load("c.pt", "b", /*replace=*/true).ok());
  EXPECT_EQ(server_.last_load.kv_pool_bytes, 4096);
  EXPECT_EQ(server_.last_load.threads, 2);
  request.mutable_source()->set_kv_pool_bytes(8192);
  request.set_replace(true);
  ASSERT_TRUE(Call(&Stub::LoadModel, request, &model).ok());
  EXPECT_EQ(server_.last_load.kv_pool_bytes, 8192);
  ASSERT_TRUE(Load("d.pt", "d").ok());
  EXPECT_EQ(server_.last_load.kv_pool_bytes, 0) << "the server's";
}

TEST_F(AdminServiceTest, LoadThatIsAbandonedIsAnsweredAtOnce) {
  EXPECT_FALSE(server_.admin().AbandonLoading());
  const auto gate = std::make_shared<Gate>();  // the loader leaves it after this test
  server_.on_load = [gate] { gate->Pass(true); };
  grpc::Status status;
  std::thread loading([&] { status = Load("b.pt", "b"); });
  ASSERT_TRUE(gate->AwaitHeld());
  EXPECT_TRUE(server_.admin().AbandonLoading());
  loading.join();  // though the loader is held
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_TRUE(Detail<v1::RetryInfo>(status, "RetryInfo").has_value());
  gate->Open();
}

TEST_F(AdminServiceTest, ChangesSettingsThatCanBeChanged) {
  auto update = [this](const std::vector<std::string>& fields,
                       const std::function<void(v1::ServerConfig&)>& set, bool only = false) {
    v1::UpdateConfigRequest request;
    for (const std::string& field : fields) request.mutable_update_mask()->add_paths(field);
    set(*request.mutable_config());
    request.set_validate_only(only);
    v1::ServerConfig config;
    return Call(&Stub::UpdateConfig, request, &config);
  };
  auto output_of_a_request = [this] {
    v1::GenerateRequest request = Ask("", 1, 1);
    request.mutable_stop()->clear_max_output_tokens();
    v1::GenerateResult result;
    grpc::ClientContext context;
    EXPECT_TRUE(stub_->GenerateOnce(&context, request, &result).ok());
    return result.accepted().max_output_tokens();
  };
  auto to_seven = [](v1::ServerConfig& config) { config.set_default_max_output_tokens(7); };
  v1::ServerConfig config;
  EXPECT_TRUE(update({"default_max_output_tokens"}, to_seven, /*only=*/true).ok());
  EXPECT_TRUE(Call(&Stub::GetConfig, v1::GetConfigRequest(), &config).ok());
  EXPECT_EQ(config.default_max_output_tokens(), 1024u);
  EXPECT_TRUE(update({"default_max_output_tokens"}, to_seven).ok());
  EXPECT_EQ(output_of_a_request(), 7u);
  EXPECT_TRUE(Call(&Stub::GetConfig, v1::GetConfigRequest(), &config).ok());
  EXPECT_EQ(config.default_max_output_tokens(), 7u);
  EXPECT_EQ(config.model(), "m");

  const grpc::Status refused = update({"threads", "max_queued_requests"}, to_seven);
  EXPECT_THAT(FieldsIn(refused), ElementsAre("update_mask", "config.max_queued_requests"))
      << "all at once";
  EXPECT_THAT(FieldsIn(update({}, to_seven)), ElementsAre("update_mask"));
  const grpc::Status unknown = update(
      {"default_policy"}, [](v1::ServerConfig& config) { config.set_default_policy("nosuch"); });
  EXPECT_THAT(unknown.error_message(), HasSubstr("unknown policy 'nosuch'"));
  EXPECT_TRUE(Call(&Stub::GetConfig, v1::GetConfigRequest(), &config).ok());
  EXPECT_EQ(config.default_policy(), "");
}

// The load began with those from before.
TEST_F(AdminServiceTest, SettingsThatChangeDuringALoadHoldForItsModel) {
  Gate gate;
  server_.on_load = [&gate] { gate.Pass(true); };
  grpc::Status loaded;
  std::thread loading([&] { loaded = Load("b.pt", "b"); });
  ASSERT_TRUE(gate.AwaitHeld());
  v1::UpdateConfigRequest update;
  update.mutable_update_mask()->add_paths("default_max_output_tokens");
  update.mutable_config()->set_default_max_output_tokens(7);
  v1::ServerConfig config;
  EXPECT_TRUE(Call(&Stub::UpdateConfig, update, &config).ok());
  gate.Open();
  loading.join();
  ASSERT_TRUE(loaded.ok());
  v1::GenerateRequest request = Ask("", 1, 1);
  request.set_model("b");
  request.mutable_stop()->clear_max_output_tokens();
  v1::GenerateResult result;
  grpc::ClientContext context;
  EXPECT_TRUE(stub_->GenerateOnce(&context, request, &result).ok());
  EXPECT_EQ(result.accepted().max_output_tokens(), 7u);
}

TEST_F(AdminServiceTest, NothingIsServedOrLoadedUntilAllModelsAre) {
  server_.lifecycle().SetState(ServerState::kStarting);
  EXPECT_EQ(ReasonIn(Generate()), "STARTING") << "though the first is there";
  EXPECT_EQ(ReasonIn(Load("b.pt", "b")), "STARTING");
  v1::UnloadModelRequest unload;
  v1::UnloadModelResponse gone;
  unload.set_name(server_.models().InService().front()->name);
  EXPECT_EQ(ReasonIn(Call(&Stub::UnloadModel, unload, &gone)), "STARTING");
  v1::ServerStatus status;
  EXPECT_EQ(ReasonIn(Call(&Stub::Drain, v1::DrainRequest(), &status)), "STARTING");
  server_.lifecycle().SetState(ServerState::kServing);
  EXPECT_TRUE(Generate().ok());
}

TEST_F(AdminServiceTest, TellsLoadAndDumpsState) {
  EXPECT_TRUE(Generate().ok());
  ASSERT_TRUE(server_.AwaitEmpty());
  v1::GetLoadResponse load;
  EXPECT_TRUE(Call(&Stub::GetLoad, v1::GetLoadRequest(), &load).ok());
  ASSERT_EQ(load.models_size(), 1);
  EXPECT_EQ(load.models(0).kv_capacity_bytes(), 100 * kFakeBytesPerToken);
  EXPECT_EQ(load.models(0).running_requests(), 0u);
  EXPECT_GT(load.models(0).prompt_tokens_per_second(), 0);
  EXPECT_GT(load.models(0).output_tokens_per_second(), 0);
  v1::DumpStateResponse dump;
  EXPECT_TRUE(Call(&Stub::DumpState, v1::DumpStateRequest(), &dump).ok());
  EXPECT_EQ(dump.status().state(), v1::ServerStatus::STATE_SERVING);
  EXPECT_EQ(dump.config().model(), "m");
  EXPECT_THAT(dump.metrics(), HasSubstr("epikv_requests_finished_total{"));
}

}  // namespace admin_service_test
}  // namespace epikv
