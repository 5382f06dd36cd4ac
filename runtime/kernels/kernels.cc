#include "runtime/kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/base/elements.h"
#include "runtime/base/processor.h"
#include "runtime/kernels/attend_avx512.h"
#include "runtime/kernels/attend_blocks.h"
#include "runtime/kernels/attend_simd.h"
#include "runtime/kernels/bent_logits.h"
#include "runtime/kernels/simd.h"

namespace epikv {
namespace {

// Keys of one block: its fp32 copies of K and V stay in the first-level cache.
constexpr int64_t kBlock = 32;

// How rows of K or V become fp32.
template <class T>
struct ModelRows {
  EPIKV_INLINE static void Read(const void* rows, int64_t begin, int64_t count, int64_t width,
                                float* out) {
    Widen(static_cast<const T*>(rows) + begin * width, out, count * width);
  }
};

struct Int8Rows {
  EPIKV_INLINE static void Read(const void* rows, int64_t begin, int64_t count, int64_t width,
                                float* out) {
    constexpr KvFormat kFormat = {.stored = KvDType::kInt8};
    const auto* row = static_cast<const int8_t*>(rows) + begin * kFormat.RowBytes(width);
    for (int64_t j = 0; j < count; ++j, row += kFormat.RowBytes(width)) {
      const float scale = RowScale(row, width);
      for (int64_t i = 0; i < width; ++i) out[j * width + i] = scale * static_cast<float>(row[i]);
    }
  }
};

template <class T>
EPIKV_INLINE void Narrow(const float* in, T* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) Store(out + i, in[i]);
}

// kWidth: the row width if it is known to the compiler, else 0.
template <int64_t kWidth>
EPIKV_INLINE float Dot(const float* a, const float* b, int64_t width) {
  const int64_t n = kWidth > 0 ? kWidth : width;
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

EPIKV_INLINE void AddScaled(float* acc, const float* row, float factor, int64_t width) {
  for (int64_t i = 0; i < width; ++i) acc[i] += factor * row[i];
}

// Where there is no better path, so that no width of it is known to the compiler. left: if not
// null, where DecodeLane::logits says; of one row.
template <class T, class Rows>
EPIKV_INLINE void AttendBody(const PrefillLane& lane, const LaneShape& shape, float* left,
                             float* scratch) {
  const int64_t group = shape.group, dk = shape.key_width, dv = shape.value_width;
  const int64_t queries = lane.rows * group, used = lane.seen + lane.rows - 1;
  float* q = scratch;             // [queries, dk], scaled
  float* acc = q + queries * dk;  // [queries, dv]
  float* k = acc + queries * dv;  // [kBlock, dk]
  float* v = k + kBlock * dk;     // [kBlock, dv]
  float* peak = v + kBlock * dv;  // [queries] running maximum
  float* mass = peak + queries;   // [queries] running sum
  for (int64_t r = 0; r < lane.rows; ++r) {
    Widen(static_cast<const T*>(lane.q) + r * lane.q_stride, q + r * group * dk, group * dk);
  }
  for (int64_t i = 0; i < queries * dk; ++i) q[i] *= shape.scale;
  std::fill(acc, acc + queries * dv, 0.0f);
  std::fill(peak, peak + queries, -INFINITY);
  std::fill(mass, mass + queries, 0.0f);

  auto attend = [&](int64_t begin, int64_t count) __attribute__((always_inline)) {
    if (!Window{lane.positions, lane.first_seen}.SeesAny(begin, count)) {
      return LeaveUnseen(left, group, used, begin, count);
    }
    Rows::Read(lane.keys, begin, count, dk, k);
    Rows::Read(lane.values, begin, count, dv, v);
    // Queries of the rows before do not see this block.
    for (int64_t g = std::max<int64_t>(0, begin - lane.seen + 1) * group; g < queries; ++g) {
      const int64_t row = g / group, seen = std::min(count, lane.seen + row - begin);
      float logit[kBlock];
      float top = peak[g];
      for (int64_t j = 0; j < seen; ++j) logit[j] = Dot<0>(q + g * dk, k + j * dk, dk);
      Bend({lane.positions, lane.first_seen + row}, shape.soft_cap, begin, seen, logit);
      if (left != nullptr) std::memcpy(left + g * used + begin, logit, seen * sizeof(float));
      for (int64_t j = 0; j < seen; ++j) top = std::max(top, logit[j]);
      if (top == -INFINITY) continue;  // nothing is seen yet
      for (int64_t j = seen; j < kBlock; ++j) logit[j] = -INFINITY;
      if (top > peak[g]) {
        const float shrink = ExpNegative(peak[g] - top);
        for (int64_t i = 0; i < dv; ++i) acc[g * dv + i] *= shrink;
        mass[g] *= shrink;
        peak[g] = top;
      }
      for (int64_t j = 0; j < kBlock; ++j) logit[j] = ExpNegative(logit[j] - top);
      float sum = 0;
      for (int64_t j = 0; j < kBlock; ++j) sum += logit[j];
      mass[g] += sum;
      for (int64_t j = 0; j < seen; ++j) {
        AddScaled(acc + g * dv, v + j * dv, logit[j], dv);
      }
    }
  };
  LeaveUnread(left, lane.reads, group, used, {0, used});
  const ReadsOf ranges(lane.reads, used);
  for (const SlotRange& range : ranges.reads) {
    for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
      attend(begin, std::min(kBlock, range.end - begin));
    }
  }
  if (left != nullptr) std::memcpy(left + group * used, peak, 2 * group * sizeof(float));
  for (int64_t g = 0; g < queries; ++g) {
    const int64_t row = g / group, of_group = g % group;
    const float norm = 1.0f / mass[g];
    T* const out = static_cast<T*>(lane.out) + row * lane.out_stride + of_group * dv;
    for (int64_t i = 0; i < dv; ++i) Store(out + i, acc[g * dv + i] * norm);
    if (lane.log_sum_exp == nullptr) continue;
    lane.log_sum_exp[of_group * lane.log_sum_exp_stride + row] = peak[g] + std::log(mass[g]);
  }
}

template <class T>
EPIKV_INLINE void AttendOf(const PrefillLane& lane, const LaneShape& shape, float* left,
                           float* scratch) {
  if (shape.stored == KvDType::kInt8) return AttendBody<T, Int8Rows>(lane, shape, left, scratch);
  AttendBody<T, ModelRows<T>>(lane, shape, left, scratch);
}

EPIKV_CLONES void AttendFloat(const PrefillLane& lane, const LaneShape& shape, float* left,
                              float* scratch) {
  AttendOf<float>(lane, shape, left, scratch);
}
EPIKV_CLONES void AttendBFloat16(const PrefillLane& lane, const LaneShape& shape, float* left,
                                 float* scratch) {
  AttendOf<BFloat16>(lane, shape, left, scratch);
}
EPIKV_CLONES void AttendFloat16(const PrefillLane& lane, const LaneShape& shape, float* left,
                                float* scratch) {
  AttendOf<Float16>(lane, shape, left, scratch);
}

void AttendAnywhere(const PrefillLane& lane, const LaneShape& shape, float* left, float* scratch) {
  switch (shape.dtype) {
    case DType::kFloat32:
      return AttendFloat(lane, shape, left, scratch);
    case DType::kBFloat16:
      return AttendBFloat16(lane, shape, left, scratch);
    case DType::kFloat16:
      return AttendFloat16(lane, shape, left, scratch);
  }
}

// Of a path that goes by blocks.
void AttendBlocks(AttentionPath path, const PrefillLane& lane, const LaneShape& shape, float* left,
                  float* scratch) {
  if (path == AttentionPath::kAvx512BFloat16) {
    return AttendAvx512BFloat16(lane, shape, left, scratch);
  }
  if (path == AttentionPath::kAmx) return AttendAmx(lane, shape, left, scratch);
  if (path == AttentionPath::kAvx512) return AttendAvx512(lane, shape, left, scratch);
  AttendSimd(lane, shape, left, scratch);
}

int64_t AnywhereScratchFloats(const LaneShape& shape, int64_t rows) {
  return (rows * shape.group + kBlock) * (shape.key_width + shape.value_width) +
         2 * rows * shape.group;
}

// Whichever the path.
int64_t ScratchFloats(const LaneShape& shape, int64_t rows) {
  return std::max(AnywhereScratchFloats(shape, rows), AttendBlocksScratchFloats(shape, rows));
}

// peak, mass: of each query.
EPIKV_CLONES void NormalizeInto(const float* logits, const float* peak, const float* mass,
                                int64_t group, int64_t used, float* row) {
  std::fill(row, row + used, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    const float norm = 1.0f / (mass[g] * static_cast<float>(group));
    const float* const logit = logits + g * used;
    for (int64_t j = 0; j < used; ++j) row[j] += ExpNegative(logit[j] - peak[g]) * norm;
  }
}

template <class T, class Rows, int64_t kKey>
EPIKV_INLINE void RowBody(const DecodeLane& lane, const LaneShape& shape, float* row,
                          float* scratch) {
  const int64_t group = shape.group, dk = shape.key_width, used = lane.used;
  const Window window = {lane.positions, lane.first_seen};
  float* q = scratch;               // [group, dk], scaled
  float* k = q + group * dk;        // [kBlock, dk]
  float* logits = k + kBlock * dk;  // [group, used]
  Widen(static_cast<const T*>(lane.q), q, group * dk);
  for (int64_t i = 0; i < group * dk; ++i) q[i] *= shape.scale;
  LeaveUnread(logits, lane.reads, group, used, {0, used});
  const ReadsOf ranges(lane.reads, used);
  for (const SlotRange& range : ranges.reads) {
    for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
      const int64_t count = std::min(kBlock, range.end - begin);
      Rows::Read(lane.keys, begin, count, dk, k);
      for (int64_t g = 0; g < group; ++g) {
        float* const of_block = logits + g * used + begin;
        for (int64_t j = 0; j < count; ++j) of_block[j] = Dot<kKey>(q + g * dk, k + j * dk, dk);
        Bend(window, shape.soft_cap, begin, count, of_block);
      }
    }
  }
  std::fill(row, row + used, 0.0f);
  for (int64_t g = 0; g < group; ++g) {
    float* const logit = logits + g * used;
    float top = -INFINITY, mass = 0;
    for (int64_t j = 0; j < used; ++j) top = std::max(top, logit[j]);
    for (int64_t j = 0; j < used; ++j) logit[j] = ExpNegative(logit[j] - top);
    for (int64_t j = 0; j < used; ++j) mass += logit[j];
    const float norm = 1.0f / (mass * static_cast<float>(group));
    for (int64_t j = 0; j < used; ++j) row[j] += logit[j] * norm;
  }
}

