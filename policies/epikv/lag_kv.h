#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "policies/loops.h"
#include "policies/scored_policy.h"

// epikv_lag_kv and epikv_lag_kv_key: the deviation over its channels of a token's key (and value)
// after scaling each channel by the range it had in the chunk before.

namespace epikv {

inline ParamSpec ChunkParam() {
  return {.name = "chunk",
          .type = ParamType::kInt,
          .fallback = int64_t{128},
          .min = 1,
          .max = 65536,
          .help = "cached tokens of a chunk"};
}

// Rows are averaged once, when their token is cached: a round reads the averages alone, which are
// one layer's worth.
class LagKv final : public ScoredPolicy {
 public:
  enum class Rows { kKeys, kKeysAndValues };
  LagKv(const Params& params, Rows rows)
      : ScoredPolicy(Granularity::kToken), chunk_(params.Int("chunk")), rows_(rows) {}

  static PolicyTraits Traits(const Params& params, const ModelShape& shape, Rows rows) {
    const bool values = rows == Rows::kKeysAndValues;
    const int64_t width = shape.key_width + (values ? shape.value_width : 0);
    return {
        .signals = values ? Signal::kKeys | Signal::kValues : Signal::kKeys,
        .prompt = PromptEviction::kByChunk,
        .slack = params.Int("slack"),
        .state_bytes_per_token = int64_t{sizeof(Token)} +
                                 shape.num_kv_heads * width * static_cast<int64_t>(sizeof(float)),
        .state_bytes = sizeof(State)};
  }

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    return std::make_unique<State>();
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) Follow(step.cache, static_cast<State&>(*step.state));
  }

 private:
  struct Token {
    int32_t index = 0;
    std::vector<float> mean;  // over layers, of the keys of each head, and then of the values
  };
  struct State final : PolicyState {
    std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<State>(*this); }

    int64_t key_width = 0, value_width = 0;  // 0: not read
    std::vector<Token> tokens;               // that are cached, oldest first
  };

  // Brings `state` to what is cached: tokens come at the end, and leave from anywhere.
  void Follow(CacheView& cache, State& state) const {
    Lane lane(cache, 0, 0);
    const absl::Span<const int32_t> index = cache.index(0, 0);
    const int64_t* const slot = lane.by_birth().const_data_ptr<int64_t>();
    std::vector<Token> now(index.size());
    std::vector<int64_t> born;  // places
    auto known = state.tokens.begin();
    for (int64_t place = 0; place < std::ssize(now); ++place) {
      const int32_t token = index[slot[place]];
      while (known != state.tokens.end() && known->index < token) ++known;
      if (known != state.tokens.end() && known->index == token) {
        now[place] = std::move(*known);
      } else {
        now[place].index = token;
        born.push_back(place);
      }
    }
    state.tokens = std::move(now);
    constexpr int64_t kBlock = 64;  // bounds the scratch
    for (int64_t begin = 0; begin < std::ssize(born); begin += kBlock) {
      std::vector<Token*> tokens;
      std::vector<int64_t> slots;
      for (int64_t i = begin; i < std::min(begin + kBlock, std::ssize(born)); ++i) {
        tokens.push_back(&state.tokens[born[i]]);
        slots.push_back(slot[born[i]]);
      }
      state.key_width = AddMean(cache.keys_of(slots), tokens);
      if (rows_ == Rows::kKeys) continue;
      state.value_width = AddMean(cache.values_of(slots), tokens);
    }
  }

  // Appends the mean over layers of each head's rows: [layers, heads, tokens, width]. Returns
  // width.
  static int64_t AddMean(const at::Tensor& rows, const std::vector<Token*>& tokens) {
    const int64_t layers = rows.size(0), heads = rows.size(1), width = rows.size(3);
    const float* row = rows.const_data_ptr<float>();
    const size_t begin = tokens.front()->mean.size();
    for (Token* token : tokens) {
      token->mean.reserve(begin + heads * width);
      token->mean.resize(begin + heads * width);
    }
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (int64_t head = 0; head < heads; ++head) {
        for (Token* token : tokens) {
          float* const sum = token->mean.data() + begin + head * width;
          for (int64_t channel = 0; channel < width; ++channel) sum[channel] += *row++;
        }
      }
    }
    for (Token* token : tokens) {
      for (size_t i = begin; i < token->mean.size(); ++i) {
        token->mean[i] /= static_cast<float>(layers);
      }
    }
    return width;
  }

  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const State& state = static_cast<const State&>(*task.state);
    const int64_t n = std::ssize(state.tokens), heads = task.cache.num_kv_heads();
    const int64_t channels = heads * (state.key_width + state.value_width);
    std::vector<const float*> rows;
    rows.reserve(n);
    for (const Token& token : state.tokens) rows.push_back(token.mean.data());
    const absl::Span<const float* const> all = rows;
    at::Tensor score = at::zeros(n);  // in birth order
    // The first chunk has none before it, and is not scaled.
    std::vector<float> low(channels), factor(channels, 1);
    for (int64_t begin = 0; begin < n; begin += chunk_) {
      if (begin > 0) {
        BoundChannels(all.subspan(begin - chunk_, chunk_), channels, low.data(), factor.data());
        for (int64_t c = 0; c < channels; ++c) factor[c] = 1 / (factor[c] - low[c] + 1e-9f);
      }
      for (int64_t channel = 0; channel < channels;) {
        const int64_t width =
            channel < heads * state.key_width ? state.key_width : state.value_width;
        AddDeviations(all.subspan(begin, chunk_), channel, width, low.data(), factor.data(),
                      score.mutable_data_ptr<float>() + begin);
        channel += width;
      }
    }
    return lane.ToSlots(score / static_cast<double>(heads));
  }

  const int64_t chunk_;
  const Rows rows_;
};

}  // namespace epikv
