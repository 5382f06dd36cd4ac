// What every call gets on its way through a running server: a line in the access log, and a trace.

#include "server/call/call_scope.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "epikv/v1/admin.grpc.pb.h"
#include "epikv/v1/generation.grpc.pb.h"
#include "epikv/v1/model.grpc.pb.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace call_scope_test {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

const std::string kTraceId = "4bf92f3577b34da6a3ce929d0e0e4736";
const std::string kSpanId = "00f067aa0ba902b7";

// Her token is "one".
constexpr char kAnn[] = "user ann 7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";

class CallScopeTest : public ::testing::Test {
 protected:
  static v1::GenerateRequest Request(const std::string& text) {
    v1::GenerateRequest request;
    request.set_text(text);
    request.set_request_id("r1");
    request.mutable_stop()->set_max_output_tokens(6);
    return request;
  }
  grpc::Status Generate(const v1::GenerateRequest& request) {
    context_.emplace();
    v1::GenerateResult result;
    return generation_.GenerateOnce(&*context_, request, &result);
  }
  grpc::Status Call(const std::vector<std::string>& traceparents, const std::string& model = "") {
    context_.emplace();
    for (const std::string& value : traceparents) context_->AddMetadata("traceparent", value);
    v1::GetModelRequest request;
    request.set_name(model);
    v1::Model response;
    return models_.GetModel(&*context_, request, &response);
  }
  // Of the last call; empty without exactly one.
  std::string EchoedTrace() const {
    const auto [begin, end] = context_->GetServerTrailingMetadata().equal_range("traceparent");
    if (std::distance(begin, end) != 1) return "";
    return std::string(begin->second.data(), begin->second.size());
  }
  // All lines, of calls that have ended. Ends the server.
  std::vector<nlohmann::json> Log() {
    server_.reset();
    std::vector<nlohmann::json> lines;
    for (absl::string_view line : absl::StrSplit(folder_.Read("log"), '\n', absl::SkipEmpty())) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }

  const TemporaryFolder folder_;
  std::optional<FakeServer> server_{std::in_place,
                                    FakeServerOptions{.access_log = folder_.File("log")}};
  const std::shared_ptr<grpc::Channel> channel_ = server_->Connect();
  v1::GenerationService::Stub generation_{channel_};
  v1::ModelService::Stub models_{channel_};
  std::optional<grpc::ClientContext> context_;
};

TEST_F(CallScopeTest, SpanOfTheServerIsInTheCallersTrace) {
  ASSERT_TRUE(Call({absl::StrCat("00-", kTraceId, "-", kSpanId, "-01")}, "fake").ok());
  EXPECT_THAT(EchoedTrace(), MatchesRegex(absl::StrCat("00-", kTraceId, "-[0-9a-f]{16}-01")));
  EXPECT_THAT(EchoedTrace(), Not(HasSubstr(kSpanId)));
  const auto line = Log().at(0);
  EXPECT_EQ(line["trace_id"], kTraceId);
  EXPECT_EQ(line["parent_span_id"], kSpanId);
  EXPECT_THAT(EchoedTrace(), HasSubstr(line["span_id"].get<std::string>()));
  EXPECT_EQ(line["sampled"], true);
}

TEST_F(CallScopeTest, ASpanWithoutACallerBeginsATrace) {
  ASSERT_TRUE(Call({}, "fake").ok());
  const auto line = Log().at(0);
  EXPECT_EQ(line["span_id"].get<std::string>().size(), 16u);
  EXPECT_FALSE(line.contains("parent_span_id"));
  EXPECT_FALSE(line.contains("sampled"));
}

TEST_F(CallScopeTest, TraceThatBreaksTheStandardIsReplaced) {
  const std::string valid = absl::StrCat("00-", kTraceId, "-", kSpanId, "-01");
  for (const auto& headers : std::vector<std::vector<std::string>>{
           {}, {""}, {valid + "-x"}, {absl::StrCat("ff", valid.substr(2))}, {valid, valid}}) {
    ASSERT_TRUE(Call(headers, "fake").ok());
    EXPECT_THAT(EchoedTrace(), MatchesRegex("00-[0-9a-f]{32}-[0-9a-f]{16}-00"));
    EXPECT_THAT(EchoedTrace(), Not(HasSubstr(kTraceId)));
  }
}

TEST_F(CallScopeTest, ErrorsCarryTheTrace) {
  const grpc::Status status = Call({absl::StrCat("00-", kTraceId, "-", kSpanId, "-00")}, "another");
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(Detail<v1::ErrorInfo>(status, "ErrorInfo")->metadata().at("trace_id"), kTraceId);
  EXPECT_THAT(EchoedTrace(), HasSubstr(kTraceId));
}

