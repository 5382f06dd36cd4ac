#include "runtime/forward/host_copy.h"

#include <ATen/ATen.h>

namespace epikv {

int64_t HostCopy::Add(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.nbytes() % 4 == 0, "a tensor of ", tensor.nbytes(), " bytes");
  queued_.push_back(tensor.contiguous());
  return std::ssize(queued_) - 1;
}

void HostCopy::Run() {
  arrived_.clear();
  if (queued_.empty()) return;
  std::vector<at::Tensor> bytes;
  bytes.reserve(queued_.size());
  for (const at::Tensor& tensor : queued_) bytes.push_back(tensor.view({-1}).view(at::kByte));
  const at::Tensor all = at::cat(bytes);
  // From memory that the device reads by itself, where there is a device.
  at::Tensor host = at::empty(all.sizes(), at::dtype(at::kByte).pinned_memory(all.is_cuda()));
  host.copy_(all);
  ++count_;
  int64_t begin = 0;
  for (const at::Tensor& tensor : queued_) {
    const int64_t size = static_cast<int64_t>(tensor.nbytes());
    arrived_.push_back(host.narrow(0, begin, size).view(tensor.scalar_type()).view(tensor.sizes()));
    begin += size;
  }
  queued_.clear();
}

}  // namespace epikv
