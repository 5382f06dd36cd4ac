#include "policies/attention/epicache.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "policies/recipe.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

constexpr int64_t kTail = 64;  // of a prompt, that asks where nobody says what is asked
constexpr double kThousand = 1000;

const ParamSpec kEpicacheParams[] = {
    {.name = "query",
     .type = ParamType::kIntList,
     .fallback = std::vector<int64_t>{},
     .max = 2147483647,
     .help = "tokens that ask, 2 or more: of what the prompt is cached for, such as passages like "
             "its questions to come; none: the newest 64 of the prompt"},
    {.name = "similarities",
     .type = ParamType::kIntList,
     .min = -kThousand,
     .max = kThousand,
     .help = "of each layer, in thousandths: how alike its keys are if the model sees blocks alone "
             "(`epikv calibrate epicache`); none: layers have equal budgets"},
    {.name = "power",
     .type = ParamType::kFloat,
     .fallback = 1.1,
     .max = 8,
     .help = "how much more layers have whose keys are less alike; 0: none has"},
    AllocatorParam("head_pool"),
    FloorParam(0),
    SlackParam(63),
};

std::vector<double> Similarities(const Params& params) {
  std::vector<double> similarities;
  for (const int64_t value : params.IntList("similarities")) {
    similarities.push_back(static_cast<double>(value) / kThousand);
  }
  return similarities;
}

// Behind each block of a prompt that is over the budget, the model reads the query, and a token is
// worth the most that any of the query gave it, of what it gave to the tokens cached. Decoded
// tokens stay as long as any of the prompt may go.
class EpiCache final : public ScoredPolicy {
 public:
  explicit EpiCache(const Params& params)
      : ScoredPolicy(Recipe::Of(params, Granularity::kHead, /*own_columns=*/1)) {
    for (const int64_t token : params.IntList("query")) {
      query_.push_back(static_cast<int32_t>(token));
    }
  }

  std::vector<std::vector<int32_t>> PassSegments(absl::Span<const int32_t> prompt) const override {
    if (!query_.empty()) return {query_};
    const size_t tail = std::min<size_t>(prompt.size(), kTail);
    return {{prompt.end() - static_cast<int64_t>(tail), prompt.end()}};
  }

  void ObservePass(absl::Span<PassStep> steps) const override {
    for (PassStep& step : steps) {
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) {
          ObserveLane(step, layer, head);
        }
      }
    }
  }

 private:
  static void ObserveLane(PassStep& step, int64_t layer, int64_t head) {
    Lane lane(step.cache, layer, head);
    const AttentionFacts attention = step.cache.attention(layer);
    at::Tensor logits = at::matmul(lane.queries(), lane.keys().t()).mul_(attention.scale);
    SoftCap(logits, attention);
    if (attention.window.has_value()) {
      const int64_t behind = step.cache.newest() + 1 + step.first;
      const at::Tensor asked = at::arange(behind, behind + step.count, at::kLong).unsqueeze(1);
      logits.masked_fill_(lane.index() <= asked - *attention.window,
                          -std::numeric_limits<float>::infinity());
    }
    const at::Tensor most = SoftmaxOfSeen(logits).amax(at::IntArrayRef{0, 1});  // [n]
    at::Tensor worth = lane.column(0);
    if (step.first == 0) worth.zero_();  // of the block before
    at::maximum_out(worth, worth, most);
  }

  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    return lane.column(0).masked_fill(lane.index() >= lane.cache().prompt_tokens(),
                                      std::numeric_limits<float>::max());
  }

  std::vector<int32_t> query_;
};

