// Tokens over a running server: who is let in, and what is done when the file changes.

#include "server/call/auth.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "epikv/v1/generation.grpc.pb.h"
#include "server/metrics/metrics_server.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/scrape.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace auth_test {

using ::testing::HasSubstr;
using ::testing::Not;

// SHA-256 of "one", of "two".
constexpr char kOne[] = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
constexpr char kTwo[] = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

// The methods of every service of ours that is linked into this program.
std::vector<std::string> OurMethods() {
  std::vector<std::string> methods;
  for (const char* file :
       {"epikv/v1/generation", "epikv/v1/tokenization", "epikv/v1/model", "epikv/v1/policy",
        "epikv/v1/packet", "epikv/v1/experiment", "epikv/v1/admin", "vllm/grpc/engine/vllm_engine",
        "xds/service/orca/v3/orca"}) {
    const auto* descriptor = google::protobuf::DescriptorPool::generated_pool()->FindFileByName(
        absl::StrCat(file, ".proto"));
    for (int i = 0; i < descriptor->service_count(); ++i) {
      const auto* service = descriptor->service(i);
      for (int j = 0; j < service->method_count(); ++j) {
        methods.push_back(absl::StrCat(service->name(), "/", service->method(j)->name()));
      }
    }
  }
  return methods;
}

// What a call says whose caller shows these `authorization` headers. The request is no message: who
// is let in is told so.
grpc::Status Call(grpc::Channel& channel, const std::string& method,
                  const std::vector<std::string>& authorization) {
  grpc::ClientContext context;
  for (const std::string& value : authorization) context.AddMetadata("authorization", value);
  grpc::GenericStub stub(std::shared_ptr<grpc::Channel>(&channel, [](grpc::Channel*) {}));
  grpc::CompletionQueue queue;
  grpc::Slice garbage("\xff");
  const absl::string_view package = absl::StartsWith(method, "VllmEngine/") ? "vllm.grpc.engine"
                                    : absl::StartsWith(method, "OpenRcaService/")
                                        ? "xds.service.orca.v3"
                                        : "epikv.v1";
  auto call = stub.PrepareCall(&context, absl::StrCat("/", package, ".", method), &queue);
  call->StartCall(nullptr);
  auto await = [&queue] {
    void* tag;
    bool ok;
    EXPECT_TRUE(queue.Next(&tag, &ok));
  };
  await();
  call->WriteLast(grpc::ByteBuffer(&garbage, 1), {}, nullptr);
  await();
  grpc::Status status;
  call->Finish(&status, nullptr);
  await();
  return status;
}

TEST(AuthTest, EveryMethodIsInTheTable) {
  std::set<std::string> roles;
  for (const MethodRole& row : MethodRoles()) roles.emplace(row.method);
  const std::vector<std::string> methods = OurMethods();
  EXPECT_EQ(roles, std::set<std::string>(methods.begin(), methods.end()));
}

class AuthServerTest : public ::testing::Test {
 protected:
  AuthServerTest() {
    folder_.Write("tokens", absl::StrCat("user ann ", kOne));
    server_.emplace(FakeServerOptions{
        .auth = {.tokens_file = folder_.File("tokens"),
                 .poll = absl::Milliseconds(1),
                 .on_reload = [this](const absl::Status& status) { OnReload(status); }},
        .vllm_dialect = true,
        .load_reports = true});
    channel_ = server_->Connect();
    admin_channel_ = server_->ConnectAdmin();
  }

  void OnReload(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    reloads_.push_back(status);
  }
  // The outcome of the `n`-th reload, from 1.
  absl::Status AwaitReload(size_t n) {
    absl::MutexLock lock(&mu_);
    auto there = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return reloads_.size() >= n; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&there), kGenerous));
    return reloads_.at(n - 1);
  }
  grpc::Status Tokenize(const std::vector<std::string>& authorization) {
    return Call(*channel_, "TokenizationService/Tokenize", authorization);
  }

  TemporaryFolder folder_;
  absl::Mutex mu_;
  std::vector<absl::Status> reloads_ ABSL_GUARDED_BY(mu_);
  std::optional<FakeServer> server_;
  std::shared_ptr<grpc::Channel> channel_, admin_channel_;
};

TEST_F(AuthServerTest, NoMethodAnswersWithoutAToken) {
  for (const std::string& method : OurMethods()) {
    const bool admin = absl::StartsWith(method, "AdminService/");
    const grpc::Status status = Call(admin ? *admin_channel_ : *channel_, method, {});
    EXPECT_EQ(status.error_code(), grpc::UNAUTHENTICATED) << method;
    EXPECT_EQ(ReasonIn(status), "UNAUTHENTICATED") << method;
  }
}

TEST_F(AuthServerTest, WhatOperatorsDoUsersMayNot) {
  for (const MethodRole& row : MethodRoles()) {
    if (row.role != Role::kOperator) continue;
    const grpc::Status status = Call(*admin_channel_, std::string(row.method), {"Bearer one"});
    EXPECT_EQ(status.error_code(), grpc::PERMISSION_DENIED) << row.method;
  }
}

