// GraphRecorder by CUDA graphs: a library of its own, libepikv_cuda.so, since it needs CUDA's
// headers and libraries. device.cc loads it where it is there.

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "runtime/forward/graph_recorder.h"

namespace epikv {
namespace {

// Memory that graphs share. LibTorch ends it with the last of them, and it cannot begin again.
using Memory = std::shared_ptr<const at::cuda::MempoolId_t>;

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(Memory memory) : memory_(std::move(memory)) {}
  void Replay() override { graph_.replay(); }
  at::cuda::CUDAGraph& graph() { return graph_; }

 private:
  const Memory memory_;
  at::cuda::CUDAGraph graph_;
};

class CudaRecorder final : public GraphRecorder {
 public:
  std::unique_ptr<DeviceGraph> Record(std::function<void()> work) override {
    Memory memory = memory_.lock();
    if (memory == nullptr) {
      memory = std::make_shared<const at::cuda::MempoolId_t>(at::cuda::graph_pool_handle());
      memory_ = memory;
    }
    auto recorded = std::make_unique<CudaGraph>(memory);
    c10::cuda::device_synchronize();
    const c10::cuda::CUDAStreamGuard aside(stream_);  // the default one records nothing
    at::cuda::CUDAGraph& graph = recorded->graph();
    graph.capture_begin(*memory, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (const std::exception&) {
      try {
        graph.capture_end();
      } catch (const std::exception&) {  // says again that nothing was recorded
      }
      throw;
    }
    graph.capture_end();
    return recorded;
  }

  at::Tensor Borrow(const at::Tensor& made) const override {
    return at::from_blob(
        made.data_ptr(), made.sizes(), made.strides(), [](void*) {}, made.options(), made.device());
  }

 private:
  const c10::cuda::CUDAStream stream_ = c10::cuda::getStreamFromPool();
  std::weak_ptr<const at::cuda::MempoolId_t> memory_;  // of the graphs that live
};

}  // namespace
}  // namespace epikv

// Of the first GPU; the caller's to delete. Throws what torch throws.
extern "C" epikv::GraphRecorder* EpikvNewCudaRecorder() { return new epikv::CudaRecorder; }
