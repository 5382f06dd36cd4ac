#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "runtime/base/float16.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/kv_format.h"

// Every path that this processor has, against attention in double over the very rows that it reads.

namespace epikv {
namespace attention_kernels_test {

using Paths = std::vector<AttentionPath>;

float Narrowed(float x, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      break;
    case DType::kBFloat16:
      return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x8000u) & 0xffff0000u);
    case DType::kFloat16:
      return WidenFloat16(NarrowFloat16(x));
  }
  return x;
}

// Elements of a dtype. They begin `offset` elements into the memory: lanes and packed rows are not
// aligned to more than an element.
class Elements {
 public:
  Elements(DType dtype, const std::vector<float>& values, int64_t offset = 0)
      : dtype_(dtype), offset_(offset), bytes_((values.size() + offset) * Size()) {
    for (size_t i = 0; i < values.size(); ++i) Set(i, values[i]);
  }
  void* data() { return bytes_.data() + offset_ * Size(); }
  float at(size_t i) const {
    const char* const p = bytes_.data() + (offset_ + i) * Size();
    uint16_t half;
    float whole;
    if (dtype_ == DType::kFloat32) return std::memcpy(&whole, p, 4), whole;
    std::memcpy(&half, p, 2);
    return dtype_ == DType::kFloat16 ? WidenFloat16(half)
                                     : std::bit_cast<float>(uint32_t{half} << 16);
  }

 private:
  int64_t Size() const { return dtype_ == DType::kFloat32 ? 4 : 2; }
  void Set(size_t i, float x) {
    char* const p = bytes_.data() + (offset_ + i) * Size();
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint16_t half =
        dtype_ == DType::kFloat16 ? NarrowFloat16(x) : static_cast<uint16_t>(bits >> 16);
    std::memcpy(p, Size() == 4 ? static_cast<const void*>(&bits) : &half, Size());
  }

  const DType dtype_;
  const int64_t offset_;
  std::vector<char> bytes_;
};

// Rows of K or V as a format has them, which begin at some byte, as lanes do.
class Rows {
 public:
  Rows(const KvFormat& format, const std::vector<float>& values, int64_t width, int64_t offset = 0)
      : format_(format),
        width_(width),
        num_rows_(static_cast<int64_t>(values.size()) / width),
        offset_(offset * (format.stored == KvDType::kInt8 ? 1 : ElementBytes(format.model))),
        bytes_(offset_ + num_rows_ * format.RowBytes(width)) {
    Elements elements(format.model, values);
    const char* const in = static_cast<const char*>(elements.data());
    for (int64_t row = 0; row < num_rows_; ++row) {
      WriteRow(in + row * width * ElementBytes(format.model),
               bytes_.data() + offset_ + row * format.RowBytes(width), width, format);
    }
    held_ = values;
    if (format.stored == KvDType::kInt8) Decode();
  }
  const void* data() const { return bytes_.data() + offset_; }
  // What they are worth.
  const std::vector<float>& held() const { return held_; }

 private:
  void Decode() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const char* const at = bytes_.data() + offset_ + row * (width_ + 4);
      float scale;
      std::memcpy(&scale, at + width_, 4);
      for (int64_t i = 0; i < width_; ++i) {
        held_[row * width_ + i] = scale * static_cast<float>(static_cast<int8_t>(at[i]));
      }
    }
  }

  const KvFormat format_;
  const int64_t width_, num_rows_, offset_;
  std::vector<char> bytes_;
  std::vector<float> held_;
};

struct Problem {
  LaneShape shape;
  int64_t used = 0;
  std::vector<float> q, keys, values;  // as the dtype holds them
  std::vector<int64_t> positions;      // empty: no window
  int64_t first_seen = 0;
  std::vector<SlotRange> reads;  // empty: all

  bool Reads(int64_t slot) const {
    return reads.empty() || std::any_of(reads.begin(), reads.end(), [&](const SlotRange& range) {
             return range.begin <= slot && slot < range.end;
           });
  }
};

Problem Random(const LaneShape& shape, int64_t used, int seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  Problem problem = {.shape = shape, .used = used};
  const auto fill = [&](std::vector<float>& values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values.push_back(Narrowed(normal(random), shape.dtype));
  };
  fill(problem.q, shape.group * shape.key_width);
  fill(problem.keys, used * shape.key_width);
  fill(problem.values, used * shape.value_width);
  return problem;
}

