#include "runtime/forward/device_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace epikv {
namespace {

using Section = DevicePlan::Section;

class Planner {
 public:
  // layout: of a padded plan; null: of any other.
  Planner(absl::Span<const DeviceItem> items, const ModelShape& shape,
          const PaddedLayout* layout = nullptr)
      : items_(items), shape_(shape), heads_(shape.num_kv_heads), layout_(layout) {}

  DevicePlan Plan() {
    PlanRows();
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) PlanAppends(layer);
    for (const bool decode : {true, false}) PlanCall(decode);
    plan_.read_by_forward = std::ssize(plan_.numbers);
    PlanTaps();
    return std::move(plan_);
  }

 private:
  Section Add(absl::Span<const int64_t> numbers) {
    const Section section{.begin = std::ssize(plan_.numbers),
                          .size = static_cast<int64_t>(numbers.size())};
    plan_.numbers.insert(plan_.numbers.end(), numbers.begin(), numbers.end());
    return section;
  }

  int64_t TableOf(const DeviceItem& item, int64_t lane) const {
    const auto tables = static_cast<int64_t>(item.slots.size());
    return lane / (shape_.num_layers * heads_ / tables);
  }

  void PlanRows() {
    std::vector<int64_t> tokens, positions, last;
    for (const DeviceItem& item : items_) {
      for (int64_t i = 0; i < item.num_rows(); ++i) {
        tokens.push_back(item.tokens[i]);
        positions.push_back(item.positions.front() + i);
      }
      for (int64_t i = item.num_logits; i > 0; --i) last.push_back(item.row + item.num_rows() - i);
    }
    num_rows_ = std::ssize(tokens);
    plan_.tokens = Add(tokens);
    plan_.positions = Add(positions);
    plan_.last = Add(last);
  }

  void PlanAppends(int64_t layer) {
    std::vector<int64_t> written, positions;
    written.reserve(num_rows_ * heads_);
    positions.reserve(num_rows_ * heads_);
    for (const DeviceItem& item : items_) {
      for (int64_t i = 0; i < item.num_rows(); ++i) {
        for (int64_t lane = layer * heads_; lane < (layer + 1) * heads_; ++lane) {
          const int64_t table = TableOf(item, lane);
          written.push_back(item.lanes[lane] + item.slots[table] + i);
          positions.push_back(item.positions[table] + i);
        }
      }
    }
    plan_.written.push_back(Add(written));
    const bool alike =
        layer > 0 && (layout_ != nullptr ? layout_->one_position : positions == positions_);
    plan_.rope_positions.push_back(alike ? plan_.rope_positions.back() : Add(positions));
    positions_ = std::move(positions);
  }

  void PlanCall(bool decode) {
    DevicePlan::Call call{.causal = !decode};
    std::vector<int64_t> rows, starts = {0};
    for (const DeviceItem& item : items_) {
      if (item.decode != decode) continue;
      call.max_queries = std::max(call.max_queries, item.num_rows());
      for (int64_t head = 0; head < heads_; ++head) {
        for (int64_t i = 0; i < item.num_rows(); ++i)
          rows.push_back((item.row + i) * heads_ + head);
        starts.push_back(std::ssize(rows));
      }
    }
    if (rows.empty()) return;
    std::vector<int64_t> all(num_rows_ * heads_);
    std::iota(all.begin(), all.end(), int64_t{0});
    call.in_order = rows == all;
    call.query_rows = Add(rows);
    call.query_starts = Add(starts);
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      std::vector<int64_t> first_rows, lengths;
      for (const DeviceItem& item : items_) {
        if (item.decode != decode) continue;
        for (int64_t lane = layer * heads_; lane < (layer + 1) * heads_; ++lane) {
          first_rows.push_back(item.lanes[lane]);
          lengths.push_back(item.used[lane]);
        }
      }
      call.max_length.push_back(layout_ != nullptr
                                    ? layout_->max_length
                                    : *std::max_element(lengths.begin(), lengths.end()));
      first_rows.push_back(first_rows.back() + lengths.back());
      call.starts.push_back(Add(first_rows));
      call.lengths.push_back(Add(lengths));
    }
    plan_.calls.push_back(std::move(call));
  }

  void PlanTaps() {
    std::vector<int64_t> first_of_item = {0};  // in the order that is wanted
    for (const DeviceItem& item : items_) {
      first_of_item.push_back(first_of_item.back() + static_cast<int64_t>(item.taps.size()));
    }
    std::vector<int64_t> order(first_of_item.back());
    int64_t taken = 0;
    for (int64_t block = 0; block < shape_.num_layers; ++block) {
      std::vector<int64_t> rows;
      for (size_t i = 0; i < items_.size(); ++i) {
        const absl::Span<const int64_t> taps = items_[i].taps;
        const auto at = std::lower_bound(taps.begin(), taps.end(), block);
        if (at == taps.end() || *at != block) continue;
        rows.push_back(items_[i].row + items_[i].num_rows() - 1);
        order[first_of_item[i] + (at - taps.begin())] = taken++;
      }
      plan_.taps.push_back(Add(rows));
    }
    plan_.tap_order = Add(order);
  }

  const absl::Span<const DeviceItem> items_;
  const ModelShape& shape_;
  const int64_t heads_;
  const PaddedLayout* const layout_;
  int64_t num_rows_ = 0;
  std::vector<int64_t> positions_;  // of the layer before
  DevicePlan plan_;
};

// Whether each of them gives its token one position.
bool OnePosition(absl::Span<const DeviceItem> items) {
  return std::all_of(items.begin(), items.end(), [](const DeviceItem& item) {
    return std::all_of(item.positions.begin(), item.positions.end(),
                       [&](int64_t position) { return position == item.positions.front(); });
  });
}

}  // namespace

DevicePlan PlanPadded(absl::Span<const DeviceItem> items, int64_t spare, const ModelShape& shape,
                      PaddedLayout& layout) {
  layout.one_position = OnePosition(items);
  const std::vector<int32_t> token = {0};
  const std::vector<int64_t> zero = {0}, lanes(shape.num_layers * shape.num_kv_heads, spare),
                             used(lanes.size(), 1);
  std::vector<DeviceItem> padded(items.begin(), items.end());
  for (int64_t row = std::ssize(items); row < layout.rows; ++row) {
    padded.push_back({.row = row,
                      .decode = true,
                      .tokens = token,
                      .lanes = lanes,
                      .slots = zero,
                      .positions = zero,
                      .used = used,
                      .num_logits = 1});
  }
  return Planner(padded, shape, &layout).Plan();
}

DevicePlan PlanDevice(absl::Span<const DeviceItem> items, const ModelShape& shape) {
  return Planner(items, shape).Plan();
}

}  // namespace epikv
