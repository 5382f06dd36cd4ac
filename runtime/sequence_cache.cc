#include "runtime/sequence_cache.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

namespace epikv {

void SlotTable::Append(int64_t first, int64_t position, int64_t count) {
  const int64_t slot = NextSlot();
  used_ = UsedAfter(count);
  hole_.reset();
  if (static_cast<int64_t>(index_.size()) < used_) {
    index_.resize(used_);
    rope_position_.resize(used_);
    for (auto& column : columns_) column.resize(used_);
  }
  for (int64_t i = 0; i < count; ++i) {
    index_[slot + i] = static_cast<int32_t>(first + i);
    rope_position_[slot + i] = static_cast<int32_t>(position + i);
    for (auto& column : columns_) column[slot + i] = 0;
  }
}

std::vector<SlotTable::Copy> SlotTable::Remove(absl::Span<const int64_t> slots, bool leave_hole) {
  if (slots.empty()) return {};
  if (slots.size() == 1 && leave_hole) {
    hole_ = slots.front();
    return {};
  }
  const int64_t kept = used_ - static_cast<int64_t>(slots.size());
  std::vector<Copy> copies;
  int64_t tail = used_ - 1;
  auto last_victim = slots.rbegin();
  for (int64_t hole : slots) {
    if (hole >= kept) break;
    while (last_victim != slots.rend() && *last_victim == tail) {
      ++last_victim;
      --tail;
    }
    copies.push_back({.from = tail, .to = hole});
    index_[hole] = index_[tail];
    rope_position_[hole] = rope_position_[tail];
    for (auto& column : columns_) column[hole] = column[tail];
    --tail;
  }
  used_ = kept;
  return copies;
}

SequenceCache::SequenceCache(KvPool& pool, SequenceId id, const Request& request,
                             const ModelShape& shape)
    : pool_(pool),
      id_(id),
      request_(request),
      shape_(shape),
      layout_(LayoutOf(shape, pool.dtype() == at::kFloat ? DType::kFloat32 : DType::kBFloat16,
                       request.traits, static_cast<int64_t>(request.tap_layers.size()))),
      capacity_(request.demand.prefill),
      offset_(capacity_.size()),
      tables_(layout_.num_tables, SlotTable(static_cast<int64_t>(request.traits.columns.size()))) {
  std::exclusive_scan(capacity_.begin(), capacity_.end(), offset_.begin(), int64_t{0});
  pool_.Open(id_, offset_.back() + capacity_.back());
}

SequenceCache::~SequenceCache() { pool_.Close(id_); }

int64_t SequenceCache::TableOf(int64_t layer, int64_t head) const {
  return (layer * shape_.num_kv_heads + head) / LanesPerTable();
}

LaneRows SequenceCache::Lane(int64_t layer, int64_t head) const {
  const int64_t lane = layer * shape_.num_kv_heads + head;
  return {.keys = pool_.key(id_, offset_[lane]),
          .values = pool_.value(id_, offset_[lane]),
          .capacity = capacity_[lane]};
}

bool SequenceCache::Uniform(int64_t layer) const {
  const int64_t first = layer * shape_.num_kv_heads;
  const SlotTable& table = tables_[TableOf(layer, 0)];
  for (int64_t head = 1; head < shape_.num_kv_heads; ++head) {
    const SlotTable& other = tables_[TableOf(layer, head)];
    if (capacity_[first + head] != capacity_[first] || other.used() != table.used() ||
        other.hole().has_value() != table.hole().has_value()) {
      return false;
    }
  }
  return true;
}

int64_t SequenceCache::NextPosition(int64_t table, int64_t index) const {
  return request_.positions == PositionMode::kAbsolute ? index : tables_[table].live();
}

void SequenceCache::Append(int64_t first, int64_t count) {
  for (int64_t t = 0; t < num_tables(); ++t) {
    tables_[t].Append(first, NextPosition(t, first), count);
  }
  newest_ = first + count - 1;
  NotePeak();
}

int64_t SequenceCache::Excess(int64_t table) const {
  const int64_t budget = request_.demand.budget[table * LanesPerTable()];
  return std::max<int64_t>(0, tables_[table].live() - budget);
}

bool SequenceCache::OverBudget(int64_t slack) const {
  for (int64_t t = 0; t < num_tables(); ++t) {
    if (Excess(t) > slack) return true;
  }
  return false;
}

absl::StatusOr<std::vector<int64_t>> SequenceCache::SlotsOf(
    int64_t table, const std::vector<int32_t>& victims) const {
  const absl::Span<const int32_t> index = tables_[table].index();
  std::vector<int64_t> slots;
  slots.reserve(victims.size());
  if (victims.size() == 1) {
    const auto at = std::find(index.begin(), index.end(), victims.front());
    if (at != index.end()) slots.push_back(at - index.begin());
  } else {
    const absl::flat_hash_set<int32_t> wanted(victims.begin(), victims.end());
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (wanted.contains(index[slot])) slots.push_back(static_cast<int64_t>(slot));
    }
  }
  if (slots.size() != victims.size()) {
    return absl::InternalError("the policy named a token twice or one that is not cached");
  }
  for (int32_t victim : victims) {
    if (request_.protection.Covers(victim, newest_)) {
      return absl::InternalError(absl::StrCat("the policy named the protected token ", victim));
    }
  }
  if (static_cast<int64_t>(victims.size()) < Excess(table)) {
    return absl::InternalError(absl::StrCat("the policy named ", victims.size(), " victims where ",
                                            Excess(table), " must go"));
  }
  return slots;
}