KvFormat FormatOf(const LaneShape& shape) { return {shape.dtype, shape.stored}; }

struct Answer {
  std::vector<double> out;     // [group, value_width]
  std::vector<double> logits;  // [group, used]
};

Answer Exact(const Problem& p) {
  const LaneShape& s = p.shape;
  Answer answer = {.out = std::vector<double>(s.group * s.value_width)};
  for (int64_t g = 0; g < s.group; ++g) {
    std::vector<double> logits;
    for (int64_t j = 0; j < p.used; ++j) {
      double dot = 0;
      for (int64_t i = 0; i < s.key_width; ++i) {
        dot += double{p.q[g * s.key_width + i]} * p.keys[j * s.key_width + i];
      }
      dot *= s.scale;
      if (s.soft_cap > 0) dot = s.soft_cap * std::tanh(dot / s.soft_cap);
      if (!p.positions.empty() && p.positions[j] < p.first_seen) dot = -INFINITY;
      if (!p.Reads(j)) dot = -INFINITY;
      logits.push_back(dot);
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double mass = 0;
    for (double logit : logits) mass += std::exp(logit - top);
    for (int64_t j = 0; j < p.used; ++j) {
      const double weight = std::exp(logits[j] - top) / mass;
      for (int64_t i = 0; i < s.value_width; ++i) {
        answer.out[g * s.value_width + i] += weight * p.values[j * s.value_width + i];
      }
    }
    answer.logits.insert(answer.logits.end(), logits.begin(), logits.end());
  }
  return answer;
}

// How far outputs may be off, beside values of size 1: half a last place of what is stored, and the
// rounding of probabilities where that is a path's way.
double Tolerance(AttentionPath path, DType dtype) {
  if (path == AttentionPath::kAvx512BFloat16 || path == AttentionPath::kAmx) return 2e-2;
  return dtype == DType::kFloat32 ? 3e-6 : dtype == DType::kFloat16 ? 2e-3 : 1.6e-2;
}

void ExpectExact(Problem p, int64_t offset = 0) {
  const DType dtype = p.shape.dtype;
  Elements q(dtype, p.q, offset);
  const Rows keys(FormatOf(p.shape), p.keys, p.shape.key_width, offset);
  const Rows values(FormatOf(p.shape), p.values, p.shape.value_width, offset);
  p.keys = keys.held();
  p.values = values.held();
  const Answer exact = Exact(p);
  for (AttentionPath path : AttentionPaths(p.shape)) {
    SCOPED_TRACE(std::string(AttentionPathName(path)));
    // What lies behind the end is nobody's: it is to stay as it is.
    constexpr float kUntouched = 77;
    std::vector<float> scratch(DecodeScratchFloats(p.shape) + 1, NAN);
    scratch.back() = kUntouched;
    std::vector<float> logits(LogitFloats(p.shape, p.used) + 1, kUntouched);
    Elements out(dtype, std::vector<float>(exact.out.size() + 1, kUntouched), offset);
    DecodeAttention(path,
                    {.q = q.data(),
                     .keys = keys.data(),
                     .values = values.data(),
                     .used = p.used,
                     .out = out.data(),
                     .logits = logits.data(),
                     .positions = p.positions.empty() ? nullptr : p.positions.data(),
                     .first_seen = p.first_seen,
                     .reads = p.reads},
                    p.shape, scratch.data());
    for (size_t i = 0; i < exact.out.size(); ++i) {
      ASSERT_NEAR(out.at(i), exact.out[i], Tolerance(path, dtype)) << "of output " << i;
    }
    EXPECT_EQ(out.at(exact.out.size()), kUntouched);
    EXPECT_EQ(scratch.back(), kUntouched);
    for (size_t i = 0; i < exact.logits.size(); ++i) {
      if (std::isinf(exact.logits[i])) {
        ASSERT_EQ(logits[i], -INFINITY) << "of logit " << i;
      } else {
        ASSERT_NEAR(logits[i], exact.logits[i], 3e-5) << "of logit " << i;
      }
    }
    // Which is what a row is made of.
    std::vector<float> row(p.used);
    RowOfLogits(logits.data(), p.shape.group, p.used, row.data());
    double sum = 0;
    for (float share : row) sum += share;
    EXPECT_NEAR(sum, 1, 1e-4);
    EXPECT_EQ(logits.back(), kUntouched);
  }
}

struct Widths {
  int64_t group, key, value;
};

class AttentionKernelsTest : public testing::TestWithParam<KvFormat> {
 protected:
  LaneShape Shape(const Widths& widths) const {
    return {.group = widths.group,
            .key_width = widths.key,
            .value_width = widths.value,
            .scale = 1 / std::sqrt(static_cast<float>(widths.key)),
            .dtype = GetParam().model,
            .stored = GetParam().stored};
  }
};

std::vector<KvFormat> Formats() {
  std::vector<KvFormat> formats;
  for (DType model : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (KvDType stored : {KvDType::kModel, KvDType::kInt8}) formats.push_back({model, stored});
  }
  return formats;
}

std::string FormatName(const testing::TestParamInfo<KvFormat>& info) {
  return std::string(DTypeName(info.param.model)) +
         (info.param.stored == KvDType::kInt8 ? "_int8" : "");
}

INSTANTIATE_TEST_SUITE_P(Formats, AttentionKernelsTest, testing::ValuesIn(Formats()), FormatName);

TEST_P(AttentionKernelsTest, EveryGroupAndWidth) {
  int seed = 0;
  for (const auto& [key, value] : std::vector<std::pair<int64_t, int64_t>>{
           {16, 16}, {32, 32}, {48, 80}, {64, 64}, {80, 48}, {96, 96}, {128, 128}, {256, 64}}) {
    for (int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16}) {
      SCOPED_TRACE(testing::Message() << group << " queries, widths " << key << " and " << value);
      ExpectExact(Random(Shape({group, key, value}), 1 + seed % 70, seed));
      ++seed;
    }
  }
}

