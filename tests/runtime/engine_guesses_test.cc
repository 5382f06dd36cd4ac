// Guesses that run ahead of a sequence, as the engine plans and concludes them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "runtime/engine/engine.h"
#include "tests/fixtures/engine_fixture.h"
#include "tests/fixtures/fake_drafter.h"

namespace epikv {
namespace engine_guesses_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

class EngineGuesses : public EngineTest {
 protected:
  // Its prompt has the whole vocabulary and begins it anew: what comes next is there already.
  RequestOptions Guessing(const std::string& id, int64_t max_output, int64_t guesses = 4) const {
    RequestOptions options = Ask(id, kFakeVocab + 10, max_output);
    options.stop.ignore_end = true;
    options.guess_tokens = guesses;
    return options;
  }
  int64_t Guessed() const {
    int64_t guessed = 0;
    for (const StepStats& step : observer_.steps) guessed += step.guessed_tokens;
    return guessed;
  }
  int64_t Accepted() const {
    int64_t accepted = 0;
    for (const StepStats& step : observer_.steps) accepted += step.accepted_tokens;
    return accepted;
  }
};

TEST_F(EngineGuesses, OneStepTellsWhatCameTrue) {
  auto output = Submit(Guessing("a", 12));
  EXPECT_EQ(Step(),
            "admitted a\nfirst token a\na> tokens 10 'w10'\nstep of 1: prefill 74, decode 0\n");
  EXPECT_EQ(Step(),
            "a> tokens 11 ' w11'\na> tokens 12 ' w12'\na> tokens 13 ' w13'\na> tokens 14 ' w14'\n"
            "a> tokens 15 ' w15'\nstep of 1: prefill 0, decode 5\n");
  RunAll();
  EXPECT_EQ(script_->forwards, 4) << "1 + 5 + 5 + 1 tokens";
  EXPECT_THAT(output->tokens, SizeIs(12));
  EXPECT_EQ(output->finished.at(0).guessed_tokens, 8);
  EXPECT_EQ(output->finished.at(0).accepted_tokens, 8);
  ExpectNothingHeld();
}

TEST_F(EngineGuesses, WhatDidNotComeTrueIsForgotten) {
  // After 12 comes 40, which the prompt does not say.
  script_->next = [](int32_t token) { return token == 12 ? 40 : (token + 1) % kFakeVocab; };
  auto output = Submit(Guessing("a", 8));
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(10, 11, 12, 40, 41, 42, 43, 44));
  EXPECT_LT(output->finished.at(0).accepted_tokens, output->finished.at(0).guessed_tokens);
  EXPECT_EQ(output->finished.at(0).kv.final_entries, (kFakeVocab + 10 + 7) * kFakeLanes);
}

TEST_F(EngineGuesses, NoGuessGoesBeyondTheLastToken) {
  auto output = Submit(Guessing("a", 3, 15));
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(10, 11, 12));
  EXPECT_EQ(Guessed(), 1);
  output = Submit(Guessing("b", 1, 15));
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(10));
}

TEST_F(EngineGuesses, NoneGoesBeyondAnEnd) {
  RequestOptions options = Guessing("a", 20, 15);
  options.stop.tokens = {14};
  auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(10, 11, 12, 13, 14));
  EXPECT_EQ(output->reason(), "stop token");
  EXPECT_EQ(Guessed(), 3) << "11, 12 and 13 are fed; 14 is told and never fed";
  EXPECT_EQ(output->finished.at(0).kv.final_entries, (kFakeVocab + 10 + 4) * kFakeLanes);
}

TEST_F(EngineGuesses, AStopStringEndsInTheMiddleOfAStep) {
  RequestOptions options = Guessing("a", 20, 15);
  options.stop.strings = {"w12 w13"};
  auto output = Submit(options);
  RunAll();
  EXPECT_THAT(output->tokens, ElementsAre(10, 11, 12, 13));
  EXPECT_EQ(output->reason(), "stop string");
  EXPECT_EQ(output->finished.at(0).kv.final_entries, (kFakeVocab + 10 + 3) * kFakeLanes);
  ExpectNothingHeld();
}

