// The services that describe (models, policies, tokenizer), health, and the ports.

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>
#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "epikv/v1/errors.pb.h"
#include "epikv/v1/model.grpc.pb.h"
#include "epikv/v1/policy.grpc.pb.h"
#include "epikv/v1/tokenization.grpc.pb.h"
#include "server/metrics/metrics_server.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/scrape.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace services_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class ServicesTest : public ::testing::Test {
 protected:
  // method: of the stub, "&Stub::GetModel".
  template <typename Stub, typename Request, typename Response>
  static grpc::Status Call(Stub& stub,
                           grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                        Response*),
                           const Request& request, Response* response) {
    grpc::ClientContext context;
    return (stub.*method)(&context, request, response);
  }

  FakeServer server_;
  const std::shared_ptr<grpc::Channel> channel_ = server_.Connect();
  v1::ModelService::Stub models_{channel_};
  v1::PolicyService::Stub policies_{channel_};
  v1::TokenizationService::Stub tokenizer_{channel_};
};

TEST_F(ServicesTest, ModelSaysWhatItIs) {
  v1::ListModelsResponse list;
  ASSERT_TRUE(Call(models_, &v1::ModelService::Stub::ListModels, {}, &list).ok());
  ASSERT_EQ(list.models_size(), 1);
  v1::GetModelRequest request;
  request.set_name("fake");
  v1::Model model;
  ASSERT_TRUE(Call(models_, &v1::ModelService::Stub::GetModel, request, &model).ok());
  EXPECT_EQ(model.SerializeAsString(), list.models(0).SerializeAsString());
  EXPECT_EQ(model.architecture(), "Fake");
  EXPECT_EQ(model.dtype(), "float32");
  EXPECT_EQ(model.vocab_size(), 64u);
  EXPECT_EQ(model.context_length(), 4096u);
  EXPECT_EQ(model.kv_dtype(), "float32");
  EXPECT_EQ(model.kv_bytes_per_token(), static_cast<uint64_t>(kFakeBytesPerToken));
  EXPECT_EQ(model.kv_capacity_tokens(), 16384u);
  EXPECT_THAT(model.eos_token_ids(), ElementsAre(63));
  EXPECT_EQ(model.decode_kernel(), "fake");
  EXPECT_EQ(model.device(), "cpu");
  EXPECT_EQ(model.weights(), "sha256:fake");
  request.set_name("gpt");
  const grpc::Status status = Call(models_, &v1::ModelService::Stub::GetModel, request, &model);
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
}

// Whoever is asked how it is has gRPC's two threads; what is long has another.
TEST_F(ServicesTest, ALongRequestHoldsUpNoOther) {
  absl::Notification open;
  const absl::Cleanup opened = [&open] {
    if (!open.HasBeenNotified()) open.Notify();
  };
  server_.frontend().long_requests.Post("somebody", 1, [&open] { open.WaitForNotification(); });
  constexpr int kLong = 4;  // more than gRPC's threads
  std::atomic<int> answered = 0;
  std::vector<std::thread> callers;
  callers.reserve(kLong);
  for (int i = 0; i < kLong; ++i) {
    callers.emplace_back([&] {
      v1::TokenizeRequest request;
      request.set_text(absl::StrCat("w5", std::string(17 << 10, ' ')));
      v1::TokenizeResponse response;
      Call(tokenizer_, &v1::TokenizationService::Stub::Tokenize, request, &response);
      ++answered;
    });
  }
  while (server_.frontend().long_requests.Waiting("") < kLong) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  v1::TokenizeRequest request;
  request.set_text(absl::StrCat("w5", std::string(15 << 10, ' ')));
  v1::TokenizeResponse response;
  EXPECT_TRUE(Call(tokenizer_, &v1::TokenizationService::Stub::Tokenize, request, &response).ok());
  v1::ListModelsResponse list;
  EXPECT_TRUE(Call(models_, &v1::ModelService::Stub::ListModels, {}, &list).ok());
  EXPECT_EQ(answered, 0);
  open.Notify();
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(answered, kLong);
}

