#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/base/dtype.h"
#include "runtime/kernels/kv_format.h"

// The inner loops on raw memory, of attention above all: what the compiler vectorises best, for the
// machine it finds at start-up (AVX-512, AVX2 or plain). Without torch. Elements are of a DType;
// all arithmetic is fp32.

namespace epikv {

// Slots [begin, end) of a lane.
struct SlotRange {
  int64_t begin = 0, end = 0;
  bool operator==(const SlotRange&) const = default;
};

// One KV head's cache and the queries of its group.
struct DecodeLane {
  const void* q = nullptr;       // [group, key_width], rotated
  const void* keys = nullptr;    // [used] rows of key_width
  const void* values = nullptr;  // [used] rows of value_width
  int64_t used = 0;              // >= 1
  void* out = nullptr;           // [group, value_width]
  // If not null: where the logits are left, of LogitFloats.
  float* logits = nullptr;
  // If not null: where each slot's token is, [used]. Those below `first_seen` are not attended.
  const int64_t* positions = nullptr;
  int64_t first_seen = 0;
  // If not empty: the only slots that are read, ascending.
  absl::Span<const SlotRange> reads;
};

struct LaneShape {
  int64_t group = 1;  // query heads of one KV head
  int64_t key_width = 0, value_width = 0;
  float scale = 1;
  float soft_cap = 0;                // logits become cap * tanh(logits / cap); 0: they stay
  DType dtype = DType::kFloat32;     // elements of q and out
  KvDType stored = KvDType::kModel;  // of keys and values: rows of KvFormat
};

// What the inner loops of attention are written for.
enum class AttentionPath { kAnywhere, kSimd, kAvx512, kAvx512BFloat16, kAmx };
absl::string_view AttentionPathName(AttentionPath path);

// Those that this processor has for a shape, the fastest last; and that one alone.
std::vector<AttentionPath> AttentionPaths(const LaneShape& shape);
AttentionPath FastestAttentionPath(const LaneShape& shape);

// Paths but kAnywhere attend to the slots of long lanes in parts of so many, and join what comes of
// them in the order of the slots: the bits are the same whether one thread attends to all of a lane
// or several to its parts.
inline constexpr int64_t kKeysOfPart = 2048;
inline int64_t PartsOf(int64_t used) { return (used + kKeysOfPart - 1) / kKeysOfPart; }

// Floats of scratch that one DecodeAttention call needs, whichever its path.
int64_t DecodeScratchFloats(const LaneShape& shape);

// out = softmax(scale * q keys^T) values, in one pass over the cache (online softmax). Some slot is
// attended.
void DecodeAttention(AttentionPath path, const DecodeLane& lane, const LaneShape& shape,
                     float* scratch);

// DecodeAttention by parts: AttendPart of each leaves what JoinParts takes of all, [PartsOf(used),
// PartFloats]. Precondition: the path is not kAnywhere.
int64_t PartFloats(const LaneShape& shape);
void AttendPart(AttentionPath path, const DecodeLane& lane, const LaneShape& shape, int64_t part,
                float* sums_of_part, float* scratch);
void JoinParts(AttentionPath path, const DecodeLane& lane, const LaneShape& shape,
               const float* parts, float* scratch);

// Queries of some rows of a prompt, of one KV head's group. Row r sees slots [0, seen + r).
struct PrefillLane {
  const void* q = nullptr;       // [rows] of [group, key_width], rotated
  int64_t q_stride = 0;          // elements from one row to the next
  const void* keys = nullptr;    // [seen + rows - 1] rows of key_width
  const void* values = nullptr;  // [seen + rows - 1] rows of value_width
  int64_t rows = 0;              // 1 to PrefillRows
  int64_t seen = 0;              // >= 1
  void* out = nullptr;           // [rows] of [group, value_width]
  int64_t out_stride = 0;        // elements
  // If not null: where each query's log-sum-exp of logits is left, [group] of [rows].
  float* log_sum_exp = nullptr;
  int64_t log_sum_exp_stride = 0;  // floats from one query of the group to the next
  // As in DecodeLane; a row's `first_seen` is one above that of the row before.
  const int64_t* positions = nullptr;
  int64_t first_seen = 0;
  absl::Span<const SlotRange> reads;  // of one row alone
  // Of one row alone: what AttendPart is given, or JoinParts' parts.
  int64_t part = -1;
  float* sums_of_part = nullptr;
  const float* parts = nullptr;
};

// A decoding token is the one row of a prompt.
inline PrefillLane OneRow(const DecodeLane& lane) {
  return {.q = lane.q,
          .keys = lane.keys,
          .values = lane.values,
          .rows = 1,
          .seen = lane.used,
          .out = lane.out,
          .positions = lane.positions,
          .first_seen = lane.first_seen,
          .reads = lane.reads};
}

// The rows of one call, so that what belongs to its queries stays in the caches.
inline int64_t PrefillRows(const LaneShape& shape) {
  return shape.group < 64 ? 64 / shape.group : 1;
}
int64_t PrefillScratchFloats(const LaneShape& shape);

// The same for each row. Precondition: the path is of AttentionPaths.
void PrefillAttention(AttentionPath path, const PrefillLane& lane, const LaneShape& shape,
                      float* scratch);

// Of one lane: [group, used], then each query's largest and its sum of exp(logit - largest).
int64_t LogitFloats(const LaneShape& shape, int64_t used);

// The row below, from what DecodeAttention left.
void RowOfLogits(const float* logits, int64_t group, int64_t used, float* row);

// Floats of scratch that one AttentionRow call over `used` slots needs.
int64_t RowScratchFloats(const LaneShape& shape, int64_t used);

// Probabilities that the group's queries give each slot, averaged over the group: row [used].
void AttentionRow(const DecodeLane& lane, const LaneShape& shape, float* row, float* scratch);

// Rotates one head's channels by RoPE. cos_sin: [rotary / 2] cosines, then as many sines. Channels
// beyond 2 x half are copied. in and out may be the same.
void Rotate(const void* in, void* out, int64_t width, int64_t half, bool interleaved,
            const float* cos_sin, DType dtype);

// A row over its root mean square, times a weight: x / sqrt(mean(x^2) + eps), in fp32, narrowed and
// then weighed, as Llama does; with `wide`, weighed by offset + weight and then narrowed, as Gemma.
struct RmsNormKind {
  float eps = 0;
  bool wide = false;
  float offset = 0;
};
// in, weight, out: [width]
void RmsNorm(const void* in, const void* weight, void* out, int64_t width, const RmsNormKind& kind,
             DType dtype);

// silu(gate) * up, silu narrowed in between. gate, up, out: [count]
void SwiGlu(const void* gate, const void* up, void* out, int64_t count, DType dtype);

// Euclidean length of now - before; `now` is also written to `stored`, as fp32.
// now: [width] elements; before, stored: [width] fp32.
float StepNorm(const void* now, const float* before, float* stored, int64_t width, DType dtype);

// Copies a row to fp32, and back to the nearest, ties to even.
void ToFloat(const void* in, float* out, int64_t width, DType dtype);
void FromFloat(const float* in, void* out, int64_t width, DType dtype);

}  // namespace epikv
