#include "policies/mlp_gate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "policies/loops.h"
#include "policies/products.h"

namespace epikv {
namespace {

// Between maps rows are whole vectors of any processor, filled up with zeros: where a row lies has
// no say in how its activations are rounded.
constexpr int64_t kVector = 32;

constexpr int64_t kFew = 16;  // rows

float Activated(Activation activation, float x) {
  if (activation == Activation::kSilu) return x / (1 + std::exp(-x));
  return 0.5f * x * (1 + std::erf(x * 0.70710678f));
}

std::string ShapeText(absl::Span<const int64_t> shape) {
  auto add = [](std::string* text, int64_t size) {
    absl::StrAppend(text, size < 0 ? "any" : absl::StrCat(size));
  };
  return absl::StrCat("[", absl::StrJoin(shape, ", ", add), "]");
}

}  // namespace

absl::StatusOr<at::Tensor> ArrayOf(const NamedArrays& arrays, const std::string& name,
                                   const std::vector<int64_t>& wanted) {
  const auto found = arrays.find(name);
  if (found == arrays.end()) return absl::InvalidArgumentError(absl::StrCat(name, " is missing"));
  const NamedArray& array = found->second;
  bool fits = array.shape.size() == wanted.size();
  for (size_t i = 0; fits && i < wanted.size(); ++i) {
    fits = wanted[i] < 0 ? array.shape[i] > 0 : array.shape[i] == wanted[i];
  }
  if (!fits) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must be ", ShapeText(wanted), ", is ", ShapeText(array.shape)));
  }
  return at::tensor(at::ArrayRef<float>(array.values), at::kFloat).view(array.shape);
}

absl::StatusOr<std::vector<std::vector<MlpGate::Linear>>> MlpGate::Read(const NamedArrays& arrays,
                                                                        const ModelShape& shape,
                                                                        int64_t depth,
                                                                        int64_t numbers) {
  std::vector<std::vector<Linear>> layers(shape.num_layers);
  size_t taken = 0;
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    int64_t width = shape.hidden_size, padding = 0;
    for (int64_t i = 1; i <= depth; ++i) {
      const std::string name = absl::StrCat("layers.", layer, ".linear", i);
      const absl::StatusOr<at::Tensor> weight =
          ArrayOf(arrays, name + ".weight",
                  {i == depth ? shape.num_kv_heads * numbers : int64_t{-1}, width});
      if (!weight.ok()) return weight.status();
      width = weight->size(0);
      const absl::StatusOr<at::Tensor> bias = ArrayOf(arrays, name + ".bias", {width});
      if (!bias.ok()) return bias.status();
      const int64_t before = padding;
      padding = i == depth ? 0 : (kVector - width % kVector) % kVector;
      layers[layer].push_back({at::constant_pad_nd(*weight, {0, before, 0, padding}),
                               at::constant_pad_nd(*bias, {0, padding})});
      taken += 2;
    }
  }
  if (taken < arrays.size()) {
    return absl::InvalidArgumentError(absl::StrCat("the file of arrays holds ", arrays.size(),
                                                   " arrays, and ", taken, " are of the gate"));
  }
  return layers;
}

void MlpGate::PlaceOn(at::Device device) const {
  std::vector<std::vector<Linear>> placed;
  for (const std::vector<Linear>& maps : layers_) {
    std::vector<Linear>& copies = placed.emplace_back();
    for (const Linear& map : maps) copies.push_back({map.weight.to(device), map.bias.to(device)});
  }
  layers_ = std::move(placed);
}

void PlaceGatesOn(at::Device device, const ModelShape& shape) {
  for (const auto& [policy, data] : shape.artefacts) {
    if (const auto* gate = dynamic_cast<const MlpGate*>(data.get())) gate->PlaceOn(device);
  }
}

// Row by row: for a few rows a product by torch takes longer to call than to do.
at::Tensor MlpGate::ApplyToFew(int64_t layer, const at::Tensor& input) const {
  const std::vector<Linear>& maps = layers_[layer];
  const int64_t heads = maps.back().bias.numel();
  const at::Tensor rows = input.to(at::kFloat).contiguous();
  at::Tensor said = at::empty({rows.size(0), heads}, at::kFloat);
  std::vector<float> hidden, next;
  for (int64_t row = 0; row < rows.size(0); ++row) {
    const float* x = rows.const_data_ptr<float>() + row * rows.size(1);
    for (const Linear& map : maps) {
      const int64_t out = map.weight.size(0), in = map.weight.size(1);
      next.resize(out);
      Affine(map.weight.const_data_ptr<float>(), map.bias.const_data_ptr<float>(), x, out, in,
             next.data());
      if (&map == &maps.back()) break;
      for (float& number : next) number = Activated(activation_, number);
      hidden.swap(next);
      x = hidden.data();
    }
    std::copy(next.begin(), next.end(), said.mutable_data_ptr<float>() + row * heads);
  }
  return said;
}

at::Tensor MlpGate::Apply(int64_t layer, const at::Tensor& input) const {
  if (input.is_cpu() && input.size(0) <= kFew) return ApplyToFew(layer, input);
  at::Tensor x = input.to(at::kFloat);
  const std::vector<Linear>& maps = layers_[layer];
  for (size_t i = 0; i < maps.size(); ++i) {
    if (i > 0) x = activation_ == Activation::kSilu ? at::silu(x) : at::gelu(x);
    x = x.is_cpu() ? Products(x, maps[i].weight).add_(maps[i].bias)
                   : at::linear(x, maps[i].weight, maps[i].bias);
  }
  return x;
}

}  // namespace epikv
