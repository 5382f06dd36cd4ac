#include "server/generation/generation_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/generation_fixture.h"

namespace epikv {
namespace generation_refusals_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// One bad request: what is wrong, and what the client is told.
struct BadInput {
  std::string name;
  std::string request;
  grpc::StatusCode code;
  std::string reason;
  std::vector<std::string> fields;
  std::string sentence;  // part of the message or of a description
};

void PrintTo(const BadInput& bad, std::ostream* out) { *out << bad.request; }

class BadInputTest : public GenerationServiceTest,
                     public ::testing::WithParamInterface<BadInput> {};

TEST_P(BadInputTest, IsToldWhatIsWrong) {
  Start({.manifest = FakeManifest(/*context_length=*/512), .kv_capacity_tokens = 400});
  const BadInput& bad = GetParam();
  auto request = FromText<v1::GenerateRequest>(bad.request);
  // The default output would be over this pool.
  if (!request.stop().has_max_output_tokens()) request.mutable_stop()->set_max_output_tokens(4);
  const grpc::Status status = Refused(request);
  EXPECT_EQ(CodeName(status.error_code()), CodeName(bad.code)) << status.error_message();
  EXPECT_EQ(ReasonIn(status), bad.reason);
  EXPECT_THAT(FieldsIn(status), ::testing::ElementsAreArray(bad.fields));
  std::string said = status.error_message();
  if (const auto violations = Detail<v1::BadRequest>(status, "BadRequest")) {
    for (const auto& v : violations->field_violations())
      absl::StrAppend(&said, "\n", v.description());
  }
  EXPECT_THAT(said, HasSubstr(bad.sentence));
  v1::GenerateResult result;
  EXPECT_TRUE(Once(Prompt(1, 1), &result).ok()) << "the next request suffers";
  EXPECT_TRUE(server_->AwaitEmpty());
}

std::string TokenIds(int count) {
  std::string ids;
  for (int i = 0; i < count; ++i) absl::StrAppend(&ids, " ids: 1");
  return absl::StrCat("token_ids {", ids, " } ");
}

INSTANTIATE_TEST_SUITE_P(
    All, BadInputTest,
    ::testing::ValuesIn(std::vector<BadInput>{
        {"no_prompt", "", grpc::INVALID_ARGUMENT, "INVALID_REQUEST", {"prompt"}, "is empty"},
        {"empty_prompt",
         "text: ''",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"prompt"},
         "at least one token"},
        {"unknown_priority",
         "text: 'w1' scheduling { priority: 9 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"scheduling.priority"},
         "unknown value 9"},
        {"no_token_ids",
         "token_ids {}",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"prompt"},
         "is empty"},
        {"everything_about_sampling",
         "token_ids { ids: 1 } sampling { min_p: 2 typical_p: 0 repetition_penalty: -1 "
         "frequency_penalty: nan presence_penalty: inf logit_bias { key: 2 value: nan } } "
         "stop { max_output_tokens: 4 min_output_tokens: 5 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.typical_p", "sampling.min_p", "sampling.repetition_penalty",
          "sampling.frequency_penalty", "sampling.presence_penalty", "sampling.logit_bias[2]",
          "stop.min_output_tokens"},
         "(and 6 more)"},
        {"too_much_output",
         "token_ids { ids: 1 } output { top_logprobs: 21 coalesce { seconds: 10 nanos: 1 } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"output.coalesce", "output.top_logprobs"},
         "must be from 0 to 10s, is 10.000000001s"},
        {"negative_wait",
         "token_ids { ids: 1 } output { coalesce { nanos: -1 } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"output.coalesce"},
         "is -1ns"},
        {"logprobs_of_an_evicted_prompt",
         TokenIds(30) + "kv { policy: 'window' max_tokens: 20 } output { prompt_logprobs: true } "
                        "stop { max_output_tokens: 40 }",
         grpc::FAILED_PRECONDITION,
         "PROMPT_EVICTED",
         {"output.prompt_logprobs"},
         "the smallest that works is 46"},
        {"regex_that_is_none",
         "token_ids { ids: 1 } sampling { regex: '(' }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.constraint.regex"},
         "parenthesis"},
        {"no_choice",
         "token_ids { ids: 1 } sampling { choice {} top_p: 2 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.constraint.choice", "sampling.top_p"},
         "is empty; at least one item is needed"},
        {"choice_of_no_word",
         "token_ids { ids: 1 } sampling { choice { items: 'x1' } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.constraint.choice"},
         "allows no text that can be made of this model's tokens"},
        {"bias_of_no_token",
         "token_ids { ids: 1 } sampling { logit_bias { key: -4 value: 1 } }",
         grpc::OUT_OF_RANGE,
         "TOKEN_RANGE",
         {"sampling.logit_bias[-4]"},
         "token id -4 is outside the vocabulary [0, 64)"},
        {"prompt_over_context",
         TokenIds(512),
         grpc::INVALID_ARGUMENT,
         "CONTEXT_LENGTH",
         {"prompt"},
         "512"},
        {"output_over_context",
         TokenIds(2) + "stop { max_output_tokens: 511 }",
         grpc::INVALID_ARGUMENT,
         "CONTEXT_LENGTH",
         {"stop.max_output_tokens"},
         "512"},
        {"no_output",
         TokenIds(2) + "stop { max_output_tokens: 0 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"stop.max_output_tokens"},
         "at least 1"},
        {"budget_0",
         TokenIds(2) + "kv { policy: 'window' max_tokens: 0 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.max_tokens"},
         "at least 1"},
        {"budget_below_its_protection",
         TokenIds(100) + "kv { policy: 'picky' max_tokens: 50 } stop { max_output_tokens: 100 }",
         grpc::INVALID_ARGUMENT,
         "KV_BUDGET",
         {"kv.budget"},
         "the smallest budget is 1"},
        {"budget_over_the_pool",
         TokenIds(2) + "stop { max_output_tokens: 450 }",
         grpc::FAILED_PRECONDITION,
         "KV_POOL_TOO_SMALL",
         {"kv.budget"},
         "never run here"},
        {"ratio_over_1",
         TokenIds(2) + "kv { policy: 'window' keep_ratio: 1.5 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.keep_ratio"},
         "(0, 1]"},
        {"ratio_nan",
         TokenIds(2) + "kv { policy: 'window' keep_ratio: nan }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.keep_ratio"},
         "(0, 1]"},
        {"budget_without_policy",
         TokenIds(2) + "kv { max_tokens: 20 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy"},
         "no default policy"},
        {"unknown_policy",
         TokenIds(2) + "kv { policy: 'windwo' max_tokens: 20 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy"},
         "did you mean window?"},
        {"unknown_parameter",
         TokenIds(2) + "kv { policy: 'window' max_tokens: 20 policy_params { fields { key: "
                       "'slak' value { number_value: 1 } } } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy_params.slak"},
         "known: slack, mode, strength, frozen, indexes"},
        {"parameter_out_of_range",
         TokenIds(2) + "kv { policy: 'window' max_tokens: 20 policy_params { fields { key: "
                       "'slack' value { number_value: 65 } } } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy_params.slack"},
         "between 0 and 64"},
        {"parameter_of_another_type",
         TokenIds(2) + "kv { policy: 'window' max_tokens: 20 policy_params { fields { key: "
                       "'slack' value { string_value: '1' } } } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy_params.slack"},
         ""},
        {"parameter_that_nothing_takes",
         TokenIds(2) + "kv { policy: 'window' max_tokens: 20 policy_params { fields { key: "
                       "'slack' value { struct_value {} } } } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy_params.slack"},
         "a bool, a number, a string, or a list of integers or of strings"},
        {"list_of_fractions",
         TokenIds(2) + "kv { policy: 'window' max_tokens: 20 policy_params { fields { key: "
                       "'indexes' value { list_value { values { number_value: 0.5 } } } } } }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.policy_params.indexes"},
         "integers"},
        {"unknown_position_mode",
         TokenIds(2) + "kv { positions: 9 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"kv.positions"},
         "unknown value 9"},
        {"temperature_nan",
         TokenIds(2) + "sampling { temperature: nan }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.temperature"},
         "finite"},
        {"temperature_negative",
         TokenIds(2) + "sampling { temperature: -0.5 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.temperature"},
         "-0.5"},
        {"top_p_0",
         TokenIds(2) + "sampling { top_p: 0 }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"sampling.top_p"},
         "(0, 1]"},
        {"token_too_large",
         "token_ids { ids: 1 ids: 64 }",
         grpc::OUT_OF_RANGE,
         "TOKEN_RANGE",
         {"token_ids.ids[1]"},
         "[0, 64)"},
        {"token_negative",
         "token_ids { ids: -1 }",
         grpc::OUT_OF_RANGE,
         "TOKEN_RANGE",
         {"token_ids.ids[0]"},
         "-1"},
        {"stop_token_too_large",
         TokenIds(2) + "stop { stop_token_ids: 99 }",
         grpc::OUT_OF_RANGE,
         "TOKEN_RANGE",
         {"stop.stop_token_ids[0]"},
         "99"},
        {"empty_stop_string",
         TokenIds(2) + "stop { stop_strings: '' }",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"stop.stop_strings[0]"},
         "1 to 256"},
        {"long_request_id",
         TokenIds(2) + "request_id: '" + std::string(129, 'x') + "'",
         grpc::INVALID_ARGUMENT,
         "INVALID_REQUEST",
         {"request_id"},
         "at most 128"},
        {"wrong_model",
         "model: 'gpt' " + TokenIds(2),
         grpc::NOT_FOUND,
         "NOT_FOUND",
         {},
         "'gpt' is not served here"}}),
    [](const auto& info) { return info.param.name; });

