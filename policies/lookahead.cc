#include "policies/lookahead.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "policies/lane.h"
#include "policies/recipe.h"
#include "policies/select.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kDrafts[] = {"snapkv", "streaming_llm", "whole"};
constexpr absl::string_view kQueries[] = {"recent", "lookahead"};
constexpr int64_t kDraftWindow = 32, kDraftKernel = 7, kDraftSinks = 4;

// Tokens that leave each lane, [layers x kv_heads]: of lanes that share a budget, as if they did
// not, which is all that a copy has room for.
std::vector<int64_t> ExcessOfLanes(const CacheView& cache, Pool pool) {
  const int64_t heads = cache.num_kv_heads(), lanes = cache.num_layers() * heads;
  const int64_t together = pool == Pool::kLane ? 1 : pool == Pool::kLayer ? heads : lanes;
  std::vector<int64_t> excess;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t of_pool = cache.excess(lane / heads, lane % heads);
    excess.push_back((of_pool + together - 1) / together);
  }
  return excess;
}

std::vector<float> SnapkvScores(CacheView& cache, int64_t layer, int64_t head) {
  Lane lane(cache, layer, head);
  const int64_t window = std::min(kDraftWindow, lane.queries().size(1));
  const at::Tensor seen = SoftmaxOfSeen(lane.Logits(window)).mean(1);  // [group, n]
  const int64_t before = seen.size(1) - window;
  const at::Tensor oldest = lane.by_birth().narrow(0, 0, before);
  const at::Tensor score =
      PoolNeighbours(seen.index_select(-1, oldest), kDraftKernel, "max").mean(0).contiguous();
  // The window stays.
  std::vector<float> scores(seen.size(1), std::numeric_limits<float>::max());
  for (int64_t i = 0; i < before; ++i) {
    scores[oldest.const_data_ptr<int64_t>()[i]] = score.const_data_ptr<float>()[i];
  }
  return scores;
}

std::vector<float> StreamingScores(const CacheView& cache, int64_t layer, int64_t head) {
  std::vector<float> scores;
  for (const int32_t index : cache.index(layer, head)) {
    scores.push_back(index < kDraftSinks ? std::numeric_limits<float>::max()
                                         : static_cast<float>(index));
  }
  return scores;
}

Pool PoolOf(const Params& params) {
  PolicyTraits traits;
  AddRecipe(params, traits);
  return traits.pool;
}

}  // namespace

ParamSpec PseudoTokensParam() {
  return {.name = "pseudo_tokens",
          .type = ParamType::kInt,
          .fallback = int64_t{8},
          .min = 1,
          .max = 256,
          .help = "tokens that the model tells ahead"};
}

ParamSpec DraftParam() {
  return {.name = "draft",
          .type = ParamType::kChoice,
          .fallback = std::string("snapkv"),
          .choices = kDrafts,
          .help =
              "what thins out the copy of the cache over which they are told; whole: nothing, "
              "they are told over the prompt itself"};
}

ParamSpec QueriesParam() {
  return {.name = "queries",
          .type = ParamType::kChoice,
          .fallback = std::string("recent"),
          .choices = kQueries,
          .help =
              "at the prompt's end, ask the newest queries alone, or beside them those of "
              "pseudo_tokens told ahead"};
}

void AddLookahead(const Params& params, PolicyTraits& traits) {
  if (params.Has("queries") && params.Choice("queries") != "lookahead") return;
  traits.pass = {.lookahead = params.Int("pseudo_tokens"),
                 .drafts = params.Choice("draft") != "whole"};
  traits.floats_per_token += kFloatsOfQuery * params.Int("pseudo_tokens");
}

Eviction DraftOf(const EvictionTask& task, const Params& params) {
  CacheView& cache = task.cache;
  const bool snapkv = params.Choice("draft") == "snapkv";
  const std::vector<int64_t> excess = ExcessOfLanes(cache, PoolOf(params));
  Eviction draft;
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      const std::vector<float> scores =
          snapkv ? SnapkvScores(cache, layer, head) : StreamingScores(cache, layer, head);
      absl::StatusOr<std::vector<int32_t>> lowest =
          LowestScores(scores, cache.index(layer, head), cache.protection(), cache.newest(),
                       excess[layer * cache.num_kv_heads() + head]);
      if (!lowest.ok()) return {.status = lowest.status()};
      draft.victims.push_back(*std::move(lowest));
    }
  }
  return draft;
}

}  // namespace epikv
