#include "server/base/errors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/text/utf8.h"
#include "tests/fixtures/error_details.h"

namespace epikv {
namespace errors_test {

using ::testing::EndsWith;

TEST(ErrorsTest, RejectionCarriesReasonMetadataAndAllViolations) {
  const grpc::Status status =
      ToGrpc(Rejection{.code = absl::StatusCode::kInvalidArgument,
                       .reason = "KV_BUDGET",
                       .message = "kv.budget: too small",
                       .violations = {{"kv.budget", "too small"}, {"sampling.top_p", "is 0"}},
                       .metadata = {{"min", "64"}}});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "kv.budget: too small");
  EXPECT_EQ(DetailsOf(status).code(), 3);
  EXPECT_EQ(DetailsOf(status).message(), "kv.budget: too small");
  const auto info = Detail<v1::ErrorInfo>(status, "ErrorInfo").value();
  EXPECT_EQ(info.reason(), "KV_BUDGET");
  EXPECT_EQ(info.domain(), "epikv");
  EXPECT_EQ(info.metadata().at("min"), "64");
  const auto bad = Detail<v1::BadRequest>(status, "BadRequest").value();
  ASSERT_EQ(bad.field_violations_size(), 2);
  EXPECT_EQ(bad.field_violations(1).field(), "sampling.top_p");
  EXPECT_EQ(bad.field_violations(1).description(), "is 0");
}

TEST(ErrorsTest, WhatDoesNotFitIntoMetadataIsCounted) {
  Rejection rejection{.reason = "INVALID_REQUEST", .message = std::string(100'000, 'm')};
  for (int i = 0; i < 1000; ++i) {
    rejection.violations.push_back(
        {absl::StrCat("stop.stop_strings[", i, "]"), std::string(2000, 'd')});
  }
  const grpc::Status status = ToGrpc(rejection);
  // Both travel in the trailers; base64 makes the details a third larger.
  EXPECT_LT(status.error_message().size() + status.error_details().size() * 4 / 3, 8192u - 256u);
  const auto bad = Detail<v1::BadRequest>(status, "BadRequest").value();
  const int told = bad.field_violations_size() - 1;
  EXPECT_GT(told, 3);
  EXPECT_EQ(bad.field_violations(told).description(), absl::StrCat("and ", 1000 - told, " more"));
}

// Bytes of both trailers that say what is wrong: gRPC percent-encodes the message and may send the
// details in base64.
size_t TrailerBytes(const grpc::Status& status) {
  size_t bytes = status.error_details().size() * 4 / 3;
  for (const char c : status.error_message()) bytes += c < 0x20 || c > 0x7e || c == '%' ? 3 : 1;
  return bytes;
}

TEST(ErrorsTest, TrailersFitWhateverTheScript) {
  for (const char* letter : {"m", "%", "\n", "ä", "€", "𝄞"}) {
    std::string text;
    for (int i = 0; i < 10'000; ++i) text += letter;
    Rejection rejection{.reason = "INVALID_REQUEST", .message = text};
    for (int i = 0; i < 1000; ++i) {
      const std::string part = text.substr(0, i * absl::string_view(letter).size());
      rejection.violations.push_back({part, part});
    }
    for (const char* name : {"a", "b", "c", "d"}) rejection.metadata[name] = text;
    const grpc::Status status = WithTraceId(ToGrpc(rejection), std::string(32, 'a'));
    constexpr size_t kTraceParentBytes = 11 + 55 + 32;
    EXPECT_LT(TrailerBytes(status) + kTraceParentBytes, 8192u - 256u) << letter;
    EXPECT_GT(TrailerBytes(status), 4096u) << letter;
    EXPECT_FALSE(FirstInvalidUtf8(status.error_message()).has_value()) << letter;
  }
}

TEST(ErrorsTest, ShortMessageOfAnyScriptIsWhole) {
  EXPECT_EQ(ToGrpc(absl::InternalError("ä€𝄞")).error_message(), "ä€𝄞");
  EXPECT_EQ(ToGrpc(absl::InternalError(std::string(1024, 'm'))).error_message().size(), 1024u);
  EXPECT_EQ(ToGrpc(absl::InternalError(std::string(1025, 'm'))).error_message().size(), 1024u);
}

TEST(ErrorsTest, LongTextIsCutBetweenCodePoints) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "ä€";
  const grpc::Status status = ToGrpc(absl::InternalError(text));
  EXPECT_THAT(status.error_message(), EndsWith("..."));
  EXPECT_FALSE(FirstInvalidUtf8(status.error_message()).has_value());
}

TEST(ErrorsTest, StatusOfARequestKeepsItsReason) {
  const grpc::Status status =
      ToGrpc(WithReason(absl::ResourceExhaustedError("reads nothing"), kSlowReader));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Detail<v1::ErrorInfo>(status, "ErrorInfo")->reason(), "SLOW_READER");
}

TEST(ErrorsTest, StatusWithoutAReasonIsNamedByItsCode) {
  const grpc::Status status = ToGrpc(absl::DeadlineExceededError("too late"));
  EXPECT_EQ(Detail<v1::ErrorInfo>(status, "ErrorInfo")->reason(), "DEADLINE_EXCEEDED");
}

TEST(ErrorsTest, PreconditionThatIsMissingIsNamed) {
  const grpc::Status refused = ToGrpc(Rejection{.code = absl::StatusCode::kFailedPrecondition,
                                                .reason = "ARTEFACT_MISSING",
                                                .message = "kv.policy: needs statistics",
                                                .violations = {{"kv.policy", "needs statistics"}}});
  const auto of_field = Detail<v1::PreconditionFailure>(refused, "PreconditionFailure").value();
  ASSERT_EQ(of_field.violations_size(), 1);
  EXPECT_EQ(of_field.violations(0).type(), "ARTEFACT_MISSING");
  EXPECT_EQ(of_field.violations(0).subject(), "kv.policy");
  EXPECT_EQ(of_field.violations(0).description(), "kv.policy: needs statistics");
  EXPECT_TRUE(Detail<v1::BadRequest>(refused, "BadRequest").has_value());
  const grpc::Status not_loaded = ToGrpc(absl::FailedPreconditionError("breaks the contract"));
  const auto of_model = Detail<v1::PreconditionFailure>(not_loaded, "PreconditionFailure").value();
  ASSERT_EQ(of_model.violations_size(), 1);
  EXPECT_EQ(of_model.violations(0).type(), "FAILED_PRECONDITION");
  EXPECT_FALSE(
      Detail<v1::PreconditionFailure>(ToGrpc(absl::NotFoundError("x")), "PreconditionFailure")
          .has_value());
}

TEST(ErrorsTest, WhatADrainEndedMayBeTriedAgain) {
  const grpc::Status status = ToGrpc(WithReason(absl::UnavailableError("stopping"), kDraining));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonIn(status), "DRAINING");
  EXPECT_GT(Detail<v1::RetryInfo>(status, "RetryInfo")->retry_delay().seconds(), 0);
}

TEST(ErrorsTest, OkHasNoDetails) {
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_EQ(ToGrpc(absl::OkStatus()).error_details(), "");
}

TEST(ErrorsTest, NotFoundNamesTheResource) {
  const grpc::Status status = NotFound("model", "gpt", "model 'gpt' is not served here");
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  const auto resource = Detail<v1::ResourceInfo>(status, "ResourceInfo").value();
  EXPECT_EQ(resource.resource_type(), "model");
  EXPECT_EQ(resource.resource_name(), "gpt");
}

TEST(ErrorsTest, ExhaustionSaysWhatAndWhenToRetry) {
  const grpc::Status status = Exhausted("waiting requests", "full", absl::Milliseconds(1500));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(Detail<v1::QuotaFailure>(status, "QuotaFailure")->violations(0).subject(),
            "waiting requests");
  const auto retry = Detail<v1::RetryInfo>(status, "RetryInfo").value();
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500'000'000);
}

