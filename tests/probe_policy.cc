#include "tests/probe_policy.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "policies/lane.h"
#include "policies/policy.h"
#include "policies/random.h"
#include "policies/select.h"

namespace epikv {
namespace {

constexpr int64_t kWindow = 20;

const ParamSpec kParams[] = {SlackParam(0)};

ProbeRecord* current_record = nullptr;

void Record(const SequenceStep& step, ProbeRecord& record) {
  const int64_t layers = step.cache.num_layers();
  for (int64_t i = 0; i < step.count; ++i) {
    record.logit_entropy.push_back(step.signals.logit_entropy[i]);
    std::vector<float>& distance = record.residual_distance.emplace_back();
    for (int64_t layer = 0; layer < layers; ++layer) {
      distance.push_back(step.signals.residual_distance[layer * step.count + i]);
    }
  }
  for (absl::Span<const float> row : step.signals.residual) {
    record.residual.emplace_back(row.begin(), row.end());
  }
  const int64_t last = layers - 1, head = step.cache.num_kv_heads() - 1;
  record.positions.push_back({.newest = step.cache.newest(),
                              .cached = std::ssize(step.cache.index(last, head)),
                              .next = step.cache.next_position(last, head)});
  record.moments.clear();
  for (int64_t layer = 0; layer < layers; ++layer) {
    const CacheView::QueryMoments moments = step.cache.query_moments(layer);
    record.moments.push_back({moments.count, moments.mean.clone(), moments.covariance.clone()});
  }
}

class Probe final : public Policy {
 public:
  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (current_record != nullptr) Record(step, *current_record);
      CheckRows(step.cache);
      if (step.count > kWindow) continue;  // the queries of a long chunk's first tokens are gone
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) Check(step, layer, head);
      }
    }
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    for (EvictionTask& task : tasks) evictions.push_back(EvictOne(task.cache));
    return evictions;
  }

 private:
  // Rows of two slots of all lanes are those of the lanes.
  static void CheckRows(const CacheView& cache) {
    int64_t last = cache.newest();
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        last = std::min(last, std::ssize(cache.index(layer, head)) - 1);
      }
    }
    const int64_t slots[] = {last, 0};
    const at::Tensor keys = cache.keys_of(slots), values = cache.values_of(slots);
    const at::Tensor wanted = at::tensor({last, int64_t{0}});
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        auto same = [&](const at::Tensor& rows, const at::Tensor& lane) {
          return rows[layer][head].equal(lane.index_select(0, wanted).to(at::kFloat));
        };
        if (!same(keys, cache.keys(layer, head)) || !same(values, cache.values(layer, head))) {
          throw std::runtime_error(absl::StrCat("layer ", layer, ", head ", head, " at token ",
                                                cache.newest(), ": rows of slots differ"));
        }
      }
    }
  }

  static void Check(SequenceStep& step, int64_t layer, int64_t head) {
    Lane lane(step.cache, layer, head);
    const int64_t tokens = step.cache.newest() + 1;
    if (lane.queries().size(1) != std::min(kWindow, tokens)) {
      throw std::runtime_error(
          absl::StrCat(lane.queries().size(1), " queries after ", tokens, " tokens"));
    }
    const absl::Span<const float> pushed = step.signals.attention->at(layer, head);
    const at::Tensor pulled =
        lane.window_attention().mean(0).narrow(0, lane.queries().size(1) - step.count, step.count);
    const float worst =
        (pulled.sum(0) - at::tensor(at::ArrayRef<float>(pushed.data(), pushed.size())))
            .abs()
            .max()
            .item<float>();
    // In a narrow dtype the flash kernel's log-sum-exp is a little off.
    const bool narrow = step.cache.keys(layer, head).scalar_type() != at::kFloat;
    if (!(worst <= (narrow ? 1e-3 : 2e-5))) {
      throw std::runtime_error(absl::StrCat("layer ", layer, ", head ", head, " at token ",
                                            step.cache.newest(), ": attention differs by ", worst));
    }
  }

  static Eviction EvictOne(CacheView& cache) {
    Eviction eviction;
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        const CounterRng rng(cache.seed(), layer * cache.num_kv_heads() + head);
        std::vector<float> score;
        for (int32_t index : cache.index(layer, head)) {
          score.push_back(static_cast<float>(rng.Uniform(index)));
        }
        absl::StatusOr<std::vector<int32_t>> victims =
            LowestScores(score, cache.index(layer, head), cache.protection(), cache.newest(),
                         cache.excess(layer, head));
        if (!victims.ok()) return {.status = victims.status()};
        eviction.victims.push_back(*std::move(victims));
      }
    }
    return eviction;
  }
};

}  // namespace

void RecordProbe(ProbeRecord* record) { current_record = record; }

extern constinit const PolicySpec kProbePolicy{
    .name = "probe",
    .summary = "compares what it is told with what it can read",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kKeys | Signal::kValues | Signal::kQueries |
                                         Signal::kAttentionRow | Signal::kPromptAttention |
                                         Signal::kLogitEntropy | Signal::kResidualDistance |
                                         Signal::kResidual | Signal::kQueryMoments,
                              .residual_layers = {kProbedBlock},
                              .window = kWindow,
                              .prompt = PromptEviction::kByChunk,
                              .slack = params.Int("slack")};
        },
    .make = [](const Params&, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Probe>();
    },
};

}  // namespace epikv
