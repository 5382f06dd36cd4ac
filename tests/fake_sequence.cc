#include "tests/fake_sequence.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "policies/random.h"
#include "tests/artefacts.h"

namespace epikv {
namespace {

class FakeAttentionRow final : public Signals::AttentionRow {
 public:
  // Of the queries from `first` on.
  FakeAttentionRow(const FakeSequence& sequence, const FakeWorld& world, Signal signal,
                   int64_t first)
      : num_heads_(sequence.num_kv_heads()) {
    if (!sequence.traits().signals.Has(signal)) return;
    std::vector<int64_t> layers = sequence.traits().attention_layers;
    if (layers.empty()) {
      layers.resize(sequence.num_layers());
      std::iota(layers.begin(), layers.end(), 0);
    }
    for (int64_t layer : layers) {
      for (int64_t head = 0; head < num_heads_; ++head) {
        rows_[layer].push_back(Sum(sequence, world, layer, head, first));
      }
    }
  }
  absl::Span<const float> at(int64_t layer, int64_t head) const override {
    const auto heads = rows_.find(layer);
    if (heads == rows_.end()) {
      ADD_FAILURE() << "read attention of layer " << layer << " without declaring it";
      return {};
    }
    return heads->second[head];
  }

 private:
  static std::vector<float> Sum(const FakeSequence& sequence, const FakeWorld& world, int64_t layer,
                                int64_t head, int64_t first) {
    const absl::Span<const int32_t> index = sequence.index(layer, head);
    std::vector<float> sum(index.size());
    for (int64_t query = first; query <= sequence.newest(); ++query) {
      std::vector<int32_t> seen;
      for (int32_t token : index) {
        if (token <= query) seen.push_back(token);
      }
      const std::vector<float> row = world.attention(layer, head, query, seen);
      size_t next = 0;
      for (size_t slot = 0; slot < index.size(); ++slot) {
        if (index[slot] <= query) sum[slot] += row[next++];
      }
    }
    return sum;
  }

