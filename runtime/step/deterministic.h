#pragma once

#include <cstdint>

namespace epikv {

// Rows of every forward in deterministic mode, since a product's bits depend on how many rows it
// has. A prompt chunk is a whole number of such forwards.
inline constexpr int64_t kDeterministicRows = 16;

}  // namespace epikv
