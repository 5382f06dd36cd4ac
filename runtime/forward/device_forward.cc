#include "runtime/forward/device_forward.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/forward/varlen_attention.h"
#include "runtime/step/step_item.h"

namespace epikv {
namespace {

// Rotates the first channels of x [m, heads, width] in fp32. cos_sin [m, 1, 2 x half].
at::Tensor Rotated(const at::Tensor& x, const at::Tensor& cos_sin, bool interleaved) {
  const int64_t half = cos_sin.size(2) / 2;
  if (half == 0) return x;
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor cos = cos_sin.narrow(2, 0, half), sin = cos_sin.narrow(2, half, half);
  const at::Tensor pairs = wide.narrow(2, 0, 2 * half);
  const at::Tensor a = interleaved ? pairs.slice(2, 0, 2 * half, 2) : pairs.narrow(2, 0, half);
  const at::Tensor b = interleaved ? pairs.slice(2, 1, 2 * half, 2) : pairs.narrow(2, half, half);
  const at::Tensor first = at::addcmul(a * cos, b, sin, -1), second = at::addcmul(b * cos, a, sin);
  std::vector<at::Tensor> parts;
  if (interleaved) {
    parts = {at::stack({first, second}, -1).flatten(2)};
  } else {
    parts = {first, second};
  }
  if (2 * half < x.size(2)) parts.push_back(wide.narrow(2, 2 * half, x.size(2) - 2 * half));
  return at::cat(parts, 2).to(x.scalar_type());
}

void CopyTo(absl::Span<float> to, const at::Tensor& from) {
  TORCH_CHECK(static_cast<size_t>(from.numel()) == to.size(), "a signal has another size");
  std::copy_n(from.const_data_ptr<float>(), to.size(), to.begin());
}

absl::Span<const float> Floats(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

}  // namespace

absl::Status DeviceForward::Supports(const Manifest& manifest) {
  for (size_t l = 0; l < manifest.layers.size(); ++l) {
    const LayerFacts& layer = manifest.layers[l];
    if (layer.soft_cap.has_value()) {
      return absl::UnimplementedError(absl::StrCat(
          "layer ", l, " has a soft cap, which works on the CPU only: use --device=cpu"));
    }
    if (layer.window.has_value() && *layer.window < manifest.context_length) {
      return absl::UnimplementedError(absl::StrCat(
          "layer ", l, " has a window of ", *layer.window, " tokens, smaller than the context of ",
          manifest.context_length, ", which works on the CPU only: use --device=cpu"));
    }
  }
  return absl::OkStatus();
}

DeviceForward::DeviceForward(const Model& model, const ModelShape& shape,
                             absl::Span<const RopeTable> ropes, KvPool& pool,
                             LaneRowsOfStep& mass_rows)
    : model_(model),
      shape_(shape),
      pool_(pool),
      mass_rows_(mass_rows),
      group_(shape.num_heads / shape.num_kv_heads) {
  TORCH_CHECK(pool.num_rows() <= std::numeric_limits<int32_t>::max(), "the KV pool has ",
              pool.num_rows(),
              " rows, more than the GPU kernel can address: lower --kv_pool_bytes");
  for (const RopeTable& rope : ropes) {
    const at::Tensor table =
        at::from_blob(const_cast<float*>(rope.at(0)),  // only read
                      {model.manifest().context_length, 2 * rope.half()}, at::kFloat);
    ropes_.push_back({.interleaved = rope.interleaved(), .table = table.to(model.device())});
  }
}

DevicePlan DeviceForward::Plan(absl::Span<const StepItem> items) const {
  std::vector<DeviceItem> planned;
  std::vector<std::vector<int64_t>> lanes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const StepItem& item = items[i];
    TORCH_CHECK(!item.turns_keys(), "cache positions work on the CPU only");
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        lanes[i].push_back(item.sequence->cache.Lane(layer, head).first_row);
      }
    }
    planned.push_back({.row = item.row,
                       .decode = item.work->decode,
                       .tokens = item.work->tokens,
                       .lanes = lanes[i],
                       .slots = item.slots,
                       .positions = item.positions,
                       .used = item.used,
                       .num_logits = item.num_logits(),
                       .taps = item.sequence->tap.layers()});
  }
  return PlanDevice(planned, shape_);
}

