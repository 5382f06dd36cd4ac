#include "tests/fake_sequence.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "policies/random.h"

namespace epikv {
namespace {

class FakeAttentionRow final : public Signals::AttentionRow {
 public:
  FakeAttentionRow(const FakeSequence& sequence, const FakeWorld& world)
      : num_heads_(sequence.num_kv_heads()) {
    const bool declared = sequence.traits().signals.Has(Signal::kAttentionRow);
    for (int64_t layer = 0; declared && layer < sequence.num_layers(); ++layer) {
      for (int64_t head = 0; head < sequence.num_kv_heads(); ++head) {
        rows_.push_back(
            world.attention(layer, head, sequence.newest(), sequence.index(layer, head)));
      }
    }
  }
  absl::Span<const float> at(int64_t layer, int64_t head) const override {
    if (rows_.empty()) {
      ADD_FAILURE() << "read attention without declaring it";
      return {};
    }
    return rows_[layer * num_heads_ + head];
  }

 private:
  const int64_t num_heads_;
  std::vector<std::vector<float>> rows_;  // [layers x kv_heads][used]
};

ResolvedParams Resolve(const FakeSequence::Options& options) {
  ResolvedParams resolved = ResolveParams(*options.spec, options.params, options.shape);
  for (const ParamViolation& v : resolved.violations) {
    ADD_FAILURE() << options.spec->name << "." << v.param << ": " << v.description;
  }
  return resolved;
}

}  // namespace

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
  return world;
}

FakeSequence::FakeSequence(const Options& options, FakeWorld world)
    : shape_(options.shape),
      protection_(options.protection),
      prompt_tokens_(options.prompt_tokens),
      world_(std::move(world)) {
  const Params params = Resolve(options).params;
  traits_ = options.spec->traits(params, shape_);
  policy_ = options.spec->make(params, shape_);
  state_ = policy_->NewState({.prompt_tokens = options.prompt_tokens,
                              .budget = options.budget,
                              .seed = options.seed,
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
      traits_(other.traits_),
      policy_(other.policy_),
      state_(other.state_ == nullptr ? nullptr : other.state_->Clone()),
      lanes_(other.lanes_),
      next_(other.next_),
      world_(other.world_) {}

void FakeSequence::Prefill(int64_t count) { Append(count, Phase::kPrefill); }
void FakeSequence::Decode() { Append(1, Phase::kDecode); }

void FakeSequence::Append(int64_t count, Phase phase) {
  const int64_t first = next_;
  next_ += count;
  for (Lane& lane : lanes_) {
    for (int64_t token = first; token < next_; ++token) {
      lane.index.push_back(static_cast<int32_t>(token));
    }
    for (std::vector<float>& column : lane.columns) column.resize(lane.index.size());
  }
  std::vector<float> residual_step;
  const FakeAttentionRow attention(*this, world_);
  Signals signals;
  if (phase == Phase::kDecode) {
    for (int64_t layer : traits_.residual_layers) {
      residual_step.push_back(world_.residual_step(layer, first));
    }
    signals = {.residual_step = residual_step, .attention = &attention};
  }
  std::vector<SequenceStep> steps;
  steps.push_back({state_.get(), *this, phase, first, count, signals});
  policy_->Observe(absl::MakeSpan(steps));
}

bool FakeSequence::OverBudget() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [&](const Lane& lane) { return ExcessOf(lane) > 0; });
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
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    const std::vector<int32_t>& victims = eviction.victims[i];
    EXPECT_GE(static_cast<int64_t>(victims.size()), ExcessOf(lane))
        << "too few victims in lane " << i;
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
  return ExcessOf(lanes_[LaneOf(layer, head)]);
}

int64_t FakeSequence::ExcessOf(const Lane& lane) const {
  const int64_t used = lane.index.size();
  return traits_.evicts && used > lane.budget + traits_.slack ? used - lane.budget : 0;
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

at::Tensor FakeSequence::keys(int64_t layer, int64_t head) const {
  return Rows(Signal::kKeys, layer, head);
}

at::Tensor FakeSequence::values(int64_t layer, int64_t head) const {
  return Rows(Signal::kValues, layer, head);
}

at::Tensor FakeSequence::Rows(Signal signal, int64_t layer, int64_t head) const {
  if (!traits_.signals.Has(signal)) {
    ADD_FAILURE() << "read " << SignalName(signal) << " without declaring it";
  }
  std::vector<at::Tensor> rows;
  for (int32_t token : index(layer, head)) {
    rows.push_back(at::tensor(world_.key(layer, head, token), at::kFloat));
  }
  return at::stack(rows);
}

}  // namespace epikv
