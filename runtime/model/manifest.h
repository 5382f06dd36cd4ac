#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/base/dtype.h"
#include "runtime/sampling/sampler.h"

namespace epikv {

// Rotary embedding of a set of layers. The angle of pair i at position p is p * inv_freq[i];
// cos and sin are multiplied by `attention_factor`. Scaled variants (linear, Llama 3, YaRN) are
// folded into these numbers by the exporter, so the runtime knows one kind.
struct Rope {
  enum class Layout { kHalf, kInterleaved };  // pairs (i, i + rotary/2), or (2i, 2i + 1)
  Layout layout = Layout::kHalf;
  // [rotary_width / 2]; the first 2 x size channels are rotated. Empty: none are (NoPE).
  std::vector<double> inv_freq;
  double attention_factor = 1.0;
};

struct LayerFacts {
  int64_t key_width = 0;           // channels of one K row
  int64_t value_width = 0;         // channels of one V row
  double scale = 0;                // logits are scale * q.k
  int64_t rope = 0;                // index into Manifest::ropes
  std::optional<double> soft_cap;  // logits become cap * tanh(logits / cap)
  std::optional<int64_t> window;   // positions that a query sees, its own included
  std::string output_projection;   // parameter name of W_O inside the module
};

// The norm before the head: x / rms(x) by a weight, as the operator epikv::rms_norm has it.
struct FinalNorm {
  std::string weight;  // parameter name inside the module. [hidden_size]
  double eps = 0;
  bool wide = false;  // by offset + weight in fp32, then narrowed; else narrowed, then by weight
  double offset = 0;
};

// Which layers and sign `epikv_flat` uses on this model, and how well it was seen to work there.
// Chosen by measurement (tools/epikv/calibrate/README.md), never by eye.
struct Calibration {
  std::string policy;  // the policy it belongs to: "epikv_flat"
  int64_t layer_a = 0,
          layer_b = 0;  // score = sign * (Z(step_a) - Z(step_b)); after block l, 0-based
  int64_t sign = 1;
  int64_t window = 64;     // tokens of the rolling z-score
  bool confirmed = false;  // run on held-out problems and found to beat random
};

// What a model file says of itself (extra file `manifest.json`; DESIGN section 3).
struct Manifest {
  std::string name;
  std::string architecture;
  DType dtype = DType::kFloat32;
  // Digest of the checkpoint's weights, the same for every dtype they are exported in; empty: the
  // file is older than this field.
  std::string weights;
  // Of the linears' weights: "int8" or "int4"; empty: they are of `dtype`.
  std::string quantization;
  int64_t vocab_size = 0;
  int64_t context_length = 0;  // prompt + output, in tokens
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  std::optional<int32_t> bos_token;
  std::vector<int32_t> eos_tokens;
  std::vector<Rope> ropes;
  std::vector<LayerFacts> layers;  // [num_layers]
  // Absent: the file is older than this field, or its last norm is of another kind.
  std::optional<FinalNorm> final_norm;
  std::optional<Calibration> calibration;
  // How its makers would have it sampled, where a request does not say: some of the fields that
  // generation_config.json can set; no seed and no biases.
  SamplingParams sampling;

  int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }

  // Reads the JSON; the error names every field that is missing, of the wrong type or out of range.
  static absl::StatusOr<Manifest> Parse(absl::string_view json);
};

}  // namespace epikv