  const int64_t num_heads_;
  std::map<int64_t, std::vector<std::vector<float>>> rows_;  // by layer, [kv_heads][used]
};

ResolvedParams Resolve(const FakeSequence::Options& options) {
  ResolvedParams resolved = ResolveParams(*options.spec, options.params, options.shape);
  for (const ParamViolation& v : resolved.violations) {
    ADD_FAILURE() << options.spec->name << "." << v.param << ": " << v.description;
  }
  return resolved;
}

at::Tensor IndexTensor(absl::Span<const int32_t> index) {
  return at::tensor(at::ArrayRef<int32_t>(index.data(), index.size()), at::kInt);
}

// What a test says nothing of: rotation, and what the policy's artefact holds.
ModelShape Completed(const FakeSequence::Options& options) {
  ModelShape shape = options.shape;
  shape.ropes.resize(shape.num_layers, {.inv_freq = {1, 0.1}});
  return WithArtefacts(std::move(shape), {&options.spec, 1});
}

}  // namespace

decltype(FakeWorld::attention) AttentionOf(const FakeWorld& world, int64_t group) {
  return [=, key_of = world.key, query_of = world.query, scale = world.attention_scale,
          cap = world.soft_cap, window = world.window](int64_t layer, int64_t head, int64_t query,
                                                       absl::Span<const int32_t> index) {
    std::vector<float> mean(index.size());
    for (int64_t member = 0; member < group; ++member) {
      const std::vector<float> q = query_of(layer, head * group + member, query);
      std::vector<double> mass;
      double most = -1e300, sum = 0;
      for (int32_t token : index) {
        const std::vector<float> k = key_of(layer, head, token);
        double logit = 0;
        for (size_t c = 0; c < q.size(); ++c) logit += static_cast<double>(q[c]) * k[c];
        logit *= scale;
        if (cap.has_value()) logit = *cap * std::tanh(logit / *cap);
        if (window.has_value() && token <= query - *window) logit = -INFINITY;
        mass.push_back(logit);
        most = std::max(most, mass.back());
      }
      for (double& m : mass) sum += m = std::exp(m - most);
      for (size_t i = 0; i < mean.size() && sum != 0; ++i) {
        mean[i] += static_cast<float>(mass[i] / sum / static_cast<double>(group));
      }
    }
    return mean;
  };
}

FakeWorld RandomWorld(uint64_t seed, int64_t levels) {
  // In (0, 1].
  auto draw = [=](uint64_t stream, uint64_t counter) {
    return static_cast<float>(1 + CounterRng(seed, stream).Below(levels, counter)) / levels;
  };
  FakeWorld world;
  world.residual_step = [=](int64_t layer, int64_t token) { return draw(layer, token); };
  world.attention = [=](int64_t layer, int64_t head, int64_t query,
                        absl::Span<const int32_t> index) {
    std::vector<float> row;
    for (int32_t token : index) {
      row.push_back(draw(1000 + 100 * layer + head, query << 20 | token));
    }
    const float sum = static_cast<float>(index.size());
    for (float& mass : row) mass /= sum;
    return row;
  };
  world.key = [=](int64_t layer, int64_t head, int64_t token) {
    return std::vector<float>{draw(2000 + 100 * layer + head, token), 0, 0, 0};
  };
  auto row = [=](int64_t stream, int64_t token) {
    std::vector<float> row;
    for (int64_t channel = 0; channel < 4; ++channel) {
      row.push_back(draw(stream, channel << 32 | token) - 0.5f);
    }
    return row;
  };
  world.value = [=](int64_t layer, int64_t head, int64_t token) {
    return row(3000 + 100 * layer + head, token);
  };
  world.query = [=](int64_t layer, int64_t head, int64_t token) {
    return row(4000 + 100 * layer + head, token);
  };
  world.logit_entropy = [=](int64_t token) { return draw(6000, token); };
  world.residual_distance = [=](int64_t layer, int64_t token) { return draw(7000 + layer, token); };
  world.residual = [=](int64_t layer, int64_t token) { return row(8000 + layer, token); };
  world.output = [=](int64_t layer, int64_t head, int64_t channel) {
    return row(5000 + 100 * layer + head, channel);
  };
  return world;
}

FakeSequence::FakeSequence(const Options& options, FakeWorld world)
    : shape_(Completed(options)),
      protection_(options.protection),
      prompt_tokens_(options.prompt_tokens),
      seed_(options.seed),
      fills_first_(options.fills_first),
      world_(std::move(world)) {
  const Params params = Resolve(options).params;
  traits_ = options.spec->traits(params, shape_);
  policy_ = options.spec->make(params, shape_);
  state_ = policy_->NewState({.prompt_tokens = options.prompt_tokens,
                              .budget = options.budget,
                              .protection = protection_});
  const int64_t layers = traits_.granularity == Granularity::kToken ? 1 : shape_.num_layers;
  const int64_t heads = traits_.granularity == Granularity::kHead ? shape_.num_kv_heads : 1;
  lanes_.resize(layers * heads);
  std::vector<int64_t> budgets(lanes_.size(), options.budget);
  if (options.spec->lane_budgets != nullptr) {
    budgets = options.spec->lane_budgets(params, shape_, options.budget);
    EXPECT_EQ(std::accumulate(budgets.begin(), budgets.end(), int64_t{0}),
              options.budget * shape_.num_layers * shape_.num_kv_heads);
  }
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].budget = budgets[i];
    lanes_[i].columns.resize(traits_.columns.size());
  }
}

FakeSequence::FakeSequence(const FakeSequence& other)
    : shape_(other.shape_),
      protection_(other.protection_),
      prompt_tokens_(other.prompt_tokens_),
      seed_(other.seed_),
      fills_first_(other.fills_first_),
      traits_(other.traits_),
      policy_(other.policy_),
      state_(other.state_ == nullptr ? nullptr : other.state_->Clone()),
      lanes_(other.lanes_),
      next_(other.next_),
      world_(other.world_),
      rows_(other.rows_) {}

