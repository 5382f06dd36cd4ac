#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace epikv {

// The one copy of a step from the device to the host: tensors queue up, and come as one. Engine
// thread.
class HostCopy {
 public:
  // Queues a tensor of elements of at most 4 bytes, and a multiple of 4 bytes, that nobody changes
  // before Run. Its place.
  int64_t Add(const at::Tensor& tensor);
  // What is queued is not wanted.
  void Drop() { queued_.clear(); }
  // Copies what is queued, and waits for it.
  void Run();
  // A tensor of the last Run, on the host. Valid as long as it is held.
  at::Tensor Get(int64_t place) const { return arrived_[place]; }

  // Copies since the start.
  int64_t count() const { return count_; }

 private:
  std::vector<at::Tensor> queued_, arrived_;
  int64_t count_ = 0;
};

}  // namespace epikv
