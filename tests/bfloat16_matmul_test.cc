#include "runtime/bfloat16_matmul.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

using ::testing::Each;
using ::testing::ElementsAreArray;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeDeleter>;

Memory Aligned(int64_t bytes) { return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

float Wide(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

std::vector<uint16_t> Noise(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> noise(count);
  for (uint16_t& x : noise)
    x = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
  return noise;
}

Memory Packed(const std::vector<uint16_t>& weight, const BFloat16Shape& shape) {
  Memory packed = Aligned(PackedBFloat16Bytes(shape));
  PackBFloat16(weight.data(), shape, packed.get());
  return packed;
}

// x [rows, inputs] weight^T, [rows, blocks x kBFloat16Block].
std::vector<float> Product(BFloat16Path path, const std::vector<uint16_t>& x, const void* packed,
                           const BFloat16Shape& shape) {
  const int64_t rows = static_cast<int64_t>(x.size()) / shape.inputs;
  const int64_t row_bytes = BFloat16RowBytes(path, shape);
  const Memory prepared = Aligned(rows * row_bytes);
  for (int64_t r = 0; r < rows; ++r) {
    PrepareBFloat16(path, x.data() + r * shape.inputs, shape,
                    static_cast<char*>(prepared.get()) + r * row_bytes);
  }
  const int64_t blocks = BFloat16Blocks(shape), width = blocks * kBFloat16Block;
  std::vector<float> out(rows * width);
  for (int64_t block = 0; block < blocks; ++block) {
    std::vector<float> sums(rows * kBFloat16Block, std::numeric_limits<float>::quiet_NaN());
    MultiplyBFloat16(path, prepared.get(), rows, packed, shape, block, sums.data());
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out.data() + r * width + block * kBFloat16Block, sums.data() + r * kBFloat16Block,
                  kBFloat16Block * sizeof(float));
    }
  }
  return out;
}

TEST(BFloat16Matmul, PackedWeightsAreWhatTheyWere) {
  for (const BFloat16Shape shape : {BFloat16Shape{1, 1}, {64, 2}, {65, 3}, {200, 129}}) {
    const std::vector<uint16_t> weight = Noise(shape.outputs * shape.inputs, 1);
    const Memory packed = Packed(weight, shape);
    std::vector<uint16_t> again(weight.size());
    UnpackBFloat16(packed.get(), shape, again.data());
    EXPECT_EQ(again, weight) << shape.outputs << " x " << shape.inputs;
  }
}

TEST(BFloat16Matmul, TheFastestPathIsTheLastOrNone) {
  const std::optional<BFloat16Path> fastest = FastestBFloat16Path();
  if (fastest.has_value()) {
    EXPECT_EQ(fastest, BFloat16Paths().back());
  }
}

class OfPath : public testing::TestWithParam<std::tuple<BFloat16Path, BFloat16Shape>> {
 protected:
  BFloat16Path path() const { return std::get<0>(GetParam()); }
  BFloat16Shape shape() const { return std::get<1>(GetParam()); }
  int64_t width() const { return BFloat16Blocks(shape()) * kBFloat16Block; }
};

TEST_P(OfPath, SumsAreThoseOfExactArithmetic) {
  const auto [outputs, inputs] = shape();
  const std::vector<uint16_t> weight = Noise(outputs * inputs, 2), x = Noise(7 * inputs, 3);
  const std::vector<float> out = Product(path(), x, Packed(weight, shape()).get(), shape());
  for (int64_t r = 0; r < 7; ++r) {
    for (int64_t o = 0; o < width(); ++o) {
      double sum = 0, size = 0;
      for (int64_t i = 0; o < outputs && i < inputs; ++i) {
        const double product = double{Wide(x[r * inputs + i])} * Wide(weight[o * inputs + i]);
        sum += product;
        size += std::abs(product);
      }
      // Each addition rounds once: half a unit of 2^-23 of what is summed so far, at most.
      const double bound = size * static_cast<double>(inputs) * std::ldexp(1.0, -24);
      EXPECT_LE(std::abs(out[r * width() + o] - sum), bound) << "row " << r << ", output " << o;
    }
  }
}

