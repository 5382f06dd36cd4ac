#include "server/dialect/vllm_service.h"
#include "server/dialect/tokenizer_bundle.h"
#include "server/dialect/vllm_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/base/sha256.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/generation_fixture.h"
#include "tests/fixtures/temporary_folder.h"
#include "vllm/grpc/engine/vllm_engine.grpc.pb.h"

namespace epikv {
namespace vllm_service_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using vllm_proto::VllmEngine;

v1::GenerateRequest Read(const std::string& request) {
  const auto read = FromVllm(FromText<vllm_proto::GenerateRequest>(request));
  EXPECT_TRUE(std::holds_alternative<v1::GenerateRequest>(read)) << request;
  return std::holds_alternative<v1::GenerateRequest>(read) ? std::get<v1::GenerateRequest>(read)
                                                           : v1::GenerateRequest();
}

std::vector<std::string> WrongIn(const vllm_proto::GenerateRequest& request) {
  const auto read = FromVllm(request);
  std::vector<std::string> fields;
  if (const auto* rejection = std::get_if<Rejection>(&read)) {
    EXPECT_EQ(rejection->code, absl::StatusCode::kInvalidArgument);
    for (const FieldViolation& violation : rejection->violations) fields.push_back(violation.field);
  }
  return fields;
}
std::vector<std::string> WrongIn(const std::string& request) {
  return WrongIn(FromText<vllm_proto::GenerateRequest>(request));
}

TEST(FromVllmTest, EveryFieldReachesOurRequest) {
  const auto expected = FromText<v1::GenerateRequest>(R"pb(
    request_id: "r"
    token_ids { ids: [ 1, 9 ] }
    sampling {
      temperature: 0.5
      top_p: 0.25
      top_k: 7
      seed: 11
      min_p: 0.125
      repetition_penalty: 1.5
      frequency_penalty: 0.5
      presence_penalty: -0.5
      logit_bias { key: 3 value: 2 }
      n: 2
      regex: "a+"
    }
    stop {
      max_output_tokens: 5
      stop_strings: "x"
      stop_token_ids: 40
      include_stop: true
      min_output_tokens: 2
      ignore_eos: true
    }
    output { text: false token_ids: true logprobs: true top_logprobs: 4 }
  )pb");
  const v1::GenerateRequest read = Read(R"pb(
    request_id: "r"
    tokenized {
      original_text: "w1 w9"
      input_ids: [ 1, 9 ]
    }
    sampling_params {
      temperature: 0.5
      top_p: 0.25
      top_k: 7
      min_p: 0.125
      frequency_penalty: 0.5
      presence_penalty: -0.5
      repetition_penalty: 1.5
      max_tokens: 5
      min_tokens: 2
      stop: "x"
      stop_token_ids: 40
      skip_special_tokens: true
      spaces_between_special_tokens: true
      ignore_eos: true
      n: 2
      logprobs: 4
      seed: 11
      include_stop_str_in_output: true
      logit_bias { key: 3 value: 2 }
      regex: "a+"
      grammar_from_first_token: true
    }
    stream: true
  )pb");
  EXPECT_EQ(read.DebugString(), expected.DebugString());
}

// Whatever the model's makers would have: routers fill that in themselves.
TEST(FromVllmTest, WhatIsNotSaidIsAsTheDialectHasIt) {
  const v1::GenerateRequest read = Read("text: 'w1'");
  EXPECT_EQ(read.text(), "w1");
  EXPECT_EQ(read.sampling().temperature(), 1);
  EXPECT_EQ(read.sampling().top_p(), 1);
  EXPECT_TRUE(read.sampling().has_top_k());
  EXPECT_EQ(read.sampling().top_k(), 0u);
  EXPECT_EQ(read.sampling().repetition_penalty(), 1);
  EXPECT_EQ(read.sampling().n(), 1u);
  EXPECT_FALSE(read.sampling().has_seed());
  EXPECT_FALSE(read.stop().has_max_output_tokens());
  EXPECT_FALSE(read.output().logprobs());
}

TEST(FromVllmTest, ConstraintsAreOurs) {
  const auto sampling = [](const std::string& constraint) {
    return Read(absl::StrCat("text: 'w1' sampling_params { ", constraint, " }")).sampling();
  };
  const std::string any_object = R"({"type":"object","additionalProperties":true})";
  EXPECT_EQ(sampling(R"(json_schema: '{"type":"array"}')").json_schema(), R"({"type":"array"})");
  EXPECT_EQ(sampling(R"(json_schema: '{"type":"object"}')").json_schema(), any_object);
  EXPECT_EQ(sampling("json_object: true").json_schema(), any_object);
  EXPECT_EQ(sampling("grammar: 'root ::= \"a\"'").grammar(), "root ::= \"a\"");
  EXPECT_THAT(sampling("choice { choices: ['a', 'b'] }").choice().items(), ElementsAre("a", "b"));
}

TEST(FromVllmTest, WhatWouldChangeTheAnswerIsRefusedByName) {
  EXPECT_THAT(WrongIn(R"pb(sampling_params { structural_tag: "x" })pb"),
              ElementsAre("sampling_params.structural_tag"));
  EXPECT_THAT(
      WrongIn("sampling_params { prompt_logprobs: 1 truncate_prompt_tokens: 5 }"),
      ElementsAre("sampling_params.prompt_logprobs", "sampling_params.truncate_prompt_tokens"));
  EXPECT_THAT(WrongIn("sampling_params { logprobs: -1 }"), ElementsAre("sampling_params.logprobs"));
  EXPECT_THAT(WrongIn("kv_transfer_params {} kv_transfer_params_json: '{}' mm_inputs {} "
                      "data_parallel_rank: 1"),
              ElementsAre("kv_transfer_params", "kv_transfer_params_json", "mm_inputs",
                          "data_parallel_rank"));
  EXPECT_THAT(WrongIn("data_parallel_rank: 0"), IsEmpty());
}

TEST(FromVllmTest, FieldsOfANewerDialectAreRefusedByNumber) {
  vllm_proto::GenerateRequest request;
  request.GetReflection()->MutableUnknownFields(&request)->AddVarint(10, 1);
  auto& sampling = *request.mutable_sampling_params();
  sampling.GetReflection()->MutableUnknownFields(&sampling)->AddVarint(99, 1);
  EXPECT_THAT(WrongIn(request), ElementsAre("10", "sampling_params.99"));
}

TEST(ZipOfTest, HasEveryFileAndItsDirectory) {
  const std::string zip = ZipOf({{"a", "one"}, {"b", ""}});
  EXPECT_EQ(zip.substr(0, 4), "PK\3\4");
  EXPECT_THAT(zip, HasSubstr("aone"));
  // The end of the directory: two entries, of 46 bytes and a name each.
  EXPECT_EQ(zip.substr(zip.size() - 22, 4), "PK\5\6");
  EXPECT_EQ(zip.at(zip.size() - 12), 2);
  EXPECT_EQ(zip.at(zip.size() - 10), 2 * 47);
  // Of "one", in the local header.
  EXPECT_EQ(zip.substr(14, 4), "\xf1\x86\x6c\x7a");
}

class VllmServiceTest : public ::testing::Test {
 protected:
  void Start(FakeServerOptions options = {}) {
    options.vllm_dialect = true;
    server_ = std::make_unique<FakeServer>(std::move(options), script_);
    stub_ = VllmEngine::NewStub(server_->Connect());
  }
  VllmEngine::Stub& stub() {
    if (stub_ == nullptr) Start();
    return *stub_;
  }
  // What it is sent; `status` is set at the end.
  std::vector<vllm_proto::GenerateResponse> Generate(const std::string& request,
                                                     grpc::Status* status = nullptr) {
    grpc::ClientContext context;
    const auto reader = stub().Generate(&context, FromText<vllm_proto::GenerateRequest>(request));
    std::vector<vllm_proto::GenerateResponse> responses;
    vllm_proto::GenerateResponse response;
    while (reader->Read(&response)) responses.push_back(response);
    const grpc::Status end = reader->Finish();
    if (status != nullptr)
      *status = end;
    else
      EXPECT_TRUE(end.ok()) << end.error_message();
    return responses;
  }
  grpc::Status Refused(const std::string& request) {
    grpc::Status status;
    EXPECT_THAT(Generate(request, &status), IsEmpty());
    return status;
  }
  template <typename Request, typename Response>
  Response Ask(grpc::Status (VllmEngine::Stub::*method)(grpc::ClientContext*, const Request&,
                                                        Response*),
               const Request& request = {}) {
    grpc::ClientContext context;
    Response response;
    last_ = (stub().*method)(&context, request, &response);
    return response;
  }

  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<VllmEngine::Stub> stub_;
  grpc::Status last_;  // of Ask
};

TEST_F(VllmServiceTest, NoOneAnswersUnlessAsked) {
  FakeServer server;
  grpc::ClientContext context;
  vllm_proto::HealthCheckResponse response;
  const grpc::Status status =
      VllmEngine::NewStub(server.Connect())->HealthCheck(&context, {}, &response);
  EXPECT_EQ(status.error_code(), grpc::UNIMPLEMENTED);
}

TEST_F(VllmServiceTest, AWholeAnswerIsOneMessage) {
  const auto responses = Generate(R"pb(
    tokenized { input_ids: [ 1, 10 ] }
    sampling_params { temperature: 0 max_tokens: 3 logprobs: 1 }
  )pb");
  ASSERT_THAT(responses, SizeIs(1));
  const vllm_proto::GenerateComplete& complete = responses.front().complete();
  EXPECT_THAT(complete.output_ids(), ElementsAre(11, 12, 13));
  EXPECT_EQ(complete.finish_reason(), "length");
  EXPECT_EQ(complete.prompt_tokens(), 2u);
  EXPECT_EQ(complete.completion_tokens(), 3u);
  EXPECT_THAT(complete.output_logprobs().token_ids(), ElementsAre(11, 12, 13));
  EXPECT_THAT(complete.output_logprobs().token_logprobs(), SizeIs(3));
  EXPECT_THAT(complete.output_logprobs().top_logprobs(), SizeIs(3));
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(VllmServiceTest, AStreamIsPartsAndAnEndWithoutTokens) {
  const auto responses = Generate(R"pb(
    tokenized { input_ids: [ 1, 10 ] }
    sampling_params { temperature: 0 max_tokens: 5 stop_token_ids: 13 }
    stream: true
  )pb");
  ASSERT_GE(responses.size(), 2u);
  std::vector<uint32_t> tokens;
  for (const auto& response : responses) {
    const auto& ids = response.chunk().token_ids();
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    EXPECT_EQ(response.chunk().completion_tokens(), static_cast<uint32_t>(ids.size()));
  }
  EXPECT_THAT(tokens, ElementsAre(11, 12, 13));
  const vllm_proto::GenerateComplete& complete = responses.back().complete();
  EXPECT_THAT(complete.output_ids(), IsEmpty());
  EXPECT_EQ(complete.finish_reason(), "stop");
  EXPECT_EQ(complete.matched_token_id(), 13u);
  EXPECT_EQ(complete.completion_tokens(), 3u);
}

TEST_F(VllmServiceTest, EachOfSeveralCompletionsEndsOnce) {
  for (const char* stream : {"false", "true"}) {
    const auto responses = Generate(absl::StrCat(
        "tokenized { input_ids: [1, 10] } "
        "sampling_params { temperature: 1 n: 3 max_tokens: 4 ignore_eos: true } stream: ",
        stream));
    std::vector<uint32_t> ended, tokens(3);
    for (const auto& response : responses) {
      if (response.has_chunk())
        tokens.at(response.chunk().index()) += response.chunk().token_ids_size();
      if (!response.has_complete()) continue;
      ended.push_back(response.complete().index());
      tokens.at(response.complete().index()) += response.complete().output_ids_size();
      EXPECT_EQ(response.complete().completion_tokens(), 4u);
    }
    EXPECT_THAT(ended, ::testing::UnorderedElementsAre(0, 1, 2)) << stream;
    EXPECT_THAT(tokens, ElementsAre(4, 4, 4)) << stream;
  }
}

TEST_F(VllmServiceTest, AnAnswerThatIsTooLargeForOneMessageIsRefused) {
  Start({.outbox = {.max_messages = 4, .max_bytes = 512},
         .transport = {.max_sent_message_bytes = 4096}});
  const std::string request =
      "tokenized { input_ids: [1, 10] } "
      "sampling_params { temperature: 0 max_tokens: 200 ignore_eos: true logprobs: 20 } ";
  const grpc::Status status = Refused(request);
  EXPECT_EQ(ReasonIn(status), "ANSWER_TOO_LARGE");
  EXPECT_TRUE(server_->AwaitEmpty());
  grpc::Status streamed;
  Generate(request + "stream: true", &streamed);
  EXPECT_TRUE(streamed.ok()) << streamed.error_message();
}

TEST_F(VllmServiceTest, RefusalsAreThoseOfGenerate) {
  const grpc::Status unknown = Refused("tokenized { input_ids: [1, 64] }");
  EXPECT_EQ(ReasonIn(unknown), "TOKEN_RANGE");
  const grpc::Status mm = Refused("tokenized { input_ids: [1] } mm_inputs {}");
  EXPECT_EQ(mm.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(FieldsIn(mm), ElementsAre("mm_inputs"));
  EXPECT_EQ(Refused("tokenized { input_ids: [1] } sampling_params { n: 4000000000 }").error_code(),
            grpc::INVALID_ARGUMENT);
}

TEST_F(VllmServiceTest, ItsRequestsAreInTheAccessLogAndInTheSeries) {
  TemporaryFolder folder;
  Start({.access_log = folder.File("log")});
  Generate("request_id: 'r' tokenized { input_ids: [1, 10] } sampling_params { max_tokens: 1 }");
  server_.reset();
  const std::string log = folder.Read("log");
  EXPECT_THAT(log, HasSubstr(R"("method":"VllmEngine/Generate")"));
  EXPECT_THAT(log, HasSubstr(R"("request_id":"r")"));
  EXPECT_THAT(log, HasSubstr(R"("finish_reason":"length")"));
}

TEST_F(VllmServiceTest, AbortEndsARequest) {
  absl::Notification began, aborted;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    if (!began.HasBeenNotified()) began.Notify();
    aborted.WaitForNotification();
    return absl::OkStatus();
  };
  grpc::ClientContext context;
  const auto reader = stub().Generate(
      &context, FromText<vllm_proto::GenerateRequest>(
                    "request_id: 'r' tokenized { input_ids: [1, 10] } stream: true"));
  began.WaitForNotification();
  vllm_proto::AbortRequest abort;
  abort.add_request_ids("nobody's");
  abort.add_request_ids("r");
  Ask(&VllmEngine::Stub::Abort, abort);
  EXPECT_TRUE(last_.ok());
  aborted.Notify();
  vllm_proto::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(VllmServiceTest, NobodyAbortsARequestOfAnother) {
  TemporaryFolder folder;
  // SHA-256 of "one", of "two".
  folder.Write("tokens",
               "user ann 7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed\n"
               "user bob 3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3\n");
  absl::Notification began, aborted;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    if (!began.HasBeenNotified()) began.Notify();
    aborted.WaitForNotification();
    return absl::OkStatus();
  };
  Start({.auth = {.tokens_file = folder.File("tokens")}, .access_log = folder.File("log")});
  grpc::ClientContext ann, bob;
  ann.AddMetadata("authorization", "Bearer one");
  bob.AddMetadata("authorization", "Bearer two");
  const auto reader = stub().Generate(&ann, FromText<vllm_proto::GenerateRequest>(R"pb(
    request_id: "r"
    tokenized { input_ids: [ 1, 10 ] }
    sampling_params { max_tokens: 2 }
  )pb"));
  began.WaitForNotification();
  vllm_proto::AbortRequest abort;
  abort.add_request_ids("r");
  vllm_proto::AbortResponse response;
  EXPECT_TRUE(stub().Abort(&bob, abort, &response).ok()) << "which tells nothing of others' ids";
  aborted.Notify();
  vllm_proto::GenerateResponse answer;
  EXPECT_TRUE(reader->Read(&answer));
  EXPECT_TRUE(reader->Finish().ok());
  server_.reset();
  EXPECT_THAT(folder.Read("log"), HasSubstr(R"("tenant":"ann")"));
}

TEST_F(VllmServiceTest, HealthSaysWhatTheDaemonDoes) {
  const auto health = [this] { return Ask(&VllmEngine::Stub::HealthCheck); };
  EXPECT_TRUE(health().healthy());
  server_->models().StartDraining();
  EXPECT_FALSE(health().healthy());
  EXPECT_EQ(health().message(), "DRAINING");
  EXPECT_TRUE(Ask(&VllmEngine::Stub::GetServerInfo).is_paused());
  EXPECT_EQ(ReasonIn(Refused("tokenized { input_ids: [1] }")), "DRAINING");
  server_->models().Resume();
  server_->lifecycle().SetStuck({"fake"});
  EXPECT_EQ(health().message(), "the engine does not answer");
  server_->lifecycle().SetStuck({});
  server_->lifecycle().SetState(ServerState::kStarting);
  health();
  EXPECT_EQ(ReasonIn(last_), "STARTING");
}

TEST_F(VllmServiceTest, InfoDescribesTheModel) {
  Manifest manifest = FakeManifest();
  manifest.sampling.temperature = 0.5;
  Start({.manifest = manifest});
  const auto info = Ask(&VllmEngine::Stub::GetModelInfo);
  EXPECT_EQ(info.served_model_name(), "fake");
  EXPECT_EQ(info.model_path(), "epikvd:fake");
  EXPECT_EQ(info.max_context_length(), 4096u);
  EXPECT_EQ(info.vocab_size(), 64u);
  EXPECT_THAT(info.eos_token_ids(), ElementsAre(63));
  EXPECT_EQ(info.default_sampling_params_json(), R"({"temperature":0.5})");
  const auto server = Ask(&VllmEngine::Stub::GetServerInfo);
  EXPECT_EQ(server.server_type(), "epikvd");
  const auto loads = Ask(&VllmEngine::Stub::GetLoads);
  ASSERT_THAT(loads.loads(), SizeIs(1));
  EXPECT_EQ(loads.loads(0).max_total_num_tokens(), 16384);
}

// A request names no model.
TEST_F(VllmServiceTest, ADaemonWithTwoModelsRefuses) {
  Start();
  Manifest second = FakeManifest();
  second.name = "second";
  server_->models().Put(server_->Make({.manifest = second}));
  Ask(&VllmEngine::Stub::HealthCheck);
  EXPECT_EQ(last_.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(last_.error_message(), HasSubstr("several models"));
}

TEST_F(VllmServiceTest, TheTokenizerComesInPartsWithItsDigest) {
  Start({.word_bytes = 4000,
         .chat_template_json = R"({"template":"T","special_tokens":{"bos_token":"w1"}})"});
  grpc::ClientContext context;
  const auto reader = stub().GetTokenizer(&context, {});
  std::string archive, digest;
  int parts = 0;
  smg::grpc::common::GetTokenizerChunk part;
  while (reader->Read(&part)) {
    EXPECT_EQ(digest, "") << "of the last part alone";
    archive += part.data();
    digest = part.sha256();
    ++parts;
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_GT(parts, 1);
  Sha256 sha256;
  sha256.Add(archive);
  EXPECT_EQ(absl::StrCat("sha256:", digest), sha256.Name());
  EXPECT_THAT(archive, HasSubstr(FakeTokenizerJson(4000)));
  EXPECT_THAT(archive, HasSubstr("chat_template.jinjaT"));
  EXPECT_THAT(archive, HasSubstr(R"(tokenizer_config.json{"bos_token":"w1"})"));
  EXPECT_THAT(archive, HasSubstr(R"(generation_config.json{"eos_token_id":[63]})"));
}

}  // namespace vllm_service_test
}  // namespace epikv