absl::StatusOr<int64_t> SequenceCache::Evict(const std::vector<std::vector<int32_t>>& victims,
                                             bool leave_hole) {
  if (static_cast<int64_t>(victims.size()) != num_tables()) {
    return absl::InternalError(
        absl::StrCat("the policy answered for ", victims.size(), " lane groups of ", num_tables()));
  }
  std::vector<std::vector<int64_t>> slots;  // all are checked before any is dropped
  for (int64_t t = 0; t < num_tables(); ++t) {
    absl::StatusOr<std::vector<int64_t>> of_table = SlotsOf(t, victims[t]);
    if (!of_table.ok()) return of_table.status();
    slots.push_back(*std::move(of_table));
  }
  int64_t entries = 0;
  for (int64_t t = 0; t < num_tables(); ++t) {
    CopySlots(t, tables_[t].Remove(slots[t], leave_hole));
    entries += static_cast<int64_t>(slots[t].size()) * LanesPerTable();
  }
  return entries;
}

void SequenceCache::CopySlots(int64_t table, absl::Span<const SlotTable::Copy> copies) {
  if (copies.empty()) return;
  const int64_t dk = pool_.key_bytes(), dv = pool_.value_bytes();
  for (int64_t lane = table * LanesPerTable(); lane < (table + 1) * LanesPerTable(); ++lane) {
    char* const keys = pool_.key(id_, offset_[lane]);
    char* const values = pool_.value(id_, offset_[lane]);
    for (const SlotTable::Copy& copy : copies) {
      std::memcpy(keys + copy.to * dk, keys + copy.from * dk, dk);
      std::memcpy(values + copy.to * dv, values + copy.from * dv, dv);
    }
  }
}

void SequenceCache::ShrinkToDecode() {
  const std::vector<int64_t>& wanted = request_.demand.decode;
  if (capacity_ == wanted) return;
  const int64_t dk = pool_.key_bytes(), dv = pool_.value_bytes();
  int64_t offset = 0;
  for (size_t lane = 0; lane < capacity_.size(); ++lane) {
    const int64_t used = tables_[lane / LanesPerTable()].used();
    if (offset != offset_[lane]) {
      std::memmove(pool_.key(id_, offset), pool_.key(id_, offset_[lane]), used * dk);
      std::memmove(pool_.value(id_, offset), pool_.value(id_, offset_[lane]), used * dv);
    }
    offset_[lane] = offset;
    capacity_[lane] = wanted[lane];
    offset += wanted[lane];
  }
  pool_.Shrink(id_, offset);
}

int64_t SequenceCache::entries() const {
  int64_t live = 0;
  for (const SlotTable& table : tables_) live += table.live();
  return live * LanesPerTable();
}

int64_t SequenceCache::bytes() const {
  int64_t slots = 0, longest = 0;
  for (const SlotTable& table : tables_) {
    slots += table.live();
    longest = std::max(longest, table.live());
  }
  return entries() * layout_.row_bytes + slots * layout_.slot_bytes +
         longest * layout_.state_bytes_per_token + layout_.state_bytes;
}

void SequenceCache::NotePeak() {
  peak_entries_ = std::max(peak_entries_, entries());
  peak_bytes_ = std::max(peak_bytes_, bytes());
}

std::vector<int32_t> SequenceCache::KeptIndexes() const {
  std::vector<int32_t> kept;
  for (const SlotTable& table : tables_) {
    const auto index = table.index();
    for (int64_t slot = 0; slot < table.used(); ++slot) {
      if (slot != table.hole()) kept.push_back(index[slot]);
    }
  }
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  return kept;
}

}  // namespace epikv
