#include "server/generation/generation_service.h"
#include "server/generation/call_facts.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/errors.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/fake_server.h"
#include "tests/fixtures/stream_client.h"

namespace epikv {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::SizeIs;

template <typename Message>
Message Parse(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message)) << text;
  return message;
}

v1::GenerateRequest Prompt(int32_t last_token, uint32_t max_output_tokens) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(1);
  request.mutable_token_ids()->add_ids(last_token);
  request.mutable_stop()->set_max_output_tokens(max_output_tokens);
  request.mutable_output()->set_token_ids(true);
  return request;
}

class GenerationServiceTest : public ::testing::Test {
 protected:
  void Start(FakeServerOptions options = {}) {
    server_ = std::make_unique<FakeServer>(std::move(options), script_);
    stub_ = v1::GenerationService::NewStub(server_->Connect());
  }
  v1::GenerationService::Stub& stub() {
    if (stub_ == nullptr) Start();
    return *stub_;
  }
  grpc::Status Once(const v1::GenerateRequest& request, v1::GenerateResult* result) {
    grpc::ClientContext context;
    return stub().GenerateOnce(&context, request, result);
  }
  grpc::Status Refused(const v1::GenerateRequest& request) {
    v1::GenerateResult result;
    return Once(request, &result);
  }
  grpc::Status Refused(const std::string& request) {
    return Refused(Parse<v1::GenerateRequest>(request));
  }
  grpc::Status Cancel(const std::string& id) {
    grpc::ClientContext context;
    v1::CancelRequestRequest request;
    request.set_request_id(id);
    v1::CancelRequestResponse response;
    return stub().CancelRequest(&context, request, &response);
  }

  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  std::unique_ptr<FakeServer> server_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
};

TEST(WhyCancelledTest, OnlyJustBeforeADeadlineItIsTheDeadline) {
  const absl::Time start = absl::FromUnixSeconds(1000);
  auto cancelled = [&](absl::Duration timeout, absl::Duration before_deadline) {
    return WhyCancelled({.start = start,
                         .deadline = start + timeout,
                         .now = start + timeout - before_deadline})
        .code();
  };
  const auto deadline = absl::StatusCode::kDeadlineExceeded, gone = absl::StatusCode::kCancelled;
  EXPECT_EQ(cancelled(absl::Seconds(1), absl::Milliseconds(20)), deadline);
  EXPECT_EQ(cancelled(absl::Seconds(1), absl::Milliseconds(21)), gone);
  EXPECT_EQ(cancelled(absl::Hours(1), absl::Milliseconds(250)), deadline);
  EXPECT_EQ(cancelled(absl::Hours(1), absl::Milliseconds(251)), gone);
  EXPECT_EQ(cancelled(absl::Hours(1), absl::Seconds(30)), gone);
  const auto none = WhyCancelled(
      {.start = start, .deadline = absl::InfiniteFuture(), .now = start + absl::Hours(1)});
  EXPECT_EQ(none.code(), gone);
}

