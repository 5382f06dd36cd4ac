#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "policies/registry.h"
#include "policies/rounding.h"
#include "tests/fixtures/fake_sequence.h"

// thinkv_tbe by hand: no code of ThinKV is public. Each test fails for one way to misread it.

namespace epikv {
namespace thinkv_tbe_test {

using testing::ElementsAre;
using testing::HasSubstr;

const PolicySpec& Tbe() { return *FindPolicy(AllPolicies(), "thinkv_tbe"); }

constexpr int64_t kPrompt = 20, kSegment = 4;

// A prompt, then segments of four tokens with the given types. Layer 0 tells them: the query of a
// segment's first token sees all tokens (E), every other one (R), or token 0 alone (T). Tests look
// at layer 1, whose keys lie on a line.
struct Story {
  std::string types;   // one a segment; the last is open
  int64_t excess = 1;  // of the round after the last segment's first token
  std::vector<int64_t> ladder = {3, 2, 1};
  std::map<std::string, ParamValue> params;  // others
  Protection protection = {.prompt = kPrompt};
  std::vector<float> line;  // keys of the decode tokens; default: 0, 1, 2 ...
};

int64_t TokensOf(const Story& story) {
  return kPrompt + kSegment * (std::ssize(story.types) - 1) + 1;
}

FakeWorld World(const Story& story) {
  FakeWorld world;
  // In layer 0 a key has 1 in its first channel if it is token 0's, in its second if it is odd.
  world.key = [=](int64_t layer, int64_t, int64_t token) {
    if (layer == 0) return std::vector<float>{token == 0 ? 1.0f : 0.0f, token % 2 ? 1.0f : 0.0f};
    const int64_t place = token - kPrompt;
    const bool given = place >= 0 && place < std::ssize(story.line);
    return std::vector<float>{given ? story.line[place] : static_cast<float>(token), 0};
  };
  world.query = [=](int64_t layer, int64_t, int64_t token) {
    const int64_t place = token - kPrompt;
    if (layer != 0 || place < 0 || place % kSegment != 0) return std::vector<float>{0, 0};
    const char type = story.types[place / kSegment];
    return std::vector<float>{type == 'T' ? 99.0f : 0.0f, type == 'R' ? 99.0f : 0.0f};
  };
  return world;
}

FakeSequence Play(const Story& story, FakeWorld world) {
  std::map<std::string, ParamValue> params = {{"layers", std::vector<int64_t>{0}},
                                              {"theta1", 0.2},
                                              {"theta2", 0.8},
                                              {"segment", kSegment},
                                              {"refresh", kSegment},
                                              {"ladder", story.ladder},
                                              {"slack", story.excess - 1}};
  for (const auto& [name, value] : story.params) params[name] = value;
  FakeSequence sequence({.spec = &Tbe(),
                         .params = params,
                         .shape = {.num_layers = 2, .num_heads = 2, .num_kv_heads = 1},
                         .protection = story.protection,
                         .prompt_tokens = kPrompt,
                         .budget = TokensOf(story) - story.excess},
                        std::move(world));
  sequence.Prefill(kPrompt);
  while (sequence.newest() + 1 < TokensOf(story)) {
    EXPECT_TRUE(sequence.Round().empty()) << "too early";
    sequence.Decode();
  }
  EXPECT_FALSE(sequence.Round().empty());
  return sequence;
}

// How many tokens of each segment are kept.
std::vector<int64_t> Sizes(const Story& story, FakeWorld world) {
  std::vector<int64_t> sizes(story.types.size());
  for (int32_t token : Play(story, std::move(world)).Kept(1)) {
    if (token >= kPrompt) ++sizes[(token - kPrompt) / kSegment];
  }
  return sizes;
}
std::vector<int64_t> Sizes(const Story& story) { return Sizes(story, World(story)); }

// Of the first segment: the places of what is kept in layer 1.
std::vector<int64_t> KeptOfFirst(const Story& story) {
  std::vector<int64_t> places;
  for (int32_t token : Play(story, World(story)).Kept(1)) {
    if (token >= kPrompt && token < kPrompt + kSegment) places.push_back(token - kPrompt);
  }
  return places;
}

TEST(ThinKvTbe, TransitionThatHasEndedDemotesEveryEarlierSegmentAStep) {
  EXPECT_THAT(Sizes({.types = "RETR"}), ElementsAre(3, 3, 4, 1));
  EXPECT_THAT(Sizes({.types = "TTR"}), ElementsAre(3, 4, 1));  // transitions too
  EXPECT_THAT(Sizes({.types = "RTETR"}), ElementsAre(2, 3, 3, 4, 1));
}

TEST(ThinKvTbe, TransitionThatGoesOnDemotesNothing) {
  EXPECT_THAT(Sizes({.types = "RET"}), ElementsAre(4, 3, 1));
}

TEST(ThinKvTbe, HighestSparsityIsTransitionAndLowestExecution) {
  // The least important go first: with any other order of types another segment shrinks.
  EXPECT_THAT(Sizes({.types = "RER"}), ElementsAre(4, 3, 1));
  EXPECT_THAT(Sizes({.types = "ERR"}), ElementsAre(3, 4, 1));
  EXPECT_THAT(Sizes({.types = "ETER", .excess = 2}), ElementsAre(3, 3, 4, 1));
}

TEST(ThinKvTbe, OldestOfTheLeastImportantGoesToTheFloorBeforeTheNext) {
  auto sizes = [](int64_t excess) { return Sizes({.types = "RERER", .excess = excess}); };
  EXPECT_THAT(sizes(1), ElementsAre(4, 3, 4, 4, 1));
  EXPECT_THAT(sizes(2), ElementsAre(4, 2, 4, 4, 1));
  EXPECT_THAT(sizes(3), ElementsAre(4, 1, 4, 4, 1));
  EXPECT_THAT(sizes(4), ElementsAre(4, 1, 4, 3, 1));
  EXPECT_THAT(sizes(7), ElementsAre(3, 1, 4, 1, 1));
  EXPECT_THAT(sizes(12), ElementsAre(1, 1, 1, 1, 1));
}

TEST(ThinKvTbe, BeyondTheFloorTheOldestOfTheLeastImportantGoWhole) {
  auto sizes = [](int64_t excess) { return Sizes({.types = "RERER", .excess = excess}); };
  EXPECT_THAT(sizes(13), ElementsAre(1, 0, 1, 1, 1));
  EXPECT_THAT(sizes(14), ElementsAre(1, 0, 1, 0, 1));
  EXPECT_THAT(sizes(15), ElementsAre(0, 0, 1, 0, 1));
  EXPECT_THAT(sizes(17), ElementsAre(0, 0, 0, 0, 0));
  // The open one last, whatever its type.
  EXPECT_THAT(Sizes({.types = "RRT", .excess = 7}), ElementsAre(0, 1, 1));
  // Of its two tokens the oldest.
  EXPECT_THAT(KeptOfFirst({.types = "ER", .excess = 3, .ladder = {2}, .line = {0, 1, 90, 91}}),
              ElementsAre(3));
}

TEST(ThinKvTbe, FloorIsTheLadders) {
  EXPECT_THAT(Sizes({.types = "EEE", .excess = 4, .ladder = {3, 2}}), ElementsAre(2, 2, 1));
  EXPECT_THAT(Sizes({.types = "EEE", .excess = 5, .ladder = {3, 2}}), ElementsAre(1, 2, 1));
}

TEST(ThinKvTbe, DemotionToMoreThanASegmentHasIsSpent) {
  EXPECT_THAT(Sizes({.types = "ETR", .excess = 1, .ladder = {9, 3, 1}}), ElementsAre(4, 3, 1))
      << "once for the transition, without effect; then the transition, by 9 and 3";
  EXPECT_THAT(Sizes({.types = "ETTR", .excess = 1, .ladder = {9, 3, 1}}), ElementsAre(3, 4, 4, 1));
}

TEST(ThinKvTbe, PublishedLadderIsTheDefault) {
  const ResolvedParams resolved = ResolveParams(Tbe(), {}, FakeSequence::Options().shape);
  EXPECT_THAT(resolved.params.IntList("ladder"), ElementsAre(64, 32, 16, 8, 4));
  EXPECT_EQ(resolved.params.Int("segment"), 128);
  EXPECT_EQ(resolved.params.Int("refresh"), 128);
}

TEST(ThinKvTbe, ProtectedTokensTakeNoPlace) {
  // Tokens 1 and 2 of the first segment stay, and another two with them.
  Story story{.types = "ERR", .ladder = {1}, .protection = {.prompt = kPrompt}};
  story.protection.spans = {{kPrompt + 1, kPrompt + 3}};
  EXPECT_THAT(Sizes(story), ElementsAre(3, 4, 1));
  story.ladder = {2};
  EXPECT_THAT(Sizes(story), ElementsAre(4, 2, 1));
}

TEST(ThinKvTbe, PromptIsTheOldestReasoningWhereItIsNotProtected) {
  const Story story{.types = "ERR", .excess = 4, .ladder = {17, 2}, .protection = {}};
  EXPECT_EQ(Play(story, World(story)).Kept(1).size(), 17u + 2 + 4 + 1);
}

TEST(ThinKvTbe, KeepsWhatIsNearestToEachCentroid) {
  // Clusters {0, 1, 4} and {90}: means 1.7 and 90.
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {0, 1, 90, 4}}),
              ElementsAre(1, 2));
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {90, 4, 0, 1}}),
              ElementsAre(0, 3));
  // From 5 and 6 on: {5, 0, -1} and {6}, but then 5 is nearer to 6 than to its mean.
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {5, 0, 6, -1}}),
              ElementsAre(2, 3));
}

