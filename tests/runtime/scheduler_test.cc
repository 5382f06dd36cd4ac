#include "runtime/engine/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

namespace epikv {

bool operator==(const PlannedItem& a, const PlannedItem& b) {
  return a.sequence == b.sequence && a.num_tokens == b.num_tokens;
}
void PrintTo(const PlannedItem& item, std::ostream* out) {
  *out << "sequence " << item.sequence << ": " << item.num_tokens;
}

namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using Item = PlannedItem;

SequenceView Prefilling(int64_t prompt, int64_t cached = 0) {
  return {.prefill_tokens = prompt, .cached_tokens = cached};
}
SequenceView AtTurn(int64_t turn, SequenceView view) {
  view.turn = turn;
  return view;
}
SequenceView Decoding() { return {.prefill_tokens = 10, .cached_tokens = 12}; }
SequenceView Paused(SequenceView view) {
  view.ready = false;
  return view;
}

TEST(Plan, NothingRunsNothing) { EXPECT_THAT(Plan({}, {}), IsEmpty()); }

TEST(Plan, DecodesFirstThenPrefillsOldestFirst) {
  const SequenceView running[] = {Prefilling(20), Decoding(), Prefilling(30), Decoding()};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 512}),
              ElementsAre(Item{1, 1}, Item{3, 1}, Item{0, 20}, Item{2, 30}));
}

TEST(Plan, LastPromptTokenIsPrefill) {
  const SequenceView running[] = {Prefilling(20, 19), Prefilling(20, 20)};
  EXPECT_THAT(Plan(running, {}), ElementsAre(Item{1, 1}, Item{0, 1}));
}

TEST(Plan, PrefillTakesTheRoomLeft) {
  const SequenceView running[] = {Decoding(), Decoding(), Prefilling(20), Prefilling(100)};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 64}),
              ElementsAre(Item{0, 1}, Item{1, 1}, Item{2, 20}, Item{3, 42}));
}

TEST(Plan, ChunkNeverCrossesAMultiple) {
  const SchedulerOptions options{.max_step_tokens = 512, .prefill_chunk_tokens = 64};
  const SequenceView running[] = {Prefilling(500), Prefilling(500, 60), Prefilling(500, 64)};
  EXPECT_THAT(Plan(running, options), ElementsAre(Item{0, 64}, Item{1, 4}, Item{2, 64}));
}

TEST(Plan, PausedAreLeftOut) {
  const SequenceView running[] = {Paused(Decoding()), Paused(Prefilling(20)), Decoding(),
                                  Prefilling(20)};
  EXPECT_THAT(Plan(running, {}), ElementsAre(Item{2, 1}, Item{3, 20}));
}

TEST(Plan, PausedPromptDoesNotHoldUpTheYounger) {
  const SequenceView running[] = {Paused(Prefilling(20)), Prefilling(20)};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 20}), ElementsAre(Item{1, 20}));
}

TEST(Plan, PromptsGoInTurnThenByAge) {
  const SequenceView running[] = {AtTurn(20, Prefilling(20)), AtTurn(0, Prefilling(20)),
                                  AtTurn(20, Prefilling(20)), AtTurn(5, Prefilling(20))};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 70}),
              ElementsAre(Item{1, 20}, Item{3, 20}, Item{0, 20}, Item{2, 10}));
}

TEST(Plan, PausedPromptTakesNoTurn) {
  const SequenceView running[] = {Paused(Prefilling(20)), AtTurn(20, Prefilling(20))};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 40}), ElementsAre(Item{1, 20}));
}

TEST(PrefillTurns, OneTenantsFollowOneAnother) {
  PrefillTurns turns;
  EXPECT_EQ(turns.Take("a", 30), 0);
  EXPECT_EQ(turns.Take("a", 50), 30);
  EXPECT_EQ(turns.Take("a", 0), 80);
  EXPECT_EQ(turns.Take("a", 1), 80);
}