TEST_F(GenerationServiceTest, StreamsAcceptedThenDeltasThenSummary) {
  StreamClient client(stub(), Prompt(10, 5));
  EXPECT_TRUE(client.AwaitDone().ok());
  const auto messages = client.AwaitMessages(0);
  ASSERT_GE(messages.size(), 3u);
  EXPECT_TRUE(messages.front().has_accepted());
  EXPECT_TRUE(messages.back().has_summary());
  EXPECT_THAT(client.token_ids(), ElementsAre(11, 12, 13, 14, 15));
  EXPECT_EQ(client.text(), "w11 w12 w13 w14 w15");
  const v1::Summary& summary = messages.back().summary();
  EXPECT_EQ(summary.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(summary.usage().prompt_tokens(), 2u);
  EXPECT_EQ(summary.usage().output_tokens(), 5u);
  EXPECT_EQ(summary.kv().policy(), "full");
  EXPECT_EQ(summary.kv().peak_tokens(), 6u);  // the last one is never cached
  EXPECT_EQ(summary.arm(), "none");
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, AcceptedEchoesEverySettingResolved) {
  Start({.default_policy = "window"});
  v1::GenerateResult result;
  const auto status = Once(Parse<v1::GenerateRequest>(R"pb(
                             text: "w1 w2 w3"
                             sampling {
                               temperature: 0.5
                               top_p: 0.9
                               top_k: 7
                               min_p: 0.25
                               typical_p: 0.75
                               repetition_penalty: 1.5
                               frequency_penalty: -0.5
                               presence_penalty: 2
                               logit_bias { key: 3 value: -1.5 }
                             }
                             stop {
                               max_output_tokens: 29
                               stop_strings: "x"
                               stop_token_ids: 40
                               include_stop: true
                               min_output_tokens: 4
                               ignore_eos: true
                             }
                             output {
                               token_ids: true
                               kept: true
                               top_logprobs: 3
                               prompt_logprobs: true
                               progress: true
                               coalesce { seconds: 1 nanos: 500000000 }
                             }
                             kv {
                               keep_ratio: 0.75
                               policy_params {
                                 fields {
                                   key: "slack"
                                   value { number_value: 2 }
                                 }
                               }
                             })pb"),
                           &result);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const v1::Accepted& accepted = result.accepted();
  EXPECT_FALSE(accepted.request_id().empty());
  EXPECT_EQ(accepted.model(), "fake");
  EXPECT_EQ(accepted.prompt_tokens(), 3u);
  EXPECT_EQ(accepted.max_output_tokens(), 29u);
  EXPECT_THAT(accepted.stop_token_ids(), ElementsAre(40));
  EXPECT_EQ(accepted.sampling().temperature(), 0.5f);
  EXPECT_EQ(accepted.sampling().top_p(), 0.9f);
  EXPECT_EQ(accepted.sampling().top_k(), 7u);
  EXPECT_TRUE(accepted.sampling().has_seed());
  EXPECT_EQ(accepted.sampling().min_p(), 0.25f);
  EXPECT_EQ(accepted.sampling().typical_p(), 0.75f);
  EXPECT_EQ(accepted.sampling().repetition_penalty(), 1.5f);
  EXPECT_EQ(accepted.sampling().frequency_penalty(), -0.5f);
  EXPECT_EQ(accepted.sampling().presence_penalty(), 2.0f);
  ASSERT_EQ(accepted.sampling().logit_bias_size(), 1);
  EXPECT_EQ(accepted.sampling().logit_bias().at(3), -1.5f);
  EXPECT_EQ(accepted.kv().policy(), "window");
  EXPECT_EQ(accepted.kv().budget_tokens(), 24u);
  EXPECT_EQ(accepted.kv().policy_params().fields().at("slack").number_value(), 2);
  EXPECT_EQ(accepted.kv().policy_params().fields().at("mode").string_value(), "calm");
  EXPECT_EQ(accepted.kv().positions(), v1::POSITION_MODE_ABSOLUTE);
  EXPECT_EQ(accepted.kv().recent_tokens(), 6u);
  EXPECT_EQ(accepted.kv().protected_prompt_tokens(), 3u);
  EXPECT_GT(accepted.kv().reserved_bytes(), 0u);
  EXPECT_EQ(accepted.arm(), "none");
  EXPECT_EQ(accepted.stop().max_output_tokens(), 29u);
  EXPECT_THAT(accepted.stop().stop_strings(), ElementsAre("x"));
  EXPECT_THAT(accepted.stop().stop_token_ids(), ElementsAre(40));
  EXPECT_TRUE(accepted.stop().include_stop());
  EXPECT_EQ(accepted.stop().min_output_tokens(), 4u);
  EXPECT_TRUE(accepted.stop().ignore_eos());
  EXPECT_EQ(accepted.output().ShortDebugString(),
            "text: true token_ids: true kept: true top_logprobs: 3 prompt_logprobs: true "
            "progress: true coalesce { seconds: 1 nanos: 500000000 }");
  EXPECT_EQ(accepted.cadence(), v1::SCORE_CADENCE_UNSPECIFIED);
}

TEST_F(GenerationServiceTest, AcceptedOfDefaultsSaysThem) {
  v1::GenerateResult result;
  ASSERT_TRUE(Once(Parse<v1::GenerateRequest>("text: 'w59'"), &result).ok());
  EXPECT_EQ(result.accepted().stop().ShortDebugString(), "max_output_tokens: 1024");
  EXPECT_EQ(result.accepted().output().ShortDebugString(), "text: true");
}

TEST_F(GenerationServiceTest, EachRequestDrawsItsOwnSeedAndId) {
  std::set<std::pair<uint64_t, std::string>> seen;
  for (int i = 0; i < 4; ++i) {
    v1::GenerateResult result;
    ASSERT_TRUE(Once(Prompt(1, 1), &result).ok());
    seen.insert({result.accepted().sampling().seed(), result.accepted().request_id()});
  }
  EXPECT_THAT(seen, SizeIs(4));
}

TEST_F(GenerationServiceTest, OnceGivesWhatTheStreamGives) {
  auto request = Prompt(10, 40);
  request.mutable_output()->set_logprobs(true);
  request.mutable_output()->set_residual_steps(true);
  request.mutable_output()->set_kv_trace(true);
  request.mutable_output()->set_kept(true);
  request.mutable_kv()->set_policy("window");
  request.mutable_kv()->set_max_tokens(24);
  StreamClient client(stub(), request);
  ASSERT_TRUE(client.AwaitDone().ok());
  v1::GenerateResult streamed;
  for (const auto& message : client.AwaitMessages(0)) {
    const v1::Delta& delta = message.delta();
    streamed.mutable_logprobs()->MergeFrom(delta.logprobs());
    streamed.mutable_signals()->MergeFrom(delta.signals());
    if (message.has_eviction()) *streamed.add_evictions() = message.eviction();
    if (message.has_summary()) *streamed.mutable_summary() = message.summary();
  }
  v1::GenerateResult once;
  ASSERT_TRUE(Once(request, &once).ok());
  EXPECT_EQ(once.text(), client.text());
  EXPECT_EQ(std::vector<int32_t>(once.token_ids().begin(), once.token_ids().end()),
            client.token_ids());
  EXPECT_THAT(once.logprobs(), SizeIs(40));
  EXPECT_THAT(once.signals(), SizeIs(39));    // the last output token is never cached
  EXPECT_THAT(once.evictions(), SizeIs(16));  // 41 were cached; the last step evicts nothing
  EXPECT_THAT(once.summary().kv().kept(), SizeIs(25));
  EXPECT_EQ(once.summary().kv().rounds(), 16u);
  EXPECT_EQ(once.summary().kv().evicted_tokens(), 16u);
  EXPECT_EQ(once.summary().kv().evicted_entries(), 16u * 4u);
  for (v1::GenerateResult* result : {&once, &streamed}) {
    result->clear_accepted();
    result->clear_text();
    result->clear_token_ids();
    result->mutable_summary()->clear_timings();
  }
  EXPECT_EQ(once.SerializeAsString(), streamed.SerializeAsString());
}

TEST_F(GenerationServiceTest, ScoreOfGeneratedTokensReturnsTheirLogProbabilities) {
  auto request = Prompt(10, 8);
  request.mutable_output()->set_logprobs(true);
  v1::GenerateResult generated;
  ASSERT_TRUE(Once(request, &generated).ok());
  v1::ScoreRequest score;
  *score.mutable_token_ids() = request.token_ids();
  *score.mutable_continuation_ids()->mutable_ids() = generated.token_ids();
  for (auto cadence : {v1::SCORE_CADENCE_DECODE, v1::SCORE_CADENCE_CHUNK}) {
    score.set_cadence(cadence);
    grpc::ClientContext context;
    v1::ScoreResponse scored;
    const auto status = stub().Score(&context, score, &scored);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_THAT(scored.logprobs(), ::testing::ElementsAreArray(generated.logprobs()));
    EXPECT_THAT(scored.token_ids(), ::testing::ElementsAreArray(generated.token_ids()));
    EXPECT_THAT(scored.greedy(), SizeIs(8));
    EXPECT_THAT(scored.greedy(), Each(true));
    EXPECT_EQ(scored.summary().usage().output_tokens(), 8u);
    EXPECT_EQ(scored.accepted().cadence(), cadence);
    EXPECT_FALSE(scored.accepted().has_stop());
    EXPECT_EQ(scored.accepted().output().ShortDebugString(),
              "text: false token_ids: true logprobs: true");
  }
}

// As text, the likeliest tokens of each place.
std::string TopOf(const google::protobuf::RepeatedPtrField<v1::TopLogprobs>& top) {
  std::string text;
  for (const v1::TopLogprobs& place : top) absl::StrAppend(&text, place.ShortDebugString(), "; ");
  return text;
}

TEST_F(GenerationServiceTest, PromptEventsComeInOrderBeforeTheFirstDelta) {
  Start({.engine = {.scheduler = {.prefill_chunk_tokens = 2}}});
  v1::GenerateRequest request = Prompt(10, 2);
  for (int32_t token : {11, 40, 41}) request.mutable_token_ids()->add_ids(token);
  request.mutable_output()->set_prompt_logprobs(true);
  request.mutable_output()->set_progress(true);
  request.mutable_output()->set_top_logprobs(2);
  StreamClient client(stub(), request);
  ASSERT_TRUE(client.AwaitDone().ok());
  std::vector<std::string> events;
  v1::PromptLogprobs joined;
  for (const v1::GenerateResponse& message : client.AwaitMessages(0)) {
    events.push_back(message.GetDescriptor()->FindFieldByNumber(message.event_case())->name());
    if (message.has_prompt_logprobs()) {
      EXPECT_EQ(message.prompt_logprobs().first(), 1u + joined.token_ids_size());
      joined.MergeFrom(message.prompt_logprobs());
    }
    if (message.has_progress())
      absl::StrAppend(&events.back(), message.progress().prompt_tokens_done());
  }
  // The last row of the prompt predicts the first output token.
  EXPECT_THAT(std::vector<std::string>(events.begin(), events.begin() + 7),
              ElementsAre("accepted", "progress2", "prompt_logprobs", "progress4",
                          "prompt_logprobs", "progress5", "delta"));
  EXPECT_THAT(joined.token_ids(), ElementsAre(10, 11, 40, 41));
  EXPECT_THAT(joined.logprobs(), ElementsAre(-4, -0.125f, -4, -0.125f));

  v1::GenerateResult once;
  ASSERT_TRUE(Once(request, &once).ok());
  joined.set_first(1);
  EXPECT_EQ(once.prompt_logprobs().SerializeAsString(), joined.SerializeAsString());
  EXPECT_EQ(TopOf(once.top_logprobs()),
            "token_ids: 42 token_ids: 43 logprobs: -0.125 logprobs: -1.125; "
            "token_ids: 43 token_ids: 44 logprobs: -0.125 logprobs: -1.125; ");
  v1::ScoreRequest score;
  *score.mutable_token_ids() = request.token_ids();
  *score.mutable_continuation_ids()->mutable_ids() = once.token_ids();
  score.set_top_logprobs(2);
  grpc::ClientContext context;
  v1::ScoreResponse scored;
  ASSERT_TRUE(stub().Score(&context, score, &scored).ok());
  EXPECT_EQ(TopOf(scored.top_logprobs()), TopOf(once.top_logprobs()));
}

TEST_F(GenerationServiceTest, DeltasShareMessagesWhereTheClientCanWait) {
  v1::GenerateRequest request = Prompt(10, 40);
  request.mutable_output()->mutable_coalesce()->set_seconds(10);
  StreamClient client(stub(), request);
  ASSERT_TRUE(client.AwaitDone().ok());
  EXPECT_THAT(client.token_ids(), SizeIs(40));
  // Accepted, the first delta, all others, the summary; others may join what waits to be written.
  EXPECT_THAT(client.AwaitMessages(0), SizeIs(::testing::Le(4u)));
}

TEST_F(GenerationServiceTest, ScoreTakesTextAndASeed) {
  v1::ScoreRequest score;
  score.set_seed(7);
  score.set_text("w3 w4");
  score.set_continuation_text("w5 w9");
  grpc::ClientContext context;
  v1::ScoreResponse scored;
  ASSERT_TRUE(stub().Score(&context, score, &scored).ok());
  EXPECT_THAT(scored.token_ids(), ElementsAre(5, 9));
  EXPECT_THAT(scored.greedy(), ElementsAre(true, false));
  EXPECT_EQ(scored.accepted().sampling().seed(), 7u);
}

TEST_F(GenerationServiceTest, NothingEndsARequestBeforeItsLeastOutput) {
  v1::GenerateRequest request = Prompt(60, 10);
  request.mutable_stop()->set_min_output_tokens(4);
  request.mutable_stop()->add_stop_strings("w61");
  request.mutable_stop()->add_stop_strings("w2");
  v1::GenerateResult result;
  ASSERT_TRUE(Once(request, &result).ok());
  EXPECT_THAT(result.token_ids(), ElementsAre(61, 62, 0, 1, 2));  // 63 is the model's end
  EXPECT_EQ(result.summary().stop_string(), "w2");
}

TEST_F(GenerationServiceTest, StopSaysWhatMatched) {
  auto request = Prompt(10, 40);
  request.mutable_stop()->add_stop_strings("w14 w15");
  v1::GenerateResult result;
  ASSERT_TRUE(Once(request, &result).ok());
  EXPECT_EQ(result.text(), "w11 w12 w13 ");
  EXPECT_EQ(result.summary().finish_reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(result.summary().stop_string(), "w14 w15");
  request.mutable_stop()->clear_stop_strings();
  request.mutable_stop()->add_stop_token_ids(13);
  ASSERT_TRUE(Once(request, &result).ok());
  EXPECT_EQ(result.summary().finish_reason(), v1::FINISH_REASON_STOP_TOKEN);
  EXPECT_EQ(result.summary().stop_token_id(), 13);
  ASSERT_TRUE(Once(Prompt(60, 40), &result).ok());
  EXPECT_EQ(result.summary().finish_reason(), v1::FINISH_REASON_END);
}

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
  auto request = Parse<v1::GenerateRequest>(bad.request);
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

TEST_F(GenerationServiceTest, QueueFullIsToldWithRetryInfoAndHurtsNobody) {
  Gate gate;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);  // the queue is counted once per step
    return absl::OkStatus();
  };
  Start({.engine = {.max_running_requests = 1}, .queue = {.max_requests = 2}});
  StreamClient running(stub(), Prompt(10, 3));
  ASSERT_TRUE(gate.AwaitHeld());
  StreamClient second(stub(), Prompt(10, 3)), third(stub(), Prompt(10, 3));
  EXPECT_EQ(second.AwaitMessages(1)[0].accepted().queue_position() +
                third.AwaitMessages(1)[0].accepted().queue_position(),
            1u);
  grpc::ClientContext context;
  v1::GenerateResult result;
  const grpc::Status status = stub().GenerateOnce(&context, Prompt(10, 3), &result);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonIn(status), "QUEUE_FULL");
  EXPECT_TRUE(Detail<v1::QuotaFailure>(status, "QuotaFailure").has_value());
  EXPECT_EQ(Detail<v1::RetryInfo>(status, "RetryInfo")->retry_delay().seconds(), 1);
  const auto& trailers = context.GetServerTrailingMetadata();
  ASSERT_EQ(trailers.count("grpc-retry-pushback-ms"), 1u);
  EXPECT_EQ(trailers.find("grpc-retry-pushback-ms")->second, "1000");
  gate.Open();
  for (StreamClient* client : {&running, &second, &third}) {
    EXPECT_TRUE(client->AwaitDone().ok());
    EXPECT_THAT(client->token_ids(), ElementsAre(11, 12, 13));
  }
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, PrioritiesAndTenantsDecideWhoIsNext) {
  Gate gate;
  std::vector<std::string> order;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);
    return absl::OkStatus();
  };
  script_->on_open = [&](const Request& request) {
    order.push_back(request.id);
    return absl::OkStatus();
  };
  Start({.engine = {.max_running_requests = 1}});
  auto asked = [](const std::string& id, v1::Priority priority, const std::string& tenant) {
    auto request = Prompt(10, 3);
    request.set_request_id(id);
    request.mutable_scheduling()->set_priority(priority);
    request.mutable_scheduling()->set_tenant(tenant);
    return request;
  };
  StreamClient running(stub(), Prompt(10, 3));
  ASSERT_TRUE(gate.AwaitHeld());
  const auto first = running.AwaitMessages(1)[0].accepted();
  EXPECT_TRUE(first.has_predicted_wait()) << "there was room";
  EXPECT_EQ(first.predicted_wait().seconds() + first.predicted_wait().nanos(), 0);
  order.clear();
  std::vector<std::unique_ptr<StreamClient>> waiting;
  for (const auto& request :
       {asked("low", v1::PRIORITY_LOW, "a"), asked("normal", v1::PRIORITY_UNSPECIFIED, "a"),
        asked("high", v1::PRIORITY_HIGH, "b")}) {
    waiting.push_back(std::make_unique<StreamClient>(stub(), request));
    const auto accepted = waiting.back()->AwaitMessages(1)[0].accepted();
    EXPECT_EQ(accepted.queue_position(), 0u);
    EXPECT_EQ(accepted.scheduling().tenant(), request.scheduling().tenant());
    EXPECT_NE(accepted.scheduling().priority(), v1::PRIORITY_UNSPECIFIED) << "as it is used";
    EXPECT_FALSE(accepted.has_predicted_wait()) << "nothing was measured";
  }
  gate.Open();
  for (const auto& client : waiting) EXPECT_TRUE(client->AwaitDone().ok());
  EXPECT_TRUE(running.AwaitDone().ok());
  EXPECT_TRUE(server_->AwaitEmpty());
  EXPECT_THAT(order, ElementsAre("high", "normal", "low"));
}