template <class T, class Rows>
EPIKV_INLINE void RowOfRows(const DecodeLane& lane, const LaneShape& shape, float* row,
                            float* scratch) {
  if (shape.key_width == 64) {
    RowBody<T, Rows, 64>(lane, shape, row, scratch);
  } else if (shape.key_width == 128) {
    RowBody<T, Rows, 128>(lane, shape, row, scratch);
  } else if (shape.key_width == 32) {
    RowBody<T, Rows, 32>(lane, shape, row, scratch);
  } else {
    RowBody<T, Rows, 0>(lane, shape, row, scratch);
  }
}

template <class T>
EPIKV_INLINE void RowOf(const DecodeLane& lane, const LaneShape& shape, float* row,
                        float* scratch) {
  if (shape.stored == KvDType::kInt8) return RowOfRows<T, Int8Rows>(lane, shape, row, scratch);
  RowOfRows<T, ModelRows<T>>(lane, shape, row, scratch);
}

EPIKV_CLONES void RowFloat(const DecodeLane& lane, const LaneShape& shape, float* row,
                           float* scratch) {
  RowOf<float>(lane, shape, row, scratch);
}
EPIKV_CLONES void RowBFloat16(const DecodeLane& lane, const LaneShape& shape, float* row,
                              float* scratch) {
  RowOf<BFloat16>(lane, shape, row, scratch);
}
EPIKV_CLONES void RowFloat16(const DecodeLane& lane, const LaneShape& shape, float* row,
                             float* scratch) {
  RowOf<Float16>(lane, shape, row, scratch);
}

