#include "runtime/kernels/quantized_matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace quantized_matmul_test {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

struct Weights {
  QuantizedShape shape;
  std::vector<uint8_t> integers;  // as PackWeight takes them
  std::vector<uint16_t> scales;
  std::vector<double> dense;  // [outputs, inputs]
  std::unique_ptr<void, FreeDeleter> packed;
};

float Widened(uint16_t bfloat16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bfloat16) << 16);
}

Weights RandomWeights(const QuantizedShape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  Weights w = {.shape = shape};
  w.integers.resize(shape.outputs * shape.inputs * shape.bits / 8);
  w.scales.resize(shape.outputs * shape.groups());
  w.dense.resize(shape.outputs * shape.inputs);
  for (uint16_t& scale : w.scales) {
    const float value = std::uniform_real_distribution<float>(1e-3f, 1e-1f)(random);
    scale = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  }
  for (int64_t i = 0; i < shape.outputs * shape.inputs; ++i) {
    const int32_t most = shape.bits == 8 ? 127 : 7;
    const int32_t value = std::uniform_int_distribution<int32_t>(-most, most)(random);
    if (shape.bits == 8) {
      w.integers[i] = static_cast<uint8_t>(static_cast<int8_t>(value));
    } else {
      w.integers[i / 2] |= static_cast<uint8_t>((value + 8) << (i % 2 * 4));
    }
    const int64_t output = i / shape.inputs, group = i % shape.inputs / shape.group;
    w.dense[i] = double{Widened(w.scales[output * shape.groups() + group])} * value;
  }
  const int64_t bytes = (PackedWeightBytes(shape) + 63) / 64 * 64;
  w.packed.reset(std::aligned_alloc(64, bytes));
  PackWeight(w.integers.data(), w.scales.data(), shape, w.packed.get());
  return w;
}

// Rows of x with what they are rounded to.
struct Rows {
  explicit Rows(int64_t rows, const QuantizedShape& shape)
      : values(rows * shape.inputs), scales(rows * shape.groups()), sums(rows * shape.groups()) {}

  QuantizedRows View() {
    return {.rows = static_cast<int64_t>(x.size()),
            .values = values.data(),
            .scales = scales.data(),
            .sums = sums.data()};
  }

  std::vector<std::vector<float>> x;
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;
};

Rows RandomRows(int64_t count, const QuantizedShape& shape, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Rows rows(count, shape);
  for (int64_t r = 0; r < count; ++r) {
    std::vector<float>& x = rows.x.emplace_back(shape.inputs);
    for (float& value : x) value = normal(random);
    QuantizeRow(x.data(), shape, r, rows.View());
  }
  return rows;
}

// x weight^T of all blocks, [rows, blocks x kQuantizedBlock].
std::vector<float> Multiply(QuantizedPath path, const QuantizedRows& x, const Weights& w) {
  const int64_t blocks = QuantizedBlocks(w.shape), width = blocks * kQuantizedBlock;
  std::vector<float> result(x.rows * width), part(x.rows * kQuantizedBlock);
  for (int64_t block = 0; block < blocks; ++block) {
    MultiplyBlock(path, x, w.packed.get(), w.shape, block, part.data());
    for (int64_t r = 0; r < x.rows; ++r) {
      std::copy_n(part.data() + r * kQuantizedBlock, kQuantizedBlock,
                  result.data() + r * width + block * kQuantizedBlock);
    }
  }
  return result;
}

class QuantizedMatmulTest : public testing::TestWithParam<QuantizedShape> {};

INSTANTIATE_TEST_SUITE_P(
    , QuantizedMatmulTest,
    testing::Values(QuantizedShape{64, 128, 128, 8}, QuantizedShape{200, 384, 128, 8},
                    QuantizedShape{1, 32, 32, 8}, QuantizedShape{65, 24, 8, 8},
                    QuantizedShape{130, 320, 64, 8}, QuantizedShape{64, 192, 96, 8},
                    QuantizedShape{64, 512, 256, 8}, QuantizedShape{64, 32, 32, 4},
                    QuantizedShape{130, 384, 32, 4}, QuantizedShape{63, 24, 8, 4},
                    QuantizedShape{257, 256, 128, 4}),
    [](const auto& info) {
      return absl::StrCat(info.param.outputs, "x", info.param.inputs, "by", info.param.group, "of",
                          info.param.bits);
    });

TEST_P(QuantizedMatmulTest, APackedWeightIsTheWeight) {
  const Weights w = RandomWeights(GetParam(), 1);
  std::vector<float> out(w.dense.size());
  UnpackWeight(w.packed.get(), w.shape, out.data());
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], static_cast<float>(w.dense[i])) << i;
}

TEST_P(QuantizedMatmulTest, RoundsRowsToTheNearestIn8Bits) {
  const QuantizedShape& shape = GetParam();
  Rows rows = RandomRows(3, shape, 2);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t i = 0; i < shape.inputs; ++i) {
      const float step = rows.scales[r * shape.groups() + i / shape.group];
      const auto value = static_cast<float>(rows.values[r * shape.inputs + i]);
      ASSERT_NEAR(value * step, rows.x[r][i], step * 0.5001) << r << " " << i;
    }
    for (int64_t g = 0; g < shape.groups(); ++g) {
      int32_t sum = 0, most = 0;
      for (int64_t i = 0; i < shape.group; ++i) {
        const int32_t value = rows.values[r * shape.inputs + g * shape.group + i];
        sum += value;
        most = std::max(most, std::abs(value));
      }
      EXPECT_EQ(rows.sums[r * shape.groups() + g], sum);
      EXPECT_EQ(most, 127);
    }
  }
}