TEST(PrefillTurns, WhoComesBeginsNowAndOwesNothing) {
  PrefillTurns turns;
  turns.Take("a", 300);
  turns.Reach(120);
  EXPECT_EQ(turns.Take("b", 20), 120);
  EXPECT_EQ(turns.Take("a", 20), 300);
  turns.Reach(100);  // one that was paused
  EXPECT_EQ(turns.Take("c", 20), 120);
  turns.Reach(300);
  EXPECT_EQ(turns.Take("b", 20), 300) << "what he has left unused is gone";
}

// While several tenants have prompts to read, they are read alike fast: no tenant is further ahead
// of another than what one step may read, however many and however long his prompts are.
TEST(PrefillTurns, TenantsAreReadAlikeFast) {
  constexpr int64_t kStep = 64, kTenants = 3;
  std::mt19937 random(7);
  auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  PrefillTurns turns;
  std::vector<SequenceView> running;
  std::vector<int64_t> tenant_of;
  int64_t read[kTenants] = {};
  for (int64_t i = 0; i < 90; ++i) {
    const int64_t tenant = i < 60 ? 0 : draw(0, kTenants - 1);  // the first has had sixty before
    const int64_t tokens = tenant == 0 ? draw(1, 200) : 150;
    const int64_t turn = turns.Take(std::string(1, static_cast<char>('a' + tenant)), tokens);
    running.push_back(AtTurn(turn, Prefilling(tokens)));
    tenant_of.push_back(tenant);
  }
  auto waits = [&](int64_t tenant) {
    for (size_t i = 0; i < running.size(); ++i) {
      if (tenant_of[i] == tenant && running[i].cached_tokens < running[i].prefill_tokens)
        return true;
    }
    return false;
  };
  while (waits(0) && waits(1) && waits(2)) {
    for (const PlannedItem& item : Plan(running, {.max_step_tokens = kStep})) {
      SequenceView& s = running[item.sequence];
      if (s.cached_tokens >= s.prefill_tokens) continue;  // it decodes
      s.cached_tokens += item.num_tokens;
      s.turn += item.num_tokens;
      read[tenant_of[item.sequence]] += item.num_tokens;
    }
    const auto [least, most] = std::minmax_element(std::begin(read), std::end(read));
    ASSERT_LE(*most - *least, kStep);
  }
  EXPECT_GT(read[2], 500);
}

TEST(Plan, DecodingAllStepsStillPrefillsALittle) {
  std::vector<SequenceView> running(40, Decoding());
  running.push_back(Prefilling(100));
  const std::vector<PlannedItem> plan = Plan(running, {.max_step_tokens = 32});
  ASSERT_EQ(plan.size(), 41u);
  EXPECT_EQ(plan.back(), (Item{40, 16}));
}

TEST(Plan, FixedChunksAreWholeOrWait) {
  const SchedulerOptions options{
      .max_step_tokens = 40, .prefill_chunk_tokens = 64, .fixed_chunk_tokens = 16};
  // The third would get 8 of its 16 tokens: it waits, and so does the fourth, which needs only 4.
  const SequenceView running[] = {Prefilling(100), Prefilling(30, 16), Prefilling(100),
                                  Prefilling(4)};
  EXPECT_THAT(Plan(running, options), ElementsAre(Item{0, 16}, Item{1, 14}));
}

TEST(Plan, FixedChunkFitsWhereDecodingFillsTheStep) {
  std::vector<SequenceView> running(40, Decoding());
  running.push_back(Prefilling(200));
  for (int64_t fixed : {8, 16, 32, 64}) {
    const std::vector<PlannedItem> plan = Plan(
        running, {.max_step_tokens = 32, .prefill_chunk_tokens = 64, .fixed_chunk_tokens = fixed});
    ASSERT_EQ(plan.size(), 41u) << "fixed " << fixed;
    EXPECT_EQ(plan.back().num_tokens, fixed);
  }
}

