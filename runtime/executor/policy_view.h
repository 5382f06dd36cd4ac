#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "policies/policy.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/model/model.h"
#include "runtime/step/step_item.h"

namespace epikv {

// CacheView::output_gram of a model's layers. [layers] of fp32 [num_heads, value_width,
// value_width]
std::vector<at::Tensor> OutputGrams(const Model& model);

// A sequence's cache as its policy sees it.
class PolicyView final : public CacheView {
 public:
  PolicyView(OpenSequence& sequence, KvPool& pool, const Model& model,
             const std::vector<at::Tensor>& output_grams, const RunningPass* pass = nullptr)
      : sequence_(sequence),
        pool_(pool),
        model_(model),
        manifest_(model.manifest()),
        output_grams_(output_grams),
        pass_(pass) {}

  int64_t num_layers() const override { return sequence_.cache.num_layers(); }
  int64_t num_kv_heads() const override { return sequence_.cache.num_kv_heads(); }
  int64_t num_heads() const override { return manifest_.num_heads; }
  int64_t first_kv_head() const override;
  int64_t all_kv_heads() const override;
  void AverageOverRanks(absl::Span<float> mean) const override;
  int64_t prompt_tokens() const override;
  int64_t newest() const override { return sequence_.cache.newest(); }
  int64_t next_position(int64_t layer, int64_t head) const override;
  const Protection& protection() const override { return sequence_.cache.protection(); }
  uint64_t seed() const override {
    sequence_.asked.seed = true;
    return sequence_.request.sampling.seed;
  }
  int64_t excess(int64_t layer, int64_t head) const override;
  absl::Span<const int32_t> index(int64_t layer, int64_t head) const override;
  absl::Span<float> column(int64_t place, int64_t layer, int64_t head) override;
  at::Tensor keys(int64_t layer, int64_t head) const override;
  at::Tensor values(int64_t layer, int64_t head) const override;
  at::Tensor keys_of(absl::Span<const int64_t> slots) const override;
  at::Tensor values_of(absl::Span<const int64_t> slots) const override;
  void RoundRows(int64_t layer, int64_t head, absl::Span<const int64_t> slots,
                 int64_t bits) override;
  at::Tensor queries(int64_t layer) const override;
  at::Tensor lookahead(int64_t layer) const override;
  at::Tensor scratch_keys(int64_t layer, int64_t head) const override;
  std::vector<int32_t> ghosts(int64_t layer, int64_t head) const override;
  at::Tensor ghost_keys(int64_t layer, int64_t head,
                        absl::Span<const int32_t> ghosts) const override;
  AttentionFacts attention(int64_t layer) const override;
  QueryMoments query_moments(int64_t layer) const override;
  at::Tensor output_projection(int64_t layer) const override;
  at::Tensor output_gram(int64_t layer) const override { return output_grams_[layer]; }

 private:
  // Rows of a lane from slot `first` on, [count, width], where policies compute: a copy if the pool
  // is elsewhere.
  at::Tensor KeyRows(int64_t layer, int64_t head, int64_t first, int64_t count) const;
  // These slots of every lane, as rows of the pool. [lanes x slots]
  std::vector<int64_t> RowsOf(absl::Span<const int64_t> slots) const;
  // A segment of a scratch pass runs.
  bool in_segment() const { return pass_ != nullptr && !pass_->segments.empty(); }
  // A layer's queries, [size(), num_heads, key_width].
  at::Tensor ReadQueries(const QueryWindow& queries, int64_t layer) const;
  at::Tensor ByLane(const at::Tensor& rows) const;
  SlotTable& Table(int64_t layer, int64_t head) const;
  OpenSequence& sequence_;
  KvPool& pool_;
  const Model& model_;
  const Manifest& manifest_;
  const std::vector<at::Tensor>& output_grams_;
  const RunningPass* const pass_;  // a segment that runs, or tokens that were told ahead; or null
};

}  // namespace epikv
