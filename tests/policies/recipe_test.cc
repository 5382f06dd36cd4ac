#include "policies/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace recipe_test {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr ScoreTraits kAttention{.kind = ScoreKind::kMass, .comparable = Comparable::kModel};
constexpr ScoreTraits kRank{.kind = ScoreKind::kValue, .comparable = Comparable::kLane};

Params Decorated(std::vector<std::string> names) {
  Params params;
  params.Set("decorate", std::move(names));
  return params;
}

std::string Wrong(const Params& params, ScoreTraits score) {
  return std::string(CheckRecipe(params, score).message());
}

TEST(CheckRecipe, DecoratorsTakeMasses) {
  for (const char* name : {"caote", "fast_caote", "vatp", "critical"}) {
    EXPECT_THAT(Wrong(Decorated({name}), kAttention), IsEmpty());
    EXPECT_THAT(Wrong(Decorated({name}), kRank),
                HasSubstr(absl::StrCat("decorate: '", name,
                                       "' takes scores that are masses, and the policy gives")));
  }
}

TEST(CheckRecipe, EachTakesWhatTheOneBeforeGives) {
  EXPECT_THAT(Wrong(Decorated({"vatp", "critical"}), kAttention), IsEmpty());
  EXPECT_THAT(Wrong(Decorated({"critical", "vatp"}), kAttention),
              HasSubstr("'vatp' takes scores that are masses, and 'critical' gives"));
}

TEST(CheckRecipe, AllocatorsCompareWhatIsComparable) {
  struct {
    const char* allocator;
    Comparable needed;
  } const cases[] = {{"uniform", Comparable::kLane},
                     {"pyramid", Comparable::kLane},
                     {"head_pool", Comparable::kLayer},
                     {"model_pool", Comparable::kModel}};
  for (const auto& c : cases) {
    for (Comparable has : {Comparable::kLane, Comparable::kLayer, Comparable::kModel}) {
      Params params;
      params.Set("allocator", std::string(c.allocator));
      EXPECT_EQ(Wrong(params, {.comparable = has}).empty(), has >= c.needed) << c.allocator;
    }
  }
}

// vatp's masses are comparable in a layer, whatever it was given.
TEST(CheckRecipe, ADecoratorMayMakeScoresLessComparable) {
  Params params = Decorated({"vatp"});
  params.Set("allocator", std::string("head_pool"));
  EXPECT_THAT(Wrong(params, kAttention), IsEmpty());
  EXPECT_THAT(Wrong(params, {.kind = ScoreKind::kMass, .comparable = Comparable::kLane}),
              HasSubstr("allocator: 'head_pool' compares scores within a layer"));
  params.Set("allocator", std::string("model_pool"));
  EXPECT_THAT(Wrong(params, kAttention), HasSubstr("only within a layer"));
}

TEST(CheckRecipe, SamplesAreDrawnByMass) {
  Params params;
  params.Set("select", std::string("sample"));
  EXPECT_THAT(Wrong(params, kAttention), IsEmpty());
  EXPECT_THAT(Wrong(params, kRank), HasSubstr("select: 'sample'"));
  params.Set("decorate", std::vector<std::string>{"critical"});
  EXPECT_THAT(Wrong(params, kAttention), HasSubstr("select: 'sample'"));
}

TEST(AddRecipe, DeclaresWhatTheDecoratorsRead) {
  PolicyTraits traits;
  AddRecipe(Decorated({"vatp", "critical"}), traits);
  EXPECT_TRUE(traits.signals.Has(Signal::kValues));
  EXPECT_TRUE(traits.signals.Has(Signal::kOutputProjection));
  EXPECT_EQ(traits.columns.size(), FindDecorator("critical")->columns.size());
  EXPECT_EQ(traits.pool, Pool::kLane);
}

// Of 4 layers, beside a window of 8 of 48: from 40 x (2 - 1/20) down to 40 x 1/20.
TEST(RecipeLaneBudgets, PyramidFallsLinearlyAndSumsToTheBudget) {
  Params params;
  params.Set("allocator", std::string("pyramid"));
  params.Set("window", int64_t{8});
  const ModelShape shape{.num_layers = 4, .num_heads = 4, .num_kv_heads = 2};
  EXPECT_THAT(RecipeLaneBudgets(params, shape, 48),
              testing::ElementsAre(86, 86, 61, 61, 35, 35, 10, 10));
  for (int64_t budget = 1; budget < 200; ++budget) {
    const std::vector<int64_t> budgets = RecipeLaneBudgets(params, shape, budget);
    EXPECT_EQ(std::accumulate(budgets.begin(), budgets.end(), int64_t{0}), budget * 4 * 2);
  }
  params.Set("allocator", std::string("head_pool"));
  EXPECT_THAT(RecipeLaneBudgets(params, shape, 48), testing::Each(48));
}

}  // namespace recipe_test
}  // namespace epikv
