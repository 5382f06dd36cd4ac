// Attention over a lane by each of our paths that this processor has.
//
//   attention_paths
//
// Prints, on one thread, the least of 24 runs. A decoding token over lanes that the caches do not
// hold: microseconds, and over those that reading the lane's bytes takes. Rows of a prompt:
// billions of operations a second.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/elements.h"
#include "runtime/base/steady_time.h"
#include "runtime/kernels/kernels.h"

namespace epikv {
namespace {

constexpr int kRuns = 24;
constexpr int64_t kLaneBytes = 64 << 20;  // of all lanes that are attended in turn

// Microseconds of work(run).
double LeastOf(const std::function<void(int64_t)>& work) {
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    const absl::Time begin = SteadyNow();
    work(run);
    least = std::min(least, absl::ToDoubleMicroseconds(SteadyNow() - begin));
  }
  return least;
}

// Elements of the shape's dtype, of size 1 and below.
std::vector<char> Elements(int64_t count, DType dtype) {
  std::vector<float> wide(count);
  for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(i * 37 % 101) / 101 - 0.5f;
  std::vector<char> elements(count * ElementBytes(dtype));
  FromFloat(wide.data(), elements.data(), count, dtype);
  return elements;
}

std::vector<char> Rows(int64_t count, int64_t width, const KvFormat& format) {
  const std::vector<char> row = Elements(width, format.model);
  std::vector<char> rows(count * format.RowBytes(width));
  for (int64_t i = 0; i < count; ++i) {
    WriteRow(row.data(), rows.data() + i * format.RowBytes(width), width, format);
  }
  return rows;
}

uint64_t Read(const std::vector<char>& bytes, int64_t begin, int64_t count) {
  uint64_t sums[8] = {};
  for (int64_t at = begin; at + 64 <= begin + count; at += 64) {
    for (int64_t i = 0; i < 8; ++i) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + at + 8 * i, sizeof(word));
      sums[i] += word;
    }
  }
  uint64_t sum = 0;
  for (uint64_t part : sums) sum += part;
  return sum;
}

void OfShape(const LaneShape& shape) {
  const KvFormat format = {shape.dtype, shape.stored};
  const std::string of =
      absl::StrCat(format.name(), ", ", shape.group, " queries of ", shape.key_width);
  const std::vector<char> q = Elements(64 * shape.group * shape.key_width, shape.dtype);
  std::vector<char> out(q.size());
  std::vector<float> scratch(std::max(DecodeScratchFloats(shape), PrefillScratchFloats(shape)));
  const int64_t row_bytes = format.RowBytes(shape.key_width);
  for (const int64_t used : {512, 4096}) {
    const int64_t lane_bytes = used * row_bytes;
    const int64_t lanes = std::max<int64_t>(2, kLaneBytes / (2 * lane_bytes));
    const std::vector<char> keys = Rows(lanes * used, shape.key_width, format), values = keys;
    volatile uint64_t sink = 0;
    const double read = LeastOf([&](int64_t run) {
      const int64_t begin = run % lanes * lane_bytes;
      sink = sink + Read(keys, begin, lane_bytes) + Read(values, begin, lane_bytes);
    });
    for (const AttentionPath path : AttentionPaths(shape)) {
      const double decode = LeastOf([&](int64_t run) {
        const int64_t begin = run % lanes * lane_bytes;
        DecodeAttention(path,
                        {.q = q.data(),
                         .keys = keys.data() + begin,
                         .values = values.data() + begin,
                         .used = used,
                         .out = out.data()},
                        shape, scratch.data());
      });
      std::printf("%-28s %-13s decode over %4lld %8.1f us %6.2f of reading\n", of.c_str(),
                  std::string(AttentionPathName(path)).c_str(), static_cast<long long>(used),
                  decode, decode / read);
    }
  }
  constexpr int64_t kPast = 512;
  const int64_t rows = PrefillRows(shape);
  const std::vector<char> keys = Rows(kPast + rows, shape.key_width, format), values = keys;
  for (const AttentionPath path : AttentionPaths(shape)) {
    const double prefill = LeastOf([&](int64_t) {
      PrefillAttention(path,
                       {.q = q.data(),
                        .q_stride = shape.group * shape.key_width,
                        .keys = keys.data(),
                        .values = values.data(),
                        .rows = rows,
                        .seen = kPast + 1,
                        .out = out.data(),
                        .out_stride = shape.group * shape.value_width},
                       shape, scratch.data());
    });
    const auto operations =
        static_cast<double>(4 * rows * shape.group * (kPast + rows / 2) * shape.key_width);
    std::printf("%-28s %-13s prefill %17.1f GFLOP/s\n", of.c_str(),
                std::string(AttentionPathName(path)).c_str(), operations / prefill / 1e3);
  }
}

void Run() {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const KvDType stored : {KvDType::kModel, KvDType::kInt8}) {
      for (const auto& [group, width] : {std::pair<int64_t, int64_t>{7, 64}, {1, 64}, {4, 128}}) {
        OfShape({.group = group,
                 .key_width = width,
                 .value_width = width,
                 .scale = 0.125f,
                 .dtype = dtype,
                 .stored = stored});
      }
    }
  }
}

}  // namespace
}  // namespace epikv

int main() {
  epikv::Run();
  return 0;
}
