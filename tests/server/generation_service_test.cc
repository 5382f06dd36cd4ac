#include "server/generation/generation_service.h"
#include "server/generation/call_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/generation_fixture.h"

namespace epikv {
namespace generation_service_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::SizeIs;

TEST(WhyCancelledTest, OnlyJustBeforeADeadlineItIsTheDeadline) {
  const absl::Time start = absl::FromUnixSeconds(1000);
  auto cancelled = [&](absl::Duration timeout, absl::Duration before_deadline) {
    return WhyCancelled({.start = start,
                         .deadline = start + timeout,
                         .now = start + timeout - before_deadline})
        .code();
  };
  const auto deadline = absl::StatusCode::kDeadlineExceeded, gone = absl::StatusCode::kCancelled;
  EXPECT_EQ(cancelled(absl::Seconds(1), absl::Milliseconds(60)), deadline);
  EXPECT_EQ(cancelled(absl::Seconds(1), absl::Milliseconds(61)), gone);
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
  const auto status = Once(FromText<v1::GenerateRequest>(R"pb(
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
  ASSERT_TRUE(Once(FromText<v1::GenerateRequest>("text: 'w59'"), &result).ok());
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

}  // namespace generation_service_test
}  // namespace epikv