template <class T>
EPIKV_INLINE void RotateOf(const T* in, T* out, int64_t width, int64_t half, bool interleaved,
                           const float* cos_sin) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float x = Load(in + i * step), y = Load(in + i * step + apart);
    Store(out + i * step, x * cos_sin[i] - y * cos_sin[half + i]);
    Store(out + i * step + apart, y * cos_sin[i] + x * cos_sin[half + i]);
  }
  std::memmove(static_cast<void*>(out + 2 * half), in + 2 * half, (width - 2 * half) * sizeof(T));
}

EPIKV_CLONES void RotateFloat(const float* in, float* out, int64_t width, int64_t half,
                              bool interleaved, const float* cos_sin) {
  RotateOf(in, out, width, half, interleaved, cos_sin);
}
EPIKV_CLONES void RotateBFloat16(const BFloat16* in, BFloat16* out, int64_t width, int64_t half,
                                 bool interleaved, const float* cos_sin) {
  RotateOf(in, out, width, half, interleaved, cos_sin);
}
EPIKV_CLONES void RotateFloat16(const Float16* in, Float16* out, int64_t width, int64_t half,
                                bool interleaved, const float* cos_sin) {
  RotateOf(in, out, width, half, interleaved, cos_sin);
}

// x as T holds it.
template <class T>
EPIKV_INLINE float Rounded(float x) {
  T narrow;
  Store(&narrow, x);
  return Load(&narrow);
}