TEST(MostStepTokens, IsReachedWhereDecodingLeavesTheLeast) {
  for (int64_t max_running : {1, 3, 30, 200}) {
    const SchedulerOptions options{.max_step_tokens = 64};
    int64_t most = 0;
    for (int64_t decoding = 0; decoding <= max_running; ++decoding) {
      std::vector<SequenceView> running(decoding, Decoding());
      running.resize(max_running, Prefilling(1000));
      int64_t tokens = 0;
      for (const PlannedItem& item : Plan(running, options)) tokens += item.num_tokens;
      most = std::max(most, tokens);
    }
    EXPECT_EQ(MostStepTokens(options, max_running), most);
  }
}

// Random running sets, stepped until all prompts are cached.
class PlanLaws : public testing::Test {
 protected:
  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  SchedulerOptions RandomOptions() {
    SchedulerOptions options;
    options.max_step_tokens = Draw(1, 300);
    options.prefill_chunk_tokens = Draw(1, 100);
    if (Draw(0, 2) == 0) {
      options.fixed_chunk_tokens = Draw(1, 24);
      options.prefill_chunk_tokens = options.fixed_chunk_tokens * Draw(1, 6);
    }
    return options;
  }
  std::vector<SequenceView> RandomSequences() {
    std::vector<SequenceView> running(Draw(0, 40));
    for (SequenceView& s : running) {
      const bool prefilling = Draw(0, 1) == 0;
      s = {.prefill_tokens = Draw(1, 400), .turn = Draw(0, 3)};
      if (!prefilling) s.cached_tokens = s.prefill_tokens + Draw(0, 50);
    }
    return running;
  }
  std::mt19937 random_{20240611};
};

bool IsDecoding(const SequenceView& s) { return s.cached_tokens >= s.prefill_tokens; }

std::pair<int64_t, int64_t> Turn(const std::vector<SequenceView>& running, int64_t place) {
  return {running[place].turn, place};
}

// The prefill tokens that a sequence would get if it ran alone.
int64_t WholeChunk(const SequenceView& s, const SchedulerOptions& options) {
  const int64_t length =
      options.fixed_chunk_tokens > 0 ? options.fixed_chunk_tokens : options.prefill_chunk_tokens;
  return std::min(s.prefill_tokens, (s.cached_tokens / length + 1) * length) - s.cached_tokens;
}

void CheckPlan(const std::vector<SequenceView>& running, const SchedulerOptions& options,
               const std::vector<PlannedItem>& plan) {
  int64_t decodes = 0, sum = 0, ready_decodes = 0;
  std::pair<int64_t, int64_t> previous = {-1, -1};
  bool cut = false;
  std::vector<bool> planned(running.size());
  for (const PlannedItem& item : plan) {
    const SequenceView& s = running[item.sequence];
    EXPECT_TRUE(s.ready);
    EXPECT_FALSE(planned[item.sequence]) << "planned twice";
    planned[item.sequence] = true;
    sum += item.num_tokens;
    if (IsDecoding(s)) {
      EXPECT_EQ(item.num_tokens, 1);
      EXPECT_EQ(decodes, &item - plan.data()) << "decode comes first";
      ++decodes;
      continue;
    }
    EXPECT_GT(Turn(running, item.sequence), previous) << "out of turn";
    previous = Turn(running, item.sequence);
    EXPECT_FALSE(cut) << "another one goes on while one before it had to be cut";
    EXPECT_GE(item.num_tokens, 1);
    EXPECT_LE(item.num_tokens, WholeChunk(s, options)) << "beyond the prompt or a multiple";
    cut = item.num_tokens < WholeChunk(s, options);
    if (options.fixed_chunk_tokens > 0) {
      EXPECT_FALSE(cut) << "a fixed chunk is whole";
    }
  }
  for (size_t i = 0; i < running.size(); ++i) {
    if (!running[i].ready) continue;
    if (IsDecoding(running[i])) ++ready_decodes;
    if (!IsDecoding(running[i]) && Turn(running, static_cast<int64_t>(i)) < previous) {
      EXPECT_TRUE(planned[i]) << "a prompt was left out before its turn";
    }
  }
  EXPECT_EQ(decodes, ready_decodes) << "every ready decoding sequence runs";
  const int64_t least = std::max<int64_t>(16, options.fixed_chunk_tokens);
  EXPECT_LE(sum, std::max(options.max_step_tokens, decodes + least));
  EXPECT_LE(sum, MostStepTokens(options, std::max<int64_t>(1, running.size())));
  if (previous.first < 0) {
    for (const SequenceView& s : running) {
      EXPECT_FALSE(s.ready && !IsDecoding(s)) << "no prefill progress";
    }
  }
}

