#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "policies/signals.h"
#include "runtime/base/dtype.h"

namespace epikv {

// The residual stream of one sequence after chosen blocks, h^l_t in fp32, and how far it moves
// between two tokens: step^l_t = |h^l_t - h^l_{t-1}|_2. The first output token's step starts from
// the last prompt token. Engine thread.
class ResidualTap {
 public:
  // layers: block numbers l, 0-based, ascending.
  ResidualTap(std::vector<int64_t> layers, int64_t hidden_size);

  const std::vector<int64_t>& layers() const { return layers_; }

  // Takes h^l of the newest row of the step that runs. place: of l in layers(). residual:
  // [hidden_size] elements. ahead: WorkItem::ahead; those before it were taken before.
  void Take(int64_t place, const void* residual, DType dtype, int64_t ahead = 0);
  // Instead, as a device found them: the steps of all layers(); and the residuals, [layers,
  // hidden_size], where somebody reads ResidualsOf.
  void PutSteps(absl::Span<const float> steps);
  void PutResiduals(absl::Span<const float> residuals);
  // What the next step is measured from. [layers, hidden_size]
  absl::Span<const float> before() const { return before_; }
  // The step is committed: what was taken is now "before".
  void Commit(bool decode, int64_t ahead = 0);

  // The newest token was cached without a forward: its residuals after all of the model's blocks,
  // [num_layers, hidden_size].
  void Restore(absl::Span<const float> residuals);

  // [layers], of the last committed step; empty if that was prefill.
  absl::Span<const float> steps() const;
  // The same for some of the layers, in their order.
  std::vector<float> StepsOf(absl::Span<const int64_t> layers) const;
  // Their residuals after the last committed step, [hidden_size] each, until the next is committed;
  // empty if that was prefill.
  std::vector<absl::Span<const float>> ResidualsOf(absl::Span<const int64_t> layers) const;

 private:
  struct Taken {
    std::vector<float> residuals;  // [layers, hidden_size]
    std::vector<float> steps;      // [layers]
  };

  // Of one of layers().
  int64_t PlaceOf(int64_t layer) const;
  Taken& TakenOf(int64_t ahead);

  const std::vector<int64_t> layers_;
  const int64_t hidden_size_;
  bool any_ = false;  // `before_` holds a token
  bool decode_ = false;
  std::vector<float> before_;  // [layers, hidden_size]
  std::vector<float> steps_;   // [layers]
  std::vector<Taken> taken_;   // by WorkItem::ahead, as far as there ever were any
};

// The newest queries of one sequence, after RoPE, layer by layer. Engine thread.
class QueryWindow {
 public:
  // capacity: queries kept; row_bytes: of one token's query heads.
  QueryWindow(int64_t num_layers, int64_t capacity, int64_t row_bytes);

  // Bytes held, and those of the step that is not yet committed.
  static int64_t Bytes(int64_t num_layers, int64_t capacity, int64_t row_bytes) {
    return 2 * num_layers * capacity * row_bytes;
  }

  // Takes a layer's queries of the step that runs: `count` rows, one after another; one of an item
  // ahead.
  void Take(int64_t layer, const char* rows, int64_t count, int64_t ahead = 0);
  // The step is committed: its `count` tokens are the newest.
  void Commit(int64_t count, int64_t ahead = 0);

  int64_t size() const { return size_; }
  int64_t capacity() const { return capacity_; }
  int64_t bytes() const { return Bytes(num_layers_, capacity_, row_bytes_); }
  void Clear() { size_ = next_ = 0; }
  // Copies a layer's queries, oldest first: size() rows.
  void Read(int64_t layer, char* out) const;

 private:
  const int64_t num_layers_, capacity_, row_bytes_;
  int64_t size_ = 0, next_ = 0;     // next_: the row that the next token takes, of capacity_
  std::vector<char> rows_, taken_;  // [layers, capacity, row_bytes]
  std::vector<std::vector<char>> taken_ahead_;  // of each item ahead, [layers, row_bytes]
};

// Bytes of a QueryMomentsTap (query_moments.h), with the step that is not yet committed: two means
// and squares, and rows that wait to be added.
constexpr int64_t kPendingQueries = 64;
constexpr int64_t QueryMomentsBytes(int64_t num_layers, int64_t num_heads, int64_t key_width) {
  return num_layers * num_heads * key_width * 4 * (2 * (key_width + 1) + kPendingQueries);
}

// Attention rows of one sequence's step, lane by lane.
class LaneRowsOfStep final : public Signals::AttentionRow {
 public:
  // layers: PolicyTraits::attention_layers.
  LaneRowsOfStep(std::vector<int64_t> layers, int64_t num_kv_heads)
      : layers_(std::move(layers)), num_kv_heads_(num_kv_heads) {}

  bool Has(int64_t layer) const;
  // used: slots of each lane, [layers x kv_heads].
  void Resize(absl::Span<const int64_t> used);
  // Takes the rows of another, of the same layers, and gives it its own.
  void SwapRows(LaneRowsOfStep& other);
  absl::Span<float> layer(int64_t layer);  // its heads, one after another
  absl::Span<float> lane(int64_t layer, int64_t head);
  absl::Span<const float> at(int64_t layer, int64_t head) const override;
  // Kept from step to step.
  int64_t bytes() const { return static_cast<int64_t>(rows_.capacity() * sizeof(float)); }

 private:
  const std::vector<int64_t> layers_;
  const int64_t num_kv_heads_;
  std::vector<int64_t> starts_;  // [lanes + 1]
  std::vector<float> rows_;
};

}  // namespace epikv