TEST_F(EngineGuesses, ARoundComesBehindTheLastGuessAlone) {
  RequestOptions options = Guessing("a", 60, 15);
  options.kv = {
      .policy = "at_end", .budget = int64_t{kFakeVocab + 20}, .params = {{"slack", int64_t{5}}}};
  options.output.kv_trace = true;
  options.guess_tokens = 0;
  auto plain = Submit(options);
  RunAll();
  ASSERT_GT(plain->evictions.size(), 2u);
  options.id = "b";
  options.guess_tokens = 15;
  auto guessed = Submit(options);
  RunAll();
  EXPECT_EQ(guessed->tokens, plain->tokens);
  ASSERT_EQ(guessed->evictions.size(), plain->evictions.size());
  for (size_t i = 0; i < plain->evictions.size(); ++i) {
    EXPECT_EQ(guessed->evictions[i].at_token, plain->evictions[i].at_token);
    EXPECT_EQ(guessed->evictions[i].victims[0].index, plain->evictions[i].victims[0].index);
  }
  EXPECT_GT(Accepted(), 10);
  EXPECT_EQ(guessed->finished.at(0).kv.peak_bytes, plain->finished.at(0).kv.peak_bytes);
}

TEST_F(EngineGuesses, AStepHoldsNoMoreRowsThanItMay) {
  Build({.engine = {.scheduler = {.max_step_tokens = 80}}});
  std::vector<size_t> rows;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    size_t of_step = 0;
    for (const WorkItem& item : items) of_step += item.tokens.size();
    rows.push_back(of_step);
    return absl::OkStatus();
  };
  for (int i = 0; i < 10; ++i) Submit(Guessing(absl::StrCat("a", i), 40, 15));
  RunAll();
  EXPECT_LE(*std::max_element(rows.begin(), rows.end()), 80u);
  EXPECT_GT(Accepted(), 100);
}

// Everything as if there had been no guesses: who fails, fails alone.
TEST_F(EngineGuesses, AForwardThatFailsRunsEachAloneAndGuessesNothing) {
  auto good = Submit(Guessing("good", 30)), bad = Submit(Guessing("bad", 30));
  Step();
  script_->on_forward = [](absl::Span<const WorkItem> items) {
    return HasRequest(items, "bad") ? Boom() : absl::OkStatus();
  };
  RunAll();
  EXPECT_EQ(bad->reason(), "error");
  EXPECT_EQ(good->reason(), "length");
  EXPECT_THAT(good->tokens, SizeIs(30));
  for (int i = 0; i < 30; ++i) EXPECT_EQ(good->tokens[i], 10 + i);
  ExpectNothingHeld();
}

TEST_F(EngineGuesses, AGuessThatFailsEndsItsOwnRequest) {
  auto good = Submit(Guessing("good", 30)), bad = Submit(Guessing("bad", 30));
  script_->on_item = [](const WorkItem& item) {
    return item.ahead == 2 && item.request->id == "bad" ? Boom() : absl::OkStatus();
  };
  RunAll();
  EXPECT_EQ(bad->reason(), "error");
  EXPECT_THAT(bad->tokens, ElementsAre(10, 11, 12)) << "what came before is told";
  EXPECT_EQ(good->reason(), "length");
  ExpectNothingHeld();
}

TEST_F(EngineGuesses, SettlingThatFailsEndsItsOwnRequest) {
  auto bad = Submit(Guessing("bad", 30));
  script_->on_settle = [](const WorkItem& item) {
    return item.ahead == 2 ? Boom() : absl::OkStatus();
  };
  RunAll();
  EXPECT_EQ(bad->reason(), "error");
  EXPECT_THAT(bad->tokens, ElementsAre(10, 11, 12, 13));
  ExpectNothingHeld();
}

TEST_F(EngineGuesses, WhoGuessesBadlyIsAskedLess) {
  // What comes behind two tokens is never what came behind them before.
  int32_t told = 0;
  script_->next = [&](int32_t) { return ++told % 3 == 0 ? (told / 3) % kFakeVocab : told % 3; };
  auto output = Submit(Guessing("a", 200, 15));
  RunAll();
  EXPECT_GT(Guessed(), 0);
  EXPECT_LT(Guessed(), 15 * 200 / 4) << "of what was there to be guessed";
}

