#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "policies/loops.h"
#include "policies/products.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kHistories[] = {"count", "mass"};

const ParamSpec kScissorhandsParams[] = {
    WindowParam(400),
    {.name = "history",
     .type = ParamType::kChoice,
     .fallback = std::string("count"),
     .choices = kHistories,
     .help = "count: how many of the window's queries gave the token less than their mean; mass: "
             "how much they gave it"},
    SlackParam(127),
};

class Scissorhands final : public ScoredPolicy {
 public:
  explicit Scissorhands(const Params& params)
      : ScoredPolicy(Granularity::kHead), count_(params.Choice("history") == "count") {}

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    return count_ ? -Unimportant(lane) : lane.window_attention().mean(at::IntArrayRef{0, 1});
  }

  // How many of the window's queries gave a token less than their mean, averaged over query heads.
  // What bounds it are the products of all queries with all keys, 2 x w x group x n x key_width
  // FLOP a round: from one to the next the tokens that a query sees are others, and so is its mean.
  // [n]
  static at::Tensor Unimportant(Lane& lane) {
    constexpr int64_t kRows = 32;  // whose logits stay in the second-level cache
    const int64_t group = lane.group(), w = lane.queries().size(1), n = lane.index().size(0);
    const AttentionFacts attention = lane.cache().attention(lane.layer());
    const at::Tensor queries =  // those of one token follow each other
        (lane.queries() * attention.scale).transpose(0, 1).flatten(0, 1);
    // In birth order: what a query sees follows each other.
    const at::Tensor keys = lane.keys().index_select(0, lane.by_birth());
    const at::Tensor index = lane.index().index_select(0, lane.by_birth());
    const int64_t* const tokens = index.const_data_ptr<int64_t>();

    std::vector<uint32_t> count(n);
    float none = 0;  // what is no number stays none
    for (int64_t begin = 0; begin < w * group; begin += kRows) {
      const int64_t rows = std::min(kRows, w * group - begin);
      at::Tensor logits = Products(queries.narrow(0, begin, rows), keys);
      SoftCap(logits, attention);
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t asked = lane.cache().newest() + 1 - w + (begin + row) / group;
        auto until = [&](int64_t token) {
          return std::upper_bound(tokens, tokens + n, token) - tokens;
        };
        const int64_t first = attention.window.has_value() ? until(asked - *attention.window) : 0;
        const int64_t seen = until(asked) - first;
        if (seen == 0) continue;
        none += 0 * CountBelowMean(logits.const_data_ptr<float>() + row * n + first, seen,
                                   count.data() + first);
      }
    }
    const at::Tensor total = Scores({count.begin(), count.end()});
    return lane.ToSlots(total / group + none);
  }

  const bool count_;
};

}  // namespace

extern constinit const PolicySpec kScissorhands{
    .name = "scissorhands",
    .summary = "drops the tokens that the newest queries most often found unimportant",
    .paper = "arXiv 2305.17118",
    .evidence =
        "golden: guozhiyu/vatp 39ea686 `LlamaAttention_heavy_hitter` (history = mass); "
        "count: scissorhands_test.cc",
    .params = kScissorhandsParams,
    .scores = true,
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params);
          traits.published = {.prompt = false, .recent = 10};
          if (params.Choice("history") == "count") traits.floats_per_token = 0;  // some at a time
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Scissorhands>(params);
    },
};

}  // namespace epikv
