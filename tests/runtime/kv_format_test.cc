#include "runtime/kernels/kv_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace epikv {
namespace kv_format_test {

using testing::Each;
using testing::ElementsAre;

constexpr KvFormat kInt8 = {DType::kFloat32, KvDType::kInt8};

struct Int8Row {
  std::vector<int> elements;
  float scale = 0;
};

Int8Row Written(const std::vector<float>& values) {
  const int64_t width = std::ssize(values);
  std::vector<char> row(kInt8.RowBytes(width));
  WriteRow(values.data(), row.data(), width, kInt8);
  Int8Row result{.scale = RowScale(row.data(), width)};
  for (int64_t i = 0; i < width; ++i) result.elements.push_back(static_cast<int8_t>(row[i]));
  return result;
}

std::vector<float> ThereAndBack(const std::vector<float>& values, const KvFormat& format) {
  std::vector<char> row(format.RowBytes(std::ssize(values)));
  std::vector<float> back(values.size());
  WriteRow(values.data(), row.data(), std::ssize(values), format);
  ReadRow(row.data(), back.data(), std::ssize(values), format);
  return back;
}

TEST(KvFormatTest, RowsHaveTheBytesThatTheirElementsAndScaleTake) {
  EXPECT_EQ((KvFormat{DType::kFloat32}.RowBytes(64)), 256);
  EXPECT_EQ((KvFormat{DType::kBFloat16}.RowBytes(64)), 128);
  for (DType model : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ((KvFormat{model, KvDType::kInt8}.RowBytes(64)), 68);
  }
}

TEST(KvFormatTest, TheLargestIs127AndTheOthersAreTheNearest) {
  const Int8Row row = Written({0.f, 254.f, -254.f, 1.9f, 2.1f, -3.2f});
  EXPECT_EQ(row.scale, 2.f);
  EXPECT_THAT(row.elements, ElementsAre(0, 127, -127, 1, 1, -2));
}

TEST(KvFormatTest, NothingIsOffByMoreThanHalfAScale) {
  std::mt19937 random(1);
  for (float size : {1e-30f, 1e-3f, 1.f, 300.f, 1e30f}) {
    std::normal_distribution<float> normal(0, size);
    for (int64_t width : {1, 7, 64, 200}) {
      std::vector<float> values(width);
      for (float& x : values) x = normal(random);
      const std::vector<float> back = ThereAndBack(values, kInt8);
      const float half = Written(values).scale / 2;
      for (int64_t i = 0; i < width; ++i) ASSERT_LE(std::fabs(back[i] - values[i]), half * 1.0001f);
    }
  }
}

// Writing what was read changes nothing: rows may be read and written any number of times.
TEST(KvFormatTest, WhatWasReadIsWrittenAsItWas) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::vector<float> values(64);
  for (float& x : values) x = normal(random);
  const std::vector<float> once = ThereAndBack(values, kInt8);
  EXPECT_EQ(Written(once).elements, Written(values).elements);
}

TEST(KvFormatTest, ZerosStayZeros) {
  EXPECT_THAT(ThereAndBack(std::vector<float>(16, 0.f), kInt8), Each(0.f));
}

TEST(KvFormatTest, WhatIsNoFiniteNumberIsSeen) {
  for (float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    for (float sign : {1.f, -1.f}) {
      std::vector<float> values(40, 1.f);
      values[17] = sign * bad;
      EXPECT_TRUE(std::isnan(Written(values).scale));
      EXPECT_THAT(ThereAndBack(values, kInt8), Each(testing::IsNan()));
    }
  }
}

TEST(KvFormatTest, OfBFloat16TheScaleIsAFloatAllTheSame) {
  const KvFormat format = {DType::kBFloat16, KvDType::kInt8};
  const std::vector<float> values = {1.f, -0.5f, 0.00390625f, 0.f};
  std::vector<uint16_t> narrow, back(values.size());
  for (float x : values) narrow.push_back(std::bit_cast<uint32_t>(x) >> 16);
  std::vector<char> row(format.RowBytes(std::ssize(values)));
  WriteRow(narrow.data(), row.data(), std::ssize(values), format);
  EXPECT_EQ(RowScale(row.data(), std::ssize(values)), 1.f / 127);
  ReadRow(row.data(), back.data(), std::ssize(values), format);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(std::bit_cast<float>(uint32_t{back[i]} << 16), values[i], 0.5 / 127 + 0.002);
  }
}

TEST(KvFormatTest, AsTheModelHasThemRowsAreCopied) {
  const std::vector<float> values = {1.5f, -2.25f, 1e-40f, std::numeric_limits<float>::infinity()};
  EXPECT_EQ(ThereAndBack(values, {DType::kFloat32, KvDType::kModel}), values);
}

}  // namespace kv_format_test
}  // namespace epikv