void DeviceForward::Run(absl::Span<StepItem> items) {
  items_ = items;
  plan_ = Plan(items);
  copy_.Drop();
  arrivals_.clear();
  tapped_.clear();
  kept_.assign(items.size(), {});
  latest_ = {};
  numbers_ = at::tensor(plan_.numbers, at::kInt).to(model_.device());
  index_ = numbers_.to(at::kLong);
  const at::Tensor logits =
      model_.Forward(Index(plan_.tokens), Index(plan_.positions), Index(plan_.last), *this);
  int64_t row = 0;
  for (StepItem& item : items) {
    TakeLogits(item, logits.narrow(0, row, item.num_logits()));
    row += item.num_logits();
  }
  TORCH_CHECK(row == logits.size(0), "logits rows do not match the batch");
  TakeSteps();
  for (StepItem& item : items) {
    if (!item.wants(Signal::kGate)) continue;
    Bring(at::stack(item.gates), [&item](const at::Tensor& rows) { item.gate = rows; });
    item.gates.clear();
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (kept_[i].empty()) continue;
    Bring(at::stack(kept_[i]), [&to = items[i].last_residuals](const at::Tensor& residuals) {
      CopyTo(absl::MakeSpan(to), residuals);
    });
  }
  copy_.Run();
  for (const std::function<void()>& arrival : arrivals_) arrival();
  arrivals_.clear();
  items_ = {};
}

void DeviceForward::Bring(const at::Tensor& tensor,
                          std::function<void(const at::Tensor&)> arrived) {
  arrivals_.push_back([this, place = copy_.Add(tensor), arrived = std::move(arrived)] {
    arrived(copy_.Get(place));
  });
}

at::Tensor DeviceForward::Index(DevicePlan::Section section) const {
  return index_.narrow(0, section.begin, section.size);
}

at::Tensor DeviceForward::Numbers(DevicePlan::Section section) const {
  return numbers_.narrow(0, section.begin, section.size);
}

// Only the rows that the host reads.
void DeviceForward::TakeLogits(StepItem& item, const at::Tensor& logits) {
  const int64_t wanted = item.wants_prompt_logprobs() ? item.num_rows() : item.num_read_logits();
  Bring(logits.narrow(0, logits.size(0) - wanted, wanted),
        [&item](const at::Tensor& rows) { item.logits = rows; });
  if (!item.wants(Signal::kLogitEntropy)) return;
  Bring(EntropiesOf(logits), [&item](const at::Tensor& rows) { item.entropies = rows; });
}

// The steps of all items by one reduction.
void DeviceForward::TakeSteps() {
  if (tapped_.empty()) return;
  const at::Tensor now = at::cat(tapped_).index_select(0, Index(plan_.tap_order)).to(at::kFloat);
  std::vector<at::Tensor> before;
  for (const StepItem& item : items_) {
    const ResidualTap& tap = item.sequence->tap;
    if (tap.layers().empty()) continue;
    at::Tensor tapped = item.sequence->tapped;
    if (!tapped.defined()) {                                           // its first step
      tapped = at::from_blob(const_cast<float*>(tap.before().data()),  // only read
                             {std::ssize(tap.layers()), shape_.hidden_size}, at::kFloat)
                   .to(now.device());
    }
    before.push_back(std::move(tapped));
  }
  const at::Tensor steps = at::linalg_vector_norm(now - at::cat(before), 2, at::IntArrayRef{1});
  int64_t first = 0;
  for (StepItem& item : items_) {
    ResidualTap& tap = item.sequence->tap;
    const auto count = std::ssize(tap.layers());
    if (count == 0) continue;
    item.tapped = now.narrow(0, first, count);
    Bring(steps.narrow(0, first, count),
          [&tap](const at::Tensor& rows) { tap.PutSteps(Floats(rows)); });
    if (item.wants(Signal::kResidual)) {
      Bring(item.tapped, [&tap](const at::Tensor& rows) { tap.PutResiduals(Floats(rows)); });
    }
    first += count;
  }
}

at::Tensor DeviceForward::Block(const at::Tensor& residual, int64_t layer) {
  // Entering block `layer` is the residual after block layer - 1.
  if (layer > 0) TakeTaps(residual, layer);
  return Steered(items_, residual, layer);
}