// In as many parts as it takes; however many, they are the file.
TEST(ModelServiceTest, TokenizerComesInParts) {
  constexpr int64_t kWordBytes = 40000;
  constexpr size_t kPartBytes = 64 << 10;
  FakeServer server({.word_bytes = kWordBytes});
  v1::ModelService::Stub models(server.Connect());
  grpc::ClientContext context;
  const auto stream = models.GetTokenizer(&context, {});
  std::string json;
  size_t parts = 0;
  for (v1::TokenizerPart part; stream->Read(&part); ++parts) {
    EXPECT_LE(part.json().size(), kPartBytes);
    json += part.json();
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(parts, (json.size() + kPartBytes - 1) / kPartBytes);
  EXPECT_GT(parts, 3);
  EXPECT_TRUE(json == FakeTokenizerJson(kWordBytes));

  v1::GetTokenizerRequest unknown;
  unknown.set_model("gpt");
  grpc::ClientContext other;
  EXPECT_EQ(models.GetTokenizer(&other, unknown)->Finish().error_code(), grpc::NOT_FOUND);
}

// A download that its client leaves ends, and one goes on when its model has gone.
TEST(ModelServiceTest, TokenizerOutlivesItsModelAndNotItsClient) {
  constexpr int64_t kWordBytes = 400000;
  FakeServer server({.word_bytes = kWordBytes});
  v1::ModelService::Stub models(server.Connect());
  v1::TokenizerPart part;
  grpc::ClientContext gone;
  const auto left = models.GetTokenizer(&gone, {});
  ASSERT_TRUE(left->Read(&part));
  gone.TryCancel();
  while (left->Read(&part)) {
  }
  EXPECT_EQ(left->Finish().error_code(), grpc::CANCELLED);

  grpc::ClientContext context;
  const auto stream = models.GetTokenizer(&context, {});
  ASSERT_TRUE(stream->Read(&part));
  ASSERT_TRUE(server.models().Remove("fake", absl::Now()));
  size_t bytes = part.json().size();
  while (stream->Read(&part)) bytes += part.json().size();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(bytes, FakeTokenizerJson(kWordBytes).size());
}

TEST_F(ServicesTest, PoliciesAreDescribedWithTheirSchema) {
  v1::ListPoliciesResponse list;
  ASSERT_TRUE(Call(policies_, &v1::PolicyService::Stub::ListPolicies, {}, &list).ok());
  ASSERT_EQ(list.policies_size(), 3);
  EXPECT_EQ(list.policies(0).name(), "full");
  v1::GetPolicyRequest request;
  request.set_name("window");
  v1::Policy policy;
  ASSERT_TRUE(Call(policies_, &v1::PolicyService::Stub::GetPolicy, request, &policy).ok());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(policy, list.policies(2)));
  EXPECT_EQ(policy.granularity(), "token");
  EXPECT_EQ(policy.prompt_eviction(), "by_chunk");
  EXPECT_EQ(policy.default_protection().sink_tokens(), 4u);
  EXPECT_FALSE(policy.default_protection().has_protect_prompt());
  EXPECT_EQ(policy.default_protection().recent_case(), v1::DefaultProtection::RECENT_NOT_SET);
  EXPECT_FALSE(policy.has_cost());  // nobody measured a fake
  ASSERT_EQ(policy.params_size(), 5);
  EXPECT_EQ(policy.params(0).name(), "slack");
  EXPECT_EQ(policy.params(0).type(), "int");
  EXPECT_EQ(policy.params(0).default_value().number_value(), 0);
  EXPECT_EQ(policy.params(0).max(), 64);
  EXPECT_THAT(policy.params(1).choices(), ElementsAre("calm", "eager"));
  EXPECT_FALSE(policy.params(1).has_max());
  EXPECT_EQ(policy.params(3).default_value().bool_value(), false);
}

