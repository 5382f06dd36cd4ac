#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "policies/gate.h"
#include "policies/spec.h"

namespace epikv {

enum class Activation { kSilu, kGelu };

// A gate of linear maps with an activation between any two of them, in fp32. The maps of an
// artefact are the arrays "layers.L.linearI.weight" [out, in] and "layers.L.linearI.bias" [out],
// with L from 0 and I from 1; the first takes hidden_size numbers, the last gives kv_heads, or a
// few for each.
class MlpGate : public PolicyData, public Gate {
 public:
  struct Linear {
    at::Tensor weight, bias;
  };

  // depth: how many maps a layer has. numbers: that the last gives for each head. INVALID_ARGUMENT
  // names the array that is missing, superfluous or of another shape.
  static absl::StatusOr<std::vector<std::vector<Linear>>> Read(const NamedArrays& arrays,
                                                               const ModelShape& shape,
                                                               int64_t depth, int64_t numbers = 1);

  MlpGate(std::vector<std::vector<Linear>> layers, Activation activation)
      : layers_(std::move(layers)), activation_(activation) {}

  // Copies the maps to where the model is, before it runs. Not while Apply may run.
  void PlaceOn(at::Device device) const;

  at::Tensor Apply(int64_t layer, const at::Tensor& input) const override;

 private:
  at::Tensor ApplyToFew(int64_t layer, const at::Tensor& input) const;

  mutable std::vector<std::vector<Linear>> layers_;  // on the CPU, unless placed elsewhere
  const Activation activation_;
};

// The array `name` of an artefact, fp32, of this shape; a size of -1 may be any. INVALID_ARGUMENT
// says what it is instead.
absl::StatusOr<at::Tensor> ArrayOf(const NamedArrays& arrays, const std::string& name,
                                   const std::vector<int64_t>& shape);

// Of all gates among a model's artefacts.
void PlaceGatesOn(at::Device device, const ModelShape& shape);

}  // namespace epikv