TEST_F(GenerationServiceTest, DeadlineThatCannotBeMetIsRefusedWithTheEstimate) {
  script_->next = [](int32_t) { return 5; };
  script_->on_forward = [](absl::Span<const WorkItem>) {
    absl::SleepFor(absl::Milliseconds(2));  // a model that takes time
    return absl::OkStatus();
  };
  v1::GenerateResult result;
  ASSERT_TRUE(Once(Prompt(10, 40), &result).ok());
  ASSERT_TRUE(server_->AwaitEmpty());
  auto within = [&](absl::Duration time) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + time));
    v1::GenerateRequest request = Prompt(10, 4000);
    request.mutable_stop()->set_ignore_eos(true);
    return stub().GenerateOnce(&context, request, &result);
  };
  grpc::Status status;
  do {                                  // what was measured is told once per step
    status = within(absl::Seconds(5));  // for 8 s of work
  } while (ReasonIn(status) != "DEADLINE_INFEASIBLE");
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
  const auto info = Detail<v1::ErrorInfo>(status, "ErrorInfo").value();
  EXPECT_EQ(info.metadata().at("wait_seconds"), "0.000");
  EXPECT_GT(std::stod(info.metadata().at("run_seconds")), 7.9);
  EXPECT_LE(std::stod(info.metadata().at("seconds_left")), 5.1);
  EXPECT_FALSE(Detail<v1::RetryInfo>(status, "RetryInfo")) << "it would not help";
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, DropFromTheQueueCarriesADelay) {
  Start({.engine = {.max_running_requests = 1}});
  script_->next = [](int32_t) { return 5; };
  script_->on_forward = [](absl::Span<const WorkItem>) {
    absl::SleepFor(absl::Milliseconds(2));
    return absl::OkStatus();
  };
  v1::GenerateResult result;
  ASSERT_TRUE(Once(Prompt(10, 40), &result).ok());
  ASSERT_TRUE(server_->AwaitEmpty());
  grpc::ClientContext running;
  const auto stream = stub().Generate(&running, Prompt(10, 4000));
  v1::GenerateResponse response;
  while (!response.has_delta()) ASSERT_TRUE(stream->Read(&response));
  v1::GenerateRequest request = Prompt(10, 50);
  request.mutable_stop()->set_ignore_eos(true);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(600)));
  const grpc::Status status = stub().GenerateOnce(&context, request, &result);
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_EQ(ReasonIn(status), "DEADLINE_INFEASIBLE");
  const auto retry = Detail<v1::RetryInfo>(status, "RetryInfo");
  ASSERT_TRUE(retry.has_value());
  const auto& trailers = context.GetServerTrailingMetadata();
  ASSERT_EQ(trailers.count("grpc-retry-pushback-ms"), 1u);
  const grpc::string_ref pushback = trailers.find("grpc-retry-pushback-ms")->second;
  EXPECT_EQ(std::stoll(std::string(pushback.data(), pushback.size())),
            retry->retry_delay().seconds() * 1000 + retry->retry_delay().nanos() / 1000000);
  running.TryCancel();
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
}