// One GenerateOnce by the owner of `token`.
grpc::Status Generate(grpc::Channel& channel, const std::string& token,
                      const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
  v1::GenerateResult result;
  return v1::GenerationService::Stub(std::shared_ptr<grpc::Channel>(&channel, [](auto*) {}))
      .GenerateOnce(&context, request, &result);
}

v1::GenerateRequest RequestOf(const std::string& tenant, uint32_t tokens = 2) {
  v1::GenerateRequest request;
  request.set_request_id("r");
  request.mutable_token_ids()->add_ids(1);
  request.mutable_stop()->set_max_output_tokens(tokens);
  request.mutable_scheduling()->set_tenant(tenant);
  return request;
}

TEST_F(AuthServerTest, WhoHasATokenIsTheTenantOfHisRequests) {
  folder_.Write("tokens", absl::StrCat("user ann ", kOne, "\noperator bob ", kTwo));
  EXPECT_TRUE(AwaitReload(1).ok());
  EXPECT_TRUE(Generate(*channel_, "one", RequestOf("")).ok());
  EXPECT_TRUE(Generate(*channel_, "one", RequestOf("ann")).ok());
  const grpc::Status other = Generate(*channel_, "one", RequestOf("bob"));
  EXPECT_EQ(other.error_code(), grpc::PERMISSION_DENIED);
  EXPECT_THAT(other.error_message(), HasSubstr("scheduling.tenant 'bob'"));
  EXPECT_TRUE(Generate(*channel_, "two", RequestOf("ann")).ok()) << "an operator's";
}

TEST_F(AuthServerTest, OnlyItsTenantAndOperatorsEndARequest) {
  folder_.Write("tokens", absl::StrCat("user ann ", kOne, "\nuser eve ", kTwo));
  EXPECT_TRUE(AwaitReload(1).ok());
  Gate gate;
  server_->script().on_forward = [&gate](absl::Span<const WorkItem>) {
    gate.Pass(true);
    return absl::OkStatus();
  };
  grpc::Status ended;
  std::thread ann([&] { ended = Generate(*channel_, "one", RequestOf("", 4000)); });
  ASSERT_TRUE(gate.AwaitHeld());
  auto cancel = [this](const std::string& token) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    v1::CancelRequestRequest request;
    request.set_request_id("r");
    v1::CancelRequestResponse response;
    return v1::GenerationService::Stub(channel_)
        .CancelRequest(&context, request, &response)
        .error_code();
  };
  EXPECT_EQ(cancel("two"), grpc::NOT_FOUND);
  EXPECT_EQ(cancel("one"), grpc::OK);
  gate.Open();
  ann.join();
  EXPECT_EQ(ended.error_code(), grpc::CANCELLED);
}

TEST_F(AuthServerTest, TokenLetsItsOwnerIn) {
  for (const char* header : {"Bearer one", "bearer one", "BEARER one"}) {
    EXPECT_EQ(Tokenize({header}).error_code(), grpc::INVALID_ARGUMENT) << header;  // it was read
  }
}

TEST_F(AuthServerTest, WhatIsNoTokenOfOursDoesNot) {
  for (const char* header : {"", "Bearer", "Bearer ", "Bearer two", "Bearer  one", "Basic one",
                             "one", "Bearer one two", kOne}) {
    EXPECT_EQ(Tokenize({header}).error_code(), grpc::UNAUTHENTICATED) << header;
  }
  EXPECT_EQ(Tokenize({absl::StrCat("Bearer ", kOne)}).error_code(), grpc::UNAUTHENTICATED);
  EXPECT_EQ(Tokenize({"Bearer one", "Bearer one"}).error_code(), grpc::UNAUTHENTICATED);
}

TEST_F(AuthServerTest, ErrorsDoNotRepeatTheToken) {
  const grpc::Status status = Tokenize({"Bearer hunter2"});
  EXPECT_THAT(status.error_message(), Not(HasSubstr("hunter2")));
  EXPECT_THAT(status.error_details(), Not(HasSubstr("hunter2")));
}

TEST_F(AuthServerTest, RefusalsAreCounted) {
  Tokenize({});
  Tokenize({"Bearer two"});
  const auto page = *MetricsServer::Start("127.0.0.1:0");
  page->Serve(server_->metrics());
  EXPECT_EQ(SeriesOf(Scrape(page->port()))
                .at(R"(epikv_requests_rejected_total{model="",reason="unauthenticated"})"),
            2);
}