TEST_F(ServicesTest, ParametersAreAJsonSchema) {
  v1::GetPolicyRequest request;
  request.set_name("window");
  v1::Policy policy;
  ASSERT_TRUE(Call(policies_, &v1::PolicyService::Stub::GetPolicy, request, &policy).ok());
  std::string text;
  ASSERT_TRUE(google::protobuf::util::MessageToJsonString(policy.params_schema(), &text).ok());
  EXPECT_EQ(nlohmann::json::parse(text), nlohmann::json::parse(R"json({
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "window",
    "description": "keeps the newest",
    "type": "object",
    "additionalProperties": false,
    "properties": {
      "slack": {"type": "integer", "minimum": 0, "maximum": 64, "default": 0,
                "description": "tokens above the budget between rounds"},
      "mode": {"type": "string", "enum": ["calm", "eager"], "default": "calm",
               "description": "nothing depends on it"},
      "strength": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.5,
                   "description": "nothing depends on it"},
      "frozen": {"type": "boolean", "default": false, "description": "not used"},
      "indexes": {"type": "array", "default": [], "description": "not used",
                  "items": {"type": "integer", "minimum": 0, "maximum": 1000000}}
    }
  })json"));
}

// Their descriptions: field, value.
std::vector<std::string> Incompatible(const v1::Policy& policy) {
  std::vector<std::string> options;
  for (const v1::IncompatibleOption& option : policy.incompatible_options()) {
    EXPECT_NE(option.reason(), "");
    options.push_back(absl::StrCat(option.field(), " ", option.value()));
  }
  return options;
}

TEST_F(ServicesTest, IncompatibleOptionsAreThoseThatAreRefused) {
  v1::ListPoliciesResponse list;
  ASSERT_TRUE(Call(policies_, &v1::PolicyService::Stub::ListPolicies, {}, &list).ok());
  EXPECT_THAT(Incompatible(list.policies(0)),
              ElementsAre("kv.budget below prompt + max_output_tokens - 1"));
  EXPECT_THAT(Incompatible(list.policies(1)),
              ElementsAre("kv.budget absent", "cadence SCORE_CADENCE_CHUNK",
                          "kv.budget below prompt + 16"));
  EXPECT_THAT(Incompatible(list.policies(2)),
              ElementsAre("kv.budget absent", "cadence SCORE_CADENCE_CHUNK",
                          "output.prompt_logprobs true with a budget below prompt + 16"));

  // The fields at fault; empty if there are none.
  auto refusal = [&](const std::string& policy, std::optional<int64_t> budget, bool in_chunks,
                     bool prompt_logprobs = false) {
    RequestOptions options{.prompt = std::vector<int32_t>(20, 1)};
    options.kv.policy = policy;
    if (budget.has_value()) options.kv.budget = *budget;
    options.stop.max_output_tokens = 30;
    if (in_chunks) options.forced.assign(30, 1);
    options.force_in_chunks = in_chunks;
    options.output.prompt_logprobs = prompt_logprobs;
    const auto resolved = server_.admission().Resolve(options);
    std::string fields;
    if (const auto* rejection = std::get_if<Rejection>(&resolved)) {
      for (const auto& violation : rejection->violations) absl::StrAppend(&fields, violation.field);
    }
    return fields;
  };
  EXPECT_EQ(refusal("full", std::nullopt, false), "");
  EXPECT_EQ(refusal("full", 20 + 30 - 1, false), "");
  EXPECT_EQ(refusal("full", 20 + 30 - 2, false), "kv.budget");
  EXPECT_EQ(refusal("full", std::nullopt, true), "");
  EXPECT_EQ(refusal("picky", std::nullopt, false), "kv.budget");
  EXPECT_EQ(refusal("picky", 20 + 16, false), "");
  EXPECT_EQ(refusal("picky", 20 + 15, false), "kv.budget");
  EXPECT_EQ(refusal("picky", 20 + 16, true), "cadence");
  EXPECT_EQ(refusal("window", std::nullopt, false), "kv.budget");
  EXPECT_EQ(refusal("window", 20 + 15, false), "");
  EXPECT_EQ(refusal("window", 20 + 16, true), "cadence");
  EXPECT_EQ(refusal("full", std::nullopt, false, true), "");
  EXPECT_EQ(refusal("window", 20 + 16, false, true), "");
  EXPECT_EQ(refusal("window", 20 + 15, false, true), "output.prompt_logprobs");
}