absl::Status Complete(Params& params, const ModelShape& shape) {
  if (!params.Has("similarities")) {
    const auto calibrated = shape.calibrated.find("epicache");
    params.Set("similarities", calibrated == shape.calibrated.end()
                                   ? ParamValue(std::vector<int64_t>{})
                                   : calibrated->second.at("similarities"));
  }
  const std::vector<int64_t>& similarities = params.IntList("similarities");
  if (!similarities.empty() && std::ssize(similarities) != shape.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat("similarities: has ", similarities.size(),
                                                   " items, and the model ", shape.num_layers,
                                                   " layers"));
  }
  const std::vector<int64_t>& query = params.IntList("query");
  for (const int64_t token : query) {
    if (token < shape.vocab_size) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "query: token id ", token, " is outside the vocabulary [0, ", shape.vocab_size, ")"));
  }
  if (query.size() == 1) return absl::InvalidArgumentError("query: has 1 item, 2 at least or none");
  return CheckRecipe(params, {ScoreKind::kMass, Comparable::kModel});
}

PolicyTraits Traits(const Params& params, const ModelShape&) {
  const int64_t query = std::ssize(params.IntList("query"));
  PolicyTraits traits{.granularity = Granularity::kHead,
                      .signals = Signal::kKeys,
                      .columns = {"score"},
                      .prompt = PromptEviction::kByChunk,
                      .slack = params.Int("slack"),
                      .pass = {.chunk = 1, .more = (query > 0 ? query : kTail) - 1},
                      .published = {.prompt = false, .sinks = 0, .recent = 0}};
  AddRecipe(params, traits);
  return traits;
}

std::vector<int64_t> LaneBudgets(const Params& params, const ModelShape& shape, int64_t budget) {
  if (params.IntList("similarities").empty()) return RecipeLaneBudgets(params, shape, budget);
  const std::vector<int64_t> of_layers =
      EpicacheBudgets(Similarities(params), params.Float("power"), budget);
  std::vector<int64_t> budgets;
  for (const int64_t of_layer : of_layers) {
    budgets.insert(budgets.end(), shape.num_kv_heads, of_layer);
  }
  return budgets;
}

}  // namespace

std::vector<int64_t> PublishedEpicacheBudgets(absl::Span<const double> similarities, double power,
                                              int64_t budget) {
  const auto [least, most] = std::minmax_element(similarities.begin(), similarities.end());
  if (power == 0 || *least == *most) return std::vector<int64_t>(similarities.size(), budget);
  std::vector<double> weights;
  for (const double s : similarities) {
    weights.push_back(std::pow(1 - (s - *least) / (*most - *least), power));
  }
  const double sum = std::reduce(weights.begin(), weights.end());
  std::vector<int64_t> budgets;
  for (const double weight : weights) {
    const double share = weight * static_cast<double>(budget * std::ssize(weights)) / sum;
    budgets.push_back(std::max(static_cast<int64_t>(share), std::max<int64_t>(1, budget / 4)));
  }
  return budgets;
}

std::vector<int64_t> EpicacheBudgets(absl::Span<const double> similarities, double power,
                                     int64_t budget) {
  std::vector<int64_t> budgets = PublishedEpicacheBudgets(similarities, power, budget);
  const int64_t layers = std::ssize(budgets),
                floor = std::min(budget, std::max<int64_t>(1, budget / 4));
  int64_t above = 0;
  for (const int64_t b : budgets) above += b - floor;
  if (above == 0) return std::vector<int64_t>(layers, budget);
  const double scale = static_cast<double>((budget - floor) * layers) / static_cast<double>(above);
  double owed = 0;
  int64_t spent = 0;
  for (int64_t& b : budgets) {
    owed += static_cast<double>(floor) + scale * static_cast<double>(b - floor);
    const int64_t rounded = std::llround(owed) - spent;  // sums stay exact
    spent += rounded;
    b = rounded;
  }
  return budgets;
}

extern constinit const PolicySpec kEpicache{
    .name = "epicache",
    .summary =
        "drops the tokens to which a query attends least that the model reads behind each "
        "block of the prompt; a layer's heads share its budget",
    .paper = "arXiv 2509.17396 (EpiCache)",
    .evidence = "cases: epicache_test.cc (a golden of apple/ml-epicache b742661)",
    .params = kEpicacheParams,
    .scores = true,
    .calibrated = true,
    .complete = &Complete,
    .traits = &Traits,
    .lane_budgets = &LaneBudgets,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<EpiCache>(params);
    },
};

}  // namespace epikv
