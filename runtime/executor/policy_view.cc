#include "runtime/executor/policy_view.h"

#include <ATen/ATen.h>

#include <stdexcept>

#include "policies/rounding.h"
#include "runtime/base/scalar_type.h"
#include "runtime/ranks/ranks.h"

namespace epikv {
namespace {

// W_O of a layer, by query head. [num_heads, value_width, hidden]
at::Tensor OutputByHead(const at::Tensor& output_projection, int64_t num_heads) {
  return output_projection.t().unflatten(0, {num_heads, -1});
}

}  // namespace

std::vector<at::Tensor> OutputGrams(const Model& model) {
  const Manifest& manifest = model.manifest();
  std::vector<at::Tensor> grams;
  for (int64_t layer = 0; layer < manifest.num_layers(); ++layer) {
    const at::Tensor by_head =
        OutputByHead(model.output_projection(layer), manifest.num_heads).to(at::kFloat);
    grams.push_back(at::matmul(by_head, by_head.transpose(1, 2)).cpu());
  }
  return grams;
}

int64_t PolicyView::first_kv_head() const {
  const auto& ranks = model_.ranks();
  return ranks == nullptr ? 0 : ranks->rank() * num_kv_heads();
}

int64_t PolicyView::all_kv_heads() const {
  const auto& ranks = model_.ranks();
  return ranks == nullptr ? num_kv_heads() : ranks->size() * num_kv_heads();
}

void PolicyView::AverageOverRanks(absl::Span<float> mean) const {
  if (model_.ranks() != nullptr) model_.ranks()->Average(mean.data(), std::ssize(mean));
}

int64_t PolicyView::prompt_tokens() const {
  sequence_.asked.prompt_tokens = true;
  return static_cast<int64_t>(sequence_.request.prompt.size());
}

int64_t PolicyView::next_position(int64_t layer, int64_t head) const {
  return sequence_.cache.NextPosition(sequence_.cache.TableOf(layer, head));
}

int64_t PolicyView::excess(int64_t layer, int64_t head) const {
  return sequence_.cache.Excess(sequence_.cache.TableOf(layer, head));
}

absl::Span<const int32_t> PolicyView::index(int64_t layer, int64_t head) const {
  return Table(layer, head).index();
}

absl::Span<float> PolicyView::column(int64_t place, int64_t layer, int64_t head) {
  return Table(layer, head).column(place);
}

at::Tensor PolicyView::keys(int64_t layer, int64_t head) const {
  return KeyRows(layer, head, 0, Table(layer, head).used());
}

at::Tensor PolicyView::scratch_keys(int64_t layer, int64_t head) const {
  return KeyRows(layer, head, Table(layer, head).used(), sequence_.cache.scratch());
}

at::Tensor PolicyView::KeyRows(int64_t layer, int64_t head, int64_t first, int64_t count) const {
  const LaneRows lane = sequence_.cache.Lane(layer, head);
  if (pool_.format().stored == KvDType::kModel) {
    return pool_.keys().narrow(0, lane.first_row + first, count).cpu();
  }
  return ReadRows(lane.keys + first * pool_.key_bytes(), count, manifest_.layers[layer].key_width,
                  pool_.format());
}

at::Tensor PolicyView::values(int64_t layer, int64_t head) const {
  const LaneRows lane = sequence_.cache.Lane(layer, head);
  const int64_t count = Table(layer, head).used();
  if (pool_.format().stored == KvDType::kModel) {
    return pool_.values().narrow(0, lane.first_row, count).cpu();
  }
  return ReadRows(lane.values, count, manifest_.layers[layer].value_width, pool_.format());
}

std::vector<int32_t> PolicyView::ghosts(int64_t layer, int64_t head) const {
  if (sequence_.tier == nullptr) return {};
  return sequence_.tier->tokens(sequence_.cache.TableOf(layer, head));
}

at::Tensor PolicyView::ghost_keys(int64_t layer, int64_t head,
                                  absl::Span<const int32_t> ghosts) const {
  const int64_t width = manifest_.layers[layer].key_width;
  if (sequence_.tier == nullptr) return at::zeros({std::ssize(ghosts), width});
  std::vector<char> rows = sequence_.tier->Keys(layer * num_kv_heads() + head, ghosts);
  return ReadRows(rows.data(), std::ssize(ghosts), width, pool_.format()).clone();
}

at::Tensor PolicyView::keys_of(absl::Span<const int64_t> slots) const {
  return ByLane(pool_.ReadKeys(RowsOf(slots)));
}

at::Tensor PolicyView::values_of(absl::Span<const int64_t> slots) const {
  return ByLane(pool_.ReadValues(RowsOf(slots)));
}

void PolicyView::RoundRows(int64_t layer, int64_t head, absl::Span<const int64_t> slots,
                           int64_t bits) {
  const int64_t first = sequence_.cache.Lane(layer, head).first_row;
  const absl::Span<const int32_t> tokens = index(layer, head);
  bool valid = sequence_.request.traits.rounds_rows;
  std::vector<int64_t> rows;
  rows.reserve(slots.size());
  for (const int64_t slot : slots) {
    valid &= slot >= 0 && slot < std::ssize(tokens) && tokens[slot] >= prompt_tokens();
    rows.push_back(first + slot);
  }
  if (!valid) throw std::invalid_argument("the policy rounds rows that are not its to round");
  pool_.Replace(rows, RoundedKeys(pool_.ReadKeys(rows), bits),
                RoundedValues(pool_.ReadValues(rows), bits));
  if (sequence_.pages.has_value()) sequence_.pages->Forget();
}

at::Tensor PolicyView::queries(int64_t layer) const {
  return ReadQueries(in_segment() ? pass_->queries : sequence_.queries, layer);
}

at::Tensor PolicyView::lookahead(int64_t layer) const {
  if (pass_ != nullptr && !in_segment()) return ReadQueries(pass_->queries, layer);
  return at::empty({0, manifest_.num_heads, manifest_.layers[layer].key_width},
                   ScalarTypeOf(manifest_.dtype));
}

at::Tensor PolicyView::ReadQueries(const QueryWindow& queries, int64_t layer) const {
  at::Tensor rows =
      at::empty({queries.size(), manifest_.num_heads, manifest_.layers[layer].key_width},
                ScalarTypeOf(manifest_.dtype));
  queries.Read(layer, static_cast<char*>(rows.mutable_data_ptr()));
  return rows;
}

AttentionFacts PolicyView::attention(int64_t layer) const {
  const LayerFacts& facts = manifest_.layers[layer];
  return {.scale = facts.scale, .soft_cap = facts.soft_cap, .window = facts.window};
}

CacheView::QueryMoments PolicyView::query_moments(int64_t layer) const {
  const QueryMoments moments = sequence_.moments.Read(layer);
  return {
      .count = moments.count, .mean = moments.mean.cpu(), .covariance = moments.covariance.cpu()};
}

at::Tensor PolicyView::output_projection(int64_t layer) const {
  return OutputByHead(model_.output_projection(layer).cpu(), manifest_.num_heads);
}

std::vector<int64_t> PolicyView::RowsOf(absl::Span<const int64_t> slots) const {
  std::vector<int64_t> rows;
  rows.reserve(num_layers() * num_kv_heads() * slots.size());
  for (int64_t layer = 0; layer < num_layers(); ++layer) {
    for (int64_t head = 0; head < num_kv_heads(); ++head) {
      const int64_t first = sequence_.cache.Lane(layer, head).first_row;
      for (const int64_t slot : slots) rows.push_back(first + slot);
    }
  }
  return rows;
}

at::Tensor PolicyView::ByLane(const at::Tensor& rows) const {
  return rows.view({num_layers(), num_kv_heads(), -1, rows.size(1)});
}

SlotTable& PolicyView::Table(int64_t layer, int64_t head) const {
  return sequence_.cache.table(sequence_.cache.TableOf(layer, head));
}

}  // namespace epikv
