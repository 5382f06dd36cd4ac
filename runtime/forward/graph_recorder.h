#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace epikv {

// What a function had a device do, to be done again over the same memory. Engine thread.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Everything that was recorded, in one launch. Throws what torch throws.
  virtual void Replay() = 0;
};

// Records graphs on one device, for one executor: what a graph has made lasts until the next one is
// recorded or replayed, for they share their memory. Outlived by its graphs. Engine thread.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  // Calls `work`, whose operations are recorded and not run. It has run before, copies nothing to
  // the host, and depends on nothing that changes but the contents of the device's memory. Throws
  // what torch throws; then nothing is recorded.
  virtual std::unique_ptr<DeviceGraph> Record(std::function<void()> work) = 0;
  // A tensor that `work` made, without a share in its memory.
  virtual at::Tensor Borrow(const at::Tensor& made) const = 0;
};

}  // namespace epikv
