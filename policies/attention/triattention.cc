#include <ATen/ATen.h>

#include <cmath>
#include <optional>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "policies/policy.h"
#include "policies/scored_policy.h"
#include "policies/spec.h"

// TriAttention. What the model's queries are on average before RoPE, per head and rotary frequency,
// was measured before; a key is worth what a query of that kind would give it, on average over the
// next positions at distances 1, 2, 4, ...

namespace epikv {
namespace {

constexpr absl::string_view kScopes[] = {"across_layers", "head", "model"};

const ParamSpec kTriattentionParams[] = {
    {.name = "scope",
     .type = ParamType::kChoice,
     .fallback = std::string("across_layers"),
     .choices = kScopes,
     .help = "which lanes decide together: across_layers, those of one KV head in all layers, by "
             "their mean; head, each alone; model, all, by the head that gives a token most"},
    {.name = "normalize",
     .type = ParamType::kBool,
     .fallback = true,
     .help = "whether each query head's scores are made z-scores over the tokens it ranks"},
    {.name = "future",
     .type = ParamType::kInt,
     .fallback = int64_t{65536},
     .min = 1,
     .max = 1 << 20,
     .help = "the largest of the distances 1, 2, 4, ... at which queries are awaited"},
    SlackParam(127),
};

// Of the queries of every head before RoPE, each pair of rotated channels as a complex number: the
// mean, and the mean of the absolute value. fp32 [layers, heads, pairs]
struct QueryStatistics final : public PolicyData {
  at::Tensor real, imag, abs;
};

absl::StatusOr<at::Tensor> ReadNumbers(const nlohmann::json& data, const char* name,
                                       const ModelShape& shape) {
  const int64_t pairs = static_cast<int64_t>(shape.ropes.front().inv_freq.size());
  at::Tensor numbers = at::empty({shape.num_layers, shape.num_heads, pairs});
  auto bad = [&] {
    return absl::InvalidArgumentError(absl::StrCat(name, " must be finite numbers [",
                                                   shape.num_layers, "][", shape.num_heads, "][",
                                                   pairs, "]"));
  };
  const nlohmann::json found = data.value(name, nlohmann::json());
  float* out = numbers.mutable_data_ptr<float>();
  if (!found.is_array() || static_cast<int64_t>(found.size()) != shape.num_layers) return bad();
  for (const nlohmann::json& layer : found) {
    if (!layer.is_array() || static_cast<int64_t>(layer.size()) != shape.num_heads) return bad();
    for (const nlohmann::json& head : layer) {
      if (!head.is_array() || static_cast<int64_t>(head.size()) != pairs) return bad();
      for (const nlohmann::json& number : head) {
        if (!number.is_number() || !std::isfinite(number.get<float>())) return bad();
        *out++ = number.get<float>();
      }
    }
  }
  return numbers;
}

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadStatistics(const ArtefactData& artefact,
                                                                 const ModelShape& shape) {
  for (const RopeShape& rope : shape.ropes) {
    if (rope.inv_freq.size() == shape.ropes.front().inv_freq.size()) continue;
    return absl::UnimplementedError("layers that rotate unequally many channels");
  }
  const nlohmann::json data = nlohmann::json::parse(artefact.json.begin(), artefact.json.end());
  if (!data.is_object()) return absl::InvalidArgumentError("must be an object");
  auto statistics = std::make_shared<QueryStatistics>();
  for (auto [name, numbers] :
       {std::pair("q_mean_real", &statistics->real), std::pair("q_mean_imag", &statistics->imag),
        std::pair("q_abs_mean", &statistics->abs)}) {
    absl::StatusOr<at::Tensor> read = ReadNumbers(data, name, shape);
    if (!read.ok()) return read.status();
    *numbers = *std::move(read);
  }
  return statistics;
}

Granularity GranularityOf(const Params& params) {
  return params.Choice("scope") == "model" ? Granularity::kToken : Granularity::kHead;
}

class TriAttention final : public ScoredPolicy {
 public:
  TriAttention(const Params& params, const ModelShape& shape)
      : ScoredPolicy(GranularityOf(params)),
        statistics_(
            std::static_pointer_cast<const QueryStatistics>(shape.artefacts.at("triattention"))),
        ropes_(shape.ropes),
        by_model_(params.Choice("scope") == "model"),
        across_layers_(params.Choice("scope") == "across_layers"),
        normalize_(params.Bool("normalize")),
        future_(params.Int("future")) {}

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    if (!by_model_) return OfGroup(lane);
    at::Tensor best;
    for (int64_t layer = 0; layer < task.cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < task.cache.num_kv_heads(); ++head) {
        Lane other(task.cache, layer, head);
        const at::Tensor score = OfGroup(other);
        best = best.defined() ? at::maximum(best, score) : score;
      }
    }
    return best;
  }