void FakeSequence::Prefill(int64_t count) {
  if (count > 0) Append(count, Phase::kPrefill);
}
void FakeSequence::Decode() { Append(1, Phase::kDecode); }

void FakeSequence::Append(int64_t count, Phase phase) {
  const int64_t first = next_;
  next_ += count;
  for (Lane& lane : lanes_) {
    for (int64_t token = first; token < next_; ++token) {
      lane.index.push_back(static_cast<int32_t>(token));
    }
    for (std::vector<float>& column : lane.columns) column.resize(lane.index.size());
    if (!fills_first_) continue;
    auto to_front = [count](auto& of_slots) {
      std::rotate(of_slots.begin(), of_slots.end() - count, of_slots.end());
    };
    to_front(lane.index);
    for (std::vector<float>& column : lane.columns) to_front(column);
  }
  std::vector<float> residual_step;
  std::vector<std::vector<float>> residuals;
  std::vector<absl::Span<const float>> residual;
  const FakeAttentionRow attention(
      *this, world_, phase == Phase::kDecode ? Signal::kAttentionRow : Signal::kPromptAttention,
      first);
  std::vector<float> logit_entropy, residual_distance;
  for (int64_t token = first; traits_.signals.Has(Signal::kLogitEntropy) && token < next_;
       ++token) {
    logit_entropy.push_back(world_.logit_entropy(token));
  }
  if (traits_.signals.Has(Signal::kResidualDistance)) {
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int64_t token = first; token < next_; ++token) {
        residual_distance.push_back(world_.residual_distance(layer, token));
      }
    }
  }
  Signals signals;
  if (phase == Phase::kPrefill && traits_.signals.Has(Signal::kPromptAttention)) {
    signals.attention = &attention;
  }
  if (phase == Phase::kDecode) {
    for (int64_t layer : traits_.residual_layers) {
      if (traits_.signals.Has(Signal::kResidualStep)) {
        residual_step.push_back(world_.residual_step(layer, first));
      }
      if (traits_.signals.Has(Signal::kResidual)) {
        residuals.push_back(world_.residual(layer, first));
      }
    }
    residual.assign(residuals.begin(), residuals.end());
    signals = {.residual_step = residual_step, .residual = residual, .attention = &attention};
  }
  signals.logit_entropy = logit_entropy;
  signals.residual_distance = residual_distance;
  std::vector<SequenceStep> steps;
  steps.push_back({state_.get(), *this, phase, first, count, signals});
  policy_->Observe(absl::MakeSpan(steps));
}

bool FakeSequence::OverBudget() const {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (ExcessOf(i) > 0) return true;
  }
  return false;
}

Eviction FakeSequence::Ask() {
  std::vector<EvictionTask> tasks;
  tasks.push_back({state_.get(), *this});
  std::vector<Eviction> evictions = policy_->Evict(absl::MakeSpan(tasks));
  EXPECT_EQ(evictions.size(), 1u);
  return std::move(evictions[0]);
}

void FakeSequence::Drop(const Eviction& eviction) {
  ASSERT_TRUE(eviction.status.ok()) << eviction.status;
  ASSERT_EQ(eviction.victims.size(), lanes_.size());
  std::vector<int64_t> left(lanes_.size());  // to drop, of each lane's pool
  for (size_t i = 0; i < lanes_.size(); ++i) left[i] = ExcessOf(i);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const size_t pool = &PoolOf(i).front() - lanes_.data();
    left[pool] -= static_cast<int64_t>(eviction.victims[i].size());
    if (pool != i) left[i] = 0;
  }
  for (size_t i = 0; i < lanes_.size(); ++i) {
    EXPECT_LE(left[i], 0) << "too few victims in lane " << i;
  }
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    const std::vector<int32_t>& victims = eviction.victims[i];
    EXPECT_EQ(std::set<int32_t>(victims.begin(), victims.end()).size(), victims.size())
        << "a victim named twice in lane " << i;
    for (int32_t victim : victims) {
      EXPECT_NE(std::find(lane.index.begin(), lane.index.end(), victim), lane.index.end())
          << victim << " is not cached in lane " << i;
      EXPECT_FALSE(protection_.Covers(victim, newest()))
          << victim << " is protected, newest " << newest();
    }
    Remove(lane, victims);
  }
}

