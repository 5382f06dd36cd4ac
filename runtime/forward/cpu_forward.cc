#include "runtime/forward/cpu_forward.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "absl/container/fixed_array.h"
#include "runtime/base/scalar_type.h"
#include "runtime/base/steady_time.h"
#include "runtime/kernels/kernels.h"
#include "runtime/step/stage_timer.h"
#include "runtime/step/step_item.h"

namespace epikv {
namespace {

// One row in the model's dtype, in bytes.
using RowScratch = absl::FixedArray<char, 1024>;

constexpr int64_t kAppendGrain = 16;  // rows that are worth a thread

}  // namespace

// [n, heads, width], whose heads lie beside each other in a row: as they are where they do, which
// those do that are a part of one product.
struct CpuForward::HeadRows {
  explicit HeadRows(const at::Tensor& x)
      : tensor(x.stride(2) == 1 && x.stride(1) == x.size(2) ? x : x.contiguous()),
        data(static_cast<const char*>(tensor.const_data_ptr())),
        row_bytes(tensor.stride(0) * static_cast<int64_t>(tensor.element_size())),
        head_bytes(tensor.size(2) * static_cast<int64_t>(tensor.element_size())) {}

  const char* at(int64_t row, int64_t head) const {
    return data + row * row_bytes + head * head_bytes;
  }

  const at::Tensor tensor;
  const char* const data;
  const int64_t row_bytes, head_bytes;
};

CpuForward::CpuForward(const Model& model, const ModelShape& shape,
                       absl::Span<const RopeTable> ropes, const KvPool& pool,
                       const CpuForwardOptions& options, LaneRowsOfStep& mass_rows,
                       StepStats& times)
    : model_(model),
      shape_(shape),
      ropes_(ropes),
      pool_(pool),
      deterministic_(options.deterministic),
      attention_(options.decode_kernel, options.prefill_kernel),
      mass_rows_(mass_rows),
      times_(times),
      taps_(shape.num_layers) {}

void CpuForward::Run(absl::Span<StepItem> items) {
  std::vector<int64_t> tokens, positions, last;
  for (const StepItem& item : items) {
    for (int64_t i = 0; i < item.num_rows(); ++i) {
      tokens.push_back(item.work->tokens[i]);
      positions.push_back(item.positions.front() + i);
    }
    for (int64_t i = item.num_logits(); i > 0; --i) {
      last.push_back(item.row + item.num_rows() - i);
    }
  }
  const size_t num_last = last.size();
  if (deterministic_) {  // a product's bits depend on its number of rows
    tokens.resize(kDeterministicRows);
    positions.resize(kDeterministicRows);
    last.resize(kDeterministicRows);
  }
  for (std::vector<Tap>& taps : taps_) taps.clear();
  for (StepItem& item : items) {
    const std::vector<int64_t>& layers = item.sequence->tap.layers();
    for (size_t place = 0; place < layers.size(); ++place) {
      taps_[layers[place]].push_back({&item, static_cast<int64_t>(place)});
    }
  }
  running_ = items;
  const absl::Cleanup end = [this] { running_ = {}; };
  const at::Tensor logits =
      model_.Forward(at::tensor(tokens, at::kLong), at::tensor(positions, at::kLong),
                     at::tensor(last, at::kLong), *this);
  int64_t row = 0;
  for (StepItem& item : items) {
    item.logits = logits.narrow(0, row, item.num_logits()).contiguous();
    if (item.wants(Signal::kLogitEntropy)) item.entropies = EntropiesOf(item.logits);
    if (item.wants(Signal::kGate)) {
      item.gate = at::stack(item.gates);
      item.gates.clear();
    }
    row += item.num_logits();
  }
  TORCH_CHECK(row == static_cast<int64_t>(num_last), "logits rows do not match the batch");
}

at::Tensor CpuForward::Block(const at::Tensor& residual, int64_t layer) {
  // Entering block `layer` is the residual after block layer - 1.
  if (layer > 0) TakeTaps(residual, layer);
  return Steered(running_, layer > 0 ? residual : WithSoftTokens(running_, residual), layer);
}

void CpuForward::TakeTaps(const at::Tensor& residual, int64_t layer) {
  TakeResiduals(residual, layer);
  if (taps_[layer - 1].empty()) return;
  const StageTimer timer(times_, Stage::kTaps);
  const at::Tensor rows = residual.contiguous();
  const DType dtype = DTypeOf(rows.scalar_type());
  const char* const data = static_cast<const char*>(rows.const_data_ptr());
  const int64_t row_bytes = shape_.hidden_size * static_cast<int64_t>(rows.element_size());
  for (const Tap& tap : taps_[layer - 1]) {
    const int64_t row = tap.item->row + tap.item->num_rows() - 1;
    tap.item->sequence->tap.Take(tap.place, data + row * row_bytes, dtype, tap.item->work->ahead);
  }
}

// A distance to the last block's residual needs all of them: they are held for this one forward, of
// the rows of those who ask.
void CpuForward::TakeResiduals(const at::Tensor& residual, int64_t layer) {
  for (StepItem& item : running_) {
    if (!item.last_residuals.empty()) {
      at::from_blob(item.last_residuals.data() + (layer - 1) * shape_.hidden_size,
                    {shape_.hidden_size})
          .copy_(residual[item.row + item.num_rows() - 1]);
    }
    if (layer == shape_.num_layers && item.wants(Signal::kFinalHidden)) {
      const StageTimer timer(times_, Stage::kTaps);
      item.final_hidden = TakeFinalHidden(item, residual, model_);
    }
    if (!item.wants(Signal::kResidualDistance)) continue;
    const StageTimer timer(times_, Stage::kTaps);
    item.residuals.push_back(residual.narrow(0, item.row, item.num_rows()).clone());
    if (layer < shape_.num_layers) continue;
    item.distances = DistancesOf(item.residuals);
    item.residuals.clear();
  }
}

AttentionShape CpuForward::ShapeOfLayer(int64_t layer) const {
  const LayerFacts& facts = model_.manifest().layers[layer];
  return {.num_heads = shape_.num_heads,
          .num_kv_heads = shape_.num_kv_heads,
          .key_width = shape_.key_width,
          .value_width = shape_.value_width,
          .scale = facts.scale,
          .soft_cap = facts.soft_cap,
          .window = facts.window,
          .dtype = ScalarTypeOf(pool_.format().model),
          .stored = pool_.format().stored};
}

at::Tensor CpuForward::Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& normed, int64_t layer) {
  const AttentionShape shape = ShapeOfLayer(layer);
  // Padding rows of deterministic mode stay zero and are attended by nobody.
  at::Tensor rotated = deterministic_ ? at::zeros_like(q, at::MemoryFormat::Contiguous)
                                      : at::empty_like(q, at::MemoryFormat::Contiguous);
  const absl::Time begin = SteadyNow();
  Append(running_, HeadRows(q), HeadRows(k), HeadRows(v), layer, rotated);
  const std::vector<AttentionItem> items = ItemsOf(rotated, layer);
  at::Tensor out = attention_.Run(rotated, layer, items, shape);
  times_.wall[static_cast<int>(Stage::kAttention)] += SteadyNow() - begin;
  TakeSignals(q, rotated, layer, items, shape);
  if (WantsGate(running_)) {
    const StageTimer timer(times_, Stage::kTaps);
    TakeGates(running_, normed, layer, /*together=*/deterministic_);
  }
  return out;
}