template <class T>
EPIKV_INLINE void RmsNormOf(const T* in, const T* weight, T* out, int64_t width,
                            const RmsNormKind& kind) {
  float squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    const float x = Load(in + i);
    squares += x * x;
  }
  const float norm = 1.0f / std::sqrt(squares / static_cast<float>(width) + kind.eps);
  if (kind.wide) {
    for (int64_t i = 0; i < width; ++i) {
      Store(out + i, (kind.offset + Load(weight + i)) * (Load(in + i) * norm));
    }
    return;
  }
  for (int64_t i = 0; i < width; ++i) {
    Store(out + i, Load(weight + i) * Rounded<T>(Load(in + i) * norm));
  }
}

template <class T>
EPIKV_INLINE void SwiGluOf(const T* gate, const T* up, T* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = Load(gate + i), e = ExpNegative(-std::fabs(x));
    const float sigmoid = (x < 0 ? e : 1.0f) / (1.0f + e);
    Store(out + i, Rounded<T>(x * sigmoid) * Load(up + i));
  }
}

EPIKV_CLONES void RmsNormFloat(const float* in, const float* weight, float* out, int64_t width,
                               const RmsNormKind& kind) {
  RmsNormOf(in, weight, out, width, kind);
}
EPIKV_CLONES void RmsNormBFloat16(const BFloat16* in, const BFloat16* weight, BFloat16* out,
                                  int64_t width, const RmsNormKind& kind) {
  RmsNormOf(in, weight, out, width, kind);
}
EPIKV_CLONES void RmsNormFloat16(const Float16* in, const Float16* weight, Float16* out,
                                 int64_t width, const RmsNormKind& kind) {
  RmsNormOf(in, weight, out, width, kind);
}

EPIKV_CLONES void SwiGluFloat(const float* gate, const float* up, float* out, int64_t count) {
  SwiGluOf(gate, up, out, count);
}
EPIKV_CLONES void SwiGluBFloat16(const BFloat16* gate, const BFloat16* up, BFloat16* out,
                                 int64_t count) {
  SwiGluOf(gate, up, out, count);
}
EPIKV_CLONES void SwiGluFloat16(const Float16* gate, const Float16* up, Float16* out,
                                int64_t count) {
  SwiGluOf(gate, up, out, count);
}

template <class T>
EPIKV_INLINE float StepNormOf(const T* now, const float* before, float* stored, int64_t width) {
  // Sixteen partial sums keep long rows accurate without a double pass.
  float sums[16] = {};
  for (int64_t i = 0; i < width; ++i) {
    const float x = Load(now + i);
    const float d = x - before[i];
    stored[i] = x;
    sums[i % 16] += d * d;
  }
  float total = 0;
  for (float s : sums) total += s;
  return std::sqrt(total);
}

