#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "policies/registry.h"
#include "tests/fake_sequence.h"

// What golden/policies/raas_page.json does not say, for its reference has no groups.

namespace epikv {
namespace {

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

}  // namespace
}  // namespace epikv
