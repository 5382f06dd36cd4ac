#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "policies/lane.h"
#include "policies/policy.h"
#include "policies/residual_layers.h"
#include "policies/rounding.h"

// ThinKV's eviction, TBE (thought-adaptive block eviction), and its quantisation, TBQ, by rounding:
// rows are as a store of so few bits would give them back, and lie in the cache as before. Decode
// tokens are cut into segments, each of one type of thought, told by how sparse attention was.
// Segments are demoted down a ladder of sizes: all earlier ones when a transition ends; else, over
// the budget, the oldest of the least important ones. All lanes keep as many tokens of a segment,
// each its own.

namespace epikv {
namespace {

const ParamSpec kThinkvTbeParams[] = {
    {.name = "layers",
     .type = ParamType::kIntList,
     .max = 4095,
     .help = "whose attention tells types apart. Default: the model's calibration"},
    {.name = "theta1",
     .type = ParamType::kFloat,
     .max = 1,
     .help = "sparsity below which a thought is execution. Default: the model's calibration"},
    {.name = "theta2",
     .type = ParamType::kFloat,
     .max = 1,
     .help = "sparsity from which on it is transition. Default: the model's calibration"},
    {.name = "segment",
     .type = ParamType::kInt,
     .fallback = int64_t{128},
     .min = 1,
     .max = 65536,
     .help = "decode tokens of a segment"},
    {.name = "refresh",
     .type = ParamType::kInt,
     .fallback = int64_t{128},
     .min = 1,
     .max = 65536,
     .help = "decode tokens from one look at the sparsity to the next"},
    {.name = "ladder",
     .type = ParamType::kIntList,
     .fallback = std::vector<int64_t>{64, 32, 16, 8, 4},
     .min = 1,
     .max = 65536,
     .help = "tokens a segment keeps at its first demotion, its second and so on, descending; the "
             "last is what every segment keeps while another has more"},
    {.name = "bits",
     .type = ParamType::kIntList,
     .fallback = std::vector<int64_t>{},
     .min = 2,
     .max = 8,
     .help = "of a decoded number once 16 newer tokens are there, by its thought: of reasoning, "
             "execution and transition, each 2, 4 or 8 (published: 4, 4, 2). Empty: nothing is "
             "rounded. The cache is not smaller for it: the summary says what it would take"},
    SlackParam(127),
};

// In ascending order of importance.
enum class Thought { kTransition, kExecution, kReasoning };

struct Segment {
  int64_t first = 0;  // index of its first token; its last is before the next segment's
  Thought type = Thought::kReasoning;
  int32_t demotions = 0;
  int32_t due = 0;  // demotions by transitions that have ended since the last round
};

struct ThoughtState final : PolicyState {
  std::unique_ptr<PolicyState> Clone() const override {
    return std::make_unique<ThoughtState>(*this);
  }

