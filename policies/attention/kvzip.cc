#include "policies/attention/kvzip.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

namespace epikv {
namespace {

constexpr int64_t kSinks = 4;  // seen by a repetition beside its chunk
constexpr int64_t kCue = 8;    // tokens of the chunk before, which say where to go on

const ParamSpec kKvzipParams[] = {
    RepeatChunkParam(),
    AllocatorParam("model_pool"),
    FloorParam(0),
    SlackParam(63),
};

// Says of each head how long the attention's input is.
class Length final : public Gate {
 public:
  explicit Length(int64_t kv_heads) : kv_heads_(kv_heads) {}
  at::Tensor Apply(int64_t, const at::Tensor& input) const override {
    return input.to(at::kFloat).norm(2, -1, /*keepdim=*/true).expand({-1, kv_heads_}).contiguous();
  }

 private:
  const int64_t kv_heads_;
};

std::vector<int32_t> Joined(const std::vector<int32_t>& a, absl::Span<const int32_t> b,
                            const std::vector<int32_t>& c, absl::Span<const int32_t> d) {
  std::vector<int32_t> all(a);
  all.insert(all.end(), b.begin(), b.end());
  all.insert(all.end(), c.begin(), c.end());
  all.insert(all.end(), d.begin(), d.end());
  return all;
}

// Logits of the step's queries for sinks, chunk and the repetition so far, -inf where a query does
// not see a token. slots: of sinks and chunk, in birth order; first: index of the chunk's first.
// [group, count, sinks + chunk + repeated]
at::Tensor LogitsOf(const PassStep& step, Lane& lane, const at::Tensor& slots, int64_t sinks,
                    int64_t first) {
  const CacheView& cache = lane.cache();
  const AttentionFacts attention = cache.attention(lane.layer());
  const at::Tensor repeated =
      cache.scratch_keys(lane.layer(), lane.head()).to(at::kFloat);  // [first + count, width]
  const at::Tensor keys = at::cat({lane.keys().index_select(0, slots), repeated});
  at::Tensor logits = at::matmul(lane.queries(), keys.t()).mul_(attention.scale);
  SoftCap(logits, attention);
  // Indexes, as if the repetition followed the prompt.
  const int64_t behind = cache.newest() + 1, chunk = slots.size(0) - sinks;
  const at::Tensor seen =
      at::cat({at::arange(sinks, at::kLong), at::arange(first, first + chunk, at::kLong),
               at::arange(behind, behind + repeated.size(0), at::kLong)});
  const at::Tensor asked =
      at::arange(behind + step.first, behind + step.first + step.count, at::kLong).unsqueeze(1);
  at::Tensor hidden = seen > asked;
  if (attention.window.has_value()) hidden = hidden.logical_or(seen <= asked - *attention.window);
  return logits.masked_fill_(hidden, -std::numeric_limits<float>::infinity());
}

}  // namespace

ParamSpec RepeatChunkParam() {
  return {.name = "chunk",
          .type = ParamType::kInt,
          .fallback = int64_t{2048},
          .min = 16,
          .max = 8192,
          .help = "prompt tokens that the model repeats at a time"};
}

absl::Status Kvzip::Complete(Params& params) {
  return CheckRecipe(params, {ScoreKind::kMass, Comparable::kModel});
}

PolicyTraits Kvzip::Traits(const Params& params, const ModelShape& shape, bool weighs) {
  const auto size = [](const std::vector<int32_t>& phrase) { return std::ssize(phrase); };
  const ModelShape::RepeatPhrases& phrases = shape.repeat;
  PolicyTraits traits{.granularity = Granularity::kHead,
                      .signals = Signal::kKeys,
                      .columns = {"score"},
                      .prompt = PromptEviction::kAtEnd,
                      .slack = params.Int("slack"),
                      .pass = {.chunk = params.Int("chunk"),
                               .more = std::max(size(phrases.whole), size(phrases.part) + kCue) +
                                       size(phrases.suffix)},
                      .published = {.sinks = kSinks}};
  if (weighs) {
    traits.signals = traits.signals | Signal::kValues | Signal::kOutputProjection | Signal::kGate;
  }
  AddRecipe(params, traits);
  return traits;
}

Kvzip::Kvzip(const Params& params, const ModelShape& shape, bool weighs)
    : ScoredPolicy(Recipe::Of(params, Granularity::kHead, /*own_columns=*/1)),
      chunk_(params.Int("chunk")),
      phrases_(shape.repeat),
      gate_(weighs ? std::make_unique<Length>(shape.num_kv_heads) : nullptr) {}

std::vector<std::vector<int32_t>> Kvzip::PassSegments(absl::Span<const int32_t> prompt) const {
  std::vector<std::vector<int32_t>> segments;
  for (size_t begin = 0; begin < prompt.size(); begin += chunk_) {
    const absl::Span<const int32_t> chunk = prompt.subspan(begin, chunk_);
    segments.push_back(begin == 0 ? Joined(phrases_.whole, {}, phrases_.suffix, chunk)
                                  : Joined(phrases_.part, prompt.subspan(begin - kCue, kCue),
                                           phrases_.suffix, chunk));
  }
  return segments;
}

void Kvzip::ObservePass(absl::Span<PassStep> steps) const {
  for (PassStep& step : steps) {
    for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) {
        ObserveLane(step, layer, head);
      }
    }
  }
}

