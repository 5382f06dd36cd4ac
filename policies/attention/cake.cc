#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "policies/recipe.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kCakeAllocators[] = {"preference", "uniform"};

ParamSpec TemperatureParam(absl::string_view name, absl::string_view help) {
  return {.name = name,
          .type = ParamType::kFloat,
          .fallback = 1.0,
          .min = 0.1,
          .max = 100,
          .help = help};
}

const ParamSpec kCakeParams[] = {
    WindowParam(32),
    PoolKernelParam(5),
    PoolModeParam("avg"),
    GqaParam("mean"),
    {.name = "gamma",
     .type = ParamType::kFloat,
     .fallback = 200.0,
     .max = 1e6,
     .help = "weight of the variance of what the window's queries give a token, beside its mean"},
    {.name = "allocator",
     .type = ParamType::kChoice,
     .fallback = std::string("preference"),
     .choices = kCakeAllocators,
     .help = "how layers share the budget: by how widely attention is spread and how much it "
             "moves; or alike"},
    TemperatureParam("tau1", "the larger, the less the spread of a layer's attention counts"),
    TemperatureParam("tau2", "the larger, the less it counts how much a layer's attention moves"),
    SlackParam(63),
};

// How a layer's attention over the tokens before the window lies, summed over queries and heads.
struct Attention {
  double entropy = 0;   // in nats
  double variance = 0;  // over the window's queries, summed over tokens
};

// What the first round found. Later rounds keep to it.
struct CakeState final : PolicyState {
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<CakeState>(*this); }

  std::vector<Attention> attention;  // of the layers
  std::vector<int64_t> budgets;      // unprotected tokens of each of a layer's lanes; empty before
};

// `total` tokens shared out in proportion to `preferences`, `most` to one layer at the most. What
// that leaves goes to the layers with room, one token each in turn, the first layer first.
std::vector<int64_t> PreferredBudgets(const std::vector<double>& preferences, int64_t total,
                                      int64_t most) {
  const int64_t layers = std::ssize(preferences);
  const double sum = std::reduce(preferences.begin(), preferences.end());
  std::vector<int64_t> budgets;
  for (const double preference : preferences) {
    const double share =
        sum > 0 && std::isfinite(sum) ? preference / sum : 1.0 / static_cast<double>(layers);
    budgets.push_back(std::min(most, static_cast<int64_t>(share * static_cast<double>(total))));
  }
  int64_t left =
      std::min(total, layers * most) - std::reduce(budgets.begin(), budgets.end(), int64_t{0});
  for (int64_t layer = 0; left > 0; layer = (layer + 1) % layers) {
    if (budgets[layer] == most) continue;
    ++budgets[layer];
    --left;
  }
  return budgets;
}

// By slot: 0 of the lane's best unprotected token, 1 of the next one; NaN where a score is none.
std::vector<float> Ranks(const at::Tensor& scores, absl::Span<const int32_t> index,
                         const Protection& protection, int64_t newest) {
  const float* score = scores.const_data_ptr<float>();
  std::vector<int32_t> open;  // slots
  std::vector<float> ranks(index.size());
  for (size_t slot = 0; slot < index.size(); ++slot) {
    if (std::isnan(score[slot])) return {score, score + index.size()};
    if (!protection.Covers(index[slot], newest)) open.push_back(static_cast<int32_t>(slot));
  }
  std::sort(open.begin(), open.end(), [&](int32_t a, int32_t b) {
    return score[a] != score[b] ? score[a] > score[b] : index[a] > index[b];
  });
  for (size_t rank = 0; rank < open.size(); ++rank) ranks[open[rank]] = static_cast<float>(rank);
  return ranks;
}

// A token's score is the mean of what the window's queries give it, and gamma times the variance: a
// token that matters now and then is kept, too. Layers share the budget by how widely their
// attention was spread and how much it moved, in the first round.
class Cake final : public ScoredPolicy {
 public:
  explicit Cake(const Params& params)
      : ScoredPolicy(RecipeOf(params)), params_(params), gamma_(params.Float("gamma")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    return ByPreference(params_) ? std::make_unique<CakeState>() : nullptr;
  }