TEST_F(GenerationServiceTest, DuplicateIdIsRefusedWhileTheFirstLives) {
  Gate gate;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    gate.Pass(true);
    return absl::OkStatus();
  };
  auto request = Prompt(10, 3);
  request.set_request_id("mine");
  StreamClient first(stub(), request);
  ASSERT_TRUE(gate.AwaitHeld());
  const grpc::Status status = Refused(request);
  EXPECT_EQ(status.error_code(), grpc::ALREADY_EXISTS);
  EXPECT_EQ(Detail<v1::ResourceInfo>(status, "ResourceInfo")->resource_name(), "mine");
  gate.Open();
  EXPECT_TRUE(first.AwaitDone().ok());
  EXPECT_THAT(first.token_ids(), SizeIs(3));
  v1::GenerateResult result;
  EXPECT_TRUE(Once(request, &result).ok()) << "the id is free again";
}

// The step under way is the last one that runs a cancelled request.
TEST_F(GenerationServiceTest, CancelRequestEndsItWithinOneStep) {
  Gate gate;
  std::atomic<int> forwards_after{0};
  std::atomic<bool> cancelled{false};
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    if (cancelled) ++forwards_after;
    gate.Pass(items[0].decode && items[0].first > 10);
    return absl::OkStatus();
  };
  auto request = Prompt(10, 4000);
  request.set_request_id("mine");
  request.mutable_stop()->clear_stop_token_ids();
  script_->next = [](int32_t) { return 5; };
  StreamClient client(stub(), request);
  ASSERT_TRUE(gate.AwaitHeld());
  EXPECT_TRUE(Cancel("mine").ok());
  cancelled = true;
  gate.Open();
  EXPECT_EQ(client.AwaitDone().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(server_->AwaitEmpty());
  EXPECT_EQ(forwards_after, 0);
  EXPECT_EQ(Cancel("mine").error_code(), grpc::NOT_FOUND);
}

