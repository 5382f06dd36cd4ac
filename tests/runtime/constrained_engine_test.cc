// What a constraint does to completions in the engine: words w0 .. w63 over a fake executor, whose
// next token is one more than the last where it is allowed, else the lowest that is. 63 is the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/admission/admission.h"
#include "runtime/base/reason.h"
#include "runtime/constraints/constraint.h"
#include "runtime/engine/engine.h"
#include "runtime/text/tokenizer.h"
#include "tests/fixtures/fake_executor.h"
#include "tests/fixtures/fake_model.h"

namespace epikv {
namespace constrained_engine_test {

using Kind = ConstraintText::Kind;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

// What one request got, by completion.
struct Got final : RequestSink {
  bool Ready() const override { return true; }
  void OnDelta(Delta delta) override {
    auto& all = tokens[delta.completion];
    all.insert(all.end(), delta.tokens.begin(), delta.tokens.end());
    text[delta.completion] += delta.text;
    if (delta.ended.has_value()) ended[delta.completion] = delta.ended->reason;
  }
  void OnFinished(Finished finished) override { finishes.push_back(std::move(finished)); }

  FinishReason reason() const { return finishes.at(0).reason; }

  std::map<int64_t, std::vector<int32_t>> tokens;
  std::map<int64_t, std::string> text;
  std::map<int64_t, FinishReason> ended;
  std::vector<Finished> finishes;
};

// With what a step's constraints may take: enough for all, or for one at a time.
class ConstrainedEngineTest : public testing::TestWithParam<int64_t> {
 protected:
  // The prompt is w0 w1 w2.
  RequestOptions Ask(const std::string& id, Kind kind, std::vector<std::string> texts) {
    RequestOptions options{.id = id, .prompt = {0, 1, 2}};
    options.stop.max_output_tokens = 6;
    auto constraint = compiler_.Compile({kind, std::move(texts)});
    EXPECT_TRUE(constraint.ok()) << constraint.status();
    options.sampling.constraint = *constraint;
    return options;
  }
  std::shared_ptr<Got> Submit(RequestOptions options) {
    auto resolved = admission_.Resolve(std::move(options));
    const auto* rejection = std::get_if<Rejection>(&resolved);
    EXPECT_EQ(rejection, nullptr) << rejection->message;
    auto got = std::make_shared<Got>();
    engine_.Submit(std::get<Request>(std::move(resolved)), got);
    return got;
  }
  void RunAll() {
    while (engine_.Step()) {
    }
    EXPECT_EQ(script_->used_bytes, 0);
    EXPECT_EQ(engine_.ledger().reserved(), 0);
  }
  std::shared_ptr<Got> Run(RequestOptions options) {
    auto got = Submit(std::move(options));
    RunAll();
    EXPECT_THAT(got->finishes, SizeIs(1));
    return got;
  }

