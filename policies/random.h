#pragma once

#include <Random123/philox.h>

#include <cstdint>

#include "absl/numeric/int128.h"

namespace epikv {

// Random numbers without state: the number at a counter depends on (seed, stream, counter) alone,
// so a request draws the same numbers whatever batch it runs in, and in whatever order it asks.
// Philox4x32-10 (Salmon et al., SC 2011): key = seed, block = (counter, stream). Immutable. The
// numbers are part of what a seed promises: changing them changes every seeded answer.
class CounterRng {
 public:
  // Streams of one seed are independent. The sampler's is kSamplerStream; others count from 0.
  static constexpr uint64_t kSamplerStream = ~uint64_t{0};

  CounterRng(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}

  uint64_t Uint64(uint64_t counter) const {
    const r123::Philox4x32::ctr_type block = {
        {Low(counter), High(counter), Low(stream_), High(stream_)}};
    const r123::Philox4x32::key_type key = {{Low(seed_), High(seed_)}};
    const r123::Philox4x32::ctr_type words = r123::Philox4x32()(block, key);
    return words[0] | uint64_t{words[1]} << 32;
  }

  // In [0, 1), a multiple of 2^-53.
  double Uniform(uint64_t counter) const {
    return static_cast<double>(Uint64(counter) >> 11) * 0x1p-53;
  }

  // In [0, n), for n >= 1: the high half of a 64 x 64 bit product. Each value's probability is
  // within 2^-64 of 1 / n, so no draw is ever rejected and one counter is one number.
  uint64_t Below(uint64_t n, uint64_t counter) const {
    return absl::Uint128High64(absl::uint128(Uint64(counter)) * n);
  }

 private:
  static uint32_t Low(uint64_t x) { return static_cast<uint32_t>(x); }
  static uint32_t High(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

  uint64_t seed_;
  uint64_t stream_;
};

}  // namespace epikv