TEST_F(GenerationServiceTest, AllViolationsAreToldAtOnce) {
  const grpc::Status status = Refused(R"pb(
    token_ids { ids: 1 ids: 64 }
    sampling { temperature: nan top_p: 0 }
    stop { stop_strings: "" max_output_tokens: 0 }
    kv {
      policy: "window"
      max_tokens: 0
      positions: 7
      policy_params {
        fields {
          key: "mode"
          value { string_value: "wild" }
        }
        fields {
          key: "frozen"
          value { null_value: 0 }
        }
      }
    })pb");
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(FieldsIn(status),
              IsSupersetOf({"token_ids.ids[1]", "sampling.temperature", "sampling.top_p",
                            "stop.stop_strings[0]", "stop.max_output_tokens", "kv.positions",
                            "kv.policy_params.mode", "kv.policy_params.frozen"}));
}

TEST_F(GenerationServiceTest, HugeErrorsStillArrive) {
  v1::GenerateRequest request = Prompt(1, 1);
  for (int i = 0; i < 16; ++i) request.mutable_stop()->add_stop_strings(std::string(300, 'x'));
  request.mutable_kv()->set_policy(std::string(3'000'000, 'p'));
  request.mutable_kv()->set_max_tokens(1);
  const grpc::Status status = Refused(request);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonIn(status), "INVALID_REQUEST");
}