  const std::unique_ptr<Tokenizer> tokenizer_ = *Tokenizer::FromJson(FakeTokenizerJson());
  ConstraintCompiler compiler_{*tokenizer_, kFakeVocab};
  EngineObserver observer_;
  const std::shared_ptr<FakeScript> script_ = std::make_shared<FakeScript>();
  Admission admission_{FakeManifest(), FakeCatalog(), {.kv_capacity_bytes = 1 << 20}};
  Engine engine_{{.kv_capacity_bytes = 1 << 20, .constraint_work = GetParam()},
                 std::make_unique<FakeExecutor>(script_, kFakeBytesPerToken + 8),
                 *tokenizer_,
                 observer_};
};

INSTANTIATE_TEST_SUITE_P(, ConstrainedEngineTest, testing::Values(1'000'000, 1),
                         [](const auto& info) {
                           return std::string(info.param == 1 ? "InTurns" : "AtOnce");
                         });

TEST_P(ConstrainedEngineTest, EndsWithTheTokenAfterWhichNothingMayFollow) {
  const auto got = Run(Ask("a", Kind::kChoice, {"w5 w2", "w7 w8 w9"}));
  EXPECT_THAT(got->tokens[0], ElementsAre(5, 2));
  EXPECT_EQ(got->text[0], "w5 w2");
  EXPECT_EQ(got->reason(), FinishReason::kEnd);
}

TEST_P(ConstrainedEngineTest, TakesTheEndOnlyWhereTheTextIsWhole) {
  script_->next = [](int32_t) { return 63; };  // always wants to end
  const auto got = Run(Ask("a", Kind::kRegex, {"w5 w2( w4)*"}));
  EXPECT_THAT(got->tokens[0], ElementsAre(5, 2, 63));
  EXPECT_EQ(got->text[0], "w5 w2");
  EXPECT_EQ(got->reason(), FinishReason::kEnd);
}

TEST_P(ConstrainedEngineTest, AStopTokenIsAnEndToo) {
  script_->next = [](int32_t token) { return token == 2 ? 9 : 4; };
  RequestOptions options = Ask("a", Kind::kRegex, {"w9( w[45])*"});
  options.stop.tokens = {4};
  const auto got = Run(std::move(options));
  EXPECT_THAT(got->tokens[0], ElementsAre(9, 4));
  EXPECT_EQ(got->text[0], "w9");
  EXPECT_EQ(got->reason(), FinishReason::kStopToken);
}

TEST_P(ConstrainedEngineTest, WithoutAnEndItGoesOnToItsLength) {
  script_->next = [](int32_t) { return 63; };
  RequestOptions options = Ask("a", Kind::kRegex, {"w5( w4)*"});
  options.stop.ignore_end = true;
  const auto got = Run(std::move(options));
  EXPECT_THAT(got->tokens[0], ElementsAre(5, 4, 4, 4, 4, 4));
  EXPECT_EQ(got->reason(), FinishReason::kLength);
}

TEST_P(ConstrainedEngineTest, TheLeastOutputWaitsOnlyWhereTheTextCanGoOn) {
  script_->next = [](int32_t token) { return token == 63 ? 4 : 63; };
  RequestOptions options = Ask("a", Kind::kRegex, {"w5( w4)*"});
  options.stop.min_output_tokens = 3;
  EXPECT_THAT(Run(std::move(options))->tokens[0], ElementsAre(5, 4, 4, 63));
  options = Ask("b", Kind::kChoice, {"w5"});
  options.stop.min_output_tokens = 3;
  const auto got = Run(std::move(options));
  EXPECT_THAT(got->tokens[0], ElementsAre(5));
  EXPECT_EQ(got->reason(), FinishReason::kEnd);
}

TEST_P(ConstrainedEngineTest, LengthAndStopStringsMayCutItShort) {
  RequestOptions options = Ask("a", Kind::kRegex, {"w3 w4 w5 w6 w7 w8 w9"});
  const auto cut = Run(std::move(options));
  EXPECT_THAT(cut->tokens[0], SizeIs(6));
  EXPECT_EQ(cut->reason(), FinishReason::kLength);
  options = Ask("b", Kind::kRegex, {"w3 w4 w5 w6"});
  options.stop.strings = {"w5"};
  const auto stopped = Run(std::move(options));
  EXPECT_EQ(stopped->text[0], "w3 w4 ");
  EXPECT_EQ(stopped->reason(), FinishReason::kStopString);
}

// One that ends where the length does, too, is whole.
TEST_P(ConstrainedEngineTest, AWholeTextOfFullLengthHasEnded) {
  RequestOptions options = Ask("a", Kind::kChoice, {"w3 w4"});
  options.stop.max_output_tokens = 2;
  EXPECT_EQ(Run(std::move(options))->reason(), FinishReason::kEnd);
}

TEST_P(ConstrainedEngineTest, NeighboursWithoutAConstraintAreAsTheyAre) {
  RequestOptions free{.id = "free", .prompt = {0, 1, 2}};
  free.stop.max_output_tokens = 4;
  const auto constrained = Submit(Ask("a", Kind::kChoice, {"w9 w9 w9"}));
  const auto other = Submit(free);
  const auto third = Submit(Ask("b", Kind::kRegex, {"w[0-9]( w5)+"}));
  RunAll();
  EXPECT_THAT(constrained->tokens[0], ElementsAre(9, 9, 9));
  EXPECT_THAT(other->tokens[0], ElementsAre(3, 4, 5, 6));
  EXPECT_THAT(third->tokens[0], ElementsAre(3, 5, 5, 5, 5, 5));
}

// Who is not constrained has a token at every step; the others have turns.
TEST_P(ConstrainedEngineTest, NobodyWaitsForTheConstraintsOfMany) {
  RequestOptions free{.id = "free", .prompt = {0, 1, 2}};
  free.stop.max_output_tokens = 20;
  const auto other = Submit(free);
  std::vector<std::shared_ptr<Got>> constrained;
  for (const char* id : {"a", "b", "c"}) {
    RequestOptions options = Ask(id, Kind::kRegex, {"w3( w[0-9]+)*"});
    options.stop.max_output_tokens = 20;
    constrained.push_back(Submit(std::move(options)));
  }
  engine_.Step();
  for (int step = 1; step < 12; ++step) {
    engine_.Step();
    EXPECT_THAT(other->tokens[0], SizeIs(step + 1));
    std::vector<size_t> told;
    for (const auto& got : constrained) told.push_back(got->tokens[0].size());
    const auto [least, most] = std::minmax_element(told.begin(), told.end());
    EXPECT_LE(*most - *least, 1u) << "at step " << step;
    if (GetParam() == 1) {
      EXPECT_LE(*most, static_cast<size_t>(step) / 3 + 2);
    }
  }
  RunAll();
  for (const auto& got : constrained) {
    EXPECT_EQ(got->tokens[0], constrained[0]->tokens[0]);
    EXPECT_THAT(got->tokens[0], SizeIs(20));
  }
}

TEST_P(ConstrainedEngineTest, EachOfSeveralCompletionsHasAPlaceOfItsOwn) {
  RequestOptions options = Ask("a", Kind::kRegex, {"w3 w4 w1|w4 w1( w2 w3)*|w9"});
  options.completions = 3;
  options.sampling.temperature = 1;
  const auto got = Run(std::move(options));
  // Completion i begins i tokens further: w3, w4, and what is not allowed: the lowest that is.
  EXPECT_THAT(got->tokens[0], ElementsAre(3, 4, 1));
  EXPECT_THAT(got->tokens[1], ElementsAre(4, 1, 2, 3, 2, 3));
  EXPECT_THAT(got->tokens[2], ElementsAre(3, 4, 1));
  EXPECT_THAT(got->ended, SizeIs(3));
}

// The vocabulary has no "w64": after w3 nothing goes on.
TEST_P(ConstrainedEngineTest, ATextThatCannotGoOnFailsItsRequestAlone) {
  const auto dead = Submit(Ask("dead", Kind::kChoice, {"w3 w64"}));
  RequestOptions several = Ask("several", Kind::kChoice, {"w3 w64", "w4 w5"});
  several.completions = 3;
  several.sampling.temperature = 1;
  const auto family = Submit(std::move(several));
  const auto neighbour = Submit(Ask("n", Kind::kChoice, {"w3 w4 w5"}));
  RunAll();
  for (const auto& failed : {dead, family}) {
    ASSERT_THAT(failed->finishes, SizeIs(1));
    EXPECT_EQ(failed->reason(), FinishReason::kError);
    EXPECT_EQ(failed->finishes[0].status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(failed->finishes[0].status), kConstraintFailed);
  }
  EXPECT_THAT(neighbour->tokens[0], ElementsAre(3, 4, 5));
}

TEST_P(ConstrainedEngineTest, WhatIsForcedIsNotConstrained) {
  RequestOptions options = Ask("a", Kind::kChoice, {"w3"});
  options.stop.max_output_tokens = std::nullopt;
  options.forced = {8, 9, 10};
  EXPECT_THAT(Run(std::move(options))->tokens[0], ElementsAre(8, 9, 10));
}

// Guesses that the constraint allows come true as they do without one, and tell the same.
TEST_P(ConstrainedEngineTest, GuessesAreThoseThatItAllows) {
  const auto run = [&](const std::string& id, const std::string& regex, int64_t guesses) {
    RequestOptions options = Ask(id, Kind::kRegex, {regex});
    options.prompt = {5, 6, 7, 8, 9, 10, 11, 12, 13, 3, 4};
    options.stop.max_output_tokens = 9;
    options.guess_tokens = guesses;
    return Run(std::move(options));
  };
  int64_t accepted = 0;
  for (const char* regex :
       {"w5( w[0-9]+)*", "w5 w6 w7( w9)*", "w5 w6 w7", "w5( w6)?( w7 w8 w20)*"}) {
    SCOPED_TRACE(regex);
    const auto plain = run("plain", regex, 0);
    const int64_t before = script_->forwards;
    const auto guessed = run("guessed", regex, 6);
    EXPECT_EQ(guessed->tokens[0], plain->tokens[0]);
    EXPECT_EQ(guessed->text[0], plain->text[0]);
    EXPECT_EQ(guessed->reason(), plain->reason());
    const Finished& end = guessed->finishes.at(0);
    if (GetParam() == 1) {  // what is read in a step leaves nothing to look ahead with
      EXPECT_EQ(end.guessed_tokens, 0);
      continue;
    }
    accepted += end.accepted_tokens;
    EXPECT_EQ(script_->forwards - before,
              static_cast<int64_t>(guessed->tokens[0].size()) - end.accepted_tokens);
  }
  EXPECT_EQ(accepted > 0, GetParam() > 1);
}

}  // namespace constrained_engine_test
}  // namespace epikv
