#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "policies/cache_view.h"
#include "policies/policy.h"
#include "policies/spec.h"

// Statistics of K and V rows over their channels, for policies that rank by them.

namespace epikv {

// `range`: largest less smallest. `variance`: over channels - 1. `norm`: L2.
inline constexpr absl::string_view kRowStats[] = {"range", "variance", "norm"};

// [..., width] -> fp32 [...]
at::Tensor RowStat(const at::Tensor& rows, const std::string& stat);

enum class RowKind { kKey, kValue };

// Of the newest token, averaged over all lanes. Of a policy whose lanes share one slot order.
float NewestRowStat(const CacheView& cache, RowKind kind, const std::string& stat);

// Of every token, averaged over all lanes. fp32 [used], by slot. As above.
at::Tensor MeanRowStat(const CacheView& cache, RowKind kind, const std::string& stat);

// kv_key_variance and kv_value_variance: a token's score is the variance of its rows, averaged over
// all lanes and over the last `window` tokens.
ParamSpec RowWindowParam();
PolicyTraits RowVarianceTraits(const Params& params, Signal rows);
std::shared_ptr<const Policy> MakeRowVariance(const Params& params, RowKind kind);

// `reserve`, `reserve_by`: tokens that are spared for the size of their values alone (dropping
// those makes models loop: VaSE, arXiv 2606.03928).
ParamSpec ReserveParam();
ParamSpec ReserveByParam();
SignalSet ReserveSignals(const Params& params);  // none without a reserve

// The slot of a cached token.
int64_t SlotOf(const CacheView& cache, int64_t token);

}  // namespace epikv