// What each running item attends over.
std::vector<AttentionItem> CpuForward::ItemsOf(const at::Tensor& rotated, int64_t layer) {
  std::vector<AttentionItem> items;
  items.reserve(running_.size());
  for (StepItem& item : running_) {
    if (item.turns_keys()) TurnKeys(item, layer);
    FindHidden(item, layer);
    ChooseReads(item, rotated, layer);
    const bool measures = item.wants_attention_rows(layer), far = ReadsTier(item, layer);
    std::vector<float>* const logits = measures ? &item.sequence->LogitsOf(item.work->ahead)
                                       : item.measures_mass ? &mass_logits_
                                                            : nullptr;
    items.push_back(
        {.cache = &item.sequence->cache,
         .row = item.row,
         .num_rows = item.num_rows(),
         .decode = item.work->decode,
         .used = absl::MakeConstSpan(item.used).subspan(layer * shape_.num_kv_heads,
                                                        shape_.num_kv_heads),
         .keys = item.turned_keys,
         .positions = item.lane_positions,
         .reads = item.reads,
         .logits = item.work->decode ? logits : nullptr,
         .log_sum_exp = far || (measures && !item.work->decode) ? &item.log_sum_exp : nullptr,
         .tier = far ? item.sequence->tier.get() : nullptr,
         .far_tokens = item.sequence->request.tier.fetch});
  }
  return items;
}

