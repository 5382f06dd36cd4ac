#include "server/generation/request_preparer.h"

#include <grpcpp/server_context.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <variant>

#include "tests/fixtures/fake_server.h"

namespace epikv {
namespace request_preparer_test {

class RequestPreparerTest : public ::testing::Test {
 protected:
  RequestPreparerTest() { EXPECT_EQ(scope_.Admit(), std::nullopt); }
  ~RequestPreparerTest() override { scope_.Close(grpc::Status::OK); }

  RequestPreparer::Result Prepare(const v1::GenerateRequest& request, bool may_wait) {
    return preparer_.Prepare(scope_, request, *model_, may_wait, /*leaves=*/{});
  }
  static v1::GenerateRequest Request(const std::string& regex) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->add_ids(1);
    request.mutable_sampling()->set_regex(regex);
    return request;
  }

  FakeServer server_;
  const ModelPtr model_ = server_.Make({});
  PacketStore packets_;
  RequestPreparer preparer_{/*experiments=*/nullptr, packets_, /*sessions=*/nullptr, {}};
  grpc::CallbackServerContext context_;
  CallScope scope_{"GenerationService/Generate", server_.frontend(), context_};
};

// Health shares gRPC's threads, and a constraint may take seconds: also one that was remembered
// when somebody looked, or by the model that this one has replaced.
TEST_F(RequestPreparerTest, AThreadThatMayNotCompileIsToldTo) {
  const v1::GenerateRequest request = Request("w[0-9]{1,2}");
  auto is_left = [&] {
    return std::holds_alternative<RequestPreparer::MustWait>(Prepare(request, false));
  };
  EXPECT_TRUE(is_left());
  EXPECT_EQ(*model_->constraints->live_bytes(), 0);
  RequestPreparer::Result compiled = Prepare(request, true);
  ASSERT_TRUE(std::holds_alternative<Prepared>(compiled));
  EXPECT_FALSE(is_left());
  RequestPreparer::Result known = Prepare(request, false);
  ASSERT_TRUE(std::holds_alternative<Prepared>(known));
  EXPECT_EQ(std::get<Prepared>(known).request.sampling.constraint,
            std::get<Prepared>(compiled).request.sampling.constraint);
  v1::GenerateRequest unconstrained;
  unconstrained.mutable_token_ids()->add_ids(1);
  EXPECT_TRUE(std::holds_alternative<Prepared>(Prepare(unconstrained, false)));
}

// Nothing is compiled, and kept, in a name that is refused: names are kept beside it.
TEST_F(RequestPreparerTest, ATenantWhoseNameIsTooLongHasNothingCompiled) {
  v1::GenerateRequest request = Request("w[0-9]{1,2}");
  request.mutable_scheduling()->set_tenant(std::string(65, 'x'));
  EXPECT_TRUE(std::holds_alternative<grpc::Status>(Prepare(request, true)));
  EXPECT_EQ(*model_->constraints->live_bytes(), 0);
  request.mutable_scheduling()->set_tenant(std::string(64, 'x'));
  EXPECT_TRUE(std::holds_alternative<Prepared>(Prepare(request, true)));
  EXPECT_GT(*model_->constraints->live_bytes(), 0);
}

}  // namespace request_preparer_test
}  // namespace epikv