TEST_F(AuthServerTest, ChangedFileIsTakenIntoUse) {
  folder_.Write("tokens", absl::StrCat("user ann ", kTwo));
  EXPECT_EQ(AwaitReload(1), absl::OkStatus());
  EXPECT_EQ(Tokenize({"Bearer one"}).error_code(), grpc::UNAUTHENTICATED);
  EXPECT_EQ(Tokenize({"Bearer two"}).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(AuthServerTest, BrokenFileLeavesTheTokensThatAreKnown) {
  folder_.Write("tokens", "user ann");
  EXPECT_THAT(AwaitReload(1).message(),
              HasSubstr(absl::StrCat(folder_.File("tokens"), "': line 1")));
  EXPECT_EQ(Tokenize({"Bearer one"}).error_code(), grpc::INVALID_ARGUMENT);
  std::filesystem::remove(folder_.File("tokens"));
  EXPECT_THAT(AwaitReload(2).message(), HasSubstr("No such file"));
  EXPECT_EQ(Tokenize({"Bearer one"}).error_code(), grpc::INVALID_ARGUMENT);
  folder_.Write("tokens", absl::StrCat("user ann ", kTwo));
  EXPECT_EQ(AwaitReload(3), absl::OkStatus());
  EXPECT_EQ(Tokenize({"Bearer one"}).error_code(), grpc::UNAUTHENTICATED);
}

TEST(AuthenticatorTest, RoleThatIsNeededIsNamed) {
  TemporaryFolder folder;
  folder.Write("tokens", absl::StrCat("user ann ", kOne, "\noperator bob ", kTwo));
  const auto auth = *Authenticator::Create({.tokens_file = folder.File("tokens")});
  Identity caller;
  const auto refused = auth->Admit("AdminService/Unknown", {{"Bearer one"}, {}}, caller);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(ReasonIn(*refused), "PERMISSION_DENIED");
  EXPECT_EQ(Detail<v1::ErrorInfo>(*refused, "ErrorInfo")->metadata().at("role"), "operator");
  EXPECT_EQ(caller.name, "ann") << "for the access log";
  EXPECT_FALSE(auth->Admit("AdminService/Unknown", {{"Bearer two"}, {}}, caller).has_value());
  EXPECT_EQ(caller.name, "bob");
}

TEST(AuthenticatorTest, AnExpiredTokenIsToldSo) {
  TemporaryFolder folder;
  folder.Write("tokens", absl::StrCat("user ann ", kOne, " until=2020-01-01T00:00:00Z\nuser ann ",
                                      kTwo, " until=2999-01-01T00:00:00Z"));
  const auto auth = *Authenticator::Create({.tokens_file = folder.File("tokens")});
  Identity caller;
  const auto refused = auth->Admit("ModelService/ListModels", {{"Bearer one"}, {}}, caller);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->error_code(), grpc::UNAUTHENTICATED);
  EXPECT_THAT(refused->error_message(), HasSubstr("expired, at 2020-01-01T00:00:00+00:00"));
  EXPECT_EQ(caller.name, "");
  EXPECT_FALSE(auth->Admit("ModelService/ListModels", {{"Bearer two"}, {}}, caller).has_value());
  EXPECT_EQ(caller.name, "ann");
}

TEST(AuthenticatorTest, ACertificateStandsForATokenThatIsNotShown) {
  TemporaryFolder folder;
  folder.Write("tokens", absl::StrCat("user ann san:ann.x\noperator bob ", kTwo));
  const auto auth =
      *Authenticator::Create({.tokens_file = folder.File("tokens"), .certificates = true});
  Identity caller;
  auto admitted = [&](const Authenticator::Credentials& shown) {
    return !auth->Admit("ModelService/ListModels", shown, caller).has_value();
  };
  EXPECT_TRUE(admitted({{}, {"ann.x"}}));
  EXPECT_EQ(caller.name, "ann");
  EXPECT_TRUE(admitted({{"Bearer two"}, {"ann.x"}})) << "the token goes before";
  EXPECT_EQ(caller.name, "bob");
  EXPECT_FALSE(admitted({{"Bearer three"}, {"ann.x"}})) << "a wrong token is not made good";
  EXPECT_FALSE(admitted({{}, {"eve.x"}}));
  EXPECT_FALSE(admitted({{}, {}}));
}

TEST(AuthenticatorTest, CertificatesThatNobodyIsAskedForAreAnError) {
  TemporaryFolder folder;
  folder.Write("tokens", "user ann san:ann.x");
  EXPECT_THAT(Authenticator::Create({.tokens_file = folder.File("tokens")}).status().message(),
              HasSubstr("set --tls_client_ca"));
}

TEST(AuthenticatorTest, WithoutAFileEveryoneIsAnAnonymousOperator) {
  const auto auth = *Authenticator::Create({});
  Identity caller;
  EXPECT_FALSE(auth->Admit("AdminService/Unknown", {}, caller).has_value());
  EXPECT_EQ(caller.name, "");
  EXPECT_EQ(caller.role, Role::kOperator);
}

TEST(AuthenticatorTest, FileThatIsWrongAtTheStartIsAnError) {
  EXPECT_THAT(Authenticator::Create({.tokens_file = "/nowhere"}).status().message(),
              HasSubstr("--auth_tokens_file: cannot read '/nowhere'"));
}

}  // namespace auth_test
}  // namespace epikv
