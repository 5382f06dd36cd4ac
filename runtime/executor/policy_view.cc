#include "runtime/executor/policy_view.h"

#include <ATen/ATen.h>

#include "runtime/base/scalar_type.h"

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

int64_t PolicyView::prompt_tokens() const {
  return static_cast<int64_t>(sequence_.request.prompt.size());
}

int64_t PolicyView::next_position(int64_t layer, int64_t head) const {
  return sequence_.cache.NextPosition(sequence_.cache.TableOf(layer, head), newest() + 1);
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
  const LaneRows lane = sequence_.cache.Lane(layer, head);
  if (pool_.format().stored == KvDType::kModel) return Rows(pool_.keys(), lane, layer, head);
  return ReadRows(lane.keys, Table(layer, head).used(), manifest_.layers[layer].key_width,
                  pool_.format());
}

at::Tensor PolicyView::values(int64_t layer, int64_t head) const {
  const LaneRows lane = sequence_.cache.Lane(layer, head);
  if (pool_.format().stored == KvDType::kModel) return Rows(pool_.values(), lane, layer, head);
  return ReadRows(lane.values, Table(layer, head).used(), manifest_.layers[layer].value_width,
                  pool_.format());
}

at::Tensor PolicyView::keys_of(absl::Span<const int64_t> slots) const {
  return ByLane(pool_.ReadKeys(RowsOf(slots)));
}

at::Tensor PolicyView::values_of(absl::Span<const int64_t> slots) const {
  return ByLane(pool_.ReadValues(RowsOf(slots)));
}

at::Tensor PolicyView::queries(int64_t layer) const {
  return ReadQueries(&sequence_.queries, layer);
}

at::Tensor PolicyView::lookahead(int64_t layer) const { return ReadQueries(lookahead_, layer); }

at::Tensor PolicyView::ReadQueries(const QueryWindow* queries, int64_t layer) const {
  const int64_t count = queries == nullptr ? 0 : queries->size();
  at::Tensor rows =
      at::empty({count, manifest_.num_heads, manifest_.layers[layer].key_width},
                ScalarTypeOf(manifest_.dtype));
  if (count > 0) queries->Read(layer, static_cast<char*>(rows.mutable_data_ptr()));
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

at::Tensor PolicyView::Rows(const at::Tensor& pool, const LaneRows& lane, int64_t layer,
                            int64_t head) const {
  return pool.narrow(0, lane.first_row, Table(layer, head).used()).cpu();
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