  int64_t decoded = 0;
  Thought now = Thought::kReasoning;     // as last seen
  std::vector<Segment> segments = {{}};  // the prompt, then those with cached tokens, oldest first;
                                         // the last one is open
  absl::Status status;
};

// What a round does to one segment, in every lane.
struct Demotion {
  int64_t size = 0;            // tokens of the segment that are not protected
  std::vector<int64_t> sizes;  // it is brought to, one after another
  int64_t oldest = 0;          // of the rest, so many go as well
};

constexpr int kMaxSteps = 20;  // of K-means

// Of n keys, oldest first, the k nearest to the centroids of a K-means: their places, ascending.
// The first centroids are keys at even distances, so that there is no chance in it. Each centroid
// takes from its own cluster alone, so that no two take the same key, and of equals the newer;
// clusters are empty only where keys are equal, and then the newest of the rest make up for them.
// keys: fp32 [n, width]. An error if one is not a number.
absl::StatusOr<std::vector<int64_t>> Representatives(const at::Tensor& keys, int64_t k) {
  const int64_t n = keys.size(0);
  at::Tensor centroids =
      keys.index_select(0, at::div(at::arange(k, at::kLong) * n, k, "floor"));  // [k, width]
  at::Tensor cluster;                                                           // [n]
  for (int step = 0; step < kMaxSteps; ++step) {
    // Mode 2: differences first. Keys have large means, which a product would lose digits to.
    const at::Tensor nearest = at::cdist(keys, centroids, 2, 2).argmin(1);
    if (cluster.defined() && at::equal(nearest, cluster)) break;
    cluster = nearest;
    const at::Tensor member = cluster.eq(at::arange(k, at::kLong).unsqueeze(1)).to(at::kFloat);
    const at::Tensor count = member.sum(1, /*keepdim=*/true);  // [k, 1]
    centroids = at::where(count > 0, member.mm(keys) / count, centroids);
  }
  const at::Tensor distance = (keys - centroids.index_select(0, cluster)).norm(2, {1});
  if (distance.isnan().any().item<bool>()) return absl::InternalError("a key is NaN");

  const float* d = distance.const_data_ptr<float>();
  const int64_t* of = cluster.const_data_ptr<int64_t>();
  std::vector<int64_t> members(k);
  for (int64_t i = 0; i < n; ++i) ++members[of[i]];
  std::vector<std::optional<int64_t>> best(k);
  for (int64_t i = 0; i < n; ++i) {
    std::optional<int64_t>& b = best[of[i]];
    // Two are equally near to their mean, but for rounding.
    if (!b.has_value() || d[i] <= d[*b] || members[of[i]] == 2) b = i;
  }
  std::vector<bool> kept(n);
  int64_t missing = 0;
  for (const std::optional<int64_t>& b : best) b.has_value() ? kept[*b] = true : ++missing;
  for (int64_t i = n - 1; missing > 0; --i) {
    if (kept[i]) continue;
    kept[i] = true;
    --missing;
  }
  std::vector<int64_t> places;
  for (int64_t i = 0; i < n; ++i) {
    if (kept[i]) places.push_back(i);
  }
  return places;
}

class ThinKvTbe final : public Policy {
 public:
  explicit ThinKvTbe(const Params& params)
      : layers_(params.IntList("layers")),
        theta1_(params.Float("theta1")),
        theta2_(params.Float("theta2")),
        segment_(params.Int("segment")),
        refresh_(params.Int("refresh")),
        ladder_(params.IntList("ladder")),
        bits_(params.IntList("bits")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    return std::make_unique<ThoughtState>();
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kDecode) ObserveOne(step);
    }
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    evictions.reserve(tasks.size());
    for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task));
    return evictions;
  }

 private:
  int64_t floor() const { return ladder_.back(); }

  void ObserveOne(const SequenceStep& step) const {
    ThoughtState& state = *static_cast<ThoughtState*>(step.state);
    std::vector<Segment>& segments = state.segments;
    const int64_t token = state.decoded++;
    if (token % segment_ == 0) {
      if (segments.back().type == Thought::kTransition) {
        for (size_t i = 0; i + 1 < segments.size(); ++i) ++segments[i].due;
      }
      segments.push_back({.first = step.first, .type = state.now});
    }
    if (token % refresh_ == 0) {
      const absl::StatusOr<Thought> seen = See(step.cache);
      state.status.Update(seen.status());
      if (!seen.ok() && bits_.empty()) return;  // the next round tells
      if (!seen.ok()) throw std::runtime_error(std::string(seen.status().message()));
      state.now = segments.back().type = *seen;
    }
    if (!bits_.empty()) RoundRows(step.cache, state);
  }

  // Of decoded tokens a group at a time, once as many newer ones are cached. What is left of it in
  // a lane gets the bits of its oldest token's thought.
  void RoundRows(CacheView& cache, const ThoughtState& state) const {
    if (state.decoded % kRoundingGroup != 0 || state.decoded < 2 * kRoundingGroup) return;
    const int64_t end = cache.newest() + 1 - kRoundingGroup, first = end - kRoundingGroup;
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        const absl::Span<const int32_t> index = cache.index(layer, head);
        std::vector<int64_t> slots;
        auto oldest = static_cast<int32_t>(cache.newest());
        for (int64_t slot = 0; slot < std::ssize(index); ++slot) {
          if (index[slot] < first || index[slot] >= end) continue;
          slots.push_back(slot);
          oldest = std::min(oldest, index[slot]);
        }
        if (slots.empty()) continue;
        // The segment of a cached token is there; others may have gone.
        const int64_t bits = BitsOf(state.segments[Of(oldest, state.segments)]);
        cache.RoundRows(layer, head, slots, bits);
        const absl::Span<float> width = cache.column(0, layer, head);
        for (const int64_t slot : slots) width[slot] = static_cast<float>(bits);
      }
    }
  }

  int64_t BitsOf(const Segment& segment) const {
    return bits_[segment.type == Thought::kReasoning   ? 0
                 : segment.type == Thought::kExecution ? 1
                                                       : 2];
  }

  // What the newest query shows. Sparsity: the share of the cached keys that get less than 1 % of
  // the probability of the key that gets most; mean over query heads and layers.
  absl::StatusOr<Thought> See(CacheView& cache) const {
    double sum = 0;
    for (int64_t layer : layers_) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        Lane lane(cache, layer, head);
        const at::Tensor& logits = lane.window_logits();  // [group, 1, n]
        const at::Tensor share = (logits - logits.amax(-1, /*keepdim=*/true)).exp();
        if (share.isnan().any().item<bool>()) {
          return absl::InternalError(
              absl::StrCat("the attention of token ", cache.newest(), " is NaN"));
        }
        sum += (share < 0.01).sum().item<double>() / static_cast<double>(share.numel());
      }
    }
    const double sparsity = sum / static_cast<double>(std::ssize(layers_) * cache.num_kv_heads());
    return sparsity < theta1_   ? Thought::kExecution
           : sparsity < theta2_ ? Thought::kReasoning
                                : Thought::kTransition;
  }

  Eviction EvictOne(const EvictionTask& task) const {
    CacheView& cache = task.cache;
    ThoughtState& state = *static_cast<ThoughtState*>(task.state);
    if (!state.status.ok()) return {.status = state.status};
    const std::vector<Demotion> plan = Plan(cache, state.segments);
    Eviction eviction;
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        absl::StatusOr<std::vector<int32_t>> victims =
            Victims(cache, layer, head, state.segments, plan);
        if (!victims.ok()) return {.status = victims.status()};
        eviction.victims.push_back(*std::move(victims));
      }
    }
    Forget(cache, eviction.victims[0], state.segments);
    return eviction;
  }

  // Of each segment, the slots of its tokens that are not protected, oldest first.
  static std::vector<std::vector<int32_t>> OpenSlots(const CacheView& cache, int64_t layer,
                                                     int64_t head,
                                                     const std::vector<Segment>& segments) {
    const absl::Span<const int32_t> index = cache.index(layer, head);
    std::vector<std::vector<int32_t>> slots(segments.size());
    for (int32_t slot = 0; slot < std::ssize(index); ++slot) {
      if (cache.protection().Covers(index[slot], cache.newest())) continue;
      slots[Of(index[slot], segments)].push_back(slot);
    }
    for (std::vector<int32_t>& of : slots) {
      std::sort(of.begin(), of.end(), [&](int32_t a, int32_t b) { return index[a] < index[b]; });
    }
    return slots;
  }

  // The segment of a token.
  static int64_t Of(int32_t token, const std::vector<Segment>& segments) {
    const auto after =
        std::upper_bound(segments.begin(), segments.end(), token,
                         [](int32_t token, const Segment& s) { return token < s.first; });
    return after - segments.begin() - 1;
  }

  // Lanes hold different tokens of a segment, but equally many: one plan serves all.
  std::vector<Demotion> Plan(const CacheView& cache, std::vector<Segment>& segments) const {
    std::vector<Demotion> plan(segments.size());
    const std::vector<std::vector<int32_t>> slots = OpenSlots(cache, 0, 0, segments);
    for (size_t i = 0; i < plan.size(); ++i) plan[i].size = std::ssize(slots[i]);
    int64_t excess = cache.excess(0, 0);
    for (size_t i = 0; i < plan.size(); ++i) {
      for (; segments[i].due > 0; --segments[i].due) excess -= Demote(segments[i], plan[i]);
    }
    while (excess > 0) {
      const std::optional<size_t> next = Next(segments, plan, floor());
      if (!next.has_value()) break;
      excess -= Demote(segments[*next], plan[*next]);
    }
    while (excess > 0) {  // everything is at its floor
      const std::optional<size_t> next = Next(segments, plan, 0);
      if (!next.has_value()) break;
      Demotion& of = plan[*next];
      const int64_t oldest = std::min(excess, of.size);
      of.oldest += oldest;
      of.size -= oldest;
      excess -= oldest;
    }
    return plan;
  }

  // Returns how many tokens it costs the segment.
  int64_t Demote(Segment& segment, Demotion& demotion) const {
    const int64_t step = std::min<int64_t>(segment.demotions++, std::ssize(ladder_) - 1);
    const int64_t size = std::min(demotion.size, ladder_[step]);
    const int64_t cost = demotion.size - size;
    if (cost > 0) demotion.sizes.push_back(size);
    demotion.size = size;
    return cost;
  }

  // Of the segments with more than `floor` tokens, the oldest of the least important; the open one
  // only if there is no other.
  static std::optional<size_t> Next(const std::vector<Segment>& segments,
                                    const std::vector<Demotion>& plan, int64_t floor) {
    std::optional<size_t> next;
    for (size_t i = 0; i + 1 < segments.size(); ++i) {
      if (plan[i].size <= floor) continue;
      if (!next.has_value() || segments[i].type < segments[*next].type) next = i;
    }
    if (!next.has_value() && plan.back().size > floor) next = plan.size() - 1;
    return next;
  }

  static absl::StatusOr<std::vector<int32_t>> Victims(const CacheView& cache, int64_t layer,
                                                      int64_t head,
                                                      const std::vector<Segment>& segments,
                                                      const std::vector<Demotion>& plan) {
    const absl::Span<const int32_t> index = cache.index(layer, head);
    const std::vector<std::vector<int32_t>> open = OpenSlots(cache, layer, head, segments);
    const at::Tensor keys = cache.keys(layer, head);
    std::vector<int32_t> victims;
    for (size_t i = 0; i < plan.size(); ++i) {
      if (plan[i].sizes.empty() && plan[i].oldest == 0) continue;
      std::vector<int32_t> slots = open[i];
      for (int64_t size : plan[i].sizes) {
        const at::Tensor rows =
            keys.index_select(0, at::tensor(at::ArrayRef<int32_t>(slots), at::kInt));
        const absl::StatusOr<std::vector<int64_t>> kept =
            Representatives(rows.to(at::kFloat), size);
        if (!kept.ok()) return kept.status();
        std::vector<int32_t> rest;
        for (int64_t place : *kept) rest.push_back(slots[place]);
        slots = std::move(rest);
      }
      slots.erase(slots.begin(), slots.begin() + plan[i].oldest);
      std::vector<int32_t> gone;
      std::set_difference(open[i].begin(), open[i].end(), slots.begin(), slots.end(),
                          std::back_inserter(gone),
                          [&](int32_t a, int32_t b) { return index[a] < index[b]; });
      for (int32_t slot : gone) victims.push_back(index[slot]);
    }
    return victims;
  }

  // Drops the closed segments of which nothing is left.
  static void Forget(const CacheView& cache, const std::vector<int32_t>& victims,
                     std::vector<Segment>& segments) {
    std::vector<int64_t> left(segments.size());
    for (int32_t token : cache.index(0, 0)) ++left[Of(token, segments)];
    for (int32_t token : victims) --left[Of(token, segments)];
    std::vector<Segment> rest;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (left[i] > 0 || i + 1 == segments.size()) rest.push_back(segments[i]);
    }
    segments = std::move(rest);
  }

  const std::vector<int64_t> layers_;
  const double theta1_, theta2_;
  const int64_t segment_, refresh_;
  const std::vector<int64_t> ladder_;
  const std::vector<int64_t> bits_;  // of reasoning, execution and transition; or none
};