TEST_P(AttentionKernelsTest, EveryLength) {
  for (int64_t used = 1; used <= 100; ++used) {
    SCOPED_TRACE(used);
    ExpectExact(Random(Shape({.group = 3, .key = 32, .value = 32}), used, static_cast<int>(used)));
  }
  ExpectExact(Random(Shape({.group = 7, .key = 64, .value = 64}), 5000, 1));
}

TEST_P(AttentionKernelsTest, WidthsOfNoVector) {
  for (int64_t width : {1, 7, 20, 36, 72}) {
    SCOPED_TRACE(width);
    ExpectExact(Random(Shape({.group = 2, .key = width, .value = width}), 50, 3));
  }
}

TEST_P(AttentionKernelsTest, MemoryThatIsNotAligned) {
  for (int64_t offset : {1, 3, 8}) {
    ExpectExact(Random(Shape({.group = 5, .key = 64, .value = 32}), 45, 5), offset);
  }
}

// Weights from 1 down to nothing, in blocks of which later ones outweigh the earlier.
TEST_P(AttentionKernelsTest, LogitsFarApart) {
  Problem problem = Random(Shape({.group = 4, .key = 32, .value = 32}), 200, 9);
  for (int64_t j = 0; j < problem.used; ++j) {
    for (int64_t i = 0; i < 32; ++i) {
      float& key = problem.keys[j * 32 + i];
      key = Narrowed(key * static_cast<float>(j / 40), GetParam().model);
    }
  }
  ExpectExact(problem);
}

TEST_P(AttentionKernelsTest, SoftCaps) {
  LaneShape shape = Shape({.group = 3, .key = 64, .value = 64});
  shape.soft_cap = 0.5;
  ExpectExact(Random(shape, 77, 11));
}

