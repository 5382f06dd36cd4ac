#include "tests/golden_world.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace epikv {
namespace {

uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

enum Kind : uint64_t { kKey = 1, kValue = 2, kQuery = 3, kHidden = 4, kOutput = 5 };

std::vector<float> Row(uint64_t seed, Kind kind, int64_t layer, int64_t head, int64_t token,
                       int64_t width) {
  uint64_t start = seed;
  for (uint64_t part : {uint64_t{kind}, static_cast<uint64_t>(layer), static_cast<uint64_t>(head),
                        static_cast<uint64_t>(token)}) {
    start = Mix(start ^ part);
  }
  const double size = Mix(start) % 8 == 0 ? 3 : 1;
  std::vector<float> row;
  for (int64_t channel = 0; channel < width; ++channel) {
    const uint64_t bits = Mix(start ^ static_cast<uint64_t>(channel + 1));
    double total = 0;
    for (int shift : {0, 16, 32, 48}) {
      total += static_cast<double>(bits >> shift & 0xFFFF) / 32768 - 1;
    }
    row.push_back(static_cast<float>(size * total));
  }
  return row;
}

}  // namespace

FakeWorld GoldenWorld(uint64_t seed, int64_t heads, int64_t kv_heads, int64_t width) {
  FakeWorld world;
  world.attention_scale = 1 / std::sqrt(static_cast<double>(width));
  auto rows = [=](Kind kind) {
    return [=](int64_t layer, int64_t head, int64_t token) {
      return Row(seed, kind, layer, head, token, width);
    };
  };
  world.key = rows(kKey);
  world.value = rows(kValue);
  world.query = rows(kQuery);
  // The residual stream is twice as wide as a head.
  world.output = [=](int64_t layer, int64_t head, int64_t channel) {
    return Row(seed, kOutput, layer, head, channel, 2 * width);
  };
  world.residual_step = [=](int64_t layer, int64_t token) {
    const std::vector<float> from = Row(seed, kHidden, layer, 0, token - 1, width);
    const std::vector<float> to = Row(seed, kHidden, layer, 0, token, width);
    double squares = 0;
    for (int64_t c = 0; c < width; ++c) squares += (to[c] - from[c]) * (to[c] - from[c]);
    return static_cast<float>(std::sqrt(squares));
  };
  world.attention = AttentionOf(world, heads / kv_heads);
  return world;
}

FakeWorld BentWorld(uint64_t seed, int64_t heads, int64_t kv_heads, int64_t width, double soft_cap,
                    int64_t window) {
  FakeWorld world = GoldenWorld(seed, heads, kv_heads, width);
  world.soft_cap = soft_cap;
  world.window = window;
  world.attention = AttentionOf(world, heads / kv_heads);
  return world;
}

}  // namespace epikv