void Kvzip::ObserveLane(PassStep& step, int64_t layer, int64_t head) const {
  Lane lane(step.cache, layer, head);
  const int64_t first = step.segment * chunk_;
  const int64_t end = std::min(first + chunk_, step.cache.prompt_tokens());
  const int64_t sinks = std::min(kSinks, first);
  // The whole prompt is cached: a token's place in birth order is its index.
  const at::Tensor chunk = lane.by_birth().narrow(0, first, end - first);
  const at::Tensor slots = at::cat({lane.by_birth().narrow(0, 0, sinks), chunk});
  const at::Tensor logits = LogitsOf(step, lane, slots, sinks, first);
  at::Tensor given = SoftmaxOfSeen(logits).narrow(-1, sinks, end - first);  // [group, count, chunk]
  if (gate_ != nullptr) {
    const at::Tensor values = lane.values().index_select(0, chunk);
    const at::Tensor norms =
        at::matmul(values, lane.output_gram()).mul_(values).sum(-1).clamp_min_(0).sqrt_();
    std::vector<float> lengths;
    for (int64_t i = 0; i < step.count; ++i) {
      lengths.push_back(
          step.signals.gate[(layer * step.count + i) * step.cache.num_kv_heads() + head]);
    }
    given = given * norms.unsqueeze(1) / at::tensor(lengths).unsqueeze(1);
  }
  at::Tensor worth = lane.column(0);
  const at::Tensor before = worth.index_select(0, chunk);
  worth.index_copy_(0, chunk, at::maximum(before, given.amax(at::IntArrayRef{0, 1})));
}

// Decoded tokens have no score, and stay as long as any of the prompt may go.
at::Tensor Kvzip::Score(const EvictionTask&, Lane& lane) const {
  return lane.column(0).masked_fill(lane.index() >= lane.cache().prompt_tokens(),
                                    std::numeric_limits<float>::max());
}

extern constinit const PolicySpec kKvzip{
    .name = "kvzip",
    .summary =
        "drops the prompt's tokens to which the model attends least while it repeats the "
        "prompt; lanes share one budget",
    .paper = "arXiv 2505.23416 (KVzip)",
    .evidence = "cases: kvzip_test.cc (a golden of kvpress 0.5.5)",
    .params = kKvzipParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return Kvzip::Complete(params); },
    .traits = [](const Params& params,
                 const ModelShape& shape) { return Kvzip::Traits(params, shape, false); },
    .lane_budgets = &RecipeLaneBudgets,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<Kvzip>(params, shape, false);
    },
};

}  // namespace epikv