TEST(ThinKvTbe, CentroidsBeginAtEvenDistancesInTheSegment) {
  // From 0 and 110 on: {0} and {200, 110, 100}, of mean 137. From the first two, 0 and 200, it
  // would end with two pairs.
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {0, 200, 110, 100}}),
              ElementsAre(0, 2));
}

TEST(ThinKvTbe, OfEqualsTheNewerStays) {
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {0, 2, 90, 92}}),
              ElementsAre(1, 3));
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {5, 5, 5, 5}}), ElementsAre(2, 3));
  // Equal but for rounding, which favours the older.
  EXPECT_THAT(KeptOfFirst({.types = "ER", .ladder = {2}, .line = {0.7f, 0.1f, 92.9f, 90.3f}}),
              ElementsAre(1, 3));
}

TEST(ThinKvTbe, EachDemotionStartsFromWhatTheLastOneLeft) {
  // {0}, {10, 11, 15}: 0 and 11 are left, and of these the newer. At once it would be 10.
  EXPECT_THAT(KeptOfFirst({.types = "ER", .excess = 3, .ladder = {2, 1}, .line = {0, 10, 11, 15}}),
              ElementsAre(2));
}

TEST(ThinKvTbe, LanesKeepEquallyManyEachItsOwn) {
  const Story story{.types = "ER", .ladder = {2}, .line = {0, 1, 90, 4}};
  const FakeSequence sequence = Play(story, World(story));
  EXPECT_EQ(sequence.Kept(0).size(), sequence.Kept(1).size());
  EXPECT_NE(sequence.Kept(0), sequence.Kept(1));
}