TEST_F(GenerationServiceTest, FailingSequenceFailsAlone) {
  script_->on_item = [](const WorkItem& item) {
    return item.request->id == "bad" && item.decode ? absl::InternalError("NaN logits")
                                                    : absl::OkStatus();
  };
  auto bad = Prompt(10, 20);
  bad.set_request_id("bad");
  StreamClient failing(stub(), bad), fine(stub(), Prompt(10, 20));
  const grpc::Status status = failing.AwaitDone();
  EXPECT_EQ(status.error_code(), grpc::INTERNAL);
  EXPECT_EQ(ReasonIn(status), "INTERNAL");
  EXPECT_TRUE(fine.AwaitDone().ok());
  EXPECT_THAT(fine.token_ids(), SizeIs(20));
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, FailedPolicyIsTold) {
  script_->on_settle = [](const WorkItem& item) {
    return item.decode ? WithReason(absl::InternalError("policy 'full' threw"), kPolicyFailed)
                       : absl::OkStatus();
  };
  const grpc::Status status = Refused(Prompt(10, 20));
  EXPECT_EQ(status.error_code(), grpc::INTERNAL);
  EXPECT_EQ(ReasonIn(status), "POLICY_FAILED");
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, FailedForwardFailsOnlyTheGuilty) {
  script_->on_forward = [](absl::Span<const WorkItem> items) {
    for (const WorkItem& item : items) {
      if (item.request->id == "bad") return absl::InternalError("forward threw");
    }
    return absl::OkStatus();
  };
  auto bad = Prompt(10, 20);
  bad.set_request_id("bad");
  StreamClient failing(stub(), bad), fine(stub(), Prompt(10, 20));
  EXPECT_EQ(failing.AwaitDone().error_code(), grpc::INTERNAL);
  EXPECT_TRUE(fine.AwaitDone().ok());
  EXPECT_THAT(fine.token_ids(), SizeIs(20));
}

