#include "runtime/model/model_shape.h"

namespace epikv {

ModelShape ShapeOf(const Manifest& manifest) {
  ModelShape shape{.vocab_size = manifest.vocab_size,
                   .num_layers = manifest.num_layers(),
                   .num_heads = manifest.num_heads,
                   .num_kv_heads = manifest.num_kv_heads,
                   .key_width = manifest.layers.front().key_width,
                   .value_width = manifest.layers.front().value_width,
                   .hidden_size = manifest.hidden_size,
                   .final_norm = manifest.final_norm.has_value()};
  for (const LayerFacts& layer : manifest.layers) {
    const Rope& rope = manifest.ropes[layer.rope];
    shape.ropes.push_back({.interleaved = rope.layout == Rope::Layout::kInterleaved,
                           .inv_freq = rope.inv_freq,
                           .attention_factor = rope.attention_factor});
  }
  if (manifest.calibration.has_value()) {
    const Calibration& c = *manifest.calibration;
    shape.calibrated[c.policy] = {
        {"layer_a", c.layer_a}, {"layer_b", c.layer_b}, {"sign", c.sign}, {"window", c.window}};
  }
  return shape;
}

}  // namespace epikv