TEST_P(QuantizedMatmulTest, EveryPathMultiplies) {
  const QuantizedShape& shape = GetParam();
  const Weights w = RandomWeights(shape, 3);
  const int64_t width = QuantizedBlocks(shape) * kQuantizedBlock;
  for (const QuantizedPath path : QuantizedPaths()) {
    for (const int64_t count : {1, 2, 3, 4, 5, 6, 7, 13, 96}) {
      Rows rows = RandomRows(count, shape, 4);
      const std::vector<float> out = Multiply(path, rows.View(), w);
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t o = 0; o < width; ++o) {
          double expected = 0, size = 0;
          for (int64_t i = 0; o < shape.outputs && i < shape.inputs; ++i) {
            const double x = double{rows.scales[r * shape.groups() + i / shape.group]} *
                             rows.values[r * shape.inputs + i];
            expected += x * w.dense[o * shape.inputs + i];
            size += std::abs(x * w.dense[o * shape.inputs + i]);
          }
          ASSERT_NEAR(out[r * width + o], expected, 1e-6 * size)
              << QuantizedPathName(path) << ", row " << r << " of " << count << ", output " << o;
        }
      }
    }
  }
}

TEST_P(QuantizedMatmulTest, BitsOfARowDoNotDependOnItsNeighboursOrThePath) {
  const QuantizedShape& shape = GetParam();
  const Weights w = RandomWeights(shape, 5);
  const int64_t width = QuantizedBlocks(shape) * kQuantizedBlock;
  constexpr int64_t kRows = 19;
  Rows many = RandomRows(kRows, shape, 6);
  const std::vector<float> expected = Multiply(QuantizedPath::kAnywhere, many.View(), w);
  for (const QuantizedPath path : QuantizedPaths()) {
    ASSERT_EQ(Multiply(path, many.View(), w), expected) << QuantizedPathName(path);
    for (int64_t r = 0; r < kRows; ++r) {
      Rows one(1, shape);
      one.x.push_back(many.x[r]);
      QuantizeRow(path, one.x[0].data(), shape, 0, one.View());
      const std::vector<float> out = Multiply(path, one.View(), w);
      for (int64_t o = 0; o < width; ++o) ASSERT_EQ(out[o], expected[r * width + o]) << r;
    }
  }
}

// The most that a pair of products may be, and what a file may hold beyond what is symmetric.
TEST(QuantizedRowsTest, TheLargestProductsAreExact) {
  constexpr int64_t kRows = 17;  // tiles are of 16
  const QuantizedShape shape = {.outputs = 64, .inputs = 64, .group = 32, .bits = 8};
  Weights w = RandomWeights(shape, 9);
  for (const int weight : {-128, 127}) {
    for (const float x : {-1.0f, 1.0f}) {
      std::fill(w.integers.begin(), w.integers.end(), static_cast<uint8_t>(weight));
      std::fill(w.scales.begin(), w.scales.end(), uint16_t{0x3f80});  // 1
      PackWeight(w.integers.data(), w.scales.data(), shape, w.packed.get());
      const std::vector<float> row(shape.inputs, x);
      for (const QuantizedPath path : QuantizedPaths()) {
        Rows rows(kRows, shape);
        for (int64_t r = 0; r < kRows; ++r) {
          rows.x.push_back(row);
          QuantizeRow(path, row.data(), shape, r, rows.View());
        }
        const float expected = x * static_cast<float>(weight * shape.inputs);
        for (const float out : Multiply(path, rows.View(), w)) {
          EXPECT_NEAR(out, expected, 1e-3) << QuantizedPathName(path);
        }
      }
    }
  }
}

TEST(QuantizedRowsTest, ARowOfZerosIsZeroAndNaNIsNotHidden) {
  const QuantizedShape shape = {.outputs = 64, .inputs = 64, .group = 32, .bits = 8};
  const Weights w = RandomWeights(shape, 7);
  for (const int64_t count : {2, 18}) {  // tiles are of 16
    Rows rows(count, shape);
    for (int64_t r = 0; r < count; ++r) {  // zeros, and a NaN, in turn
      rows.x.emplace_back(64, r % 2 == 0 ? 0.0f : 1.0f);
      if (r % 2 == 1) rows.x[r][40] = std::numeric_limits<float>::quiet_NaN();
      QuantizeRow(rows.x[r].data(), shape, r, rows.View());
    }
    for (const QuantizedPath path : QuantizedPaths()) {
      const std::vector<float> out = Multiply(path, rows.View(), w);
      for (int64_t i = 0; i < count * 64; ++i) {
        if (i / 64 % 2 == 0) {
          EXPECT_EQ(out[i], 0) << QuantizedPathName(path);
        } else {
          EXPECT_TRUE(std::isnan(out[i])) << QuantizedPathName(path);
        }
      }
    }
  }
}

TEST(QuantizedRowsTest, SumsAreOfTheValuesWhateverTheRow) {
  const QuantizedShape shape = {.outputs = 64, .inputs = 32, .group = 32, .bits = 8};
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  for (const QuantizedPath path : QuantizedPaths()) {
    SCOPED_TRACE(std::string(QuantizedPathName(path)));
    for (const float strange : {kNaN, kInfinity, -kInfinity, kLeast, kLeastRounded}) {
      Rows rows(1, shape);
      std::vector<float> x(32);
      for (size_t i = 0; i < x.size(); i += 2) x[i] = strange;
      QuantizeRow(path, x.data(), shape, 0, rows.View());
      EXPECT_EQ(rows.sums[0], std::accumulate(rows.values.begin(), rows.values.end(), 0))
          << strange;
      if (std::abs(strange) <= kLeastRounded) {
        EXPECT_THAT(rows.values, testing::Each(0)) << strange;
      }
    }
  }
}

}  // namespace quantized_matmul_test
}  // namespace epikv