TEST(ThinKvTbe, SparsityIsTheShareBelowAHundredthOfTheMost) {
  // The second segment's query gives token 0 so many times what it gives any other.
  auto sizes = [](double times) {
    const Story story{.types = "RER"};
    FakeWorld world = World(story);
    world.query = [times, query = world.query](int64_t layer, int64_t head, int64_t token) {
      if (layer != 0 || token != kPrompt + kSegment) return query(layer, head, token);
      return std::vector<float>{static_cast<float>(std::log(times)), 0};
    };
    return Sizes(story, world);
  };
  EXPECT_THAT(sizes(99), ElementsAre(4, 3, 1));   // execution
  EXPECT_THAT(sizes(101), ElementsAre(3, 4, 1));  // a transition, which demotes the one before
}

TEST(ThinKvTbe, SparsityIsOfEachQueryHead) {
  // One head sees token 0 alone, the other all: half sparse, reasoning. The mean of their rows
  // gives no token less than a hundredth of what it gives token 0: not sparse at all, execution.
  const Story story{.types = "EER"};
  FakeWorld world = World(story);
  world.query = [](int64_t, int64_t head, int64_t token) {
    return std::vector<float>{token == kPrompt && head == 0 ? 99.0f : 0, 0};
  };
  EXPECT_THAT(Sizes(story, world), ElementsAre(4, 3, 1));
}