// Many requests at random: with guesses and without, the same outputs.
TEST_F(EngineGuesses, RandomRunsTellTheSame) {
  std::mt19937 dice(17);
  for (int round = 0; round < 20; ++round) {
    std::vector<RequestOptions> asked;
    const int requests = 1 + static_cast<int>(dice() % 5);
    for (int i = 0; i < requests; ++i) {
      RequestOptions options = Guessing(absl::StrCat(round, "/", i), 1 + dice() % 60, dice() % 16);
      if (dice() % 2 == 0) {
        options.kv = {.policy = dice() % 2 == 0 ? "at_end" : "by_chunk",
                      .budget = kFakeVocab + 14 + static_cast<int64_t>(dice() % 20),
                      .params = {{"slack", static_cast<int64_t>(dice() % 8)}}};
      }
      if (dice() % 3 == 0) options.stop.strings = {absl::StrCat("w", 10 + dice() % 50)};
      if (dice() % 3 == 0)
        options.stop.min_output_tokens = dice() % *options.stop.max_output_tokens;
      asked.push_back(options);
    }
    std::vector<std::shared_ptr<Output>> with, without;
    for (RequestOptions options : asked) with.push_back(Submit(options));
    RunAll();
    for (RequestOptions options : asked) {
      options.id += "/plain";
      options.guess_tokens = 0;
      without.push_back(Submit(options));
    }
    RunAll();
    for (int i = 0; i < requests; ++i) {
      EXPECT_EQ(with[i]->tokens, without[i]->tokens);
      EXPECT_EQ(with[i]->text, without[i]->text);
      EXPECT_EQ(with[i]->reason(), without[i]->reason());
      const KvUsage &kv = with[i]->finished.at(0).kv, &plain = without[i]->finished.at(0).kv;
      EXPECT_EQ(kv.evicted_entries, plain.evicted_entries);
      EXPECT_EQ(kv.final_entries, plain.final_entries);
      EXPECT_EQ(kv.peak_entries, plain.peak_entries);
      EXPECT_EQ(kv.rounds, plain.rounds);
    }
    ExpectNothingHeld();
  }
  EXPECT_GT(Accepted(), 100);
}

TEST_F(EngineGuesses, TooManyAreRefused) {
  const auto resolved = admission_->Resolve(Guessing("a", 5, kMostGuesses + 1));
  ASSERT_TRUE(std::holds_alternative<Rejection>(resolved));
  EXPECT_THAT(std::get<Rejection>(resolved).message, HasSubstr("speculation.max_tokens"));
}

class EngineDrafts : public EngineGuesses {
 protected:
  EngineDrafts() { BuildDrafting({}); }
  void BuildDrafting(RigOptions options) {
    options.drafter = std::make_unique<FakeDrafter>(draft_);
    Build(std::move(options));
  }
  // Nothing of its prompt says what comes.
  RequestOptions Drafting(const std::string& id, int64_t max_output, int64_t guesses = 4) const {
    RequestOptions options = Ask(id, 10, max_output);
    options.stop.ignore_end = true;
    options.guess_tokens = guesses;
    options.guess_source = GuessSource::kDraft;
    return options;
  }

  std::shared_ptr<DraftScript> draft_ = std::make_shared<DraftScript>();
};

TEST_F(EngineDrafts, OneStepTellsWhatTheDraftGuessed) {
  auto output = Submit(Drafting("a", 12));
  RunAll();
  EXPECT_EQ(script_->forwards, 4) << "1 + 5 + 5 + 1 tokens";
  EXPECT_THAT(output->tokens, SizeIs(12));
  EXPECT_EQ(output->finished.at(0).accepted_tokens, 8);
  EXPECT_THAT(draft_->open, SizeIs(0));
  EXPECT_EQ(draft_->room, 1 << 20);
  ExpectNothingHeld();
}

TEST_F(EngineDrafts, WrongGuessesChangeNothing) {
  draft_->next = [](int32_t token) { return (token * 7 + 3) % 64; };
  auto output = Submit(Drafting("a", 30));
  RunAll();
  for (int i = 0; i < 30; ++i) EXPECT_EQ(output->tokens[i], 10 + i);
  EXPECT_GT(Guessed(), 0);
  EXPECT_LT(draft_->calls, 25) << "it is asked less";
}

TEST_F(EngineDrafts, ADraftThatIsDearIsTriedNowAndThen) {
  draft_->guess_time = absl::Hours(1);
  script_->on_forward = [this](absl::Span<const WorkItem>) {
    now_ += absl::Milliseconds(10);
    return absl::OkStatus();
  };
  Submit(Drafting("a", 500));
  RunAll();
  EXPECT_GE(draft_->calls, 2);
  EXPECT_LE(draft_->calls, 12);
}