TEST_F(PlanLaws, HoldInEveryRandomState) {
  for (int round = 0; round < 3000; ++round) {
    const SchedulerOptions options = RandomOptions();
    std::vector<SequenceView> running = RandomSequences();
    for (SequenceView& s : running) {
      s.ready = Draw(0, 4) > 0;
      if (!IsDecoding(s) && options.fixed_chunk_tokens == 0) {
        s.cached_tokens = Draw(0, s.prefill_tokens - 1);
      }
    }
    CheckPlan(running, options, Plan(running, options));
    if (HasFailure()) FAIL() << "in round " << round;
  }
}

// The prompt whose turn it is advances in every step, whatever decodes beside it; so all end, and
// the number of steps is bounded by the work.
TEST_F(PlanLaws, NobodyStarves) {
  for (int round = 0; round < 300; ++round) {
    const SchedulerOptions options = RandomOptions();
    std::vector<SequenceView> running = RandomSequences();
    int64_t left = 0;
    for (const SequenceView& s : running)
      left += std::max<int64_t>(0, s.prefill_tokens - s.cached_tokens);
    for (int64_t steps = 0; left > 0; ++steps) {
      ASSERT_LT(steps, 40 * 400) << "prefill never ends";
      const auto next = std::min_element(
          running.begin(), running.end(), [](const SequenceView& a, const SequenceView& b) {
            return std::pair(IsDecoding(a), a.turn) < std::pair(IsDecoding(b), b.turn);
          });
      const int64_t before = next->cached_tokens;
      const int64_t due = std::min<int64_t>(16, WholeChunk(*next, options));
      for (const PlannedItem& item : Plan(running, options)) {
        SequenceView& s = running[item.sequence];
        if (!IsDecoding(s)) left -= item.num_tokens;
        s.cached_tokens += item.num_tokens;
      }
      ASSERT_GE(next->cached_tokens - before, due) << "in round " << round;
    }
  }
}

// With fixed chunks a prompt is cut at the same places alone and in any company.
TEST_F(PlanLaws, FixedChunksDoNotDependOnNeighbours) {
  for (int round = 0; round < 300; ++round) {
    SchedulerOptions options = RandomOptions();
    options.fixed_chunk_tokens = Draw(1, 24);
    options.prefill_chunk_tokens = options.fixed_chunk_tokens * Draw(1, 6);
    std::vector<SequenceView> running = RandomSequences();
    for (int step = 0; step < 100; ++step) {
      for (SequenceView& s : running) s.ready = Draw(0, 4) > 0;
      for (const PlannedItem& item : Plan(running, options)) {
        SequenceView& s = running[item.sequence];
        if (!IsDecoding(s)) {
          ASSERT_EQ(s.cached_tokens % options.fixed_chunk_tokens, 0);
          ASSERT_EQ(item.num_tokens, WholeChunk(s, options));
        }
        s.cached_tokens += item.num_tokens;
      }
    }
  }
}

}  // namespace
}  // namespace epikv