// K and V apart: a slot table's index and position, columns, state.
TEST_F(ServicesTest, StateIsWhatAdmissionReserves) {
  v1::GetPolicyRequest request;
  request.set_name("picky");
  v1::Policy policy;
  ASSERT_TRUE(Call(policies_, &v1::PolicyService::Stub::GetPolicy, request, &policy).ok());
  EXPECT_THAT(policy.columns(), ElementsAre("age"));
  EXPECT_EQ(policy.state_bytes_per_token(), 8u + 4u + 24u);
  EXPECT_EQ(policy.state_bytes_per_sequence(), 1000u);
  RequestOptions options{.prompt = {1}};
  options.kv.policy = "picky";
  options.kv.budget = int64_t{40};
  options.stop.max_output_tokens = 100;
  const Request resolved = std::get<Request>(server_.admission().Resolve(options));
  const int64_t tokens = 40 + 1;
  EXPECT_EQ(resolved.demand.peak_bytes(),
            tokens * (kFakeBytesPerToken + policy.state_bytes_per_token()) +
                policy.state_bytes_per_sequence());
}

TEST_F(ServicesTest, UnknownPolicyIsNotFoundAndCloseOnesAreNamed) {
  v1::GetPolicyRequest request;
  request.set_name("pick");
  v1::Policy policy;
  const auto status = Call(policies_, &v1::PolicyService::Stub::GetPolicy, request, &policy);
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("unknown policy 'pick'; did you mean picky?"));
}

TEST_F(ServicesTest, TokenizesAndDetokenizes) {
  v1::TokenizeRequest request;
  request.set_text("w5 w7 w5");
  v1::TokenizeResponse tokens;
  ASSERT_TRUE(Call(tokenizer_, &v1::TokenizationService::Stub::Tokenize, request, &tokens).ok());
  EXPECT_THAT(tokens.tokens().ids(), ElementsAre(5, 7, 5));
  v1::DetokenizeRequest back;
  *back.mutable_tokens() = tokens.tokens();
  v1::DetokenizeResponse text;
  ASSERT_TRUE(Call(tokenizer_, &v1::TokenizationService::Stub::Detokenize, back, &text).ok());
  EXPECT_EQ(text.text(), "w5 w7 w5");
}

TEST_F(ServicesTest, TokenizerRefusesWhatItCannotRead) {
  v1::TokenizeRequest request;
  request.set_text("\xff");
  v1::TokenizeResponse tokens;
  EXPECT_EQ(
      Call(tokenizer_, &v1::TokenizationService::Stub::Tokenize, request, &tokens).error_code(),
      grpc::INVALID_ARGUMENT);
  v1::DetokenizeRequest back;
  back.mutable_tokens()->add_ids(64);
  v1::DetokenizeResponse text;
  EXPECT_EQ(Call(tokenizer_, &v1::TokenizationService::Stub::Detokenize, back, &text).error_code(),
            grpc::OUT_OF_RANGE);
}

void Add(v1::ChatRole role, const std::string& content, v1::ChatPrompt& chat) {
  v1::ChatMessage& message = *chat.add_messages();
  message.set_role(role);
  message.set_content(content);
}