absl::Status ThinkvTbeComplete(Params& params, const ModelShape& shape) {
  // A calibration belongs to its layers: a request that names some gets nothing from it.
  const auto calibrated = shape.calibrated.find("thinkv_tbe");
  if (calibrated != shape.calibrated.end() && !params.Has("layers")) {
    for (const auto& [name, value] : calibrated->second) {
      if (!params.Has(name)) params.Set(name, value);
    }
  }
  if (!params.Has("layers") || !params.Has("theta1") || !params.Has("theta2")) {
    return absl::InvalidArgumentError(
        "thinkv_tbe needs the parameters layers, theta1 and theta2, which differ from model to "
        "model: give all three, or calibrate the model: epikv calibrate thinkv_tbe MODEL.pt --text "
        "FILE -o OUT.json");
  }
  const std::vector<int64_t>& layers = params.IntList("layers");
  if (layers.empty() ||
      std::adjacent_find(layers.begin(), layers.end(), std::greater_equal<>()) != layers.end()) {
    return absl::InvalidArgumentError("layers must be ascending, each once, and not empty");
  }
  for (int64_t layer : layers) {
    if (layer >= shape.num_layers) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layers has ", layer, "; the model's layers are 0 to ", shape.num_layers - 1));
    }
  }
  if (params.Float("theta1") >= params.Float("theta2")) {
    return absl::InvalidArgumentError("theta1 must be less than theta2");
  }
  const std::vector<int64_t>& ladder = params.IntList("ladder");
  if (ladder.empty() ||
      std::adjacent_find(ladder.begin(), ladder.end(), std::less_equal<>()) != ladder.end()) {
    return absl::InvalidArgumentError("ladder must be descending, and not empty");
  }
  const std::vector<int64_t>& bits = params.IntList("bits");
  if (!bits.empty() && (bits.size() != 3 || std::any_of(bits.begin(), bits.end(), [](int64_t b) {
                          return b != 2 && b != 4 && b != 8;
                        }))) {
    return absl::InvalidArgumentError(
        "bits must be three numbers, of reasoning, execution and transition, each 2, 4 or 8");
  }
  return absl::OkStatus();
}

