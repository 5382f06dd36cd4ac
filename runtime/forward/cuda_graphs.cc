// GraphRecorder by CUDA graphs: a library of its own, libepikv_cuda.so, since it needs CUDA's
// headers and libraries. device.cc loads it where it is there.

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/forward/graph_recorder.h"

namespace epikv {
namespace {

// Memory that graphs share. LibTorch ends it with the last of them, and it cannot begin again.
using Memory = std::shared_ptr<const at::cuda::MempoolId_t>;
using Work = std::function<std::vector<at::Tensor>()>;

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(Memory memory) : memory_(std::move(memory)) {}

  // On the current stream. Throws what `work` throws, or why there is no graph of it.
  void Record(const Work& work) {
    graph_.capture_begin(*memory_, cudaStreamCaptureModeThreadLocal);
    std::vector<at::Tensor> made;
    std::exception_ptr failed;
    try {
      made = work();
    } catch (const std::exception&) {
      failed = std::current_exception();
    }
    try {
      graph_.capture_end();
    } catch (const std::exception&) {
      if (failed == nullptr) failed = std::current_exception();
      Abandon();
    }
    if (failed != nullptr) std::rethrow_exception(failed);
    for (const at::Tensor& tensor : made) {  // without a share in the memory
      made_.push_back(at::from_blob(
          tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, tensor.options(),
          tensor.device()));
    }
  }

  void Replay() override { graph_.replay(); }

 private:
  // What capture_end does to the allocators, where it fails before.
  void Abandon() const {
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(c10::cuda::current_device(), *memory_);
      c10::cuda::CUDACachingAllocator::releasePool(c10::cuda::current_device(), *memory_);
      at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(*memory_);
      at::getHostAllocator(at::kCUDA)->release_pool(*memory_);
    } catch (const std::exception&) {  // it was done already
    }
  }

  const Memory memory_;
  at::cuda::CUDAGraph graph_;
};

class CudaRecorder final : public GraphRecorder {
 public:
  std::unique_ptr<DeviceGraph> Record(Work work) override {
    // Of the process: while one thread records, another must not wait for the device, as this does.
    static std::mutex& one_at_a_time = *new std::mutex;
    const std::scoped_lock lock(one_at_a_time);
    try {
      return RecordOnce(work);
    } catch (const c10::OutOfMemoryError&) {
      // Graphs have memory of their own, which what is cached for others does not become.
      c10::cuda::CUDACachingAllocator::emptyCache();
      return RecordOnce(work);
    }
  }

 private:
  std::unique_ptr<DeviceGraph> RecordOnce(const Work& work) {
    Memory memory = memory_.lock();
    if (memory == nullptr) {
      memory = std::make_shared<const at::cuda::MempoolId_t>(at::cuda::graph_pool_handle());
      memory_ = memory;
    }
    auto recorded = std::make_unique<CudaGraph>(std::move(memory));
    c10::cuda::device_synchronize();
    const c10::cuda::CUDAStreamGuard aside(stream_);  // the default one records nothing
    recorded->Record(work);
    return recorded;
  }

  const c10::cuda::CUDAStream stream_ = c10::cuda::getStreamFromPool();
  std::weak_ptr<const at::cuda::MempoolId_t> memory_;  // of the graphs that live
};

}  // namespace
}  // namespace epikv

// Of the first GPU; the caller's to delete. Throws what torch throws.
extern "C" epikv::GraphRecorder* EpikvNewCudaRecorder() { return new epikv::CudaRecorder; }