void DeviceForward::TakeTaps(const at::Tensor& residual, int64_t layer) {
  const DevicePlan::Section tapped = plan_.taps[layer - 1];
  if (tapped.size > 0) tapped_.push_back(residual.index_select(0, Index(tapped)));
  for (size_t i = 0; i < items_.size(); ++i) {
    StepItem& item = items_[i];
    if (!item.last_residuals.empty()) {
      const at::Tensor last = residual[item.row + item.num_rows() - 1];
      kept_[i].push_back(last.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
    if (layer == shape_.num_layers && item.wants(Signal::kFinalHidden)) {
      Bring(TakeFinalHidden(item, residual, model_),
            [&item](const at::Tensor& rows) { item.final_hidden = rows; });
    }
    if (!item.wants(Signal::kResidualDistance)) continue;
    item.residuals.push_back(residual.narrow(0, item.row, item.num_rows()).clone());
    if (layer < shape_.num_layers) continue;
    Bring(DistancesOf(item.residuals), [&item](const at::Tensor& rows) { item.distances = rows; });
    item.residuals.clear();
  }
}

at::Tensor DeviceForward::Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& normed, int64_t layer) {
  const int64_t n = q.size(0), pairs = n * shape_.num_kv_heads;  // (row, KV head)
  const at::Tensor& angles = AnglesOf(layer);
  const bool interleaved = ropes_[model_.manifest().layers[layer].rope].interleaved;
  // A KV head's queries and key turn together: a GPU minds the number of operations.
  const at::Tensor turned = Rotated(at::cat({q.reshape({pairs, group_, shape_.key_width}),
                                             k.reshape({pairs, 1, shape_.key_width})},
                                            1),
                                    angles, interleaved);
  pool_.Write(Index(plan_.written[layer]), turned.select(1, group_),
              v.reshape({pairs, shape_.value_width}));
  const at::Tensor queries = turned.narrow(1, 0, group_).contiguous();
  const at::Tensor out = Attend(queries, layer);

  const at::Tensor rotated = queries.view({n, shape_.num_heads, shape_.key_width});
  for (const StepItem& item : items_) {
    TakeQueries(item, q, rotated, layer);
    if (item.wants_attention_rows(layer)) {
      Measure(item, rotated, layer, item.sequence->attention_rows);
    }
    if (item.measures_mass) Measure(item, rotated, layer, mass_rows_);
  }
  TakeGates(items_, normed, layer, /*together=*/false);
  return out.view({n, shape_.num_heads, shape_.value_width});
}

// Cosines and sines at the rows' positions. Most layers share them.
const at::Tensor& DeviceForward::AnglesOf(int64_t layer) {
  const int64_t rope = model_.manifest().layers[layer].rope;
  const DevicePlan::Section positions = plan_.rope_positions[layer];
  if (!latest_.angles.defined() || latest_.rope != rope || latest_.positions != positions.begin) {
    latest_ = {.rope = rope,
               .positions = positions.begin,
               .angles = ropes_[rope].table.index_select(0, Index(positions)).unsqueeze(1)};
  }
  return latest_.angles;
}

// queries [n x kv_heads, group, width], rotated, contiguous -> the same
at::Tensor DeviceForward::Attend(const at::Tensor& queries, int64_t layer) const {
  at::Tensor out;
  for (const DevicePlan::Call& call : plan_.calls) {
    const at::Tensor rows = Index(call.query_rows);
    const at::Tensor attended =
        VarlenAttention({.q = call.in_order ? queries : queries.index_select(0, rows),
                         .keys = pool_.keys(),
                         .values = pool_.values(),
                         .query_starts = Numbers(call.query_starts),
                         .starts = Numbers(call.starts[layer]),
                         .lengths = Numbers(call.lengths[layer]),
                         .max_queries = call.max_queries,
                         .max_length = call.max_length[layer],
                         .causal = call.causal,
                         .scale = model_.manifest().layers[layer].scale});
    if (call.in_order) return attended;
    if (!out.defined()) out = at::empty_like(queries);
    out.index_copy_(0, rows, attended);
  }
  return out;
}

void DeviceForward::TakeQueries(const StepItem& item, const at::Tensor& q,
                                const at::Tensor& rotated, int64_t layer) {
  OpenSequence& sequence = *item.sequence;
  if (item.wants(Signal::kQueryMoments)) {
    sequence.moments.Take(layer, q.narrow(0, item.row, item.num_rows()), item.work->first);
  }
  if (!item.wants_queries()) return;
  const int64_t kept = std::min(item.num_rows(), item.queries->capacity());
  Bring(rotated.narrow(0, item.row + item.num_rows() - kept, kept),
        [&queries = *item.queries, layer, kept](const at::Tensor& rows) {
          queries.Take(layer, static_cast<const char*>(rows.const_data_ptr()), kept);
        });
}

// What the item's queries give each slot of its lanes at a layer.
void DeviceForward::Measure(const StepItem& item, const at::Tensor& rotated, int64_t layer,
                            LaneRowsOfStep& rows) {
  const SequenceCache& cache = item.sequence->cache;
  const int64_t heads = cache.Uniform(layer) ? shape_.num_kv_heads : 1;  // at once
  const at::Tensor q = rotated.narrow(0, item.row, item.num_rows());
  std::vector<at::Tensor> masses;
  for (int64_t head = 0; head < shape_.num_kv_heads; head += heads) {
    const LaneRows lane = cache.Lane(layer, head);
    masses.push_back(AttentionMass(q.narrow(1, head * group_, heads * group_), pool_.keys(),
                                   lane.first_row, heads, lane.capacity,
                                   item.used[layer * shape_.num_kv_heads + head],
                                   model_.manifest().layers[layer].scale)
                         .flatten());
  }
  Bring(at::cat(masses),
        [&rows, layer](const at::Tensor& mass) { CopyTo(rows.layer(layer), mass); });
}

}  // namespace epikv
