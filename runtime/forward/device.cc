#include "runtime/forward/device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "runtime/forward/device_forward.h"

namespace epikv {

absl::StatusOr<at::Device> OpenDevice(absl::string_view name) {
  if (name == "cpu") return at::Device(at::kCPU);
  if (name != "cuda") {
    return absl::InvalidArgumentError(absl::StrCat("device must be cpu or cuda, is '", name, "'"));
  }
  // Not linked: see cmake/torch.cmake. Torch looks for it once, when CUDA is first asked for.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--device=cuda needs a LibTorch with CUDA, and this is LibTorch ", EPIKV_TORCH_VERSION,
        " without (", dlerror(), "): build against a CUDA wheel, or serve with --device=cpu"));
  }
  if (!at::detail::getCUDAHooks().hasCUDA()) {
    return absl::FailedPreconditionError(
        "--device=cuda needs a GPU, and CUDA finds none: look at nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or serve with --device=cpu");
  }
  return at::Device(at::kCUDA, 0);
}

absl::Status CheckGpuServes(const Manifest& manifest) {
  constexpr int64_t kWidest = 256;  // of the flash kernel, as what follows
  if (manifest.dtype == DType::kFloat32) {
    return absl::UnimplementedError(
        "--device=cuda serves float16 and bfloat16, and the model is float32: export it with "
        "--dtype bf16, or serve with --device=cpu");
  }
  for (const LayerFacts& layer : manifest.layers) {
    if (layer.key_width % 8 != 0 || layer.key_width > kWidest) {
      return absl::UnimplementedError(
          absl::StrCat("--device=cuda needs heads with a multiple of 8 channels, at most ", kWidest,
                       "; this model's heads have ", layer.key_width, ": serve with --device=cpu"));
    }
  }
  return DeviceForward::Supports(manifest);
}

absl::StatusOr<std::unique_ptr<GraphRecorder>> NewGpuRecorder() {
  void* const library = dlopen("libepikv_cuda.so", RTLD_NOW);
  void* const make = library == nullptr ? nullptr : dlsym(library, "EpikvNewCudaRecorder");
  if (make == nullptr) return absl::FailedPreconditionError(dlerror());
  return std::unique_ptr<GraphRecorder>(reinterpret_cast<GraphRecorder* (*)()>(make)());
}

int64_t FreeGpuBytes(at::Device device) {
  return static_cast<int64_t>(
      c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).first);
}

}  // namespace epikv