// Of small integers every sum is exact: no element is missed, none counts twice.
TEST_P(OfPath, SumsOfSmallIntegersAreExact) {
  const auto [outputs, inputs] = shape();
  std::mt19937 random(4);
  auto integers = [&](int64_t count) {
    std::vector<uint16_t> result(count);
    for (uint16_t& value : result) {
      const auto integer = static_cast<float>(std::uniform_int_distribution<int>(-8, 8)(random));
      value = static_cast<uint16_t>(std::bit_cast<uint32_t>(integer) >> 16);
    }
    return result;
  };
  const std::vector<uint16_t> weight = integers(outputs * inputs);
  const Memory packed = Packed(weight, shape());
  std::vector<int64_t> counts = {kBFloat16Rows};
  for (int64_t rows = 1; rows <= 32; ++rows) counts.push_back(rows);  // tiles of all sizes
  for (const int64_t rows : counts) {
    const std::vector<uint16_t> x = integers(rows * inputs);
    std::vector<float> expected(rows * width());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t i = 0; i < inputs; ++i) {
          expected[r * width() + o] += Wide(x[r * inputs + i]) * Wide(weight[o * inputs + i]);
        }
      }
    }
    EXPECT_THAT(Product(path(), x, packed.get(), shape()), ElementsAreArray(expected)) << rows;
  }
}

TEST_P(OfPath, ARowDoesNotDependOnThoseBesideIt) {
  const int64_t inputs = shape().inputs;
  const std::vector<uint16_t> x = Noise(40 * inputs, 6);
  const Memory packed = Packed(Noise(shape().outputs * inputs, 5), shape());
  const std::vector<float> together = Product(path(), x, packed.get(), shape());
  for (const int64_t rows : {1, 2, 6, 7, 13, 20, 39}) {
    const std::vector<uint16_t> last(x.end() - rows * inputs, x.end());
    const std::vector<float> out = Product(path(), last, packed.get(), shape());
    EXPECT_THAT(out, ElementsAreArray(together.end() - rows * width(), together.end())) << rows;
  }
}

TEST_P(OfPath, WhatIsNoNumberStaysInItsRow) {
  const int64_t inputs = shape().inputs;
  std::vector<uint16_t> x = Noise(8 * inputs, 8);
  const Memory packed = Packed(Noise(shape().outputs * inputs, 7), shape());
  const std::vector<float> before = Product(path(), x, packed.get(), shape());
  x[3 * inputs + inputs - 1] = 0x7fc0;
  const std::vector<float> after = Product(path(), x, packed.get(), shape());
  for (int64_t r = 0; r < 8; ++r) {
    const std::vector<float> row(after.begin() + r * width(),
                                 after.begin() + r * width() + shape().outputs);
    if (r == 3) {
      EXPECT_THAT(row, Each(testing::IsNan()));
    } else {
      EXPECT_THAT(row, ElementsAreArray(before.begin() + r * width(),
                                        before.begin() + r * width() + shape().outputs));
    }
  }
}

std::string NameOf(const testing::TestParamInfo<OfPath::ParamType>& info) {
  const auto [path, shape] = info.param;
  return absl::StrCat(path == BFloat16Path::kPaired ? "Paired" : "Widened", "_", shape.outputs, "x",
                      shape.inputs);
}

// None on a processor without AVX-512.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OfPath);
INSTANTIATE_TEST_SUITE_P(
    BFloat16Matmul, OfPath,
    testing::Combine(testing::ValuesIn(BFloat16Paths()),
                     testing::Values(BFloat16Shape{1, 1}, BFloat16Shape{64, 64},
                                     BFloat16Shape{65, 7}, BFloat16Shape{130, 200},
                                     BFloat16Shape{96, 1025})),
    NameOf);

}  // namespace
}  // namespace epikv