PolicyTraits ThinkvTbeTraits(const Params& params, const ModelShape& shape) {
  const bool rounds = !params.IntList("bits").empty();
  const std::vector<int64_t>& ladder = params.IntList("ladder");
  return {
      .granularity = Granularity::kHead,
      .compares_heads = true,
      .signals = Signal::kKeys | Signal::kQueries,
      .window = 1,
      .columns = rounds ? std::vector<absl::string_view>{"bits"} : std::vector<absl::string_view>{},
      .rounds_rows = rounds,
      .slack = params.Int("slack"),
      // A round may bring a segment down all of the ladder.
      .pairs_per_token = kMaxSteps * std::accumulate(ladder.begin(), ladder.end(), int64_t{0}),
      .plans_all_lanes = true,
      .published = {.recent = 16},
      // A segment may be down to one token.
      .state_bytes_per_token = sizeof(Segment),
      .state_bytes = sizeof(ThoughtState),
      .uncalibrated = Uncalibrated("thinkv_tbe", params, shape),
  };
}

}  // namespace

extern constinit const PolicySpec kThinkvTbe{
    .name = "thinkv_tbe",
    .summary =
        "keeps representatives of each stretch of thought, fewer of those that matter less and "
        "fewer the further thought has moved on",
    .paper =
        "arXiv 2510.01290 (ThinKV), the half that evicts; with `bits` the half that quantises, "
        "by rounding alone",
    .evidence = "cases: thinkv_tbe_test.cc",
    .params = kThinkvTbeParams,
    .calibrated = true,
    .complete = &ThinkvTbeComplete,
    .traits = &ThinkvTbeTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<ThinKvTbe>(params);
    },
};

}  // namespace epikv