  static bool ByPreference(const Params& params) {
    return params.Choice("allocator") == "preference";
  }

 private:
  // Every lane has its budget by preference: a pool of all lanes, whose scores say who is within.
  static Recipe RecipeOf(const Params& params) {
    Recipe recipe{.granularity = Granularity::kHead};
    if (ByPreference(params)) recipe.pool = Pool::kModel;
    return recipe;
  }

  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const at::Tensor& attention = lane.window_attention();  // [group, w, n]
    const at::Tensor variance = attention.size(1) > 1 ? attention.var(1, /*unbiased=*/true)
                                                      : at::zeros_like(attention.select(1, 0));
    if (ByPreference(params_)) Note(task, lane, attention, variance);
    return ScoreBeforeWindow(lane, attention.mean(1) + gamma_ * variance, params_);
  }

  static void Note(const EvictionTask& task, Lane& lane, const at::Tensor& attention,
                   const at::Tensor& variance) {
    auto& state = static_cast<CakeState&>(*task.state);
    if (!state.budgets.empty()) return;
    state.attention.resize(lane.cache().num_layers());
    Attention& layer = state.attention[lane.layer()];
    if (lane.head() == 0) layer = {};
    const at::Tensor seen = BeforeWindow(lane, attention);
    layer.entropy -= (seen * (seen + 1e-10).log()).sum().item<double>();
    layer.variance += BeforeWindow(lane, variance).sum().item<double>();
  }

  // Scores become places in the lane, against its budget: those within are above 0, and all lanes
  // have as many of them as the budget of the round.
  void Reconcile(const EvictionTask& task, std::vector<at::Tensor>& scores) const override {
    if (!ByPreference(params_)) return;
    const CacheView& cache = task.cache;
    const int64_t heads = cache.num_kv_heads(), lanes = std::ssize(scores);
    int64_t open = -cache.excess(0, 0), most = 0;  // what may be kept unprotected; of one lane
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const absl::Span<const int32_t> index = cache.index(lane / heads, lane % heads);
      const int64_t unprotected = std::count_if(index.begin(), index.end(), [&](int32_t token) {
        return !cache.protection().Covers(token, cache.newest());
      });
      open += unprotected;
      most = std::max(most, unprotected);
    }
    auto& state = static_cast<CakeState&>(*task.state);
    if (state.budgets.empty()) {
      std::vector<double> preferences;
      for (const Attention& layer : state.attention) {
        preferences.push_back(std::pow(std::max(0.0, layer.entropy), 1 / params_.Float("tau1")) *
                              std::pow(layer.variance, 1 / params_.Float("tau2")));
      }
      state.budgets = PreferredBudgets(preferences, open / heads, most);
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const std::vector<float> ranks = Ranks(scores[lane], cache.index(lane / heads, lane % heads),
                                             cache.protection(), cache.newest());
      scores[lane] = static_cast<double>(state.budgets[lane / heads]) - Scores(ranks);
    }
  }

  const Params params_;
  const double gamma_;
};

PolicyTraits CakeTraits(const Params& params, const ModelShape& shape) {
  PolicyTraits traits = WindowTraits(params);
  if (Cake::ByPreference(params)) {
    traits.pool = Pool::kModel;
    traits.state_bytes =
        static_cast<int64_t>(sizeof(Attention) + sizeof(int64_t)) * shape.num_layers;
  }
  return traits;
}

}  // namespace

extern constinit const PolicySpec kCake{
    .name = "cake",
    .summary =
        "drops the tokens to which the newest queries attend least and most evenly; layers share "
        "one budget, more of it where attention is spread and moves",
    .paper = "arXiv 2503.12491 (CAKE)",
    .evidence = "golden: antgroup/cakekv c4675ce `CakeprefillKVCache`",
    .params = kCakeParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits = &CakeTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Cake>(params);
    },
};

}  // namespace epikv