EPIKV_CLONES void WidenInto(const void* in, float* out, int64_t width, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Widen(static_cast<const float*>(in), out, width);
    case DType::kBFloat16:
      return Widen(static_cast<const BFloat16*>(in), out, width);
    case DType::kFloat16:
      return Widen(static_cast<const Float16*>(in), out, width);
  }
}

EPIKV_CLONES void NarrowInto(const float* in, void* out, int64_t width, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return Narrow(in, static_cast<float*>(out), width);
    case DType::kBFloat16:
      return Narrow(in, static_cast<BFloat16*>(out), width);
    case DType::kFloat16:
      return Narrow(in, static_cast<Float16*>(out), width);
  }
}

EPIKV_CLONES float StepNormFloat(const float* now, const float* before, float* stored, int64_t w) {
  return StepNormOf(now, before, stored, w);
}
EPIKV_CLONES float StepNormBFloat16(const BFloat16* now, const float* before, float* stored,
                                    int64_t w) {
  return StepNormOf(now, before, stored, w);
}
EPIKV_CLONES float StepNormFloat16(const Float16* now, const float* before, float* stored,
                                   int64_t w) {
  return StepNormOf(now, before, stored, w);
}

}  // namespace

std::vector<AttentionPath> AttentionPaths(const LaneShape& shape) {
  std::vector<AttentionPath> paths = {AttentionPath::kAnywhere};
  if (CanAttendSimd(shape)) paths.push_back(AttentionPath::kSimd);
  if (CanAttendAvx512(shape)) paths.push_back(AttentionPath::kAvx512);
  if (CanAttendAvx512BFloat16(shape)) {
    paths.insert(ThisProcessor().fast_bf16_pairs ? paths.end() : paths.end() - 1,
                 AttentionPath::kAvx512BFloat16);
  }
  if (CanAttendAmx(shape)) paths.push_back(AttentionPath::kAmx);
  return paths;
}

AttentionPath FastestAttentionPath(const LaneShape& shape) {
  if (CanAttendAmx(shape)) return AttentionPath::kAmx;
  if (ThisProcessor().fast_bf16_pairs && CanAttendAvx512BFloat16(shape)) {
    return AttentionPath::kAvx512BFloat16;
  }
  if (CanAttendAvx512(shape)) return AttentionPath::kAvx512;
  return CanAttendSimd(shape) ? AttentionPath::kSimd : AttentionPath::kAnywhere;
}

absl::string_view AttentionPathName(AttentionPath path) {
  switch (path) {
    case AttentionPath::kAnywhere:
      return "any processor";
    case AttentionPath::kSimd:
      return SimdName();
    case AttentionPath::kAvx512:
      return "AVX-512";
    case AttentionPath::kAvx512BFloat16:
      return "AVX-512 BF16";
    case AttentionPath::kAmx:
      return "AMX";
  }
  return "";
}

int64_t DecodeScratchFloats(const LaneShape& shape) { return ScratchFloats(shape, /*rows=*/1); }

int64_t LogitFloats(const LaneShape& shape, int64_t used) { return shape.group * (used + 2); }

void RowOfLogits(const float* logits, int64_t group, int64_t used, float* row) {
  const float* const peak = logits + group * used;
  NormalizeInto(logits, peak, peak + group, group, used, row);
}

int64_t RowScratchFloats(const LaneShape& shape, int64_t used) {
  return (shape.group + kBlock) * shape.key_width + shape.group * used;
}

void DecodeAttention(AttentionPath path, const DecodeLane& lane, const LaneShape& shape,
                     float* scratch) {
  if (path != AttentionPath::kAnywhere) {
    return AttendBlocks(path, OneRow(lane), shape, lane.logits, scratch);
  }
  AttendAnywhere(OneRow(lane), shape, lane.logits, scratch);
}

void AddPart(const float* part, int64_t width, float* total) {
  const float peak = part[width], mass = part[width + 1];
  float &total_peak = total[width], &total_mass = total[width + 1];
  if (mass == 0) return;  // nothing of it is seen
  if (total_mass == 0) {
    std::copy(part, part + width + 2, total);
    return;
  }
  const float top = std::max(total_peak, peak);
  const float before = std::exp(total_peak - top), now = std::exp(peak - top);
  total_peak = top;
  total_mass = total_mass * before + mass * now;
  for (int64_t i = 0; i < width; ++i) total[i] = total[i] * before + part[i] * now;
}

