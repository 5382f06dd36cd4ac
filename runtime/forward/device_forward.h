#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "runtime/forward/device_plan.h"
#include "runtime/forward/graph_recorder.h"
#include "runtime/forward/host_copy.h"
#include "runtime/forward/recorded_steps.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/model/model.h"
#include "runtime/model/operators.h"
#include "runtime/model/rope_table.h"
#include "runtime/sampling/sampler.h"
#include "runtime/signals/signals.h"

namespace epikv {

struct StepItem;

// Forwards on a device, in ATen operations alone: the same code on CUDA and, in tests, on the CPU.
// What a forward needs goes up as one tensor of numbers (DevicePlan) and what the host needs of it
// comes down in one copy (HostCopy); K, V, residuals and queries stay. Engine thread.
//
// Steps that only decode are recorded, where there is a recorder: a GPU runs a step's thousand
// kernels in a fifth of the time that it takes to launch them one by one. What signals need of a
// layer is then taken after the forward, from what the layer's hooks saw.
//
// Left to the CPU: positions = cache, soft caps, windows, deterministic mode.
class DeviceForward final : private ForwardHooks {
 public:
  // UNIMPLEMENTED: what of this model only the CPU can do.
  static absl::Status Supports(const Manifest& manifest);

  // Of the executor, which outlives it. recorder: null: nothing is recorded; nor is a model whose
  // code writes in place, for what it gives a hook may change afterwards. head_tokens: see
  // ExecutorOptions.
  DeviceForward(const Model& model, const ModelShape& shape, absl::Span<const RopeTable> ropes,
                KvPool& pool, LaneRowsOfStep& mass_rows, std::shared_ptr<GraphRecorder> recorder,
                int64_t head_tokens);

  // One forward over items whose rows follow one another from 0. Leaves on the host, with the items
  // and their sequences, what the executor commits, samples from and tells policies.
  void Run(absl::Span<StepItem> items);

  // Copies from the device since the start: one a step, and another where the likeliest tokens of a
  // row did not tell which one is drawn.
  int64_t host_copies() const { return copy_.count() + second_copies_; }
  // Steps since the start that were replayed.
  int64_t replays() const { return replays_; }
  // Why the last step that could not be recorded was not. Empty: there was none.
  const std::string& recording_failed() const { return recording_failed_; }

 private:
  at::Tensor Block(const at::Tensor& residual, int64_t layer) override;
  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override;

  at::Tensor RunOnce();
  bool CanBeRecorded() const;
  at::Tensor RunRecorded();
  SeenStep RunPlanned(const RecordedStep& step);
  void Record(RecordedStep& step);
  void MeasureSeen(absl::Span<const SeenLayer> layers);
  template <class Number>
  at::Tensor Pinned(const std::vector<Number>& numbers) const;

  // What is looked at of the residual after block layer - 1.
  void TakeTaps(const at::Tensor& residual, int64_t layer);
  // What is looked at of a layer's attention, but for what queries give their lanes.
  void TakeAttention(const SeenLayer& seen, int64_t layer);
  template <class Use>
  auto WithPlanned(Use use) const;
  at::Tensor Index(DevicePlan::Section section) const;    // int64
  at::Tensor Numbers(DevicePlan::Section section) const;  // int32
  const at::Tensor& AnglesOf(int64_t layer);
  at::Tensor Attend(const at::Tensor& queries, int64_t layer) const;
  void TakeQueries(const StepItem& item, const at::Tensor& q, const at::Tensor& rotated,
                   int64_t layer);
  void Measure(const StepItem& item, const at::Tensor& rotated, int64_t layer,
               LaneRowsOfStep& rows);
  // A row of logits of which the token, or what tells it, is found on the device.
  struct Drawn {
    StepItem* item = nullptr;
    int64_t row = 0;  // the first, where the need is kHighest
    RowNeed need = RowNeed::kHighest;
  };
  void TakeLogits(StepItem& item, const at::Tensor& all, int64_t row);
  void TakeDrawn(const at::Tensor& logits);
  at::Tensor DrawsOf(absl::Span<const Drawn> rows) const;
  void DrawByShare(const at::Tensor& logits, const at::Tensor& highest,
                   absl::Span<const Drawn> rows);
  void TakeHeads(const at::Tensor& logits, const at::Tensor& highest, absl::Span<const Drawn> rows);
  void TakeSteps();
  // Brings a tensor with the step's copy, and then calls `arrived` with it.
  void Bring(const at::Tensor& tensor, std::function<void(const at::Tensor&)> arrived);
  // The same of what fills StepItem::found.
  void Find(const at::Tensor& tensor, std::function<void(const at::Tensor&)> arrived);
  void FetchUntold(const at::Tensor& logits);

  const Model& model_;
  const ModelShape& shape_;
  KvPool& pool_;
  LaneRowsOfStep& mass_rows_;
  std::shared_ptr<GraphRecorder> recorder_;
  const int64_t group_;  // query heads of a KV head
  const int64_t head_tokens_;
  struct Angles {
    bool interleaved = false;
    at::Tensor table;  // [context_length, 2 x half]: cosines, sines
  };
  std::vector<Angles> ropes_;
  at::Tensor scales_;  // of logits, fp32 [layers, 1, 1, 1]
  HostCopy copy_;

  // The forward that runs.
  absl::Span<StepItem> items_;
  DevicePlan plan_;
  at::Tensor numbers_, index_;  // the plan's, int32 and int64
  std::vector<Drawn> drawn_;
  std::vector<at::Tensor> tapped_;             // by block that is: rows that are looked at
  std::vector<std::vector<at::Tensor>> kept_;  // by item: last_residuals, a row a block
  struct {
    int64_t rope = 0, positions = 0;
    at::Tensor angles;  // [n x kv_heads, 1, 2 x half]
  } latest_;
  std::vector<std::function<void()>> arrivals_, finds_;
  int64_t second_copies_ = 0;

  RecordedSteps recorded_;
  std::vector<SeenLayer>* seen_ = nullptr;  // of the step that is being recorded
  int64_t replays_ = 0;
  std::string recording_failed_;
};

}  // namespace epikv
