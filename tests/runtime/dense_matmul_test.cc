#include "runtime/kernels/dense_matmul.h"

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
#include "runtime/base/float16.h"
#include "runtime/base/processor.h"

namespace epikv {
namespace dense_matmul_test {

using ::testing::Each;
using ::testing::ElementsAreArray;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeDeleter>;

Memory Aligned(int64_t bytes) { return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

// What elements of the dtype can be.
std::vector<float> Noise(int64_t count, uint32_t seed, DType dtype) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> noise(count);
  for (float& x : noise) {
    // Of a number in a register: of `x` itself GCC 12 clears the lower half in memory, and with
    // -fsanitize=thread it forgets to.
    const uint32_t drawn = std::bit_cast<uint32_t>(normal(random));
    x = std::bit_cast<float>(drawn & (dtype == DType::kBFloat16 ? ~0xffffU : ~0U));
    if (dtype == DType::kFloat16) x = WidenFloat16(NarrowFloat16(x));
  }
  return noise;
}

// Values as they lie in memory.
std::vector<char> Stored(const std::vector<float>& values, DType dtype) {
  const int64_t bytes = ElementBytes(dtype), skipped = 4 - bytes;  // of a float: its lower half
  std::vector<char> stored(values.size() * bytes);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kFloat16) {
      const uint16_t narrow = NarrowFloat16(values[i]);
      std::memcpy(stored.data() + i * bytes, &narrow, bytes);
      continue;
    }
    std::memcpy(stored.data() + i * bytes, reinterpret_cast<const char*>(&values[i]) + skipped,
                bytes);
  }
  return stored;
}

Memory Packed(const std::vector<float>& weight, const DenseShape& shape) {
  Memory packed = Aligned(PackedDenseBytes(shape));
  PackDense(Stored(weight, shape.dtype).data(), shape, packed.get());
  return packed;
}

// x [rows, inputs] weight^T, [rows, blocks x kDenseBlock].
std::vector<float> Product(DensePath path, const std::vector<float>& x, const void* packed,
                           const DenseShape& shape) {
  const int64_t rows = static_cast<int64_t>(x.size()) / shape.inputs;
  const int64_t row_bytes = DenseRowBytes(path, shape);
  const Memory prepared = Aligned(rows * row_bytes);
  const std::vector<char> stored = Stored(x, shape.dtype);
  for (int64_t r = 0; r < rows; ++r) {
    PrepareDense(path, stored.data() + r * shape.inputs * ElementBytes(shape.dtype), shape,
                 static_cast<char*>(prepared.get()) + r * row_bytes);
  }
  const int64_t blocks = DenseBlocks(shape), width = blocks * kDenseBlock;
  std::vector<float> out(rows * width);
  for (int64_t block = 0; block < blocks; ++block) {
    std::vector<float> sums(rows * kDenseBlock, std::numeric_limits<float>::quiet_NaN());
    MultiplyDense(path, prepared.get(), rows, packed, shape, block, sums.data());
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(out.data() + r * width + block * kDenseBlock, sums.data() + r * kDenseBlock,
                  kDenseBlock * sizeof(float));
    }
  }
  return out;
}

TEST(DenseMatmul, PackedWeightsAreWhatTheyWere) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (DenseShape shape : {DenseShape{1, 1}, {64, 2}, {65, 3}, {200, 129}}) {
      shape.dtype = dtype;
      const std::vector<float> weight = Noise(shape.outputs * shape.inputs, 1, dtype);
      const Memory packed = Packed(weight, shape);
      std::vector<char> again(weight.size() * ElementBytes(dtype));
      UnpackDense(packed.get(), shape, again.data());
      EXPECT_EQ(again, Stored(weight, dtype)) << shape.outputs << " x " << shape.inputs;
    }
  }
}

TEST(DenseMatmul, TheFastestPathIsTheLast) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const std::vector<DensePath> paths = DensePaths(dtype);
    const std::optional<DensePath> fastest = FastestDensePath(dtype);
    ASSERT_EQ(fastest.has_value(), !paths.empty());
    if (fastest.has_value()) {
      EXPECT_EQ(fastest, paths.back());
    }
  }
}

// As Intel's manual has TDPBF16PS: of 32 inputs the even ones and the odd ones are summed apart,
// each product and its sum rounded once, and both are added to what is there.
TEST(DenseMatmul, AMatrixUnitSumsAsItsManualSays) {
  if (!ThisProcessor().amx_bf16) GTEST_SKIP() << "this processor has no matrix unit";
  constexpr int64_t kStep = 32, kRows = 17;
  for (const DenseShape shape :
       {DenseShape{65, 7, DType::kBFloat16}, DenseShape{130, 200, DType::kBFloat16},
        DenseShape{64, 1024, DType::kBFloat16}}) {
    const int64_t width = DenseBlocks(shape) * kDenseBlock;
    const std::vector<float> weight = Noise(shape.outputs * shape.inputs, 11, shape.dtype),
                             x = Noise(kRows * shape.inputs, 12, shape.dtype);
    std::vector<float> expected(kRows * width);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t o = 0; o < shape.outputs; ++o) {
        float& sum = expected[r * width + o];
        for (int64_t begin = 0; begin < shape.inputs; begin += kStep) {
          float parts[2] = {};
          for (int64_t i = begin; i < std::min(shape.inputs, begin + kStep); ++i) {
            parts[i % 2] =
                std::fma(x[r * shape.inputs + i], weight[o * shape.inputs + i], parts[i % 2]);
          }
          sum += parts[0] + parts[1];
        }
      }
    }
    EXPECT_THAT(Product(DensePath::kTiled, x, Packed(weight, shape).get(), shape),
                ElementsAreArray(expected));
  }
}

