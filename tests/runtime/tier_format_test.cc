#include "runtime/kernels/tier_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "runtime/kernels/kernels.h"

namespace epikv {
namespace tier_format_test {

// A row of the pool's format from fp32, and back.
std::vector<char> RowOf(const std::vector<float>& values, const KvFormat& format) {
  const auto width = static_cast<int64_t>(values.size());
  std::vector<char> plain(width * ElementBytes(format.model)), row(format.RowBytes(width));
  FromFloat(values.data(), plain.data(), width, format.model);
  WriteRow(plain.data(), row.data(), width, format);
  return row;
}
std::vector<float> ValuesOf(const std::vector<char>& row, int64_t width, const KvFormat& format) {
  std::vector<char> plain(width * ElementBytes(format.model));
  std::vector<float> values(width);
  ReadRow(row.data(), plain.data(), width, format);
  ToFloat(plain.data(), values.data(), width, format.model);
  return values;
}

std::vector<char> ThroughTier(const std::vector<char>& row, int64_t width,
                              const TierFormat& format) {
  std::vector<char> packed(format.RowBytes(width)), back(row.size());
  PackRow(row.data(), packed.data(), width, format);
  UnpackRow(packed.data(), back.data(), width, format);
  return back;
}

std::vector<float> Random(int64_t width, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(width);
  for (float& value : values) value = normal(random) * (1 + static_cast<float>(seed % 5));
  return values;
}

TEST(TierFormat, AsCachedIsTheBits) {
  for (const KvFormat pool :
       {KvFormat{DType::kFloat32, KvDType::kModel}, KvFormat{DType::kBFloat16, KvDType::kModel},
        KvFormat{DType::kBFloat16, KvDType::kInt8}}) {
    const std::vector<char> row = RowOf(Random(40, 3), pool);
    EXPECT_EQ(ThroughTier(row, 40, {.pool = pool}), row);
  }
  const KvFormat int8{DType::kFloat32, KvDType::kInt8};
  const std::vector<char> row = RowOf(Random(40, 3), int8);
  EXPECT_EQ(ThroughTier(row, 40, {.pool = int8, .stored = TierDType::kInt8}), row)
      << "rounded once, it is rounded no more";
}

TEST(TierFormat, IsOffByHalfAScaleAtMost) {
  for (const int64_t width : {1, 7, 32, 33, 64, 96}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      const KvFormat pool{.model = DType::kFloat32};
      const std::vector<float> values = Random(width, seed);
      for (const auto& [stored, levels, scaled] :
           {std::tuple(TierDType::kInt8, 127.f, width),
            std::tuple(TierDType::kInt4, 7.f, int64_t{32})}) {
        const std::vector<float> back = ValuesOf(
            ThroughTier(RowOf(values, pool), width, {.pool = pool, .stored = stored}), width, pool);
        for (int64_t first = 0; first < width; first += scaled) {
          const int64_t end = std::min(width, first + scaled);
          float most = 0;
          for (int64_t c = first; c < end; ++c) most = std::max(most, std::abs(values[c]));
          for (int64_t c = first; c < end; ++c) {
            EXPECT_LE(std::abs(back[c] - values[c]), most / levels * .5001f) << width << ", " << c;
          }
        }
      }
    }
  }
}

TEST(TierFormat, TakesWhatItSays) {
  const KvFormat pool{.model = DType::kBFloat16};
  EXPECT_EQ((TierFormat{.pool = pool}).RowBytes(64), 128);
  EXPECT_EQ((TierFormat{.pool = pool, .stored = TierDType::kInt8}).RowBytes(64), 64 + 4);
  EXPECT_EQ((TierFormat{.pool = pool, .stored = TierDType::kInt4}).RowBytes(64), 32 + 2 * 4);
  EXPECT_EQ((TierFormat{.pool = pool, .stored = TierDType::kInt4}).RowBytes(33), 17 + 2 * 4);
}

TEST(TierFormat, ZerosStayAndWhatIsNoNumberDoesNotBecomeOne) {
  const KvFormat pool{.model = DType::kFloat32};
  std::vector<float> values(64, 0);
  const TierFormat int4{.pool = pool, .stored = TierDType::kInt4};
  EXPECT_EQ(ValuesOf(ThroughTier(RowOf(values, pool), 64, int4), 64, pool), values);
  for (const float odd : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    values[40] = odd;
    const std::vector<float> back = ValuesOf(ThroughTier(RowOf(values, pool), 64, int4), 64, pool);
    EXPECT_TRUE(std::isnan(back[40])) << odd;
    EXPECT_EQ(back[5], 0) << "of another scale";
  }
}

}  // namespace tier_format_test
}  // namespace epikv
