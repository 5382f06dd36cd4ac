#include "runtime/model/rank_operators.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include "runtime/base/scalar_type.h"
#include "runtime/ranks/ranks.h"

namespace epikv {
namespace {

thread_local Ranks* current_ranks = nullptr;

Ranks& CurrentRanks() {
  TORCH_CHECK(current_ranks != nullptr, "a shard of a model ran outside epikv::Model");
  return *current_ranks;
}

// x [...] -> the sum over ranks, of the same type, with the same bits in each.
at::Tensor SumRanks(const at::Tensor& x) {
  at::Tensor sum = x.contiguous();
  if (sum.is_same(x)) sum = x.clone();
  CurrentRanks().Sum(sum.mutable_data_ptr(), sum.numel(), DTypeOf(sum.scalar_type()));
  return sum;
}

// part [rows, n] -> [rows, size]: all ranks' parts beside each other, without what is beyond size.
at::Tensor GatherRanks(const at::Tensor& part, int64_t size) {
  Ranks& ranks = CurrentRanks();
  const at::Tensor own = part.contiguous();
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), ranks.size());
  at::Tensor all = at::empty(sizes, own.options());  // [ranks, rows, n]
  ranks.Gather(own.const_data_ptr(), static_cast<int64_t>(own.nbytes()), all.mutable_data_ptr());
  // None of the rows, in a chunk of a prompt that goes on, has logits.
  return all.transpose(0, 1).reshape({own.size(0), ranks.size() * own.size(1)}).narrow(1, 0, size);
}

// Rows [begin, begin + weight.size(0)) of an embedding; zeros for the tokens of other ranks.
at::Tensor EmbeddingPart(const at::Tensor& weight, const at::Tensor& token_ids, int64_t begin) {
  const at::Tensor own = token_ids - begin;
  const at::Tensor others = (own < 0).logical_or(own >= weight.size(0));
  return at::embedding(weight, own.masked_fill(others, 0)).masked_fill(others.unsqueeze(-1), 0);
}

}  // namespace

RanksScope::RanksScope(Ranks* ranks) : outer_(current_ranks) { current_ranks = ranks; }

RanksScope::~RanksScope() { current_ranks = outer_; }

}  // namespace epikv

// Not in a model file: CutShard puts them into the graph. They exchange, which no schema can say.
TORCH_LIBRARY_FRAGMENT(epikv, m) {
  m.def(torch::schema("sum_ranks(Tensor x) -> Tensor", c10::AliasAnalysisKind::CONSERVATIVE));
  m.def(torch::schema("gather_ranks(Tensor part, int size) -> Tensor",
                      c10::AliasAnalysisKind::CONSERVATIVE));
  m.def("embedding_part(Tensor weight, Tensor token_ids, int begin) -> Tensor");
  m.impl("sum_ranks", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::SumRanks));
  m.impl("gather_ranks", c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(epikv::GatherRanks));
  m.impl("embedding_part", c10::DispatchKey::CompositeExplicitAutograd,
         TORCH_FN(epikv::EmbeddingPart));
}
