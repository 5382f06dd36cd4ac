#include "tests/law_model.h"

#include <ATen/ATen.h>

namespace epikv {
namespace {

class MeddlingHooks final : public ForwardHooks {
 public:
  MeddlingHooks(ForwardHooks& hooks, const LawModel::Meddle& meddle, const at::Tensor& token_ids)
      : hooks_(hooks), meddle_(meddle), token_ids_(token_ids) {}

  at::Tensor Block(const at::Tensor& residual, int64_t layer) override {
    return hooks_.Block(residual, layer);
  }
  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override {
    at::Tensor changed_q = q.clone(), changed_k = k.clone(), changed_v = v.clone();
    meddle_(token_ids_, changed_q, changed_k, changed_v, layer);
    return hooks_.Attention(changed_q, changed_k, changed_v, normed, layer);
  }

 private:
  ForwardHooks& hooks_;
  const LawModel::Meddle& meddle_;
  const at::Tensor token_ids_;
};

// Rotates one token's heads [heads, width] at `positions` [heads].
at::Tensor Rotated(const at::Tensor& x, const std::vector<int64_t>& positions, const Rope& rope) {
  const int64_t half = static_cast<int64_t>(rope.inv_freq.size());
  const at::Tensor angle = at::outer(at::tensor(positions).to(at::kFloat),
                                     at::tensor(rope.inv_freq, at::kDouble).to(at::kFloat));
  const at::Tensor cos = angle.cos(), sin = angle.sin();
  const at::Tensor a = x.narrow(1, 0, half), b = x.narrow(1, half, half);
  return at::cat({a * cos - b * sin, b * cos + a * sin}, 1);
}

// Plain attention of one new token over all tokens so far, masked lane by lane.
class MaskedHooks final : public ForwardHooks {
 public:
  MaskedHooks(const Manifest& manifest, PositionMode positions, KvDType stored)
      : manifest_(manifest),
        mode_(positions),
        stored_(stored),
        keys_(manifest.num_layers()),
        values_(manifest.num_layers()),
        alive_(manifest.num_layers() * manifest.num_kv_heads) {}

  void Drop(int64_t layer, int64_t head, int64_t index) {
    alive_[layer * manifest_.num_kv_heads + head][index] = false;
  }

  MaskedReference::Step TakeStep() { return std::exchange(step_, {}); }

  at::Tensor Block(const at::Tensor& residual, int64_t layer) override {
    if (layer > 0) step_.residuals.push_back(residual[0].clone());
    return residual;
  }

  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor&, int64_t layer) override {
    const int64_t kv_heads = manifest_.num_kv_heads, group = manifest_.num_heads / kv_heads;
    const LayerFacts& facts = manifest_.layers[layer];
    std::vector<int64_t> positions, query_positions;
    for (int64_t head = 0; head < kv_heads; ++head) {
      std::vector<bool>& alive = alive_[layer * kv_heads + head];
      positions.push_back(mode_ == PositionMode::kAbsolute
                              ? static_cast<int64_t>(alive.size())
                              : std::count(alive.begin(), alive.end(), true));
      query_positions.insert(query_positions.end(), group, positions.back());
      alive.push_back(true);
    }
    const Rope& rope = manifest_.ropes[facts.rope];
    keys_[layer].push_back(
        Held(mode_ == PositionMode::kCache ? k[0].clone() : Rotated(k[0], positions, rope)));
    values_[layer].push_back(Held(v[0].clone()));
    const at::Tensor query = Rotated(q[0], query_positions, rope);
    at::Tensor keys = at::stack(keys_[layer], 1);  // [kv_heads, tokens, width]
    if (mode_ == PositionMode::kCache) keys = AtRanks(keys, layer, rope);
    const at::Tensor values = at::stack(values_[layer], 1);
    std::vector<at::Tensor> out;
    at::Tensor rows = at::zeros({kv_heads, static_cast<int64_t>(keys_[layer].size())});
    for (int64_t h = 0; h < manifest_.num_heads; ++h) {
      const int64_t head = h / group;
      std::vector<double> mask;
      for (bool alive : alive_[layer * kv_heads + head]) mask.push_back(alive ? 0 : -INFINITY);
      const at::Tensor logits =
          at::mv(keys[head].to(at::kDouble), query[h].to(at::kDouble)) * facts.scale +
          at::tensor(mask, at::kDouble);
      const at::Tensor weights = at::softmax(logits, 0);
      rows[head] += weights / static_cast<double>(group);
      out.push_back(at::mv(values[head].t().to(at::kDouble), weights).to(at::kFloat));
    }
    step_.attention.push_back(rows);
    return at::stack(out).unsqueeze(0);
  }

 private:
  // What rows [n, width] are worth once they are cached.
  at::Tensor Held(const at::Tensor& rows) const {
    if (stored_ == KvDType::kModel) return rows;
    const at::Tensor scale = rows.abs().amax(-1, /*keepdim=*/true) / 127;
    return (rows / scale).round().nan_to_num(0) * scale;
  }

  // Each lane's living tokens at positions 0, 1, 2, ...
  at::Tensor AtRanks(const at::Tensor& keys, int64_t layer, const Rope& rope) const {
    std::vector<at::Tensor> turned;
    for (int64_t head = 0; head < manifest_.num_kv_heads; ++head) {
      std::vector<int64_t> ranks;
      int64_t next = 0;
      for (bool alive : alive_[layer * manifest_.num_kv_heads + head]) {
        ranks.push_back(next);
        next += alive ? 1 : 0;
      }
      turned.push_back(Held(Rotated(keys[head], ranks, rope)));
    }
    return at::stack(turned);
  }

  const Manifest& manifest_;
  const PositionMode mode_;
  const KvDType stored_;
  std::vector<std::vector<at::Tensor>> keys_, values_;  // [layers][tokens] of [kv_heads, width]
  std::vector<std::vector<bool>> alive_;                // [lanes][tokens]
  MaskedReference::Step step_;
};

}  // namespace

at::Tensor LawModel::Forward(const at::Tensor& token_ids, const at::Tensor& positions,
                             const at::Tensor& last, ForwardHooks& hooks) const {
  MeddlingHooks meddling(hooks, meddle_, token_ids);
  at::Tensor logits = model_->Forward(token_ids, positions, last, meddle_ ? meddling : hooks);
  for (int64_t row = 0; row < logits.size(0); ++row) logits_.push_back(logits[row].clone());
  return logits;
}

std::vector<MaskedReference::Step> MaskedReference::Run(const std::vector<int32_t>& tokens,
                                                        const std::vector<Dropped>& dropped,
                                                        PositionMode positions) const {
  MaskedHooks hooks(model_.manifest(), positions, stored_);
  std::vector<Step> steps;
  size_t next = 0;
  const at::Tensor row = at::zeros({1}, at::kLong);
  for (int64_t t = 0; t < static_cast<int64_t>(tokens.size()); ++t) {
    const at::Tensor logits = model_.Forward(at::full({1}, tokens[t], at::kLong),
                                             at::full({1}, t, at::kLong), row, hooks);
    steps.push_back(hooks.TakeStep());
    steps.back().logits = logits[0];
    for (; next < dropped.size() && dropped[next].at_token == t; ++next) {
      hooks.Drop(dropped[next].layer, dropped[next].head, dropped[next].index);
    }
  }
  return steps;
}

}  // namespace epikv