  // The mean over layers; the lanes of one head number hold the same tokens, each in its slots.
  void Reconcile(const EvictionTask& task, std::vector<at::Tensor>& scores) const override {
    if (!across_layers_) return;
    const int64_t layers = task.cache.num_layers(), heads = task.cache.num_kv_heads();
    for (int64_t head = 0; head < heads; ++head) {
      std::vector<Lane> lanes;
      at::Tensor sum;  // in birth order
      for (int64_t layer = 0; layer < layers; ++layer) {
        const at::Tensor& score = scores[layer * heads + head];
        if (!score.defined()) return;  // all are within their budgets, or none
        Lane& lane = lanes.emplace_back(task.cache, layer, head);
        const at::Tensor in_order = score.index_select(0, lane.by_birth());
        sum = sum.defined() ? sum + in_order : in_order;
      }
      for (int64_t layer = 0; layer < layers; ++layer) {
        scores[layer * heads + head] = lanes[layer].ToSlots(sum / static_cast<double>(layers));
      }
    }
  }

  // The largest score that a query head of the lane gives. [n]
  at::Tensor OfGroup(Lane& lane) const {
    const RopeShape& rope = ropes_.at(lane.layer());
    const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
    // In birth order, so that no slot has a say in how sums are rounded.
    const at::Tensor keys = lane.keys().index_select(0, lane.by_birth());
    const at::Tensor rotated = keys.narrow(1, 0, 2 * pairs);
    const at::Tensor real =
        rope.interleaved ? rotated.slice(1, 0, 2 * pairs, 2) : rotated.narrow(1, 0, pairs);
    const at::Tensor imag =
        rope.interleaved ? rotated.slice(1, 1, 2 * pairs, 2) : rotated.narrow(1, pairs, pairs);
    auto of_group = [&](const at::Tensor& statistic) {
      return statistic[lane.layer()].narrow(0, lane.head() * lane.group(), lane.group());
    };
    const at::Tensor q_real = of_group(statistics_->real), q_imag = of_group(statistics_->imag);
    // A cached key has been turned by its own position, so a query that is turned by another meets
    // it at their distance. Turned by the mean of all rotations: the mean of what they give.
    const auto [cos, sin] = MeanTurn(rope, lane.cache().next_position(lane.layer(), lane.head()));
    const at::Tensor turned_real = q_real * cos - q_imag * sin;  // [group, pairs]
    const at::Tensor turned_imag = q_real * sin + q_imag * cos;
    const at::Tensor spread =
        of_group(statistics_->abs) - (q_real.square() + q_imag.square()).sqrt();
    const at::Tensor length = (real.square() + imag.square()).sqrt();  // [n, pairs]
    // The cached keys have the factor of rotated rows already.
    at::Tensor score = (at::matmul(turned_real, real.t()) + at::matmul(turned_imag, imag.t()) +
                        at::matmul(spread, length.t())) *
                       rope.attention_factor;  // [group, n]
    const std::optional<int64_t> window = lane.cache().attention(lane.layer()).window;
    if (window.has_value()) {
      // What none of those queries sees is like what they would give least.
      const at::Tensor hidden =
          lane.index().index_select(0, lane.by_birth()) + *window <= lane.cache().newest() + 2;
      score = at::where(hidden, score.amin(1, true), score);
    }
    if (normalize_) {
      // The protected prompt is not ranked.
      const at::Tensor ranked =
          (lane.index().index_select(0, lane.by_birth()) >= lane.cache().protection().prompt)
              .to(at::kFloat);
      const at::Tensor count = ranked.sum().clamp_min(1);
      const at::Tensor mean = (score * ranked).sum(1, true) / count;
      const at::Tensor deviation = (((score - mean) * ranked).square().sum(1, true) / count).sqrt();
      score = (score - mean) / deviation.clamp_min(1e-6);
    }
    return lane.ToSlots(score.amax(0));
  }

  // The mean of e^(i (position + d) w) over d = 1, 2, 4, ... <= future, by frequency w. fp32
  // [pairs] each
  std::pair<at::Tensor, at::Tensor> MeanTurn(const RopeShape& rope, int64_t position) const {
    const int64_t pairs = static_cast<int64_t>(rope.inv_freq.size());
    at::Tensor cos = at::empty({pairs}), sin = at::empty({pairs});
    for (int64_t pair = 0; pair < pairs; ++pair) {
      double cos_sum = 0, sin_sum = 0;
      int64_t count = 0;
      for (int64_t distance = 1; distance <= future_; distance *= 2, ++count) {
        const double angle = static_cast<double>(position + distance) * rope.inv_freq[pair];
        cos_sum += std::cos(angle);
        sin_sum += std::sin(angle);
      }
      cos[pair] = cos_sum / static_cast<double>(count);
      sin[pair] = sin_sum / static_cast<double>(count);
    }
    return {cos, sin};
  }

  const std::shared_ptr<const QueryStatistics> statistics_;
  const std::vector<RopeShape> ropes_;
  const bool by_model_, across_layers_, normalize_;
  const int64_t future_;
};

}  // namespace

extern constinit const PolicySpec kTriattention{
    .name = "triattention",
    .summary =
        "drops the tokens whose keys would be given least by queries such as the model's are "
        "before RoPE, at growing distances",
    .paper = "arXiv 2604.04921 (TriAttention)",
    .evidence = "golden: WeianMao/triattention c3744ee `TriAttention`",
    .params = kTriattentionParams,
    .scores = true,
    .read_data = &ReadStatistics,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = GranularityOf(params),
                              .signals = Signal::kKeys,
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack"),
                              .published = {.recent = 0}};
        },
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<TriAttention>(params, shape);
    },
};

}  // namespace epikv
