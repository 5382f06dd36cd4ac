#include "policies/guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace guard_test {

// A full cache under Guard, whose slots keep their places.
class GuardedCache {
 public:
  GuardedCache(int64_t slots, GuardOptions options) : slots_(slots), guard_(options) {}

  // The page that made room; -1: none had to.
  int32_t Access(int32_t page, const Guard::Predict& predict, const Guard::Draw& draw) {
    if (std::find(cached_.begin(), cached_.end(), page) != cached_.end()) {
      guard_.Hit(page);
      return -1;
    }
    ++misses_;
    if (std::ssize(cached_) < slots_) {
      cached_.push_back(page);
      return -1;
    }
    const int32_t victim = guard_.Miss(page, cached_, predict, draw);
    *std::find(cached_.begin(), cached_.end(), victim) = page;
    return victim;
  }
  int64_t misses() const { return misses_; }

 private:
  const int64_t slots_;
  Guard guard_;
  std::vector<int32_t> cached_;
  int64_t misses_ = 0;
};

int32_t LowestOf(absl::Span<const int32_t> pages, const std::vector<double>& scores) {
  return *std::min_element(pages.begin(), pages.end(),
                           [&](int32_t a, int32_t b) { return scores[a] < scores[b]; });
}

TEST(Guard, DropsWhatTheAuthorsDrop) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/guard.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 5);
  for (const nlohmann::json& given : cases) {
    const nlohmann::json& options = given["options"];
    SCOPED_TRACE(options.dump());
    GuardedCache cache(given["slots"],
                       {.follow_if_guarded = options.value("follow_if_guarded", false),
                        .relax_times = options.value("relax_times", 0),
                        .relax_prob = options.value("relax_prob", 0.0)});
    ASSERT_GT(given["steps"].size(), 20);
    int64_t victims = 0, draws = 0;
    for (const nlohmann::json& step : given["steps"]) {
      const std::vector<double> scores = step["scores"], drawn = step["draws"];
      size_t next = 0;
      const int32_t victim = cache.Access(
          step["page"], [&](absl::Span<const int32_t> pages) { return LowestOf(pages, scores); },
          [&] { return drawn.at(next++); });
      ASSERT_EQ(victim, step["victim"].get<int32_t>());
      ASSERT_EQ(next, drawn.size());
      victims += victim >= 0 ? 1 : 0;
      draws += std::ssize(drawn);
    }
    EXPECT_GT(victims, 10);
    EXPECT_TRUE(draws > 0 || options.contains("relax_times"));
  }
}

std::vector<int32_t> Trace(int64_t length, int32_t pages, uint64_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> trace;
  for (int64_t i = 0; i < length; ++i) {
    // Some pages are asked for more often, and there are phases.
    const auto base = static_cast<int32_t>(i / 200 * 3);
    trace.push_back((base + std::min<int32_t>(random() % pages, random() % pages)) % pages);
  }
  return trace;
}

// When each page is asked for next, after access i; never: the length.
std::vector<int64_t> NextUses(const std::vector<int32_t>& trace) {
  std::vector<int64_t> next(trace.size());
  std::map<int32_t, int64_t> seen;
  for (int64_t i = std::ssize(trace) - 1; i >= 0; --i) {
    const auto found = seen.find(trace[i]);
    next[i] = found == seen.end() ? std::ssize(trace) : found->second;
    seen[trace[i]] = i;
  }
  return next;
}

int64_t BeladyMisses(const std::vector<int32_t>& trace, int64_t slots) {
  const std::vector<int64_t> next = NextUses(trace);
  std::map<int32_t, int64_t> cached;  // and when they are asked for next
  int64_t misses = 0;
  for (size_t i = 0; i < trace.size(); ++i) {
    if (!cached.contains(trace[i])) {
      ++misses;
      if (std::ssize(cached) == slots) {
        cached.erase(std::max_element(cached.begin(), cached.end(),
                                      [](auto& a, auto& b) { return a.second < b.second; }));
      }
    }
    cached[trace[i]] = next[i];
  }
  return misses;
}

// wrong: the prediction drops who is asked for first, in place of last.
int64_t GuardMisses(const std::vector<int32_t>& trace, int64_t slots, bool wrong, uint64_t seed) {
  const std::vector<int64_t> next = NextUses(trace);
  GuardedCache cache(slots, {});
  std::map<int32_t, int64_t> uses;
  std::mt19937 random(seed);
  for (size_t i = 0; i < trace.size(); ++i) {
    cache.Access(
        trace[i],
        [&](absl::Span<const int32_t> pages) {
          return *std::max_element(pages.begin(), pages.end(), [&](int32_t a, int32_t b) {
            return wrong ? uses[a] > uses[b] : uses[a] < uses[b];
          });
        },
        [&] { return std::generate_canonical<double, 53>(random); });
    uses[trace[i]] = next[i];
  }
  return cache.misses();
}

// With predictions that are right it misses what the best of all does (the paper's theorem 1).
TEST(Guard, IsAsGoodAsAPerfectPrediction) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int32_t> trace = Trace(2000, 24, seed);
    EXPECT_EQ(GuardMisses(trace, 8, /*wrong=*/false, seed), BeladyMisses(trace, 8)) << seed;
  }
}

// With the worst there are it misses 2 H_{k-1} + 2 times as often at most (its theorem 2).
TEST(Guard, BoundsWhatAWrongPredictionCosts) {
  constexpr int64_t kSlots = 8;
  double harmonic = 0;
  for (int64_t i = 1; i < kSlots; ++i) harmonic += 1.0 / static_cast<double>(i);
  double most = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int32_t> trace = Trace(2000, 12, seed);
    const auto best = static_cast<double>(BeladyMisses(trace, kSlots));
    most = std::max(most,
                    static_cast<double>(GuardMisses(trace, kSlots, /*wrong=*/true, seed)) / best);
  }
  RecordProperty("misses_over_best", absl::StrCat(most));
  EXPECT_LE(most, 2 * harmonic + 2);
  EXPECT_GT(most, 1.1) << "these predictions are wrong";
}

// A prediction that may be followed although it was wrong can leave nobody unguarded.
TEST(Guard, WhereEverybodyIsGuardedChanceDecides) {
  GuardedCache cache(3, {.follow_if_guarded = true});
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    cache.Access(
        static_cast<int32_t>(random() % 5),
        [](absl::Span<const int32_t> pages) { return pages.front(); },
        [&] { return std::generate_canonical<double, 53>(random); });
  }
  EXPECT_GT(cache.misses(), 50);
}

}  // namespace guard_test
}  // namespace epikv
