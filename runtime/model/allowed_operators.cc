#include "runtime/model/allowed_operators.h"

#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace epikv {
namespace {

// Of aten. "add" is add_, too.
constexpr absl::string_view kAten = R"(
  abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv all amax amin aminmax any arange arccos
  arcsin arctan arctan2 argmax argmin argsort asin asinh atan atan2 atanh atleast_1d atleast_2d avg_pool1d baddbmm
  batch_norm bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor bmm broadcast_tensors
  broadcast_to bucketize cat ceil celu chunk clamp clamp_max clamp_min clip clone column_stack concat concatenate
  constant_pad_nd contiguous conv1d conv2d copy copysign cos cosh count_nonzero cross cummax cummin cumprod cumsum
  detach diag diag_embed diagonal diff div divide dot dropout einsum elu embedding eq equal erf erfc erfinv exp exp2
  expand expand_as expm1 eye fill flatten flip float_power floor floor_divide fmax fmin fmod frac full
  full_like gather ge gelu glu greater greater_equal group_norm gt hardsigmoid hardswish hardtanh heaviside hstack hypot
  index index_add index_copy index_fill index_put index_select inner isclose isfinite isin isinf isnan isneginf isposinf
  item kron layer_norm le leaky_relu lerp less less_equal linalg_matmul linalg_norm linalg_vector_norm linear linspace
  log log10 log1p log2 log_sigmoid log_softmax logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or
  logical_xor logit logsumexp lt masked_fill masked_scatter masked_select matmul max maximum mean median meshgrid min
  minimum mish mm moveaxis movedim mul multiply mv nan_to_num nanmean nansum narrow ne neg negative new_full new_ones
  new_zeros nonzero norm normalize not_equal numel one_hot ones ones_like outer pad permute polar positive pow prelu
  prod quantile ravel real reciprocal relu relu6 remainder repeat repeat_interleave reshape reshape_as rms_norm roll
  round rsqrt rsub scalar_tensor scaled_dot_product_attention scatter scatter_add scatter_reduce searchsorted
  select selu sgn sigmoid sign signbit silu sin sinc sinh size slice softmax softplus softshrink sort split
  split_with_sizes sqrt square squeeze stack std stride sub subtract sum sum_to_size swapaxes swapdims t take
  take_along_dim tan tanh tensor tensor_split tensordot threshold tile to topk trace transpose tril triu true_divide
  trunc type_as unbind unflatten unfold unsqueeze var view view_as view_as_complex view_as_real vstack where xlogy zero
  zeros zeros_like
  is_complex is_contiguous is_floating_point is_nonzero is_scripting is_signed result_type promote_types imag conj
  resolve_conj element_size storage_offset dim
  Bool Float Int IntImplicit FloatImplicit ScalarImplicit
  append bin capitalize center clear count degrees dict divmod endswith extend fabs factorial find floordiv format gcd
  get hex index insert isalnum isalpha isdecimal isdigit join items keys len list lower lstrip mathremainder modf oct ord
  pop popitem radians range remove replace reverse rfind rstrip setdefault sorted splitlines startswith str strip
  swapcase title update upper values warn
  __and__ __contains__ __derive_index __getitem__ __iand__ __ilshift__ __ior__ __irshift__ __is__ __isnot__ __ixor__
  __lshift__ __not__ __or__ __range_length __round_to_zero_floordiv __rshift__ __xor__ _set_item _softmax _log_softmax
  _unwrap_optional
)";

// Of prim: the language itself.
constexpr absl::string_view kPrim = R"(
  Constant If Loop ListConstruct ListUnpack TupleConstruct TupleUnpack TupleIndex TupleSlice DictConstruct GetAttr
  CallMethod CallFunction NumToTensor RaiseException StringIndex Uninitialized unchecked_cast unchecked_unwrap_optional
  isinstance annotate tolist dtype device layout shape min max abs data requires_grad type is_cpu is_cuda is_quantized
  is_sparse is_meta is_mkldnn is_nested itemsize nbytes rangelist ModuleContainerIndex EnumName EnumValue Function
)";

constexpr absl::string_view kEpikv = "attention block quantized_linear rms_norm swiglu";

absl::flat_hash_set<std::string> Words(absl::string_view text) {
  return absl::StrSplit(text, absl::ByAnyChar(" \n"), absl::SkipEmpty());
}

}  // namespace

bool OperatorIsAllowed(absl::string_view name) {
  static const auto& aten = *new absl::flat_hash_set<std::string>(Words(kAten));
  static const auto& prim = *new absl::flat_hash_set<std::string>(Words(kPrim));
  static const auto& epikv = *new absl::flat_hash_set<std::string>(Words(kEpikv));
  if (absl::ConsumePrefix(&name, "prim::")) return prim.contains(name);
  if (absl::ConsumePrefix(&name, "epikv::")) return epikv.contains(name);
  if (!absl::ConsumePrefix(&name, "aten::")) return false;
  if (aten.contains(name)) return true;
  return !absl::StartsWith(name, "_") && absl::ConsumeSuffix(&name, "_") && aten.contains(name);
}

}  // namespace epikv