TEST(ErrorsTest, InfeasibleDeadlineSaysWhatWasEstimated) {
  const DeadlineEstimate estimate{
      .left = absl::Milliseconds(900), .wait = absl::Seconds(2), .run = absl::Milliseconds(500)};
  const grpc::Status status = DeadlineInfeasible(estimate, absl::Milliseconds(1600));
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
  const auto info = Detail<v1::ErrorInfo>(status, "ErrorInfo").value();
  EXPECT_EQ(info.reason(), "DEADLINE_INFEASIBLE");
  EXPECT_EQ(info.metadata().at("seconds_left"), "0.900");
  EXPECT_EQ(info.metadata().at("wait_seconds"), "2.000");
  EXPECT_EQ(info.metadata().at("run_seconds"), "0.500");
  const auto retry = Detail<v1::RetryInfo>(status, "RetryInfo").value();
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 600'000'000);
  EXPECT_FALSE(Detail<v1::RetryInfo>(DeadlineInfeasible(estimate, std::nullopt), "RetryInfo"));
}

TEST(ErrorsTest, EveryCodeHasItsName) {
  EXPECT_EQ(CodeName(grpc::StatusCode::OK), "OK");
  EXPECT_EQ(CodeName(grpc::StatusCode::OUT_OF_RANGE), "OUT_OF_RANGE");
  EXPECT_EQ(CodeName(grpc::StatusCode::UNAUTHENTICATED), "UNAUTHENTICATED");
  EXPECT_EQ(CodeName(static_cast<grpc::StatusCode>(99)), "UNKNOWN");
}

TEST(ErrorsTest, TraceIsAddedToOurErrorsAlone) {
  const std::string trace = std::string(32, 'a');
  const grpc::Status ours = WithTraceId(PermissionDenied("AdminService/Drain", "operator"), trace);
  EXPECT_EQ(ours.error_code(), grpc::PERMISSION_DENIED);
  EXPECT_EQ(ours.error_message(), "AdminService/Drain needs the role operator");
  EXPECT_EQ(ErrorReason(ours), "PERMISSION_DENIED");
  const auto info = Detail<v1::ErrorInfo>(ours, "ErrorInfo");
  EXPECT_EQ(info->metadata().at("role"), "operator");
  EXPECT_EQ(info->metadata().at("trace_id"), trace);
  EXPECT_EQ(WithTraceId(grpc::Status::OK, trace).error_details(), "");
  const grpc::Status theirs(grpc::INTERNAL, "what", "no details of ours");
  EXPECT_EQ(WithTraceId(theirs, trace).error_details(), theirs.error_details());
  EXPECT_EQ(ErrorReason(theirs), "");
}

}  // namespace errors_test
}  // namespace epikv
