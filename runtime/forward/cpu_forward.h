#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "runtime/attention/attention.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/model/model.h"
#include "runtime/model/operators.h"
#include "runtime/model/rope_table.h"
#include "runtime/signals/signals.h"
#include "runtime/step/deterministic.h"
#include "runtime/step/step_stats.h"

namespace epikv {

struct StepItem;

struct CpuForwardOptions {
  DecodeKernel decode_kernel = DecodeKernel::kBatch;
  PrefillKernel prefill_kernel = PrefillKernel::kBatch;
  bool deterministic = false;  // every forward has exactly kDeterministicRows rows
};

// Forwards on the CPU: answers the model's two operators from the lanes, which our own kernels read
// where they lie. Engine thread.
class CpuForward final : private ForwardHooks {
 public:
  // All of the executor, which outlives it. times: gains what attention and taps took.
  CpuForward(const Model& model, const ModelShape& shape, absl::Span<const RopeTable> ropes,
             const KvPool& pool, const CpuForwardOptions& options, LaneRowsOfStep& mass_rows,
             StepStats& times);

  // One forward over items whose rows follow one another from 0. Leaves with the items and their
  // sequences what the executor commits, samples from and tells policies.
  void Run(absl::Span<StepItem> items);

  const AttentionCounts& attention_counts() const { return attention_.counts(); }

 private:
  struct Tap {
    StepItem* item = nullptr;
    int64_t place = 0;  // in the sequence's ResidualTap
  };

  at::Tensor Block(const at::Tensor& residual, int64_t layer) override;
  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override;

  // What is looked at of the residual after block layer - 1.
  void TakeTaps(const at::Tensor& residual, int64_t layer);
  void TakeResiduals(const at::Tensor& residual, int64_t layer);
  struct HeadRows;
  void Append(absl::Span<const StepItem> items, const HeadRows& q, const HeadRows& k,
              const HeadRows& v, int64_t layer, at::Tensor& rotated);
  void AppendRows(const StepItem& item, int64_t first, int64_t last, const HeadRows& q,
                  const HeadRows& k, const HeadRows& v, int64_t layer, char* turned, char* out);
  AttentionShape ShapeOfLayer(int64_t layer) const;
  std::vector<AttentionItem> ItemsOf(const at::Tensor& rotated, int64_t layer);
  void TurnKeys(StepItem& item, int64_t layer);
  void FindHidden(StepItem& item, int64_t layer);
  bool ReadsTier(const StepItem& item, int64_t layer) const;
  void ChooseReads(StepItem& item, const at::Tensor& rotated, int64_t layer) const;
  void TakeSignals(const at::Tensor& q, const at::Tensor& rotated, int64_t layer,
                   absl::Span<const AttentionItem> items, const AttentionShape& shape);

  const Model& model_;
  const ModelShape& shape_;
  const absl::Span<const RopeTable> ropes_;
  const KvPool& pool_;
  const bool deterministic_;
  const epikv::Attention attention_;
  LaneRowsOfStep& mass_rows_;       // of the one sequence whose attention_mass is measured
  std::vector<float> mass_logits_;  // its AttentionItem::logits
  StepStats& times_;

  // The forward that runs.
  absl::Span<StepItem> running_;
  std::vector<std::vector<Tap>> taps_;  // by block number
};

}  // namespace epikv
