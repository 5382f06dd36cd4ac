#include "runtime/model/one_dnn_weight.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string_view>
#include <vector>

namespace epikv {
namespace {

// Rows that oneDNN is told to expect. It fixes the layout, not what may be run: with 16, float32
// is fastest or equal from 1 to 512 rows, and bfloat16 does not care.
constexpr int64_t kExpectedRows = 16;

// A kernel that ATen publishes only through the dispatcher.
template <typename Signature>
auto Operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

bool OneDnnWeight::Supports(at::ScalarType dtype) {
  if (!at::globalContext().hasMKLDNN()) return false;
  if (dtype == at::kFloat) return true;
  static const bool has_bfloat16 = Operator<bool()>("mkldnn::_is_mkldnn_bf16_supported").call();
  return dtype == at::kBFloat16 && has_bfloat16;
}

OneDnnWeight::OneDnnWeight(const at::Tensor& weight)
    : in_(weight.size(1)), out_(weight.size(0)), dtype_(weight.scalar_type()) {
  static const auto reorder = Operator<at::Tensor(const at::Tensor&, std::optional<int64_t>)>(
      "mkldnn::_reorder_linear_weight");
  packed_ = reorder.call(weight.detach(), kExpectedRows);
}

at::Tensor OneDnnWeight::Apply(const at::Tensor& x, const std::optional<at::Tensor>& bias) const {
  TORCH_CHECK(x.scalar_type() == dtype_ && x.dim() > 0 && x.size(-1) == in_,
              "epikv::packed_linear: x is ", x.scalar_type(), x.sizes(), ", the weight ", dtype_,
              " [", out_, ", ", in_, "]");
  if (x.numel() == 0) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = out_;
    return at::empty(sizes, x.options());
  }
  using Scalars = c10::List<std::optional<at::Scalar>>;
  static const auto linear =
      Operator<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          std::string_view, Scalars, std::optional<std::string_view>)>(
          "mkldnn::_linear_pointwise");
  static const Scalars none;
  return linear.call(x, packed_, bias, "none", none, "");
}

at::Tensor OneDnnWeight::Dense(at::ScalarType dtype) const { return packed_.to_dense().to(dtype); }

int64_t OneDnnWeight::bytes() const {
  return packed_.numel() * static_cast<int64_t>(packed_.itemsize());
}

}  // namespace epikv
