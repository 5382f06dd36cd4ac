#pragma once

#include <bit>
#include <cstdint>

// IEEE 754's binary16 where the compiler has no such type: Clang before 15 on x86. Branches that a
// compiler can vectorise.

namespace epikv {

inline float WidenFloat16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * 0x1p112f);
  const uint32_t magnitude = rest < 0x7c00u << 13 ? finite : rest | 0x7f800000u;
  return std::bit_cast<float>(sign | magnitude);
}

// To the nearest, ties to even.
inline uint16_t NarrowFloat16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), size = bits & 0x7fffffffu;
  uint32_t narrow;
  if (size >= 0x47800000u) {  // 2^16 and more, infinity, NaN
    narrow = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (size < 0x38800000u) {  // below 2^-14: the sum's last bit is worth 2^-24
    narrow = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  } else {
    narrow = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1)) >> 13;
  }
  return static_cast<uint16_t>(bits >> 16 & 0x8000u) | static_cast<uint16_t>(narrow);
}

}  // namespace epikv