// Takes what policies asked for of this layer: queries, their moments, attention.
void CpuForward::TakeSignals(const at::Tensor& q, const at::Tensor& rotated, int64_t layer,
                             absl::Span<const AttentionItem> items, const AttentionShape& shape) {
  for (size_t i = 0; i < items.size(); ++i) {
    const StepItem& item = running_[i];
    const bool moments = item.wants(Signal::kQueryMoments);
    if (!item.wants_queries() && !moments && !item.wants_attention_rows(layer) &&
        !item.measures_mass) {
      continue;
    }
    OpenSequence& sequence = *item.sequence;
    const StageTimer taps(times_, Stage::kTaps);
    if (item.wants_queries()) {
      const int64_t row_bytes = shape_.num_heads * shape_.key_width * rotated.element_size();
      item.queries->Take(
          layer, static_cast<const char*>(rotated.const_data_ptr()) + items[i].row * row_bytes,
          items[i].num_rows, item.work->ahead);
    }
    if (moments) {
      sequence.moments.Take(layer, q.narrow(0, items[i].row, items[i].num_rows), item.work->first,
                            item.work->ahead);
    }
    if (item.measures_mass) {
      attention_.NewestRows(rotated, layer, items[i], shape, mass_rows_.layer(layer));
    }
    if (!item.wants_attention_rows(layer)) continue;
    const absl::Span<float> rows = sequence.RowsOf(item.work->ahead).layer(layer);
    if (items[i].decode) {
      attention_.NewestRows(rotated, layer, items[i], shape, rows);
    } else {
      attention_.ColumnSums(rotated, layer, items[i], shape, rows);
    }
  }
}

// Rotates queries into `rotated`, and writes rotated keys and values into the slots the step takes,
// as the pool's format has them.
void CpuForward::Append(absl::Span<const StepItem> items, const HeadRows& q, const HeadRows& k,
                        const HeadRows& v, int64_t layer, at::Tensor& rotated) {
  if (items.empty()) return;
  auto* const out = static_cast<char*>(rotated.mutable_data_ptr());
  const int64_t rows = items.back().row + items.back().num_rows();
  // Items of one row each, too, are several threads' where there are many.
  at::parallel_for(0, rows, kAppendGrain, [&](int64_t begin, int64_t end) {
    RowScratch turned(shape_.key_width * ElementBytes(pool_.format().model));
    auto item = std::upper_bound(items.begin(), items.end(), begin,
                                 [](int64_t row, const StepItem& of) { return row < of.row; }) -
                1;
    for (; item != items.end() && item->row < end; ++item) {
      const int64_t first = std::max(begin - item->row, int64_t{0});
      const int64_t last = std::min(end - item->row, item->num_rows());
      AppendRows(*item, first, last, q, k, v, layer, turned.data(), out);
    }
  });
}

// Rows [first, last) of an item. turned: room for a key.
void CpuForward::AppendRows(const StepItem& item, int64_t first, int64_t last, const HeadRows& q,
                            const HeadRows& k, const HeadRows& v, int64_t layer, char* turned,
                            char* out) {
  const RopeTable& rope = ropes_[model_.manifest().layers[layer].rope];
  const KvFormat& format = pool_.format();
  const int64_t kv_heads = shape_.num_kv_heads, group = shape_.num_heads / kv_heads;
  const int64_t key_bytes = shape_.key_width * ElementBytes(format.model);
  const SequenceCache& cache = item.sequence->cache;
  auto rotate = [&](const char* in, char* to, const float* cos_sin) {
    Rotate(in, to, shape_.key_width, rope.half(), rope.interleaved(), cos_sin, format.model);
  };
  for (int64_t head = 0; head < kv_heads; ++head) {
    const int64_t table = cache.TableOf(layer, head);
    const LaneRows lane = cache.Lane(layer, head);
    for (int64_t i = first; i < last; ++i) {
      const float* const cos_sin = rope.at(item.positions[table] + i);
      const int64_t slot = item.slots[table] + i, row = item.row + i;
      const char* key = k.at(row, head);
      if (!item.turns_keys()) {
        rotate(key, turned, cos_sin);
        key = turned;
      }
      WriteRow(key, lane.keys + slot * pool_.key_bytes(), shape_.key_width, format);
      WriteRow(v.at(row, head), lane.values + slot * pool_.value_bytes(), shape_.value_width,
               format);
      for (int64_t query = head * group; query < (head + 1) * group; ++query) {
        rotate(q.at(row, query), out + (row * shape_.num_heads + query) * key_bytes, cos_sin);
      }
    }
  }
}

