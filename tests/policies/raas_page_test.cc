#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

// What golden/policies/raas_page.json does not say, for its reference has no groups.

namespace epikv {
namespace raas_page_test {

constexpr int64_t kPages = 5, kNewest = 8;

// Pages of two, whose tokens' keys lie along a channel of their own: a query's channels are its
// bounds for the pages. None looks anywhere but that of the newest token.
FakeWorld World(const std::vector<std::vector<float>>& bounds) {  // [heads][pages]
  FakeWorld world = RandomWorld(1, 1 << 20);
  world.key = [](int64_t, int64_t, int64_t token) {
    std::vector<float> key(kPages);
    key[token / 2] = 1;
    return key;
  };
  world.query = [=](int64_t, int64_t head, int64_t token) {
    return token == kNewest ? bounds[head] : std::vector<float>(kPages);
  };
  return world;
}

// Dates by page, once token 8 has opened the fifth page. Of a budget of four, two count as used.
std::vector<float> Dates(const std::vector<std::vector<float>>& bounds) {
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "raas_page"),
                         .params = {{"page", int64_t{2}}},
                         .shape = {.num_layers = 1, .num_heads = 2, .num_kv_heads = 1},
                         .prompt_tokens = 2,
                         .budget = 8},
                        World(bounds));
  sequence.Prefill(2);
  while (sequence.newest() < kNewest) sequence.Decode();
  std::vector<float> dates(kPages);
  const absl::Span<const int32_t> index = sequence.index(0, 0);
  for (size_t slot = 0; slot < index.size(); ++slot) {
    dates[index[slot] / 2] = sequence.column(0, 0, 0)[slot];
  }
  return dates;
}

// Both heads look at page 2, but each a little more at another: those are the two highest of any
// head, though page 2 has the highest mean.
TEST(RaasPage, TheQueryHeadThatGivesMostCounts) {
  EXPECT_THAT(Dates({{0, 5, 4.9, 0, 0}, {0, 0, 4.9, 5, 0}}), testing::ElementsAre(4, 9, 8, 9, 9));
}

// What a head gives is its share: one whose bounds are large in all pages says no more for that.
TEST(RaasPage, AHeadsBoundsCountAgainstItsOwn) {
  EXPECT_THAT(Dates({{0, 5, 4.9, 0, 0}, {20, 20, 20, 20, 20}}),
              testing::ElementsAre(4, 9, 9, 8, 9));
}

// Bounds are followed from step to step; they are those of the tokens that are left, also where a
// page lost some to a round and kept those that are protected.
TEST(RaasPage, BoundsAreThoseOfTheTokensThatAreLeft) {
  constexpr int64_t kPage = 4, kHeads = 2, kBudget = 24, kPrompt = 9;
  FakeSequence sequence({.spec = FindPolicy(AllPolicies(), "raas_page"),
                         .params = {{"page", kPage}},
                         .shape = {.num_layers = 1, .num_heads = kHeads, .num_kv_heads = 1},
                         .protection = {.sinks = 2, .spans = {{14, 15}, {21, 23}, {33, 34}}},
                         .prompt_tokens = kPrompt,
                         .budget = kBudget},
                        RandomWorld(3, 1 << 20));
  sequence.Prefill(kPrompt);
  std::map<int64_t, float> date;  // by page
  int64_t halves = 0;             // pages that lost some of their tokens alone
  while (sequence.newest() < 90) {
    sequence.Decode();
    const absl::Span<const int32_t> index = sequence.index(0, 0);
    const at::Tensor keys = sequence.keys(0, 0), query = sequence.queries(0)[0];
    std::map<int64_t, std::vector<int64_t>> pages;  // slots
    for (size_t slot = 0; slot < index.size(); ++slot) pages[index[slot] / kPage].push_back(slot);
    std::map<int64_t, double> score;
    for (int64_t head = 0; head < kHeads; ++head) {
      std::map<int64_t, double> bound;
      for (const auto& [page, slots] : pages) {
        halves += page < index.back() / kPage && std::ssize(slots) < kPage ? 1 : 0;
        const at::Tensor rows = keys.index_select(0, at::tensor(slots));
        bound[page] = at::maximum(query[head] * rows.amax(0), query[head] * rows.amin(0))
                          .sum()
                          .item<double>();
      }
      std::vector<double> highest;
      for (const auto& [page, b] : bound) highest.push_back(b);
      std::sort(highest.begin(), highest.end(), std::greater<>());
      highest.resize(std::min<size_t>(highest.size(), kBudget / kPage));
      double sum = 0;
      for (double b : highest) sum += std::exp(b);
      for (const auto& [page, b] : bound) {
        const double share = b >= highest.back() ? std::exp(b) / sum : 0;
        score[page] = std::max(score[page], share);
      }
    }
    std::vector<std::pair<double, int64_t>> order;
    for (const auto& [page, s] : score) order.push_back({s, page});
    std::sort(order.begin(), order.end(), std::greater<>());
    order.resize(std::min<size_t>(order.size(), kBudget / kPage / 2));
    for (const auto& [s, page] : order) date[page] = static_cast<float>(sequence.newest() + 1);
    const int64_t newest_page = sequence.newest() / kPage;
    if (pages[newest_page].size() == 1)
      date[newest_page] = static_cast<float>(sequence.newest() + 1);
    for (size_t slot = 0; slot < index.size(); ++slot) {
      EXPECT_EQ(sequence.column(0, 0, 0)[slot], date[index[slot] / kPage])
          << "token " << index[slot] << " at " << sequence.newest();
    }
    sequence.Round();
  }
  EXPECT_GT(halves, 20);
}

}  // namespace raas_page_test
}  // namespace epikv
