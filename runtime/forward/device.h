#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/forward/graph_recorder.h"
#include "runtime/model/manifest.h"

namespace epikv {

// "cpu", or "cuda": the first GPU that CUDA shows this process. Loads LibTorch's CUDA library the
// first time, without which nothing of CUDA is in the process, and so comes before any other use of
// torch. FAILED_PRECONDITION: this LibTorch has no CUDA, or there is no GPU.
absl::StatusOr<at::Device> OpenDevice(absl::string_view name);

// Whether a model can be served on a GPU: UNIMPLEMENTED, and why not.
absl::Status CheckGpuServes(const Manifest& manifest);

// Records graphs on the GPU of OpenDevice. FAILED_PRECONDITION: libepikv_cuda.so is not there, or
// cannot be loaded. Throws what torch throws.
absl::StatusOr<std::unique_ptr<GraphRecorder>> NewGpuRecorder();

// Bytes that are free on a GPU, beside what torch has taken.
int64_t FreeGpuBytes(at::Device device);

}  // namespace epikv
