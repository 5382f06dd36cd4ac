#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/forward/device_plan.h"
#include "runtime/forward/graph_recorder.h"

namespace epikv {

// What a layer's hooks saw in a forward.
struct SeenLayer {
  at::Tensor normed, q, rotated;  // see ForwardHooks::Attention; rotated: [n, heads, width]
  at::Tensor residual;            // after the block
};

// What a forward leaves.
struct SeenStep {
  at::Tensor logits;
  at::Tensor index;  // the plan's numbers as int64
  std::vector<SeenLayer> layers;

  // As one list, and back.
  std::vector<at::Tensor> Tensors() const;
  static SeenStep Of(const std::vector<at::Tensor>& tensors);
};

// Decode steps of one size. Each is run as it is the first time, is recorded the second time, and
// replayed from then on.
struct RecordedStep {
  DevicePlan plan;     // that was recorded; those to come differ in numbers alone
  at::Tensor numbers;  // int32, on the device, as many as any such plan has
  bool ran = false;
  bool refused = false;                // it cannot be recorded
  std::unique_ptr<DeviceGraph> graph;  // null: not recorded yet
};

// The steps of an executor, by size; of too many the one that was not used for longest goes.
class RecordedSteps {
 public:
  // Rows that a step of `count` decoded tokens is run with. 0: so many are not recorded.
  static int64_t Rows(int64_t count);
  // Slots that lanes are said to have at most.
  static int64_t Length(int64_t longest);

  RecordedStep& Find(const PaddedLayout& layout);
  int64_t size() const { return static_cast<int64_t>(steps_.size()); }

 private:
  struct Used {
    int64_t at = 0;
    std::unique_ptr<RecordedStep> step;
  };
  std::map<PaddedLayout, Used> steps_;
  int64_t time_ = 0;
};

}  // namespace epikv
