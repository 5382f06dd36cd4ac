#include "runtime/engine/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <ostream>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace epikv {

bool operator==(const PlannedItem& a, const PlannedItem& b) {
  return a.sequence == b.sequence && a.num_tokens == b.num_tokens;
}
void PrintTo(const PlannedItem& item, std::ostream* out) {
  *out << "sequence " << item.sequence << ": " << item.num_tokens;
}

namespace scheduler_test {

using testing::ElementsAre;
using testing::IsEmpty;
using Item = PlannedItem;

SequenceView Prefilling(int64_t prompt, int64_t cached = 0) {
  return {.prefill_tokens = prompt, .cached_tokens = cached};
}
SequenceView Of(absl::string_view tenant, SequenceView view, int64_t turn = 0) {
  view.tenant = tenant;
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

TEST(Plan, OneTenantsPromptsDoNotHoldUpTheOthers) {
  const SequenceView running[] = {Of("a", Prefilling(20)), Of("a", Prefilling(20)),
                                  Of("a", Prefilling(20)), Of("b", Prefilling(20)),
                                  Of("b", Prefilling(20)), Of("c", Prefilling(20))};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 90}),
              ElementsAre(Item{0, 20}, Item{3, 20}, Item{5, 20}, Item{1, 20}, Item{4, 10}));
}

TEST(Plan, TenantsGoByTurns) {
  const SequenceView running[] = {Of("a", Prefilling(20), 5), Of("b", Prefilling(20), 3),
                                  Of("c", Prefilling(20), 4), Of("b", Prefilling(20), 3)};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 70}),
              ElementsAre(Item{1, 20}, Item{2, 20}, Item{0, 20}, Item{3, 10}));
}

TEST(Plan, PausedPromptTakesNoTurnOfItsTenant) {
  const SequenceView running[] = {Of("a", Paused(Prefilling(20))), Of("b", Prefilling(20)),
                                  Of("a", Prefilling(20)), Of("b", Prefilling(20))};
  EXPECT_THAT(Plan(running, {.max_step_tokens = 40}), ElementsAre(Item{1, 20}, Item{2, 20}));
}

// Of (last_step, round_pairs) who has no room where `most` pairs may be compared.
std::vector<int64_t> Out(const std::vector<std::pair<int64_t, int64_t>>& running, int64_t most) {
  std::vector<SequenceView> views;
  std::vector<PlannedItem> plan;
  for (const auto& [last_step, pairs] : running) {
    views.push_back(Decoding());
    views.back().last_step = last_step;
    plan.push_back({.sequence = std::ssize(views) - 1, .num_tokens = 1, .round_pairs = pairs});
  }
  return WithoutRoom(views, plan, most);
}

TEST(WithoutRoom, WhoHasNoRoundRunsAndOneRunsWhateverItTakes) {
  EXPECT_THAT(Out({{9, 0}, {9, 50}, {9, 0}}, 10), IsEmpty());
  EXPECT_THAT(Out({}, 10), IsEmpty());
}

TEST(WithoutRoom, WhoHasWaitedLongestGoesFirstAndNobodyPasses) {
  EXPECT_THAT(Out({{9, 4}, {8, 4}, {9, 4}, {7, 4}, {9, 0}}, 8), ElementsAre(0, 2));
  EXPECT_THAT(Out({{9, 4}, {9, 4}, {9, 4}}, 8), ElementsAre(2));
  EXPECT_THAT(Out({{7, 4}, {8, 5}, {9, 1}}, 8), ElementsAre(1, 2)) << "the third would fit";
}

TEST(WithoutRoom, SumsDoNotOverflow) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(Out({{9, most}, {9, most}}, most), ElementsAre(1));
}

// Of tenants that come and go, with any number of prompts of any length.
TEST(PrefillTurns, OfTTenantsEachIsReadInOneOfTSteps) {
  std::mt19937 random(7);
  auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const std::vector<std::string> names = {"a", "b", "c", "d", "e"};
  for (const int64_t fixed : {0, 16}) {
    const SchedulerOptions options{
        .max_step_tokens = 64, .prefill_chunk_tokens = 64, .fixed_chunk_tokens = fixed};
    PrefillTurns turns;
    std::vector<SequenceView> running;
    std::map<absl::string_view, int64_t> waited;  // steps
    for (int step = 0; step < 5000; ++step) {
      std::erase_if(running, [&](const SequenceView& s) {
        return s.cached_tokens >= s.prefill_tokens || draw(0, 99) == 0;  // cancelled
      });
      if (draw(0, 2) == 0) {
        const int64_t tenant = draw(0, 9) < 6 ? 0 : draw(0, 4);  // the first has most
        running.push_back(Of(names[tenant], Prefilling(draw(1, 400))));
      }
      turns.Set(absl::MakeSpan(running));
      const std::vector<PlannedItem> plan = Plan(running, options);
      turns.OnPlanned(running, plan);
      std::map<absl::string_view, bool> read;
      for (const SequenceView& s : running) read[s.tenant];
      for (const PlannedItem& item : plan) {
        running[item.sequence].cached_tokens += item.num_tokens;
        read[running[item.sequence].tenant] = true;
      }
      std::map<absl::string_view, int64_t> now;
      for (const auto& [tenant, was_read] : read) {
        now[tenant] = was_read ? 0 : waited[tenant] + 1;
        ASSERT_LT(now[tenant], 5) << tenant << " in step " << step;
      }
      waited = std::move(now);
    }
  }
}

TEST(PrefillTurns, WhoComesWaitsForThoseWhoAreThere) {
  PrefillTurns turns;
  std::vector<SequenceView> running = {Of("a", Prefilling(500)), Of("b", Prefilling(500))};
  auto next = [&] {
    turns.Set(absl::MakeSpan(running));
    const std::vector<PlannedItem> plan = Plan(running, {.max_step_tokens = 64});
    turns.OnPlanned(running, plan);
    return running[plan.front().sequence].tenant;
  };
  EXPECT_EQ(next(), "a");
  running.push_back(Of("c", Prefilling(500)));
  running.push_back(Of("a", Prefilling(500)));
  EXPECT_EQ(next(), "b");
  EXPECT_EQ(next(), "a");
  EXPECT_EQ(next(), "c");
  EXPECT_EQ(next(), "b");
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
      static const absl::string_view kTenants[] = {"", "a", "b", "c"};
      const int64_t tenant = Draw(0, 3);
      s = {.prefill_tokens = Draw(1, 400), .tenant = kTenants[tenant], .turn = tenant % 3};
      if (!prefilling) s.cached_tokens = s.prefill_tokens + Draw(0, 50);
    }
    return running;
  }
  std::mt19937 random_{20240611};
};

bool IsDecoding(const SequenceView& s) { return s.cached_tokens >= s.prefill_tokens; }

using TurnAndPlace = std::tuple<int64_t, int64_t, int64_t>;

// Whose turn it is: ready prompts of its tenant before it, the tenant's turn, its place.
TurnAndPlace Turn(const std::vector<SequenceView>& running, int64_t place) {
  const auto before =
      std::count_if(running.begin(), running.begin() + place, [&](const SequenceView& s) {
        return s.ready && !IsDecoding(s) && s.tenant == running[place].tenant;
      });
  return {before, running[place].turn, place};
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
  TurnAndPlace previous = {-1, -1, -1};
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
  if (std::get<0>(previous) < 0) {
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

}  // namespace scheduler_test
}  // namespace epikv