TEST_F(CallScopeTest, LineSaysWhatBecameOfARequest) {
  v1::GenerateRequest request = Request("a b c d e f");
  request.mutable_kv()->set_policy("window");
  request.mutable_kv()->set_max_tokens(24);
  ASSERT_TRUE(Generate(request).ok());
  const auto lines = Log();
  ASSERT_THAT(lines, SizeIs(1));
  const nlohmann::json& line = lines[0];
  EXPECT_EQ(line["method"], "GenerationService/GenerateOnce");
  EXPECT_EQ(line["code"], "OK");
  EXPECT_EQ(line["request_id"], "r1");
  EXPECT_EQ(line["model"], "fake");
  EXPECT_EQ(line["policy"], "window");
  EXPECT_EQ(line["budget_tokens"], 24);
  EXPECT_EQ(line["output_tokens"], 6);
  EXPECT_EQ(line["operation"], "text_completion");
  EXPECT_EQ(line["finish_reason"], "length");
  EXPECT_THAT(line["peer"].get<std::string>(), StartsWith("ipv4:127.0.0.1:"));
  EXPECT_GT(line["prompt_tokens"], 0);
  EXPECT_GT(line["peak_tokens"], 0);
  EXPECT_GT(line["seconds"], 0);
  EXPECT_GT(line["ttft_seconds"], 0);
  EXPECT_GE(line["seconds"], line["ttft_seconds"]);
  EXPECT_FALSE(line.contains("reason"));
  EXPECT_FALSE(line.contains("identity"));
}

TEST_F(CallScopeTest, LineSaysWhyARequestWasRefused) {
  v1::GenerateRequest request = Request("a");
  request.mutable_kv()->set_policy("no such policy");
  EXPECT_EQ(Generate(request).error_code(), grpc::INVALID_ARGUMENT);
  const auto lines = Log();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0]["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(lines[0]["reason"], "INVALID_REQUEST");
  EXPECT_EQ(lines[0]["policy"], "no such policy");
  EXPECT_EQ(lines[0]["request_id"], "r1");
  EXPECT_FALSE(lines[0].contains("output_tokens"));
}

TEST_F(CallScopeTest, LineOfACancelledStreamCountsWhatItGot) {
  Gate gate;
  server_->script().next = [](int32_t) { return 5; };  // on and on
  server_->script().on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);
    return absl::OkStatus();
  };
  StreamClient stream(generation_, Request("a b c"));
  ASSERT_TRUE(gate.AwaitHeld());
  grpc::ClientContext context;
  v1::CancelRequestRequest cancel;
  cancel.set_request_id("r1");
  v1::CancelRequestResponse cancelled;
  EXPECT_TRUE(generation_.CancelRequest(&context, cancel, &cancelled).ok());
  gate.Open();
  EXPECT_EQ(stream.AwaitDone().error_code(), grpc::CANCELLED);
  const auto lines = Log();
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(lines[0]["method"], "GenerationService/CancelRequest");
  EXPECT_EQ(lines[1]["method"], "GenerationService/Generate");
  EXPECT_EQ(lines[1]["code"], "CANCELLED");
  EXPECT_EQ(lines[1]["finish_reason"], "cancelled");
  EXPECT_GT(lines[1]["output_tokens"], 0);
}

TEST_F(CallScopeTest, TextOfPromptsAndOutputsIsNotLogged) {
  ASSERT_TRUE(Generate(Request("tell nobody")).ok());
  EXPECT_EQ(Generate(Request("")).error_code(), grpc::INVALID_ARGUMENT);
  server_.reset();
  EXPECT_THAT(folder_.Read("log"), Not(HasSubstr("nobody")));
}

TEST_F(CallScopeTest, LongNamesAreCut) {
  v1::GenerateRequest request = Request("a");
  request.set_model(std::string(100000, 'm'));
  EXPECT_EQ(Generate(request).error_code(), grpc::NOT_FOUND);
  EXPECT_EQ(Log().at(0)["model"].get<std::string>().size(), 128u);
}

TEST(CallScopeAuthTest, LineNamesTheCaller) {
  const TemporaryFolder folder;
  folder.Write("tokens", kAnn);
  {
    FakeServer server(
        {.auth = {.tokens_file = folder.File("tokens")}, .access_log = folder.File("log")});
    v1::ModelService::Stub models(server.Connect());
    for (const char* token : {"Bearer one", "Bearer hunter2"}) {
      grpc::ClientContext context;
      context.AddMetadata("authorization", token);
      v1::ListModelsResponse response;
      models.ListModels(&context, {}, &response);
    }
  }
  const std::string log = folder.Read("log");
  const std::vector<std::string> lines = absl::StrSplit(log, '\n', absl::SkipEmpty());
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(nlohmann::json::parse(lines[0])["identity"], "ann");
  const nlohmann::json refused = nlohmann::json::parse(lines[1]);
  EXPECT_EQ(refused["code"], "UNAUTHENTICATED");
  EXPECT_FALSE(refused.contains("identity"));
  EXPECT_THAT(log, Not(HasSubstr("hunter2")));
}

// The line that an audit looks for.
TEST(CallScopeAuthTest, LineNamesWhoMayNot) {
  const TemporaryFolder folder;
  folder.Write("tokens", kAnn);
  {
    FakeServer server(
        {.auth = {.tokens_file = folder.File("tokens")}, .access_log = folder.File("log")});
    v1::AdminService::Stub admin(server.ConnectAdmin());
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer one");
    v1::ServerStatus response;
    EXPECT_EQ(admin.GetServerStatus(&context, {}, &response).error_code(), grpc::PERMISSION_DENIED);
  }
  const nlohmann::json line = nlohmann::json::parse(folder.Read("log"));
  EXPECT_EQ(line["code"], "PERMISSION_DENIED");
  EXPECT_EQ(line["identity"], "ann");
}

}  // namespace call_scope_test
}  // namespace epikv