TEST_F(ServicesTest, AConversationIsWrittenAsItsTemplateDoes) {
  v1::ApplyChatTemplateRequest request;
  Add(v1::CHAT_ROLE_SYSTEM, " w1", *request.mutable_chat());
  Add(v1::CHAT_ROLE_USER, "w2 w3\n", *request.mutable_chat());
  v1::ApplyChatTemplateResponse response;
  ASSERT_TRUE(
      Call(tokenizer_, &v1::TokenizationService::Stub::ApplyChatTemplate, request, &response).ok());
  EXPECT_EQ(response.text(), "w60 w1 w61 w2 w3 w62");
  EXPECT_THAT(response.tokens().ids(), ElementsAre(60, 1, 61, 2, 3, 62));
}

TEST_F(ServicesTest, WhatIsNoConversationIsNamed) {
  v1::ApplyChatTemplateResponse response;
  auto refusal = [&](const std::vector<v1::ChatRole>& roles, bool thinking = false) {
    v1::ApplyChatTemplateRequest request;
    for (v1::ChatRole role : roles) Add(role, "w1", *request.mutable_chat());
    if (thinking) request.mutable_chat()->set_thinking(true);
    const grpc::Status status =
        Call(tokenizer_, &v1::TokenizationService::Stub::ApplyChatTemplate, request, &response);
    return absl::StrCat(status.error_code(), " ", status.error_message());
  };
  const std::string invalid = absl::StrCat(grpc::INVALID_ARGUMENT, " ");
  EXPECT_THAT(refusal({}), StartsWith(invalid + "chat.messages: "));
  EXPECT_THAT(refusal({v1::CHAT_ROLE_SYSTEM}), StartsWith(invalid + "chat.messages: "));
  EXPECT_THAT(refusal({v1::CHAT_ROLE_ASSISTANT}), StartsWith(invalid + "chat.messages[0].role: "));
  EXPECT_THAT(refusal({v1::CHAT_ROLE_USER, v1::CHAT_ROLE_USER}),
              StartsWith(invalid + "chat.messages[1].role: "));
  EXPECT_THAT(refusal({v1::CHAT_ROLE_USER, v1::CHAT_ROLE_SYSTEM}),
              StartsWith(invalid + "chat.messages[1].role: "));
  EXPECT_THAT(refusal({v1::CHAT_ROLE_UNSPECIFIED}),
              StartsWith(invalid + "chat.messages[0].role: must be CHAT_ROLE_SYSTEM"));
  EXPECT_THAT(refusal({static_cast<v1::ChatRole>(9)}),
              StartsWith(invalid + "chat.messages[0].role: must be CHAT_ROLE_SYSTEM"));
  EXPECT_EQ(refusal({v1::CHAT_ROLE_USER}, /*thinking=*/true),
            absl::StrCat(
                grpc::FAILED_PRECONDITION,
                " chat: this model's chat template does not let thinking be switched on or off"));
}

// grpc.health.v1, whose messages Debian does not package: a string in field 1, an enum in field 1.
int32_t Health(const std::shared_ptr<grpc::Channel>& channel, const std::string& name) {
  grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                   grpc::internal::RpcMethod::NORMAL_RPC, channel);
  google::protobuf::StringValue request;
  request.set_value(name);
  google::protobuf::Int32Value response;
  grpc::ClientContext context;
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall<google::protobuf::StringValue, google::protobuf::Int32Value,
                                        grpc::protobuf::MessageLite, grpc::protobuf::MessageLite>(
          channel.get(), method, &context, request, &response);
  return status.ok() ? response.value() : -status.error_code();
}

TEST_F(ServicesTest, HealthKnowsEveryServiceAndTheModel) {
  constexpr int32_t kServing = 1, kNotServing = 2;
  const std::string names[] = {"",
                               "epikv.v1.GenerationService",
                               "epikv.v1.TokenizationService",
                               "epikv.v1.ModelService",
                               "epikv.v1.PolicyService",
                               "models/fake"};
  const auto all_are = [&](int32_t wanted) {
    for (const std::string& name : names) EXPECT_EQ(Health(channel_, name), wanted) << name;
  };
  all_are(kServing);
  EXPECT_EQ(Health(channel_, "models/other"), -grpc::NOT_FOUND);
  server_.lifecycle().SetState(ServerState::kDraining);
  all_are(kNotServing);
  EXPECT_EQ(Health(channel_, "liveness"), kServing);
  server_.lifecycle().SetState(ServerState::kServing);
  all_are(kServing);
  EXPECT_TRUE(server_.models().Remove("fake", absl::InfinitePast()));
  all_are(kNotServing);
  EXPECT_EQ(Health(channel_, "liveness"), kServing);
}