int64_t PartFloats(const LaneShape& shape) { return shape.group * (shape.value_width + 2); }

void AttendPart(AttentionPath path, const DecodeLane& lane, const LaneShape& shape, int64_t part,
                float* sums_of_part, float* scratch) {
  PrefillLane row = OneRow(lane);
  row.part = part;
  row.sums_of_part = sums_of_part;
  AttendBlocks(path, row, shape, lane.logits, scratch);
}

void JoinParts(AttentionPath path, const DecodeLane& lane, const LaneShape& shape,
               const float* parts, float* scratch) {
  PrefillLane row = OneRow(lane);
  row.parts = parts;
  AttendBlocks(path, row, shape, lane.logits, scratch);
}

int64_t PrefillScratchFloats(const LaneShape& shape) {
  return ScratchFloats(shape, PrefillRows(shape));
}

void PrefillAttention(AttentionPath path, const PrefillLane& lane, const LaneShape& shape,
                      float* scratch) {
  if (path != AttentionPath::kAnywhere) return AttendBlocks(path, lane, shape, nullptr, scratch);
  AttendAnywhere(lane, shape, nullptr, scratch);
}

void AttentionRow(const DecodeLane& lane, const LaneShape& shape, float* row, float* scratch) {
  switch (shape.dtype) {
    case DType::kFloat32:
      return RowFloat(lane, shape, row, scratch);
    case DType::kBFloat16:
      return RowBFloat16(lane, shape, row, scratch);
    case DType::kFloat16:
      return RowFloat16(lane, shape, row, scratch);
  }
}

void Rotate(const void* in, void* out, int64_t width, int64_t half, bool interleaved,
            const float* cos_sin, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return RotateFloat(static_cast<const float*>(in), static_cast<float*>(out), width, half,
                         interleaved, cos_sin);
    case DType::kBFloat16:
      return RotateBFloat16(static_cast<const BFloat16*>(in), static_cast<BFloat16*>(out), width,
                            half, interleaved, cos_sin);
    case DType::kFloat16:
      return RotateFloat16(static_cast<const Float16*>(in), static_cast<Float16*>(out), width, half,
                           interleaved, cos_sin);
  }
}

void RmsNorm(const void* in, const void* weight, void* out, int64_t width, const RmsNormKind& kind,
             DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return RmsNormFloat(static_cast<const float*>(in), static_cast<const float*>(weight),
                          static_cast<float*>(out), width, kind);
    case DType::kBFloat16:
      return RmsNormBFloat16(static_cast<const BFloat16*>(in), static_cast<const BFloat16*>(weight),
                             static_cast<BFloat16*>(out), width, kind);
    case DType::kFloat16:
      return RmsNormFloat16(static_cast<const Float16*>(in), static_cast<const Float16*>(weight),
                            static_cast<Float16*>(out), width, kind);
  }
}

void SwiGlu(const void* gate, const void* up, void* out, int64_t count, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return SwiGluFloat(static_cast<const float*>(gate), static_cast<const float*>(up),
                         static_cast<float*>(out), count);
    case DType::kBFloat16:
      return SwiGluBFloat16(static_cast<const BFloat16*>(gate), static_cast<const BFloat16*>(up),
                            static_cast<BFloat16*>(out), count);
    case DType::kFloat16:
      return SwiGluFloat16(static_cast<const Float16*>(gate), static_cast<const Float16*>(up),
                           static_cast<Float16*>(out), count);
  }
}

float StepNorm(const void* now, const float* before, float* stored, int64_t width, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      break;
    case DType::kBFloat16:
      return StepNormBFloat16(static_cast<const BFloat16*>(now), before, stored, width);
    case DType::kFloat16:
      return StepNormFloat16(static_cast<const Float16*>(now), before, stored, width);
  }
  return StepNormFloat(static_cast<const float*>(now), before, stored, width);
}

void ToFloat(const void* in, float* out, int64_t width, DType dtype) {
  WidenInto(in, out, width, dtype);
}

void FromFloat(const float* in, void* out, int64_t width, DType dtype) {
  NarrowInto(in, out, width, dtype);
}

}  // namespace epikv