// Ranges of any length, at any place, whatever else bends the logits; a row of the same.
TEST_P(AttentionKernelsTest, ReadsTheRangesThatAreAskedFor) {
  std::mt19937 random(17);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE(round);
    LaneShape shape = Shape({.group = 1 + round % 8, .key = 32, .value = 64});
    if (round % 3 == 1) shape.soft_cap = 0.7f;
    Problem problem = Random(shape, 300, round);
    for (int64_t begin = random() % 40; begin < problem.used;) {
      const int64_t end = std::min<int64_t>(problem.used, begin + 1 + random() % 70);
      problem.reads.push_back({begin, end});
      begin = end + 1 + static_cast<int64_t>(random() % 90);
    }
    if (round % 4 == 2) {
      for (int64_t j = 0; j < problem.used; ++j) problem.positions.push_back(j);
      problem.first_seen = problem.reads.back().begin;
    }
    ExpectExact(problem);
  }
}

// What is not read is not looked at.
TEST_P(AttentionKernelsTest, WhatIsNotReadMayBeAnything) {
  Problem problem = Random(Shape({.group = 3, .key = 64, .value = 64}), 200, 19);
  problem.reads = {{16, 48}, {100, 101}, {184, 200}};
  for (int64_t j = 0; j < problem.used; ++j) {
    if (problem.Reads(j)) continue;
    std::fill_n(problem.keys.begin() + j * 64, 64, NAN);
    std::fill_n(problem.values.begin() + j * 64, 64, NAN);
  }
  Problem clean = problem;
  for (std::vector<float>* rows : {&clean.keys, &clean.values}) {
    for (float& x : *rows) x = std::isnan(x) ? 0.0f : x;
  }
  ExpectExact(clean);
  Elements q(problem.shape.dtype, problem.q);
  const Rows keys(FormatOf(problem.shape), problem.keys, 64);
  const Rows values(FormatOf(problem.shape), problem.values, 64);
  for (AttentionPath path : AttentionPaths(problem.shape)) {
    std::vector<float> scratch(DecodeScratchFloats(problem.shape));
    Elements out(problem.shape.dtype, std::vector<float>(3 * 64));
    DecodeAttention(path,
                    {.q = q.data(),
                     .keys = keys.data(),
                     .values = values.data(),
                     .used = problem.used,
                     .out = out.data(),
                     .reads = problem.reads},
                    problem.shape, scratch.data());
    for (int64_t i = 0; i < 3 * 64; ++i) EXPECT_TRUE(std::isfinite(out.at(i))) << i;
  }
}

// A window that hides whole blocks, and parts of some.
TEST_P(AttentionKernelsTest, Windows) {
  for (int64_t first_seen : {0, 10, 64, 150, 199}) {
    SCOPED_TRACE(first_seen);
    Problem problem = Random(Shape({.group = 3, .key = 32, .value = 64}), 200, 13);
    for (int64_t j = 0; j < problem.used; ++j) problem.positions.push_back(j * 7 % 200);
    std::sort(problem.positions.begin(), problem.positions.begin() + 150);
    problem.first_seen = first_seen;
    ExpectExact(problem);
  }
}