TEST(ThinKvTbe, TypesAreSeenAtEachRefreshAlone) {
  // The second segment looks like a transition, but nobody looks.
  EXPECT_THAT(Sizes({.types = "RTER", .params = {{"refresh", int64_t{8}}}}),
              ElementsAre(4, 4, 3, 1));
  // A segment is what it last was while it was open: here at its third token.
  const Story story{.types = "EER", .params = {{"refresh", int64_t{2}}}};
  FakeWorld world = World(story);
  world.query = [](int64_t layer, int64_t, int64_t token) {
    return std::vector<float>{0, layer == 0 && token == kPrompt + 2 ? 99.0f : 0};
  };
  EXPECT_THAT(Sizes(story, world), ElementsAre(4, 3, 1));
}

TEST(ThinKvTbe, AttentionThatIsNotANumberIsAnError) {
  FakeSequence::Options options{.spec = &Tbe(), .prompt_tokens = 4, .budget = 5};
  options.params["slack"] = int64_t{0};
  FakeWorld world = RandomWorld(1, 8);
  world.query = [](int64_t, int64_t, int64_t) { return std::vector<float>(4, std::nanf("")); };
  FakeSequence sequence(options, world);
  sequence.Prefill(4);
  sequence.Decode();
  sequence.Decode();
  const Eviction eviction = sequence.Ask();
  EXPECT_EQ(eviction.status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(eviction.status.message()), HasSubstr("token 4"));
}

// Parameters that differ from model to model.

std::string Refusal(const std::map<std::string, ParamValue>& params, const ModelShape& shape) {
  const ResolvedParams resolved = ResolveParams(Tbe(), params, shape);
  return resolved.violations.empty() ? "" : resolved.violations[0].description;
}

ModelShape Calibrated() {
  ModelShape shape{.num_layers = 8, .num_heads = 4, .num_kv_heads = 2};
  shape.calibrated["thinkv_tbe"] = {
      {"layers", std::vector<int64_t>{2, 5}}, {"theta1", 0.3}, {"theta2", 0.6}};
  return shape;
}

TEST(ThinKvTbe, IsRefusedWithoutACalibration) {
  const ModelShape shape{.num_layers = 8, .num_heads = 4, .num_kv_heads = 2};
  const std::string refusal = Refusal({}, shape);
  for (const char* part : {"layers", "theta1", "theta2", "epikv calibrate thinkv_tbe"}) {
    EXPECT_THAT(refusal, HasSubstr(part));
  }
  const std::map<std::string, ParamValue> given = {
      {"layers", std::vector<int64_t>{1}}, {"theta1", 0.1}, {"theta2", 0.2}};
  EXPECT_EQ(Refusal(given, shape), "");
  for (const auto& [name, value] : given) {
    std::map<std::string, ParamValue> less = given;
    less.erase(name);
    EXPECT_THAT(Refusal(less, shape), HasSubstr("theta1")) << "without " << name;
  }
}

TEST(ThinKvTbe, TakesTheModelsCalibration) {
  const ResolvedParams resolved = ResolveParams(Tbe(), {}, Calibrated());
  ASSERT_TRUE(resolved.violations.empty());
  EXPECT_THAT(resolved.params.IntList("layers"), ElementsAre(2, 5));
  EXPECT_EQ(resolved.params.Float("theta2"), 0.6);
  EXPECT_FALSE(Tbe().traits(resolved.params, Calibrated()).uncalibrated);

  const ResolvedParams other = ResolveParams(Tbe(), {{"theta1", 0.4}}, Calibrated());
  EXPECT_TRUE(Tbe().traits(other.params, Calibrated()).uncalibrated);
  // Thresholds of other layers say nothing.
  EXPECT_NE(Refusal({{"layers", std::vector<int64_t>{1}}}, Calibrated()), "");
}

