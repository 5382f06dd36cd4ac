#pragma once

#include "absl/strings/string_view.h"
#include "runtime/base/processor.h"

// For files of kernels that Highway compiles (foreach_target.h): which of its instruction sets they
// are for. One a kind of processor, whose vectors have 4 or 8 floats: those of AVX-512 have kernels
// by hand, and SVE's have no width that a compiler knows.

#define HWY_DISABLE_PCLMUL_AES  // of AVX2, what no kernel uses
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)

// The namespace of what it has compiled for that set. Elsewhere of nothing that is called.
#if defined(__x86_64__)
#define EPIKV_SIMD N_AVX2
#elif defined(__aarch64__)
#define EPIKV_SIMD N_NEON
#else
#define EPIKV_SIMD HWY_NAMESPACE
#endif

namespace epikv {

inline bool HasSimd() { return ThisProcessor().avx2 || ThisProcessor().neon; }
inline absl::string_view SimdName() { return ThisProcessor().neon ? "NEON" : "AVX2"; }

}  // namespace epikv