// A stream whose client reads nothing: its words are 8 KiB, so that they fill the transport.
TEST_F(GenerationServiceTest, SlowReaderIsCancelledAndSlowsNobody) {
  script_->next = [](int32_t token) { return token % 60 + 1; };
  std::atomic<int> missed{0};
  std::atomic<int64_t> neighbour_steps{0};
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    bool neighbour = false;
    for (const WorkItem& item : items) neighbour |= item.request->id == "neighbour";
    // From its first step to its last one, it is in each.
    const int64_t steps = neighbour_steps;
    if (!neighbour && steps > 0 && steps < 1500) ++missed;
    if (neighbour) ++neighbour_steps;
    return absl::OkStatus();
  };
  Start({.word_bytes = 8192,
         .outbox = {.max_messages = 4, .max_bytes = 32768, .stall = absl::Milliseconds(300)}});
  auto slow = Prompt(10, 4000);
  slow.set_request_id("slow");
  StreamClient stuck(stub(), slow, /*reads=*/1);
  stuck.AwaitMessages(1);
  // Paused, not ended: its outbox is full.
  ASSERT_TRUE(server_->observer().AwaitStep(
      [](const StepStats& step) { return step.sequences == 0 && step.running == 1; }));
  auto request = Prompt(10, 1500);
  request.set_request_id("neighbour");
  request.mutable_output()->set_text(false);
  StreamClient neighbour(*v1::GenerationService::NewStub(server_->Connect()), request);
  EXPECT_TRUE(neighbour.AwaitDone().ok());
  EXPECT_THAT(neighbour.token_ids(), SizeIs(1500));
  EXPECT_EQ(missed, 0);
  EXPECT_TRUE(server_->AwaitEmpty());
  stuck.ReadOn();
  const grpc::Status status = stuck.AwaitDone();
  // After twice the limit the stream is cut, and the client hears of that alone.
  EXPECT_TRUE(ReasonIn(status) == "SLOW_READER" || status.error_code() == grpc::CANCELLED)
      << status.error_message();
}

