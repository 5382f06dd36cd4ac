#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace epikv {

// What a function had a device do, to be done again over the same memory. Engine thread.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Everything that was recorded, in one launch. Throws what torch throws.
  virtual void Replay() = 0;
  // What the function returned, as the last replay has left it; nothing of it lasts longer than
  // until the next graph of its recorder is recorded or replayed: they share their memory.
  const std::vector<at::Tensor>& made() const { return made_; }

 protected:
  std::vector<at::Tensor> made_;
};

// Records graphs on one device, for one executor. Outlives its graphs. Engine thread.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  // Calls `work`, whose operations are recorded and not run; maybe twice. It has run before, copies
  // nothing to the host, and depends on nothing that changes but the contents of the device's
  // memory. Throws what torch throws; then nothing is recorded.
  virtual std::unique_ptr<DeviceGraph> Record(std::function<std::vector<at::Tensor>()> work) = 0;
};

}  // namespace epikv
