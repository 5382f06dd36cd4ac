#include "runtime/forward/device_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace epikv {
namespace device_plan_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Two layers of two KV heads.
const ModelShape kShape = {.num_layers = 2, .num_heads = 6, .num_kv_heads = 2};

std::vector<int32_t> In(const DevicePlan& plan, DevicePlan::Section section) {
  const auto begin = plan.numbers.begin() + section.begin;
  return {begin, begin + section.size};
}

// A token of a sequence whose lanes share slots; it fills a hole.
struct Decoded {
  std::vector<int32_t> tokens = {7};
  std::vector<int64_t> lanes = {100, 120, 140, 160}, slots = {3}, positions = {50};
  std::vector<int64_t> used = {20, 20, 20, 20}, taps = {0, 1};
  DeviceItem At(int64_t row) const {
    return {.row = row,
            .decode = true,
            .tokens = tokens,
            .lanes = lanes,
            .slots = slots,
            .positions = positions,
            .used = used,
            .num_logits = 1,
            .taps = taps};
  }
};

// Three tokens of a prompt of which every lane has kept others.
struct Prompt {
  std::vector<int32_t> tokens = {1, 2, 3};
  std::vector<int64_t> lanes = {0, 10, 20, 30}, slots = {5, 6, 7, 4}, positions = {5, 6, 7, 4};
  std::vector<int64_t> used = {8, 9, 10, 7}, taps = {1};
  DeviceItem At(int64_t row) const {
    return {.row = row,
            .tokens = tokens,
            .lanes = lanes,
            .slots = slots,
            .positions = positions,
            .used = used,
            .num_logits = 2,
            .taps = taps};
  }
};

TEST(DevicePlan, SaysWhereEachRowGoes) {
  const Decoded decoded;
  const Prompt prompt;
  const DevicePlan plan = PlanDevice({decoded.At(0), prompt.At(1)}, kShape);
  EXPECT_THAT(In(plan, plan.tokens), ElementsAre(7, 1, 2, 3));
  EXPECT_THAT(In(plan, plan.positions), ElementsAre(50, 5, 6, 7));
  EXPECT_THAT(In(plan, plan.last), ElementsAre(0, 2, 3));
  ASSERT_EQ(plan.written.size(), 2);  // row by row, head by head
  EXPECT_THAT(In(plan, plan.written[0]), ElementsAre(103, 123, 5, 16, 6, 17, 7, 18));
  EXPECT_THAT(In(plan, plan.written[1]), ElementsAre(143, 163, 27, 34, 28, 35, 29, 36));
  EXPECT_THAT(In(plan, plan.rope_positions[0]), ElementsAre(50, 50, 5, 6, 6, 7, 7, 8));
  EXPECT_THAT(In(plan, plan.rope_positions[1]), ElementsAre(50, 50, 7, 4, 8, 5, 9, 6));
}

TEST(DevicePlan, CallsOnceForDecodedRowsAndOnceForPrompts) {
  const Decoded decoded;
  const Prompt prompt;
  const DevicePlan plan = PlanDevice({decoded.At(0), prompt.At(1)}, kShape);
  ASSERT_EQ(plan.calls.size(), 2);
  const DevicePlan::Call &ones = plan.calls[0], &chunks = plan.calls[1];
  EXPECT_FALSE(ones.causal);
  EXPECT_FALSE(ones.in_order);
  EXPECT_EQ(ones.max_queries, 1);
  EXPECT_THAT(In(plan, ones.query_rows), ElementsAre(0, 1));
  EXPECT_THAT(In(plan, ones.query_starts), ElementsAre(0, 1, 2));
  EXPECT_THAT(In(plan, ones.starts[1]), ElementsAre(140, 160, 180));
  EXPECT_THAT(In(plan, ones.lengths[1]), ElementsAre(20, 20));
  EXPECT_THAT(ones.max_length, ElementsAre(20, 20));

  EXPECT_TRUE(chunks.causal);
  EXPECT_EQ(chunks.max_queries, 3);
  EXPECT_THAT(In(plan, chunks.query_rows), ElementsAre(2, 4, 6, 3, 5, 7));  // each lane's together
  EXPECT_THAT(In(plan, chunks.query_starts), ElementsAre(0, 3, 6));
  EXPECT_THAT(In(plan, chunks.starts[0]), ElementsAre(0, 10, 19));
  EXPECT_THAT(In(plan, chunks.lengths[0]), ElementsAre(8, 9));
  EXPECT_THAT(chunks.max_length, ElementsAre(9, 10));
}