TEST_F(GenerationServiceTest, ReaderThatReturnsInTimeGetsEverything) {
  script_->next = [](int32_t token) { return token % 60 + 1; };
  Start({.word_bytes = 8192, .outbox = {.max_messages = 4, .max_bytes = 32768}});
  StreamClient client(stub(), Prompt(10, 200), /*reads=*/1);
  client.AwaitMessages(1);
  ASSERT_TRUE(server_->observer().AwaitStep(
      [](const StepStats& step) { return step.sequences == 0 && step.running == 1; }));
  client.ReadOn();
  EXPECT_TRUE(client.AwaitDone().ok());
  EXPECT_THAT(client.token_ids(), SizeIs(200));
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, DrainFinishesStreamsAndRefusesNewOnes) {
  Gate gate;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);
    return absl::OkStatus();
  };
  StreamClient running(stub(), Prompt(10, 30));
  ASSERT_TRUE(gate.AwaitHeld());
  server_->engine().StartDraining();
  const grpc::Status status = Refused(Prompt(10, 3));
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(ReasonIn(status), "DRAINING");
  EXPECT_TRUE(Detail<v1::RetryInfo>(status, "RetryInfo").has_value());
  gate.Open();
  server_->engine().Drain(absl::Now() + kGenerous);
  EXPECT_TRUE(running.AwaitDone().ok());
  EXPECT_THAT(running.token_ids(), SizeIs(30));
}

TEST_F(GenerationServiceTest, DrainCancelsWhatIsLeftAtItsDeadline) {
  script_->next = [](int32_t) { return 5; };
  StreamClient endless(stub(), Prompt(10, 4000));
  endless.AwaitMessages(2);
  server_->engine().Drain(absl::Now());
  const grpc::Status status = endless.AwaitDone();
  EXPECT_TRUE(server_->AwaitEmpty());
  if (status.ok()) return;  // it ended first
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE) << status.error_message();
  EXPECT_EQ(ReasonIn(status), "DRAINING");
  EXPECT_TRUE(Detail<v1::RetryInfo>(status, "RetryInfo").has_value());
}

}  // namespace
}  // namespace epikv
