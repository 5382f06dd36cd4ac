#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "absl/strings/str_cat.h"
#include "policies/random.h"
#include "policies/scored_policy.h"

namespace epikv {
namespace {

constexpr int64_t kCurSinks = 4;
constexpr int64_t kRank = 20;  // of the random projection

constexpr absl::string_view kLeverages[] = {"key", "value", "kv_avg", "kv_product"};
constexpr absl::string_view kProjections[] = {"none", "fixed", "resample"};

const ParamSpec kCurParams[] = {
    {.name = "leverage",
     .type = ParamType::kChoice,
     .fallback = std::string("kv_product"),
     .choices = kLeverages,
     .help = "whose squared norms rank a token: its key's, its value's, their mean or product"},
    {.name = "local_window",
     .type = ParamType::kInt,
     .fallback = int64_t{16},
     .max = 65536,
     .help = "neighbouring tokens of whose norms each takes its share; 0: norms as they are"},
    {.name = "projection",
     .type = ParamType::kChoice,
     .fallback = std::string("none"),
     .choices = kProjections,
     .help = "norms of rows projected to 20 random directions: the same in all rounds, or drawn "
             "anew in each"},
    SlackParam(63),
};

// Independent normal numbers of variance 1 / kRank, by Box and Muller. [width, kRank]
at::Tensor RandomDirections(uint64_t seed, uint64_t stream, int64_t width) {
  const CounterRng rng(seed, stream);
  std::vector<float> numbers(width * kRank);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double radius = std::sqrt(-2 * std::log(rng.Uniform(2 * i) + 0x1p-54));
    const double angle = 2 * std::numbers::pi * rng.Uniform(2 * i + 1);
    numbers[i] = static_cast<float>(radius * std::cos(angle) / std::sqrt(kRank));
  }
  return Scores(numbers).reshape({width, kRank});
}

class Cur final : public ScoredPolicy {
 public:
  explicit Cur(const Params& params)
      : ScoredPolicy(Granularity::kHead),
        leverage_(params.Choice("leverage")),
        local_window_(params.Int("local_window")),
        projection_(params.Choice("projection")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    at::Tensor score;  // in birth order
    if (leverage_ == "key") {
      score = Leverage(lane, lane.keys());
    } else if (leverage_ == "value") {
      score = Leverage(lane, lane.values());
    } else {
      const at::Tensor key = Leverage(lane, lane.keys());
      const at::Tensor value = Leverage(lane, lane.values());
      score = leverage_ == "kv_avg" ? (key + value) / 2 : key * value;
    }
    score = score / score.sum();
    score.slice(0, 0, kCurSinks) = 1;
    return lane.ToSlots(score);
  }

  // Squared norms in birth order, as shares of their windows. [n]
  at::Tensor Leverage(Lane& lane, const at::Tensor& rows) const {
    at::Tensor in_order = rows.index_select(0, lane.by_birth());
    if (projection_ != "none") {
      const CacheView& cache = lane.cache();
      const uint64_t round = projection_ == "fixed" ? 0 : cache.newest() + 1;
      in_order = in_order.matmul(
          RandomDirections(cache.seed(), round << 24 | lane.layer(), rows.size(-1)));
    }
    const at::Tensor norms = in_order.square().sum(-1);
    if (local_window_ == 0) return norms;
    const int64_t n = norms.numel(), rest = n % local_window_;
    const at::Tensor windows = at::constant_pad_nd(norms, {0, rest == 0 ? 0 : local_window_ - rest})
                                   .reshape({-1, local_window_});
    // Where all are zero, so are the shares.
    const at::Tensor sum =
        windows.sum(-1, /*keepdim=*/true).clamp_min(std::numeric_limits<float>::min());
    return (windows / sum).flatten().narrow(0, 0, n);
  }

  const std::string leverage_;
  const int64_t local_window_;
  const std::string projection_;
};

SignalSet SignalsOf(const std::string& leverage) {
  if (leverage == "key") return Signal::kKeys;
  if (leverage == "value") return Signal::kValues;
  return Signal::kKeys | Signal::kValues;
}

}  // namespace

extern constinit const PolicySpec kCur{
    .name = "cur",
    .summary = "drops the tokens with the smallest keys and values among their neighbours",
    .paper = "arXiv 2509.15038 (CurDKV)",
    .evidence = "golden: kvpress 0.5.5 `CURPress`, terarachang/VaSE bfa2692 `EvictLayer`",
    .params = kCurParams,
    .scores = true,
    .complete =
        [](Params& params, const ModelShape& shape) {
          if (params.Choice("projection") == "none" || shape.key_width == shape.value_width) {
            return absl::OkStatus();
          }
          return absl::InvalidArgumentError(absl::StrCat(
              "projection: keys and values share one, and the model's are ", shape.key_width,
              " and ", shape.value_width, " channels wide; take none"));
        },
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = SignalsOf(params.Choice("leverage")),
                              .prompt = PromptEviction::kAtEnd,
                              .slack = params.Int("slack"),
                              .published = {.prompt = false, .sinks = kCurSinks, .recent = 1}};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Cur>(params);
    },
};

}  // namespace epikv