TEST(DevicePlan, DecodedRowsAloneNeedNoGather) {
  const Decoded decoded;
  const DevicePlan plan = PlanDevice({decoded.At(0), decoded.At(1)}, kShape);
  ASSERT_EQ(plan.calls.size(), 1);
  EXPECT_TRUE(plan.calls[0].in_order);
  EXPECT_THAT(In(plan, plan.calls[0].query_rows), ElementsAre(0, 1, 2, 3));
  // Where layers agree, positions go up once.
  EXPECT_EQ(plan.rope_positions[0].begin, plan.rope_positions[1].begin);
}

// Taken block by block, wanted item by item.
TEST(DevicePlan, OrdersWhatIsTapped) {
  const Decoded decoded;
  const Prompt prompt;
  const DevicePlan plan = PlanDevice({prompt.At(0), decoded.At(3)}, kShape);
  EXPECT_THAT(In(plan, plan.taps[0]), ElementsAre(3));
  EXPECT_THAT(In(plan, plan.taps[1]), ElementsAre(2, 3));
  EXPECT_THAT(In(plan, plan.tap_order), ElementsAre(1, 0, 2));
  Prompt silent;
  silent.taps.clear();
  EXPECT_THAT(In(plan, PlanDevice({silent.At(0)}, kShape).tap_order), IsEmpty());
}

constexpr int64_t kSpare = 999;

TEST(PaddedPlan, GivesRowsThatAreNobodysTheSpareOne) {
  const Decoded decoded;
  PaddedLayout layout = {.rows = 3, .max_length = 256};
  const DevicePlan plan = PlanPadded({decoded.At(0)}, kSpare, kShape, layout);
  EXPECT_TRUE(layout.one_position);
  EXPECT_THAT(In(plan, plan.tokens), ElementsAre(7, 0, 0));
  EXPECT_THAT(In(plan, plan.positions), ElementsAre(50, 0, 0));
  EXPECT_THAT(In(plan, plan.last), ElementsAre(0, 1, 2));
  EXPECT_THAT(In(plan, plan.written[1]), ElementsAre(143, 163, kSpare, kSpare, kSpare, kSpare));
  ASSERT_EQ(plan.calls.size(), 1);
  const DevicePlan::Call& call = plan.calls.front();
  EXPECT_TRUE(call.in_order);
  EXPECT_THAT(call.max_length, ElementsAre(256, 256));
  EXPECT_THAT(In(plan, call.starts[0]),
              ElementsAre(100, 120, kSpare, kSpare, kSpare, kSpare, kSpare + 1));
  EXPECT_THAT(In(plan, call.lengths[0]), ElementsAre(20, 20, 1, 1, 1, 1));
  // Of the items alone, behind what the forward reads.
  EXPECT_GE(plan.taps[0].begin, plan.read_by_forward);
  EXPECT_THAT(In(plan, plan.taps[0]), ElementsAre(0));
}

// What a recorded forward reads lies at the same places whatever the numbers.
TEST(PaddedPlan, HasOneLayoutForAllNumbers) {
  Decoded one, other;
  other.tokens = {8};
  other.lanes = {5, 6, 7, 8};
  other.slots = {0};
  other.positions = {3};
  other.used = {1, 2, 3, 4};
  other.taps = {};
  auto layout_of = [](std::vector<DeviceItem> items, bool one_position) {
    PaddedLayout layout = {.rows = 4, .max_length = 256};
    const DevicePlan plan = PlanPadded(items, kSpare, kShape, layout);
    EXPECT_EQ(layout.one_position, one_position);
    std::vector<int64_t> begins = {plan.tokens.begin, plan.last.begin, plan.read_by_forward};
    for (int64_t layer = 0; layer < kShape.num_layers; ++layer) {
      const DevicePlan::Call& call = plan.calls.front();
      for (const DevicePlan::Section section : {plan.written[layer], plan.rope_positions[layer],
                                                call.starts[layer], call.lengths[layer]}) {
        begins.insert(begins.end(), {section.begin, section.size});
      }
    }
    return begins;
  };
  const std::vector<int64_t> shared = layout_of({one.At(0)}, true);
  EXPECT_EQ(layout_of({other.At(0), one.At(1)}, true), shared);
  // A sequence whose layers keep different tokens, and one whose layers happen to agree.
  Decoded apart = one;
  apart.slots = {3, 4};
  apart.positions = {50, 51};
  const std::vector<int64_t> each = layout_of({apart.At(0)}, false);
  EXPECT_NE(each, shared);
  EXPECT_EQ(layout_of({one.At(0), apart.At(1)}, false), each);
}

}  // namespace device_plan_test
}  // namespace epikv