// C++ clients serialise text that is not UTF-8; gRPC alone would answer an empty UNIMPLEMENTED.
TEST_F(GenerationServiceTest, TextThatIsNotUtf8IsNamed) {
  v1::GenerateRequest request = Prompt(1, 1);
  request.set_text("abc\xff");
  request.mutable_stop()->add_stop_strings("fine");
  request.mutable_stop()->add_stop_strings("\xc3");
  (*request.mutable_kv()->mutable_policy_params()->mutable_fields())["mode"].set_string_value(
      "\xed\xa0\x80");
  const grpc::Status once = Refused(request);
  EXPECT_EQ(once.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonIn(once), "NOT_UTF8");
  EXPECT_THAT(FieldsIn(once),
              ::testing::UnorderedElementsAre("text", "stop.stop_strings[1]",
                                              "kv.policy_params.fields[0].value.string_value"));
  StreamClient client(stub(), request);
  EXPECT_EQ(client.AwaitDone().error_code(), grpc::INVALID_ARGUMENT);
  v1::ScoreRequest score;
  score.set_text("w1");
  score.set_continuation_text("\xff");
  grpc::ClientContext context;
  v1::ScoreResponse scored;
  EXPECT_THAT(FieldsIn(stub().Score(&context, score, &scored)), ElementsAre("continuation_text"));
  EXPECT_EQ(Cancel("\xff").error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(GenerationServiceTest, ScoreNeedsAContinuation) {
  v1::ScoreRequest score;
  score.set_text("w1");
  score.set_cadence(static_cast<v1::ScoreCadence>(5));
  score.mutable_scheduling()->set_tenant(std::string(65, 'x'));
  grpc::ClientContext context;
  v1::ScoreResponse scored;
  const grpc::Status status = stub().Score(&context, score, &scored);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(FieldsIn(status), ElementsAre("cadence", "continuation", "scheduling.tenant"));
}

TEST_F(GenerationServiceTest, MessageOverTheLimitIsRefused) {
  Start({.transport = {.max_message_bytes = 1024}});
  v1::GenerateRequest request;
  request.set_text(std::string(4096, 'x'));
  EXPECT_EQ(Refused(request).error_code(), grpc::RESOURCE_EXHAUSTED);
  v1::GenerateResult result;
  EXPECT_TRUE(Once(Prompt(1, 1), &result).ok());
}

}  // namespace generation_refusals_test
}  // namespace epikv