TEST(ThinKvTbe, RefusesWhatMakesNoSense) {
  using List = std::vector<int64_t>;
  EXPECT_THAT(Refusal({{"layers", List{8}}, {"theta1", 0.1}, {"theta2", 0.2}}, Calibrated()),
              HasSubstr("0 to 7"));
  for (const List& layers : {List{}, List{0, 0}, List(100'000, 1), List{2, 1}}) {
    EXPECT_THAT(Refusal({{"layers", layers}, {"theta1", 0.1}, {"theta2", 0.2}}, Calibrated()),
                HasSubstr("ascending, each once"));
  }
  EXPECT_THAT(Refusal({{"theta1", 0.6}}, Calibrated()), HasSubstr("less than theta2"));
  EXPECT_THAT(Refusal({{"ladder", List{4, 4}}}, Calibrated()), HasSubstr("descending"));
  EXPECT_THAT(Refusal({{"ladder", List{}}}, Calibrated()), HasSubstr("not empty"));
}

// Three segments of sixteen: execution, transition, reasoning.
FakeSequence Rounded(const std::vector<int64_t>& bits, int64_t decoded) {
  FakeWorld world;
  world.key = [](int64_t layer, int64_t, int64_t token) {
    if (layer == 0) return std::vector<float>{token == 0 ? 1.0f : 0.0f, token % 2 ? 1.0f : 0.0f};
    return std::vector<float>{std::sin(static_cast<float>(token)), 0.01f * token};
  };
  world.value = [](int64_t, int64_t, int64_t token) {
    return std::vector<float>{std::cos(static_cast<float>(token)), 1};
  };
  world.query = [](int64_t layer, int64_t, int64_t token) {
    const int64_t place = token - kPrompt;
    if (layer != 0 || place % 16 != 0) return std::vector<float>{0, 0};
    return std::vector<float>{place == 16 ? 99.0f : 0.0f, place == 32 ? 99.0f : 0.0f};
  };
  FakeSequence sequence({.spec = &Tbe(),
                         .params = {{"layers", std::vector<int64_t>{0}},
                                    {"theta1", 0.2},
                                    {"theta2", 0.8},
                                    {"segment", int64_t{16}},
                                    {"refresh", int64_t{16}},
                                    {"bits", bits}},
                         .shape = {.num_layers = 2, .num_heads = 2, .num_kv_heads = 1},
                         .protection = {.prompt = kPrompt},
                         .prompt_tokens = kPrompt,
                         .budget = 1000},
                        std::move(world));
  sequence.Prefill(kPrompt);
  for (int64_t i = 0; i < decoded; ++i) sequence.Decode();
  return sequence;
}

TEST(ThinkvTbe, RoundsEachGroupByItsThoughtOnceSixteenNewerAreThere) {
  EXPECT_THAT(Rounded({8, 8, 8}, 31).column(0, 1, 0), testing::Each(0));

  FakeSequence sequence = Rounded({8, 4, 2}, 64);
  std::vector<float> widths(kPrompt, 0);  // the prompt stays as it is
  for (const float bits : {4, 2, 8, 0}) widths.insert(widths.end(), 16, bits);
  EXPECT_THAT(sequence.column(0, 1, 0), testing::ElementsAreArray(widths));

  // All as it was before, then group by group.
  at::Tensor keys = at::empty({kPrompt + 64, 2}), values = at::empty({kPrompt + 64, 2});
  for (int64_t token = 0; token < kPrompt + 64; ++token) {
    keys[token][0] = std::sin(static_cast<float>(token));
    keys[token][1] = 0.01f * static_cast<float>(token);
    values[token][0] = std::cos(static_cast<float>(token));
    values[token][1] = 1;
  }
  int64_t first = kPrompt;
  for (const int64_t bits : {4, 2, 8}) {
    keys.narrow(0, first, 16).copy_(RoundedKeys(keys.narrow(0, first, 16).clone(), bits));
    values.narrow(0, first, 16).copy_(RoundedValues(values.narrow(0, first, 16).clone(), bits));
    first += 16;
  }
  EXPECT_TRUE(at::equal(sequence.keys(1, 0), keys));
  EXPECT_TRUE(at::equal(sequence.values(1, 0), values));
}

TEST(ThinkvTbe, RoundsNothingUnlessAsked) {
  const FakeSequence sequence = Rounded({}, 40);
  EXPECT_FALSE(sequence.traits().rounds_rows);
  EXPECT_TRUE(sequence.traits().columns.empty());
}

// Whole segments have gone when a group is rounded, its oldest token's among them.
TEST(ThinkvTbe, RoundsWhatIsLeftByItsOwnThought) {
  FakeWorld world;
  world.key = [](int64_t, int64_t, int64_t token) {
    return std::vector<float>{static_cast<float>(token), 0};
  };
  world.value = world.key;
  world.query = [](int64_t, int64_t, int64_t) { return std::vector<float>{0, 0}; };
  FakeSequence sequence({.spec = &Tbe(),
                         .params = {{"layers", std::vector<int64_t>{0}},
                                    {"theta1", 0.0},
                                    {"theta2", 1.0},
                                    {"segment", int64_t{1}},
                                    {"refresh", int64_t{1}},
                                    {"ladder", std::vector<int64_t>{1}},
                                    {"slack", int64_t{0}},
                                    {"bits", std::vector<int64_t>{4, 8, 2}}},
                         .shape = {.num_layers = 2, .num_heads = 2, .num_kv_heads = 1},
                         .prompt_tokens = 1,
                         .budget = 18},
                        std::move(world));
  sequence.Prefill(1);
  while (sequence.newest() < 32) {
    EXPECT_THAT(sequence.column(0, 0, 0), testing::Each(0));
    sequence.Round();
    sequence.Decode();
  }
  std::vector<float> bits(19, 0);
  bits[0] = bits[1] = bits[2] = 4;  // tokens 14 to 16, of those that are left
  EXPECT_THAT(sequence.column(0, 0, 0), testing::UnorderedElementsAreArray(bits));
}

TEST(ThinkvTbe, ASequenceWhoseAttentionIsNoNumberFailsWithoutARound) {
  FakeWorld world;
  world.key = [](int64_t, int64_t, int64_t) { return std::vector<float>{NAN, 0}; };
  world.value = world.key;
  world.query = [](int64_t, int64_t, int64_t) { return std::vector<float>{1, 0}; };
  FakeSequence sequence({.spec = &Tbe(),
                         .params = {{"layers", std::vector<int64_t>{0}},
                                    {"theta1", 0.0},
                                    {"theta2", 1.0},
                                    {"bits", std::vector<int64_t>{4, 4, 2}}},
                         .shape = {.num_layers = 2, .num_heads = 2, .num_kv_heads = 1},
                         .prompt_tokens = 1,
                         .budget = 100},
                        std::move(world));
  sequence.Prefill(1);
  EXPECT_THROW(sequence.Decode(), std::runtime_error);
}

TEST(ThinkvTbe, BitsAreThreeOfTwoFourAndEight) {
  const ModelShape shape{.num_layers = 2, .num_heads = 2, .num_kv_heads = 1};
  for (const std::vector<int64_t>& bits :
       {std::vector<int64_t>{4}, {4, 4}, {4, 4, 4, 4}, {4, 4, 3}, {16, 4, 2}}) {
    const ResolvedParams resolved = ResolveParams(
        Tbe(),
        {{"layers", std::vector<int64_t>{0}}, {"theta1", 0.2}, {"theta2", 0.8}, {"bits", bits}},
        shape);
    ASSERT_EQ(resolved.violations.size(), 1u);
    EXPECT_THAT(resolved.violations[0].description, HasSubstr(bits[0] == 16 ? "8" : "2, 4 or 8"));
  }
}

}  // namespace thinkv_tbe_test
}  // namespace epikv
