#include "runtime/admission/kv_demand.h"

#include <algorithm>

namespace epikv {
namespace {

// Most tokens that a lane holds while a prompt is cached in chunks, with a round after each.
int64_t PeakByChunk(int64_t prefill, int64_t budget, int64_t chunk) {
  const int64_t whole = prefill / chunk * chunk;  // the last chunk may be a part of one
  const int64_t in_last_part = std::min(budget, whole) + prefill - whole;
  if (whole == 0) return in_last_part;
  return std::max(in_last_part, std::min(budget, whole - chunk) + chunk);
}

}  // namespace

KvDemand DemandOf(const Request& request, const std::vector<int64_t>& budgets, int64_t longest,
                  int64_t chunk, const KvLayout& layout) {
  KvDemand demand;
  const int64_t prefill = request.prefill_tokens();
  for (int64_t budget : budgets) {
    int64_t while_prefilling = prefill, while_decoding = longest;
    if (request.traits.evicts) {
      const int64_t after_prefill = std::min(prefill, budget);
      while_decoding =
          std::min(after_prefill + longest - prefill, budget + request.traits.slack + 1);
      if (request.traits.prompt == PromptEviction::kByChunk) {
        while_prefilling = PeakByChunk(prefill, budget, chunk);
      }
    }
    demand.budget.push_back(budget);
    demand.prefill.push_back(std::max(while_prefilling, while_decoding));
    demand.decode.push_back(while_decoding);
  }
  demand.prefill_bytes =
      BytesOf(layout, demand.prefill) + std::min(prefill, chunk) * layout.step_bytes_per_row;
  demand.decode_bytes = BytesOf(layout, demand.decode) + layout.step_bytes_per_row;
  return demand;
}

void AddLookahead(const Request& request, const KvLayout& layout, KvDemand& demand) {
  const int64_t prefill = request.prefill_tokens(), ahead = request.traits.lookahead;
  const bool over = std::any_of(demand.budget.begin(), demand.budget.end(),
                                [&](int64_t budget) { return budget < prefill; });
  if (ahead == 0 || !over) return;
  for (const int64_t budget : demand.budget) {
    demand.lookahead.push_back(std::min(budget, prefill) + ahead);
  }
  demand.prefill_bytes += BytesOf(layout, demand.lookahead) + layout.step_bytes_per_row;
}

}  // namespace epikv