struct Kind {
  DType dtype;
  DensePath path;
};

class OfPath : public testing::TestWithParam<std::tuple<Kind, DenseShape>> {
 protected:
  DensePath path() const { return std::get<0>(GetParam()).path; }
  DType dtype() const { return std::get<0>(GetParam()).dtype; }
  DenseShape shape() const {
    DenseShape shape = std::get<1>(GetParam());
    shape.dtype = dtype();
    return shape;
  }
  int64_t width() const { return DenseBlocks(shape()) * kDenseBlock; }
};

TEST_P(OfPath, SumsAreThoseOfExactArithmetic) {
  const int64_t outputs = shape().outputs, inputs = shape().inputs;
  const std::vector<float> weight = Noise(outputs * inputs, 2, dtype()),
                           x = Noise(7 * inputs, 3, dtype());
  const std::vector<float> out = Product(path(), x, Packed(weight, shape()).get(), shape());
  for (int64_t r = 0; r < 7; ++r) {
    for (int64_t o = 0; o < width(); ++o) {
      double sum = 0, size = 0;
      for (int64_t i = 0; o < outputs && i < inputs; ++i) {
        const double product = double{x[r * inputs + i]} * weight[o * inputs + i];
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
  const int64_t outputs = shape().outputs, inputs = shape().inputs;
  std::mt19937 random(4);
  auto integers = [&](int64_t count) {
    std::vector<float> result(count);
    for (float& value : result) {
      value = static_cast<float>(std::uniform_int_distribution<int>(-8, 8)(random));
    }
    return result;
  };
  const std::vector<float> weight = integers(outputs * inputs);
  const Memory packed = Packed(weight, shape());
  std::vector<int64_t> counts = {kDenseRows};
  for (int64_t rows = 1; rows <= 32; ++rows) counts.push_back(rows);  // tiles of all sizes
  for (const int64_t rows : counts) {
    const std::vector<float> x = integers(rows * inputs);
    std::vector<float> expected(rows * width());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t i = 0; i < inputs; ++i) {
          expected[r * width() + o] += x[r * inputs + i] * weight[o * inputs + i];
        }
      }
    }
    EXPECT_THAT(Product(path(), x, packed.get(), shape()), ElementsAreArray(expected)) << rows;
  }
}

TEST_P(OfPath, ARowDoesNotDependOnThoseBesideIt) {
  const int64_t inputs = shape().inputs;
  const std::vector<float> x = Noise(40 * inputs, 6, dtype());
  const Memory packed = Packed(Noise(shape().outputs * inputs, 5, dtype()), shape());
  const std::vector<float> together = Product(path(), x, packed.get(), shape());
  for (const int64_t rows : {1, 2, 6, 7, 13, 20, 39}) {
    const std::vector<float> last(x.end() - rows * inputs, x.end());
    const std::vector<float> out = Product(path(), last, packed.get(), shape());
    EXPECT_THAT(out, ElementsAreArray(together.end() - rows * width(), together.end())) << rows;
  }
}

TEST_P(OfPath, WhatIsNoNumberStaysInItsRow) {
  const int64_t inputs = shape().inputs;
  std::vector<float> x = Noise(8 * inputs, 8, dtype());
  const Memory packed = Packed(Noise(shape().outputs * inputs, 7, dtype()), shape());
  const std::vector<float> before = Product(path(), x, packed.get(), shape());
  x[3 * inputs + inputs - 1] = std::numeric_limits<float>::quiet_NaN();
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

// Whatever the width of a vector, inputs are added in their order, and nothing is rounded between a
// product and its sum.
TEST_P(OfPath, Float32SumsAreTheSameOnEveryProcessor) {
  if (path() == DensePath::kPaired) GTEST_SKIP() << "its products are rounded in pairs";
  if (path() == DensePath::kTiled) GTEST_SKIP() << "a matrix unit has an order of its own";
  const int64_t outputs = shape().outputs, inputs = shape().inputs;
  const std::vector<float> weight = Noise(outputs * inputs, 9, dtype());
  const Memory packed = Packed(weight, shape());
  for (const int64_t rows : {1, 2, 3, 5, 6, 11, 25, 40}) {
    const std::vector<float> x = Noise(rows * inputs, 10, dtype());
    std::vector<float> expected(rows * width());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t o = 0; o < outputs; ++o) {
        float& sum = expected[r * width() + o];
        for (int64_t i = 0; i < inputs; ++i) {
          sum = std::fma(weight[o * inputs + i], x[r * inputs + i], sum);
        }
      }
    }
    EXPECT_THAT(Product(path(), x, packed.get(), shape()), ElementsAreArray(expected)) << rows;
  }
}

std::string NameOf(const testing::TestParamInfo<OfPath::ParamType>& info) {
  const auto& [kind, shape] = info.param;
  const char* const names[] = {"Float32",     "Widened",     "Paired",
                               "Float32Simd", "WidenedSimd", "Tiled"};
  return absl::StrCat(names[static_cast<int>(kind.path)], "_", DTypeName(kind.dtype), "_",
                      shape.outputs, "x", shape.inputs);
}

std::vector<Kind> AllKinds() {
  std::vector<Kind> kinds;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DensePath path : DensePaths(dtype)) kinds.push_back({dtype, path});
  }
  return kinds;
}

// None on a processor without AVX2 or NEON.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OfPath);
INSTANTIATE_TEST_SUITE_P(DenseMatmul, OfPath,
                         testing::Combine(testing::ValuesIn(AllKinds()),
                                          testing::Values(DenseShape{1, 1}, DenseShape{64, 64},
                                                          DenseShape{65, 7}, DenseShape{130, 200},
                                                          DenseShape{96, 1025})),
                         NameOf);

}  // namespace dense_matmul_test
}  // namespace epikv
