#pragma once

#include <cstdint>
#include <vector>

#include "tests/fake_sequence.h"

namespace epikv {

// The world of golden/world.py: the same rows, bit for bit. Attention rows are what its queries
// give its keys; residual steps are of its "hidden" rows, of head 0.
FakeWorld GoldenWorld(uint64_t seed, int64_t heads, int64_t kv_heads, int64_t width);

// The same under a soft cap and a window of so many tokens.
FakeWorld BentWorld(uint64_t seed, int64_t heads, int64_t kv_heads, int64_t width, double soft_cap,
                    int64_t window);

}  // namespace epikv