int64_t NumThreads() {
  std::ifstream status("/proc/self/status");
  const std::string text{std::istreambuf_iterator<char>(status), {}};
  int64_t threads = 0;
  const std::string key = "Threads:";
  const size_t at = text.find(key) + key.size();
  EXPECT_TRUE(absl::SimpleAtoi(text.substr(at, text.find('\n', at) - at), &threads));
  return threads;
}

// A stream of server reflection that has been answered once, or refused, and is left open.
class ReflectionStream {
 public:
  explicit ReflectionStream(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    call_ = stub_.PrepareCall(
        &context_, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue_);
    call_->StartCall(this);
    Await();
    const grpc::Slice list_services("\x3a\x00", 2);  // field 7, an empty string
    call_->Write(grpc::ByteBuffer(&list_services, 1), this);
    Await();
    grpc::ByteBuffer answer;
    call_->Read(&answer, this);
    answered_ = Await();
  }
  ~ReflectionStream() { End(); }

  bool answered() const { return answered_; }
  grpc::Status End() {
    grpc::Status status;
    if (call_ == nullptr) return status;
    if (answered_) context_.TryCancel();  // else it has ended
    call_->Finish(&status, this);
    Await();
    call_ = nullptr;
    return status;
  }

 private:
  bool Await() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool answered_ = false;
};

TEST_F(ServicesTest, IdleReflectionStreamsHoldABoundedNumberOfThreads) {
  { ReflectionStream first(channel_); }  // connects
  const int64_t before = NumThreads();
  std::vector<std::unique_ptr<ReflectionStream>> streams;
  for (int i = 0; i < 100; ++i) streams.push_back(std::make_unique<ReflectionStream>(channel_));
  EXPECT_LE(NumThreads() - before, 40);
  EXPECT_TRUE(streams.front()->answered());
  EXPECT_FALSE(streams.back()->answered());
  EXPECT_EQ(streams.back()->End().error_code(), grpc::RESOURCE_EXHAUSTED);
  v1::ListModelsResponse list;
  EXPECT_TRUE(Call(models_, &v1::ModelService::Stub::ListModels, {}, &list).ok());
  EXPECT_EQ(Health(channel_, ""), 1);
  streams.clear();
}

TEST_F(ServicesTest, PortInUseIsNamed) {
  Lifecycle lifecycle;
  Models models(lifecycle);
  Courier courier(absl::Seconds(1));
  const auto second = Server::Start({.port = {.listen = server_.address()}}, models, lifecycle,
                                    courier, server_.frontend());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(server_.address()));
}

TEST(MetricsPageTest, AnswersWhileAStepRuns) {
  const auto script = std::make_shared<FakeScript>();
  Gate gate;
  script->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);
    return absl::OkStatus();
  };
  FakeServer server({}, script);
  const auto page = *MetricsServer::Start("127.0.0.1:0");
  page->Serve(server.metrics());
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  request.mutable_stop()->set_max_output_tokens(3);
  StreamClient client(*v1::GenerationService::NewStub(server.Connect()), request);
  ASSERT_TRUE(gate.AwaitHeld());
  const auto values = SeriesOf(Scrape(page->port()));
  EXPECT_EQ(values.at(R"(epikv_requests_running{model="fake",priority="normal"})"), 1);
  EXPECT_EQ(values.at(R"(epikv_kv_bytes{model="fake",state="used"})"), kFakeBytesPerToken);
  gate.Open();
  EXPECT_TRUE(client.AwaitDone().ok());
}

}  // namespace services_test
}  // namespace epikv
