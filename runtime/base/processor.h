#pragma once

// What instruction sets do not say of a processor.

namespace epikv {

// Whether AVX512_BF16 is faster than widening to fp32. Intel's processors take two cycles for 32
// products in bfloat16, and half a one for 16 in fp32; AMD's half a one or a whole for either.
inline bool HasFastBFloat16Pairs() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has = __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
  return has;
#else
  return false;
#endif
}

}  // namespace epikv
