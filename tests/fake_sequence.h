#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "policies/policy.h"

namespace epikv {

// What a model would have shown a policy. Pure functions, so that nothing depends on slots.
struct FakeWorld {
  // Of decode token `token`, after block `layer`.
  std::function<float(int64_t layer, int64_t token)> residual_step;
  // The row of query `query` over the tokens `index` of a lane. [index]
  std::function<std::vector<float>(int64_t layer, int64_t head, int64_t query,
                                   absl::Span<const int32_t> index)>
      attention;
  std::function<std::vector<float>(int64_t layer, int64_t head, int64_t token)> key, value;
  // Of a query head, after RoPE.
  std::function<std::vector<float>(int64_t layer, int64_t query_head, int64_t token)> query;
  double attention_scale = 1;
  std::optional<double> soft_cap;  // AttentionFacts', of every layer
  std::optional<int64_t> window;
  // Of a token: the entropy of the next, and a residual's distance from the last.
  std::function<float(int64_t token)> logit_entropy;
  std::function<float(int64_t layer, int64_t token)> residual_distance;
  // Of decode token `token`, after block `layer`. [hidden]
  std::function<std::vector<float>(int64_t layer, int64_t token)> residual;
  // A row of W_O: what channel `channel` of a query head's output adds to the residual. [hidden]
  std::function<std::vector<float>(int64_t layer, int64_t query_head, int64_t channel)> output;
};

// Rows that are the softmax of the world's queries over its keys, averaged over the `group` query
// heads of a KV head: what policies must be shown that look at both. Under its soft cap and window.
decltype(FakeWorld::attention) AttentionOf(const FakeWorld& world, int64_t group);

// Every value is drawn from `levels` different ones: few levels make ties.
FakeWorld RandomWorld(uint64_t seed, int64_t levels);

// One sequence and its cache without model, pool or engine: the runtime's side of policy.h in its
// simplest form. Every breach of the contract, by a policy or by its test, fails the running test.
class FakeSequence final : public CacheView {
 public:
  struct Options {
    const PolicySpec* spec = nullptr;
    std::map<std::string, ParamValue> params;
    // Calibrated for the policies that cannot do without.
    ModelShape shape = {
        .num_layers = 3,
        .num_heads = 4,
        .num_kv_heads = 2,
        .hidden_size = 4,
        .calibrated = {
            {"thinkv_tbe",
             {{"layers", std::vector<int64_t>{0, 2}}, {"theta1", 0.3}, {"theta2", 0.6}}}}};
    Protection protection;
    int64_t prompt_tokens = 0;
    int64_t budget = 0;
    uint64_t seed = 0;
    bool fills_first = false;  // new tokens take the first slots, as of evicted ones; else the last
  };

  FakeSequence(const Options& options, FakeWorld world);
  // A copy that shares nothing with `other`.
  FakeSequence(const FakeSequence& other);

  void Prefill(
      int64_t count);  // caches `count` prompt tokens; 0: none, and the policy is told nothing
  void Decode();       // caches one more
  // True if a round is due.
  bool OverBudget() const;
  // Rounds in prefill end at the budget; in decode they wait until the slack is used up.
  int64_t Slack() const;
  // The policy's answer, not acted upon. The policy may have changed its state.
  Eviction Ask();
  // Checks the answer against the contract and drops the victims.
  void Drop(const Eviction& eviction);
  // A round, if one is due. Returns its victims, sorted, by lane; empty if there was none.
  std::vector<std::vector<int32_t>> Round();

  // Rearranges the slots of every lane.
  void Shuffle(std::mt19937& random);

  // Indexes cached in a lane, ascending.
  std::vector<int32_t> Kept(int64_t layer = 0, int64_t head = 0) const;
  const PolicyTraits& traits() const { return traits_; }
  const Policy& policy() const { return *policy_; }
  EvictionTask task() { return {state_.get(), *this}; }

  int64_t num_layers() const override { return shape_.num_layers; }
  int64_t num_kv_heads() const override { return shape_.num_kv_heads; }
  int64_t num_heads() const override { return shape_.num_heads; }
  int64_t prompt_tokens() const override { return prompt_tokens_; }
  int64_t newest() const override { return next_ - 1; }
  int64_t next_position(int64_t, int64_t) const override { return next_; }
  const Protection& protection() const override { return protection_; }
  uint64_t seed() const override { return seed_; }
  int64_t excess(int64_t layer, int64_t head) const override;
  absl::Span<const int32_t> index(int64_t layer, int64_t head) const override;
  absl::Span<float> column(int64_t place, int64_t layer, int64_t head) override;
  at::Tensor keys(int64_t layer, int64_t head) const override;
  at::Tensor values(int64_t layer, int64_t head) const override;
  at::Tensor keys_of(absl::Span<const int64_t> slots) const override;
  at::Tensor values_of(absl::Span<const int64_t> slots) const override;
  at::Tensor queries(int64_t layer) const override;
  AttentionFacts attention(int64_t) const override {
    return {.scale = world_.attention_scale, .soft_cap = world_.soft_cap, .window = world_.window};
  }
  QueryMoments query_moments(int64_t layer) const override;
  at::Tensor output_projection(int64_t layer) const override;
  at::Tensor output_gram(int64_t layer) const override;

 private:
  // Lanes that share a keep decision are one.
  struct Lane {
    int64_t budget = 0;
    std::vector<int32_t> index;
    std::vector<std::vector<float>> columns;  // [columns][used]
  };

  size_t LaneOf(int64_t layer, int64_t head) const;
  // The lanes that share one budget with lane `i`.
  absl::Span<const Lane> PoolOf(size_t i) const;
  int64_t ExcessOf(size_t i) const;
  void Append(int64_t count, Phase phase);
  void Remove(Lane& lane, absl::Span<const int32_t> victims);
  void Expect(Signal signal) const;  // that it is declared
  // Of all tokens so far, [tokens, width].
  enum class Rows { kKey, kValue, kQuery };
  at::Tensor AllRows(Rows kind, int64_t layer, int64_t head) const;
  template <class RowsOf>
  at::Tensor OfAllLanes(absl::Span<const int64_t> slots, const RowsOf& rows_of) const;

  const ModelShape shape_;
  const Protection protection_;
  const int64_t prompt_tokens_;
  const uint64_t seed_;
  const bool fills_first_;
  PolicyTraits traits_;
  std::shared_ptr<const Policy> policy_;
  std::unique_ptr<PolicyState> state_;
  std::vector<Lane> lanes_;
  int64_t next_ = 0;  // index of the next token
  FakeWorld world_;
  // What AllRows has made so far.
  mutable std::map<std::tuple<Rows, int64_t, int64_t>, at::Tensor> rows_;
};

}  // namespace epikv