std::vector<std::vector<int32_t>> FakeSequence::Round() {
  if (!OverBudget()) return {};
  Eviction eviction = Ask();
  Drop(eviction);
  for (std::vector<int32_t>& victims : eviction.victims) std::sort(victims.begin(), victims.end());
  return std::move(eviction.victims);
}

void FakeSequence::Remove(Lane& lane, absl::Span<const int32_t> victims) {
  for (int32_t victim : victims) {
    const auto found = std::find(lane.index.begin(), lane.index.end(), victim);
    if (found == lane.index.end()) continue;
    const size_t slot = found - lane.index.begin();
    lane.index[slot] = lane.index.back();
    lane.index.pop_back();
    for (std::vector<float>& column : lane.columns) {
      column[slot] = column.back();
      column.pop_back();
    }
  }
}

void FakeSequence::Shuffle(std::mt19937& random) {
  for (Lane& lane : lanes_) {
    for (size_t slot = lane.index.size(); slot > 1; --slot) {
      const size_t other = random() % slot;
      std::swap(lane.index[slot - 1], lane.index[other]);
      for (std::vector<float>& column : lane.columns) std::swap(column[slot - 1], column[other]);
    }
  }
}

std::vector<int32_t> FakeSequence::Kept(int64_t layer, int64_t head) const {
  std::vector<int32_t> kept = lanes_[LaneOf(layer, head)].index;
  std::sort(kept.begin(), kept.end());
  return kept;
}

size_t FakeSequence::LaneOf(int64_t layer, int64_t head) const {
  if (traits_.granularity == Granularity::kToken) return 0;
  if (traits_.granularity == Granularity::kLayer) return layer;
  return layer * shape_.num_kv_heads + head;
}

int64_t FakeSequence::excess(int64_t layer, int64_t head) const {
  return ExcessOf(LaneOf(layer, head));
}

absl::Span<const FakeSequence::Lane> FakeSequence::PoolOf(size_t i) const {
  const size_t size = traits_.pool == Pool::kLane    ? 1
                      : traits_.pool == Pool::kLayer ? shape_.num_kv_heads
                                                     : lanes_.size();
  return absl::MakeConstSpan(lanes_).subspan(i / size * size, size);
}

int64_t FakeSequence::Slack() const { return next_ > prompt_tokens_ ? traits_.slack : 0; }

int64_t FakeSequence::ExcessOf(size_t i) const {
  int64_t used = 0, budget = 0, slack = 0;
  for (const Lane& lane : PoolOf(i)) {
    used += static_cast<int64_t>(lane.index.size());
    budget += lane.budget;
    slack += Slack();
  }
  return traits_.evicts && used > budget + slack ? used - budget : 0;
}

absl::Span<const int32_t> FakeSequence::index(int64_t layer, int64_t head) const {
  return lanes_[LaneOf(layer, head)].index;
}

absl::Span<float> FakeSequence::column(int64_t place, int64_t layer, int64_t head) {
  Lane& lane = lanes_[LaneOf(layer, head)];
  if (place >= static_cast<int64_t>(lane.columns.size())) {
    ADD_FAILURE() << "read column " << place << " without declaring it";
    return {};
  }
  return absl::MakeSpan(lane.columns[place]);
}