// Where the tokens are, if the layer's window hides one from some row: none while there are not
// more tokens than it is wide.
void CpuForward::FindHidden(StepItem& item, int64_t layer) {
  item.lane_positions.clear();
  const std::optional<int64_t> window = model_.manifest().layers[layer].window;
  if (!window.has_value()) return;
  const SequenceCache& cache = item.sequence->cache;
  bool hides = false;
  for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
    hides |= item.positions[cache.TableOf(layer, head)] + item.num_rows() > *window;
  }
  for (int64_t head = 0; hides && head < shape_.num_kv_heads; ++head) {
    const int64_t table = cache.TableOf(layer, head);
    item.lane_positions.push_back(
        {.of_slots = item.PositionsOf(table).data(), .of_first_row = item.positions[table]});
  }
}

// Whether the item's rows attend to what was demoted. What a window hides lies further back.
bool CpuForward::ReadsTier(const StepItem& item, int64_t layer) const {
  const OpenSequence& sequence = *item.sequence;
  const TierOptions& options = sequence.request.tier;
  if (options.doubt > 0 && !item.looks_again) return false;
  return options.fetch > 0 && sequence.tier != nullptr && item.pass == nullptr &&
         !sequence.tier->empty() && !model_.manifest().layers[layer].window.has_value();
}

// Which slots of its lanes the item's query reads, of a request that reads a part: in decode,
// behind the dense layers. A window that hides tokens is a choice already.
void CpuForward::ChooseReads(StepItem& item, const at::Tensor& rotated, int64_t layer) const {
  item.reads.clear();
  const ReadLimit& read = item.sequence->request.read;
  if (read.tokens == 0 || item.work->in_prefill() || layer < read.rule.dense_layers ||
      !item.lane_positions.empty()) {
    return;
  }
  const int64_t kv_heads = shape_.num_kv_heads, group = shape_.num_heads / kv_heads;
  const SequenceCache& cache = item.sequence->cache;
  const char* const q = static_cast<const char*>(rotated.const_data_ptr()) +
                        item.row * shape_.num_heads * shape_.key_width * rotated.element_size();
  item.reads.resize(kv_heads);
  at::parallel_for(0, kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      const int64_t lane = layer * kv_heads + head, slot = item.slots[cache.TableOf(layer, head)];
      item.sequence->pages->Update(lane, cache.Lane(layer, head).keys, slot, item.used[lane]);
      item.sequence->pages->Choose(lane,
                                   q + head * group * shape_.key_width * rotated.element_size(),
                                   group, slot, read.tokens, item.reads[head]);
    }
  });
  ReadSlots& slots = item.sequence->reads;
  bool part = false;
  for (int64_t head = 0; head < kv_heads; ++head) {
    const int64_t used = item.used[layer * kv_heads + head];
    int64_t count = 0;
    for (const SlotRange& range : item.reads[head]) count += range.end - range.begin;
    part |= count > 0;
    slots.read += count > 0 ? count : used;
    slots.cached += used;
  }
  if (!part) item.reads.clear();  // any kernel will do
}

// Rotates a layer's keys at their ranks, in lanes laid out, and of a format, as those of the cache.
void CpuForward::TurnKeys(StepItem& item, int64_t layer) {
  const RopeTable& rope = ropes_[model_.manifest().layers[layer].rope];
  const KvFormat& format = pool_.format();
  const SequenceCache& cache = item.sequence->cache;
  const int64_t key_bytes = pool_.key_bytes();
  std::vector<int64_t> starts;
  int64_t rows = 0;
  for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
    starts.push_back(rows);
    rows += cache.Lane(layer, head).capacity;
  }
  at::Tensor& scratch = item.sequence->turned;
  if (!scratch.defined() || scratch.size(0) < rows) {
    scratch = at::empty({rows, key_bytes}, at::kByte);
  }
  char* const turned = static_cast<char*>(scratch.mutable_data_ptr());
  item.turned_keys.clear();
  for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
    char* const out = turned + starts[head] * key_bytes;
    const char* const in = cache.Lane(layer, head).keys;
    const std::vector<int64_t>& ranks = item.PositionsOf(cache.TableOf(layer, head));
    at::parallel_for(0, std::ssize(ranks), 64, [&](int64_t begin, int64_t end) {
      RowScratch key(shape_.key_width * ElementBytes(format.model));
      for (int64_t slot = begin; slot < end; ++slot) {
        ReadRow(in + slot * key_bytes, key.data(), shape_.key_width, format);
        Rotate(key.data(), key.data(), shape_.key_width, rope.half(), rope.interleaved(),
               rope.at(ranks[slot]), format.model);
        WriteRow(key.data(), out + slot * key_bytes, shape_.key_width, format);
      }
    });
    item.turned_keys.push_back(out);
  }
}

}  // namespace epikv