TEST_F(EngineDrafts, WhatTheDraftWasWorthSaysNothingOfLookingUp) {
  draft_->next = [](int32_t token) { return (token * 7 + 3) % 64; };
  for (int i = 0; i < 30; ++i) Submit(Drafting(absl::StrCat("drafts ", i), 4));
  RunAll();
  auto output = Submit(Guessing("looks up", 12));
  RunAll();
  EXPECT_EQ(output->finished.at(0).accepted_tokens, 8);
}

// What comes is forced to be none of what it says.
TEST_F(EngineDrafts, ADraftWhoseGuessesCannotBeIsAskedLess) {
  draft_->next = [](int32_t) { return kEnd; };
  RequestOptions options = Drafting("a", 40);
  options.stop.ignore_end = false;
  script_->next = [](int32_t token) { return (token + 1) % 50; };
  Submit(options);
  RunAll();
  EXPECT_GT(draft_->calls, 1);
  EXPECT_LT(draft_->calls, 30);
  EXPECT_EQ(Guessed(), 0);
}

TEST_F(EngineDrafts, ALongPromptOfAShortOutputIsNotReadByIt) {
  RequestOptions options = Drafting("a", 2);
  options.prompt = Ask("", 100, 1).prompt;
  Submit(options);
  RunAll();
  EXPECT_EQ(draft_->calls, 0);
}

TEST_F(EngineDrafts, WhatLookingUpWasWorthSaysNothingOfTheDraft) {
  // What comes behind two tokens is never what came behind them before.
  int32_t told = 0;
  script_->next = [&](int32_t) { return ++told % 3 == 0 ? (told / 3) % kFakeVocab : told % 3; };
  Submit(Guessing("looks up", 400, 15));
  RunAll();
  script_->next = [](int32_t token) { return (token + 1) % 64; };
  auto output = Submit(Drafting("drafts", 12));
  RunAll();
  EXPECT_EQ(output->finished.at(0).accepted_tokens, 8);
}

TEST_F(EngineDrafts, WhereItHasNoRoomGuessesAreLookedUp) {
  draft_->room = 30;
  auto drafts = Submit(Drafting("a", 20));
  RequestOptions options = Guessing("b", 12);
  options.guess_source = GuessSource::kDraft;
  auto looks_up = Submit(options);
  RunAll();
  EXPECT_GT(drafts->finished.at(0).accepted_tokens, 0);
  EXPECT_GT(looks_up->finished.at(0).accepted_tokens, 0);
  EXPECT_EQ(draft_->room, 30);
}

TEST_F(EngineDrafts, ADraftThatFailsIsNotAskedAgain) {
  draft_->fails = true;
  auto output = Submit(Drafting("a", 30));
  RunAll();
  EXPECT_EQ(output->reason(), "length");
  EXPECT_EQ(draft_->calls, 1);
  EXPECT_THAT(draft_->open, SizeIs(0));
}

TEST_F(EngineDrafts, WhatEndsInTheMiddleIsClosed) {
  auto stopped = Submit(Drafting("a", 60)), cancelled = Submit(Drafting("b", 60));
  for (int i = 0; i < 4; ++i) Step();
  EXPECT_THAT(draft_->open, SizeIs(2));
  engine_->Cancel("b", absl::CancelledError("enough"));
  EXPECT_THAT(draft_->open, SizeIs(1));
  RunAll();
  EXPECT_THAT(draft_->open, SizeIs(0));
}

TEST_F(EngineDrafts, CompletionsDraftEachForItself) {
  RequestOptions options = Drafting("a", 20);
  options.completions = 3;
  options.sampling.temperature = 1;
  Submit(options);
  RunAll();
  EXPECT_GT(Accepted(), 0);
  EXPECT_THAT(draft_->open, SizeIs(0));
}

TEST_F(EngineGuesses, ADraftThatIsNotThereIsRefused) {
  RequestOptions options = Guessing("a", 5);
  options.guess_source = GuessSource::kDraft;
  const auto resolved = admission_->Resolve(options);
  ASSERT_TRUE(std::holds_alternative<Rejection>(resolved));
  EXPECT_THAT(std::get<Rejection>(resolved).message, HasSubstr("no draft model"));
}

}  // namespace engine_guesses_test
}  // namespace epikv