at::Tensor FakeSequence::AllRows(Rows kind, int64_t layer, int64_t head) const {
  const auto& rows = kind == Rows::kKey     ? world_.key
                     : kind == Rows::kValue ? world_.value
                                            : world_.query;
  at::Tensor& made = rows_[{kind, layer, head}];
  const int64_t before = made.defined() ? made.size(0) : 0;
  if (before < next_) {
    std::vector<at::Tensor> all;
    if (before > 0) all.push_back(made);
    for (int64_t token = before; token < next_; ++token) {
      all.push_back(at::tensor(rows(layer, head, token)).unsqueeze(0));
    }
    made = at::cat(all);
  }
  return made;
}

at::Tensor FakeSequence::keys(int64_t layer, int64_t head) const {
  Expect(Signal::kKeys);
  return AllRows(Rows::kKey, layer, head).index_select(0, IndexTensor(index(layer, head)));
}

at::Tensor FakeSequence::values(int64_t layer, int64_t head) const {
  Expect(Signal::kValues);
  return AllRows(Rows::kValue, layer, head).index_select(0, IndexTensor(index(layer, head)));
}

at::Tensor FakeSequence::keys_of(absl::Span<const int64_t> slots) const {
  return OfAllLanes(slots, [this](int64_t layer, int64_t head) { return keys(layer, head); });
}

at::Tensor FakeSequence::values_of(absl::Span<const int64_t> slots) const {
  return OfAllLanes(slots, [this](int64_t layer, int64_t head) { return values(layer, head); });
}

template <class RowsOf>
at::Tensor FakeSequence::OfAllLanes(absl::Span<const int64_t> slots, const RowsOf& rows_of) const {
  const at::Tensor wanted = at::tensor(at::ArrayRef<int64_t>(slots.data(), slots.size()));
  std::vector<at::Tensor> rows;
  for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
    for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
      rows.push_back(rows_of(layer, head).index_select(0, wanted));
    }
  }
  return at::stack(rows).unflatten(0, {shape_.num_layers, shape_.num_kv_heads});
}

at::Tensor FakeSequence::queries(int64_t layer) const {
  Expect(Signal::kQueries);
  const int64_t count = std::min(next_, traits_.window);
  std::vector<at::Tensor> heads;
  for (int64_t head = 0; head < shape_.num_heads; ++head) {
    heads.push_back(AllRows(Rows::kQuery, layer, head).narrow(0, next_ - count, count));
  }
  return at::stack(heads, 1);
}

CacheView::QueryMoments FakeSequence::query_moments(int64_t layer) const {
  Expect(Signal::kQueryMoments);
  std::vector<at::Tensor> means, covariances;
  const int64_t count = next_ - kFirstMeasuredQuery;
  for (int64_t head = 0; head < shape_.num_heads; ++head) {
    const at::Tensor all =
        AllRows(Rows::kQuery, layer, head).narrow(0, kFirstMeasuredQuery, count).to(at::kDouble);
    const at::Tensor centred = all - all.mean(0);
    means.push_back(all.mean(0).to(at::kFloat));
    covariances.push_back(
        (centred.t().matmul(centred) / static_cast<double>(count)).to(at::kFloat));
  }
  return {.count = count, .mean = at::stack(means), .covariance = at::stack(covariances)};
}

at::Tensor FakeSequence::output_projection(int64_t layer) const {
  Expect(Signal::kOutputProjection);
  const int64_t width = static_cast<int64_t>(world_.value(layer, 0, 0).size());
  std::vector<at::Tensor> rows;
  for (int64_t head = 0; head < shape_.num_heads; ++head) {
    for (int64_t channel = 0; channel < width; ++channel) {
      rows.push_back(at::tensor(world_.output(layer, head, channel)));
    }
  }
  return at::stack(rows).reshape({shape_.num_heads, width, -1});
}

at::Tensor FakeSequence::output_gram(int64_t layer) const {
  const at::Tensor by_head = output_projection(layer);
  return at::matmul(by_head, by_head.transpose(1, 2));
}

void FakeSequence::Expect(Signal signal) const {
  if (traits_.signals.Has(signal)) return;
  ADD_FAILURE() << "read " << SignalName(signal) << " without declaring it";
}

}  // namespace epikv
