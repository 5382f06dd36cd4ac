#include "runtime/base/processor.h"

#include <cstdlib>
#include <utility>

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace epikv {
namespace {

#if defined(__x86_64__)
// The compilers' builtin does not know it everywhere.
bool HasF16c() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

#if !defined(__clang__)
// A process has the matrix unit's registers once it has asked for them, and some sandboxes refuse.
bool MayUseMatrixUnit() {
  constexpr int kRequestState = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && syscall(SYS_arch_prctl, kRequestState, kTiles) == 0;
}
#endif
#endif

Processor Detect() {
  Processor found;
#if defined(__x86_64__)
  found.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && HasF16c();
  found.follows_streams = __builtin_cpu_is("amd");
#if !defined(__clang__)  // kernels for more than AVX2 are written for GCC
  found.avx512 = found.avx2 && __builtin_cpu_supports("x86-64-v4");
  found.avx512_vnni = found.avx512 && __builtin_cpu_supports("avx512vnni");
  found.avx512_bf16 = found.avx512 && __builtin_cpu_supports("avx512bf16");
  found.fast_bf16_pairs = found.avx512_bf16 && !__builtin_cpu_is("intel");
  if (found.avx512 && MayUseMatrixUnit()) {
    found.amx_bf16 = __builtin_cpu_supports("amx-bf16");
    found.amx_int8 = __builtin_cpu_supports("amx-int8");
  }
#endif
#elif defined(__aarch64__)
  found.neon = true;
  found.neon_dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  return found;
}

Processor& Used() {
  static Processor used = Detect();
  return used;
}

// What the libraries below LibTorch read when they are first used.
void LimitLibraries(const char* torch, const char* one_dnn, const char* mkl) {
  setenv("ATEN_CPU_CAPABILITY", torch, /*overwrite=*/1);
  setenv("ONEDNN_MAX_CPU_ISA", one_dnn, /*overwrite=*/1);
  setenv("MKL_ENABLE_INSTRUCTIONS", mkl, /*overwrite=*/1);
}

}  // namespace

const Processor& ThisProcessor() { return Used(); }

bool FetchesAhead(int64_t passes) { return passes > 1 || !Used().follows_streams; }

std::optional<ProcessorLimit> ProcessorLimitOf(absl::string_view name) {
  for (const auto& [known, limit] : {std::pair{"auto", ProcessorLimit::kNone},
                                     {"avx512", ProcessorLimit::kAvx512},
                                     {"avx2", ProcessorLimit::kAvx2},
                                     {"plain", ProcessorLimit::kPlain}}) {
    if (name == known) return limit;
  }
  return std::nullopt;
}

absl::Status LimitProcessor(ProcessorLimit limit) {
  Processor& used = Used();
  const bool follows_streams = used.follows_streams;
  switch (limit) {
    case ProcessorLimit::kNone:
      return absl::OkStatus();
    case ProcessorLimit::kAvx512:
      if (!used.avx512) return absl::FailedPreconditionError("this processor has no AVX-512");
      used = {.avx2 = true, .avx512 = true, .follows_streams = follows_streams};
      LimitLibraries("avx512", "AVX512_CORE", "AVX512");
      return absl::OkStatus();
    case ProcessorLimit::kAvx2:
      if (!used.avx2) return absl::FailedPreconditionError("this processor has no AVX2");
      used = {.avx2 = true, .follows_streams = follows_streams};
      LimitLibraries("avx2", "AVX2", "AVX2");
      return absl::OkStatus();
    case ProcessorLimit::kPlain:
      used = {};
      LimitLibraries("default", "SSE41", "SSE4_2");
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

}  // namespace epikv
