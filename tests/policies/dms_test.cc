#include <gtest/gtest.h>

#include "policies/registry.h"
#include "tests/fixtures/fake_sequence.h"

// dms: when a token may go, and when it does. Its reference (Model-Optimizer, experimental/dms)
// masks attention inside a model of its own, and has no cache to compare with.

namespace epikv {
namespace dms_test {

constexpr int64_t kRecent = 16, kCadence = 8;

// Lets the token before every third one go, in the one head there is.
FakeSequence Sequence(int64_t budget) {
  const PolicySpec& spec = *FindPolicy(AllPolicies(), "dms");
  FakeSequence::Options options{.spec = &spec,
                                .params = {{"cadence", kCadence}, {"slack", int64_t{0}}},
                                .protection = {.recent = kRecent},
                                .prompt_tokens = 20,
                                .budget = budget};
  options.shape = {.num_layers = 1, .num_heads = 1, .num_kv_heads = 1, .hidden_size = 1};
  const NamedArrays arrays = {{"layers.0.linear1.weight", {{1, 1}, {1}}},
                              {"layers.0.linear1.bias", {{1}, {0}}}};
  auto gate = spec.read_data({.json = "{}", .arrays = arrays}, options.shape);
  EXPECT_TRUE(gate.ok()) << gate.status();
  options.shape.artefacts["dms"] = *gate;
  FakeWorld world = RandomWorld(1, 8);
  world.attention_input = [](int64_t, int64_t token) {
    return std::vector<float>{token % 3 == 0 ? 1.0f : -1.0f};
  };
  return FakeSequence(options, std::move(world));
}

bool LetGo(int64_t token) { return token % 3 == 2; }

TEST(Dms, ATokenGoesOnceItHasLeftTheRecentWindow) {
  FakeSequence sequence = Sequence(/*budget=*/1000);
  sequence.Prefill(20);
  sequence.Round();
  int64_t round = sequence.newest();
  while (sequence.newest() < 150) {
    sequence.Decode();
    sequence.Round();
    if ((sequence.newest() + 1) % kCadence == 0) round = sequence.newest();
    std::vector<int32_t> wanted;
    for (int32_t token = 0; token <= sequence.newest(); ++token) {
      if (!LetGo(token) || token > round - kRecent) wanted.push_back(token);
    }
    ASSERT_EQ(sequence.Kept(), wanted) << "after token " << sequence.newest();
  }
}

// The decision comes with the token's successor, and so with the next chunk.
TEST(Dms, ThePromptsChunksAreOnePrompt) {
  FakeSequence whole = Sequence(1000), parts = Sequence(1000);
  whole.Prefill(20);
  whole.Round();
  for (const int64_t count : {3, 3, 1, 13}) {
    parts.Prefill(count);
    parts.Round();
  }
  EXPECT_EQ(parts.Kept(), whole.Kept());
  EXPECT_EQ(whole.Kept(), (std::vector<int32_t>{0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                16, 17, 18, 19}));
}

TEST(Dms, NoMoreThanTheBudgetStays) {
  FakeSequence sequence = Sequence(/*budget=*/30);
  sequence.Prefill(20);
  sequence.Round();
  while (sequence.newest() < 150) {
    sequence.Decode();
    sequence.Round();
    ASSERT_LE(std::ssize(sequence.Kept()), 30);
  }
  // Of those that it would keep the newest, and the recent window.
  for (const int32_t token : sequence.Kept()) {
    EXPECT_TRUE(!LetGo(token) || token > sequence.newest() - kRecent - kCadence) << token;
  }
}

}  // namespace dms_test
}  // namespace epikv