// Rows that are the newest of a prompt, among heads that are somebody else's.
void ExpectExactRows(const LaneShape& shape, int64_t past, int64_t rows, int seed,
                     std::optional<int64_t> window = std::nullopt) {
  constexpr int64_t kHeadsBeside = 3;
  const int64_t used = past + rows;
  Problem p = Random(shape, used, seed);
  const int64_t stride = (shape.group + kHeadsBeside) * shape.key_width;
  const int64_t out_stride = (shape.group + kHeadsBeside) * shape.value_width;
  const std::vector<float> q = Random(shape, rows * stride / shape.key_width, seed + 1).keys;
  if (window.has_value()) {
    for (int64_t j = 0; j < used; ++j) p.positions.push_back(j + 5);
  }
  Elements queries(shape.dtype, q);
  const Rows keys(FormatOf(shape), p.keys, shape.key_width);
  const Rows values(FormatOf(shape), p.values, shape.value_width);
  p.keys = keys.held();
  p.values = values.held();
  for (AttentionPath path : AttentionPaths(shape)) {
    SCOPED_TRACE(std::string(AttentionPathName(path)));
    constexpr float kUntouched = 77;
    Elements out(shape.dtype, std::vector<float>(rows * out_stride, kUntouched));
    std::vector<float> scratch(PrefillScratchFloats(shape) + 1, NAN);
    scratch.back() = kUntouched;
    std::vector<float> log_sum_exp(shape.group * (rows + 2), kUntouched);
    PrefillLane lane = {.q = queries.data(),
                        .q_stride = stride,
                        .keys = keys.data(),
                        .values = values.data(),
                        .rows = rows,
                        .seen = past + 1,
                        .out = out.data(),
                        .out_stride = out_stride,
                        .log_sum_exp = log_sum_exp.data(),
                        .log_sum_exp_stride = rows + 2};
    if (window.has_value()) {
      lane.positions = p.positions.data();
      lane.first_seen = past + 5 - *window + 1;
    }
    PrefillAttention(path, lane, shape, scratch.data());
    EXPECT_EQ(scratch.back(), kUntouched);
    for (int64_t row = 0; row < rows; ++row) {
      Problem of_row = p;
      of_row.used = past + row + 1;
      of_row.first_seen = lane.first_seen + row;
      of_row.q.assign(q.begin() + row * stride,
                      q.begin() + row * stride + shape.group * shape.key_width);
      const Answer exact = Exact(of_row);
      for (size_t i = 0; i < exact.out.size(); ++i) {
        ASSERT_NEAR(out.at(row * out_stride + i), exact.out[i], Tolerance(path, shape.dtype))
            << "of row " << row << ", output " << i;
      }
      for (int64_t i = exact.out.size(); i < out_stride; ++i) {
        ASSERT_EQ(out.at(row * out_stride + i), kUntouched);
      }
      for (int64_t g = 0; g < shape.group; ++g) {
        double mass = 0;
        for (int64_t j = 0; j < of_row.used; ++j)
          mass += std::exp(exact.logits[g * of_row.used + j]);
        ASSERT_NEAR(log_sum_exp[g * (rows + 2) + row], std::log(mass), 1e-4);
      }
    }
    EXPECT_EQ(log_sum_exp[rows], kUntouched);
  }
}

TEST_P(AttentionKernelsTest, RowsOfAPrompt) {
  int seed = 0;
  for (int64_t group : {1, 3, 4, 7, 8, 16, 100}) {
    for (int64_t past : {0, 1, 31, 32, 100}) {
      const LaneShape shape = Shape({.group = group, .key = 64, .value = 32});
      for (int64_t rows : {int64_t{1}, PrefillRows(shape) / 2 + 1, PrefillRows(shape)}) {
        SCOPED_TRACE(testing::Message() << rows << " rows of " << group << " behind " << past);
        ExpectExactRows(shape, past, rows, ++seed);
      }
    }
  }
}

TEST_P(AttentionKernelsTest, RowsUnderSoftCapsAndWindows) {
  LaneShape shape = Shape({.group = 2, .key = 32, .value = 64});
  for (int64_t window : {1, 5, 40, 90, 1000}) {
    SCOPED_TRACE(window);
    ExpectExactRows(shape, 100, PrefillRows(shape), 17, window);
  }
  shape.soft_cap = 0.5;
  ExpectExactRows(shape, 40, PrefillRows(shape), 18);
  ExpectExactRows(shape, 40, PrefillRows(shape), 19, 20);
}

void ExpectPartsOfTheWhole(LaneShape shape) {
  for (const int64_t used : {kKeysOfPart, kKeysOfPart + 1, 2 * kKeysOfPart + 77}) {
    for (const char* how : {"all", "window", "reads", "a part that is not read", "soft cap"}) {
      SCOPED_TRACE(testing::Message() << used << " slots, " << how);
      shape.soft_cap = how == std::string("soft cap") ? 0.7f : 0;
      Problem p = Random(shape, used, static_cast<int>(used));
      if (how == std::string("window")) {
        p.positions.resize(used);
        std::iota(p.positions.begin(), p.positions.end(), 0);
        p.first_seen = used > 2 * kKeysOfPart ? kKeysOfPart + 500 : used - 40;
      }
      if (how == std::string("reads")) {
        p.reads = {{5, 70}, {kKeysOfPart - 9, std::min(used, kKeysOfPart + 9)}};
        if (used > 2 * kKeysOfPart) p.reads.push_back({2 * kKeysOfPart + 3, used - 1});
      }
      if (how == std::string("a part that is not read") && used > 2 * kKeysOfPart) {
        p.reads = {{3, 40}, {2 * kKeysOfPart + 1, used}};
        p.positions.resize(used);
        std::iota(p.positions.begin(), p.positions.end(), 0);
        p.first_seen = 50;  // nor is the first seen
      }
      ExpectExact(p);
      Elements q(shape.dtype, p.q);
      const Rows keys(FormatOf(shape), p.keys, shape.key_width);
      const Rows values(FormatOf(shape), p.values, shape.value_width);
      for (AttentionPath path : AttentionPaths(shape)) {
        if (path == AttentionPath::kAnywhere) continue;
        std::vector<float> scratch(DecodeScratchFloats(shape));
        const auto lane = [&](Elements& out, std::vector<float>& logits) {
          return DecodeLane{.q = q.data(),
                            .keys = keys.data(),
                            .values = values.data(),
                            .used = used,
                            .out = out.data(),
                            .logits = logits.data(),
                            .positions = p.positions.empty() ? nullptr : p.positions.data(),
                            .first_seen = p.first_seen,
                            .reads = p.reads};
        };
        const std::vector<float> nothing(shape.group * shape.value_width);
        Elements whole(shape.dtype, nothing), joined(shape.dtype, nothing);
        std::vector<float> logits(LogitFloats(shape, used)), of_parts(logits.size());
        DecodeAttention(path, lane(whole, logits), shape, scratch.data());
        std::vector<float> parts(PartsOf(used) * PartFloats(shape));
        for (int64_t part = PartsOf(used) - 1; part >= 0; --part) {  // in any order
          AttendPart(path, lane(joined, of_parts), shape, part,
                     parts.data() + part * PartFloats(shape), scratch.data());
        }
        JoinParts(path, lane(joined, of_parts), shape, parts.data(), scratch.data());
        for (size_t i = 0; i < nothing.size(); ++i) {
          ASSERT_EQ(joined.at(i), whole.at(i)) << AttentionPathName(path) << ", output " << i;
        }
        EXPECT_EQ(of_parts, logits) << AttentionPathName(path);
      }
    }
  }
}

// Of several threads, each of which has some of a lane's parts.
TEST_P(AttentionKernelsTest, PartsHaveTheBitsOfTheWhole) {
  ExpectPartsOfTheWhole(Shape({.group = 3, .key = 32, .value = 48}));
  ExpectPartsOfTheWhole(Shape({.group = 3, .key = 32, .value = 64}));  // of pairs and tiles, too
}

// A row's bits do not depend on those computed with it, of which some see a part more.
TEST_P(AttentionKernelsTest, RowsAreTheSameInAnyCompany) {
  const LaneShape shape = Shape({.group = 3, .key = 64, .value = 64});
  const int64_t rows = PrefillRows(shape), stride = 3 * 64;
  for (const int64_t past : {int64_t{50}, kKeysOfPart - 7}) {
    SCOPED_TRACE(past);
    const Problem p = Random(shape, past + rows, 21);
    const std::vector<float> q = Random(shape, rows * 3, 22).keys;
    Elements queries(shape.dtype, q);
    const Rows keys(FormatOf(shape), p.keys, shape.key_width);
    const Rows values(FormatOf(shape), p.values, shape.value_width);
    std::vector<float> scratch(PrefillScratchFloats(shape));
    for (AttentionPath path : AttentionPaths(shape)) {
      const auto run = [&](int64_t first, int64_t count) {
        Elements out(shape.dtype, std::vector<float>(count * stride));
        const int64_t size = shape.dtype == DType::kFloat32 ? 4 : 2;
        PrefillAttention(path,
                         {.q = static_cast<char*>(queries.data()) + first * stride * size,
                          .q_stride = stride,
                          .keys = keys.data(),
                          .values = values.data(),
                          .rows = count,
                          .seen = past + first + 1,
                          .out = out.data(),
                          .out_stride = stride},
                         shape, scratch.data());
        return out;
      };
      const Elements together = run(0, rows);
      for (int64_t row = 0; row < rows; ++row) {
        const Elements alone = run(row, 1);
        for (int64_t i = 0; i < stride; ++i) {
          ASSERT_EQ(alone.at(i), together.at(row * stride + i)) << "of row " << row;
        }
      }
    }
  }
}

}  // namespace attention_kernels_test
}  // namespace epikv
