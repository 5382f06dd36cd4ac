#include "runtime/kv/sequence_cache.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "policies/rounding.h"

namespace epikv {
namespace {

// Where lanes of these capacities begin, one after another.
std::vector<int64_t> OffsetsOf(const std::vector<int64_t>& capacity) {
  std::vector<int64_t> offset(capacity.size());
  std::exclusive_scan(capacity.begin(), capacity.end(), offset.begin(), int64_t{0});
  return offset;
}

}  // namespace

void SlotTable::Append(int64_t first, int64_t position, int64_t count) {
  const int64_t slot = NextSlot(), used = UsedAfter(count);
  if (static_cast<int64_t>(index_.size()) < used) {
    for (auto& column : columns_) column.resize(used);
    rope_position_.resize(used);
    index_.resize(used);
  }
  used_ = used;
  hole_.reset();
  for (int64_t i = 0; i < count; ++i) {
    index_[slot + i] = static_cast<int32_t>(first + i);
    rope_position_[slot + i] = static_cast<int32_t>(position + i);
    for (auto& column : columns_) column[slot + i] = 0;
  }
}

void SlotTable::Adopt(absl::Span<const int32_t> index, absl::Span<const int32_t> position) {
  const int64_t slot = NextSlot(), count = std::ssize(index);
  Append(/*first=*/0, /*position=*/0, count);
  std::copy(index.begin(), index.end(), index_.begin() + slot);
  std::copy(position.begin(), position.end(), rope_position_.begin() + slot);
}

void SlotTable::Insert(int32_t index, int32_t position, absl::Span<const float> columns) {
  const int64_t slot = NextSlot();
  Append(index, position, 1);
  for (int64_t place = 0; place < num_columns(); ++place) columns_[place][slot] = columns[place];
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

SlotTable SlotTable::Without(const SlotTable& from, absl::Span<const int64_t> left_out) {
  SlotTable table(0);
  auto next = left_out.begin();
  for (int64_t slot = 0; slot < from.used_; ++slot) {
    if (next != left_out.end() && *next == slot) {
      ++next;
      continue;
    }
    table.index_.push_back(from.index_[slot]);
    table.rope_position_.push_back(from.rope_position_[slot]);
  }
  table.used_ = std::ssize(table.index_);
  return table;
}

SequenceCache::SequenceCache(KvPool& pool, SequenceId id, const Request& request,
                             const ModelShape& shape)
    : pool_(pool),
      id_(id),
      request_(request),
      protection_(request.protection),
      shape_(shape),
      layout_(LayoutOf(shape, pool.format(), request.traits,
                       static_cast<int64_t>(request.tap_layers.size()), request.positions,
                       request.read, request.guess_tokens)),
      capacity_(request.demand.prefill),
      offset_(OffsetsOf(capacity_)),
      tables_(layout_.num_tables, SlotTable(static_cast<int64_t>(request.traits.columns.size()))),
      rows_(pool, id, offset_.back() + capacity_.back()) {}

SequenceCache::SequenceCache(SequenceId id, const Request& request, const SequenceCache& from,
                             std::vector<int64_t> capacity)
    : pool_(from.pool_),
      id_(id),
      request_(request),
      protection_(request.protection),
      shape_(from.shape_),
      layout_(LayoutOf(shape_, pool_.format(), request.traits,
                       static_cast<int64_t>(request.tap_layers.size()), request.positions,
                       request.read, request.guess_tokens)),
      capacity_(std::move(capacity)),
      offset_(OffsetsOf(capacity_)),
      tables_(from.tables_),
      rows_(pool_, id, offset_.back() + capacity_.back()),  // may move the rows of `from`
      newest_(from.newest_),
      peak_entries_(from.peak_entries_),
      peak_bytes_(from.peak_bytes_) {
  if (SharesBudgets()) {
    capacity_ = ShareOut(std::reduce(capacity_.begin(), capacity_.end()));
    offset_ = OffsetsOf(capacity_);
  }
  std::vector<RowMove> copies;
  for (size_t lane = 0; lane < offset_.size(); ++lane) {
    copies.push_back({.from = pool_.first_row(from.id_) + from.offset_[lane],
                      .to = pool_.first_row(id_) + offset_[lane],
                      .count = tables_[lane / LanesPerTable()].used()});
  }
  pool_.Copy(copies);
  NotePeak();
}

SequenceCache::SequenceCache(SequenceId id, const Request& request, const SequenceCache& from,
                             const Slots& left_out)
    : pool_(from.pool_),
      id_(id),
      request_(request),
      protection_(request.protection),
      shape_(from.shape_),
      layout_(LayoutOf(shape_, pool_.format(), request.traits, /*num_tap_layers=*/0,
                       request.positions)),
      capacity_(request.demand.prefill),
      offset_(OffsetsOf(capacity_)),
      rows_(pool_, id, offset_.back() + capacity_.back()),  // may move the rows of `from`
      newest_(from.newest_) {
  std::vector<RowMove> copies;
  for (size_t lane = 0; lane < offset_.size(); ++lane) {
    const int64_t first = pool_.first_row(from.id_) + from.offset_[lane];
    int64_t to = pool_.first_row(id_) + offset_[lane], begin = 0;
    auto copy_until = [&](int64_t end) {
      if (end > begin) copies.push_back({.from = first + begin, .to = to, .count = end - begin});
      to += end - begin;
      begin = end + 1;
    };
    for (const int64_t slot : left_out[lane]) copy_until(slot);
    copy_until(from.tables_[lane].used());
    tables_.push_back(SlotTable::Without(from.tables_[lane], left_out[lane]));
  }
  pool_.Copy(copies);
  NotePeak();
}

std::vector<int64_t> SequenceCache::UsedRows() const {
  std::vector<int64_t> used;
  for (size_t lane = 0; lane < capacity_.size(); ++lane) {
    used.push_back(tables_[lane / LanesPerTable()].used());
  }
  return used;
}

int64_t SequenceCache::TableOf(int64_t layer, int64_t head) const {
  return (layer * shape_.num_kv_heads + head) / LanesPerTable();
}

LaneRows SequenceCache::Lane(int64_t layer, int64_t head) const {
  const int64_t lane = layer * shape_.num_kv_heads + head;
  const int64_t row = pool_.first_row(id_) + offset_[lane];
  return {.first_row = row,
          .keys = pool_.key(row),
          .values = pool_.value(row),
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

int64_t SequenceCache::NextPosition(int64_t table) const {
  if (request_.positions == PositionMode::kAbsolute) return next();
  return tables_[table].live() + scratch_;
}

std::vector<int64_t> SequenceCache::PositionsAfter(int64_t table, int64_t count) const {
  if (request_.positions == PositionMode::kCache) return RanksAfter(table, count);
  const SlotTable& slots = tables_[table];
  std::vector<int64_t> positions(slots.rope_position().begin(), slots.rope_position().end());
  positions.resize(UsedAfter(table, count));
  const int64_t first = NextPosition(table) - scratch_;
  for (int64_t i = 0; i < scratch_ + count; ++i) positions[slots.NextSlot(i)] = first + i;
  return positions;
}

std::vector<int64_t> SequenceCache::RanksAfter(int64_t table, int64_t count) const {
  const SlotTable& slots = tables_[table];
  std::vector<int64_t> by_birth(slots.used());
  std::iota(by_birth.begin(), by_birth.end(), int64_t{0});
  if (slots.hole().has_value()) by_birth.erase(by_birth.begin() + *slots.hole());
  std::sort(by_birth.begin(), by_birth.end(),
            [index = slots.index()](int64_t a, int64_t b) { return index[a] < index[b]; });
  std::vector<int64_t> ranks(slots.UsedAfter(count));
  for (int64_t rank = 0; rank < std::ssize(by_birth); ++rank) ranks[by_birth[rank]] = rank;
  for (int64_t i = 0; i < count; ++i) ranks[slots.NextSlot(i)] = slots.live() + i;
  return ranks;
}

void SequenceCache::Append(int64_t first, int64_t count) {
  for (int64_t t = 0; t < num_tables(); ++t) {
    tables_[t].Append(first, NextPosition(t), count);
  }
  newest_ = first + count - 1;
  NotePeak();
}

void SequenceCache::Adopt(int64_t count, const std::vector<Packet::Table>& tables) {
  const auto first = static_cast<int32_t>(next());
  for (int64_t t = 0; t < num_tables(); ++t) {
    const Packet::Table& from = tables[t];
    std::vector<int32_t> index = from.index;
    for (int32_t& token : index) token += first;
    tables_[t].Adopt(index, from.position);
  }
  newest_ += count;
  NotePeak();
}

void SequenceCache::Insert(int64_t table, int32_t index, int32_t position,
                           absl::Span<const float> columns) {
  tables_[table].Insert(index, position, columns);
  NotePeak();
}

int64_t SequenceCache::TablesPerPool() const {
  switch (request_.traits.pool) {
    case Pool::kLane:
      return 1;
    case Pool::kLayer:
      return num_tables() / shape_.num_layers;
    case Pool::kModel:
      return num_tables();
  }
  return 1;
}

int64_t SequenceCache::Excess(int64_t table) const { return std::max<int64_t>(0, Surplus(table)); }

int64_t SequenceCache::Surplus(int64_t table) const {
  const int64_t together = TablesPerPool(), first = table / together * together;
  int64_t excess = 0;
  for (int64_t t = first; t < first + together; ++t) {
    excess += tables_[t].live() - request_.demand.budget[t * LanesPerTable()];
  }
  return excess;
}

bool SequenceCache::OverBudget(int64_t slack, int64_t coming) const {
  const int64_t together = TablesPerPool();
  for (int64_t t = 0; t < num_tables(); t += together) {
    if (Surplus(t) + coming * together > slack * together) return true;
  }
  return false;
}

absl::StatusOr<std::vector<int64_t>> SequenceCache::SlotsOf(
    int64_t table, const std::vector<int32_t>& victims) const {
  const absl::Span<const int32_t> index = tables_[table].index();
  std::vector<int64_t> slots;
  if (victims.empty()) return slots;
  slots.reserve(victims.size());
  if (victims.size() == 1) {
    const auto at = std::find(index.begin(), index.end(), victims.front());
    if (at != index.end()) slots.push_back(at - index.begin());
  } else {
    std::vector<bool> wanted(newest_ + 1);  // by index
    for (int32_t victim : victims) {
      if (victim >= 0 && victim <= newest_) wanted[victim] = true;
    }
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (wanted[index[slot]]) slots.push_back(static_cast<int64_t>(slot));
    }
  }
  if (slots.size() != victims.size()) {
    return absl::InternalError("the policy named a token twice, or a token that is not cached");
  }
  for (int32_t victim : victims) {
    if (protection_.Covers(victim, newest_)) {
      return absl::InternalError(absl::StrCat("the policy named the protected token ", victim));
    }
  }
  return slots;
}

absl::StatusOr<SequenceCache::Slots> SequenceCache::SlotsOf(
    const std::vector<std::vector<int32_t>>& victims) const {
  if (static_cast<int64_t>(victims.size()) != num_tables()) {
    return absl::InternalError(absl::StrCat("the policy answered for ", victims.size(),
                                            " lane groups, there are ", num_tables()));
  }
  Slots slots;
  for (int64_t t = 0; t < num_tables(); ++t) {
    absl::StatusOr<std::vector<int64_t>> of_table = SlotsOf(t, victims[t]);
    if (!of_table.ok()) return of_table.status();
    slots.push_back(*std::move(of_table));
  }
  const int64_t together = TablesPerPool();
  for (int64_t first = 0; first < num_tables(); first += together) {
    int64_t named = 0;
    for (int64_t t = first; t < first + together; ++t) named += std::ssize(slots[t]);
    if (named < Excess(first)) {
      return absl::InternalError(absl::StrCat("the policy named ", named, " tokens to evict, but ",
                                              Excess(first), " must go"));
    }
  }
  return slots;
}

int64_t SequenceCache::Evict(const Slots& slots, bool leave_hole) {
  // A hole is for the next token; lanes that share a budget are laid out anew instead.
  leave_hole = leave_hole && !SharesBudgets();
  int64_t entries = 0;
  std::vector<RowMove> moves;
  for (int64_t t = 0; t < num_tables(); ++t) {
    AddMoves(t, tables_[t].Remove(slots[t], leave_hole), moves);
    entries += static_cast<int64_t>(slots[t].size()) * LanesPerTable();
  }
  pool_.Copy(moves);
  ShareRoom();
  return entries;
}

std::vector<int64_t> SequenceCache::ShareOut(int64_t rows) const {
  std::vector<int64_t> capacity(capacity_.size());
  for (size_t lane = 0; lane < capacity.size(); ++lane) {
    capacity[lane] = tables_[lane / LanesPerTable()].used();
    rows -= capacity[lane];
  }
  if (rows < 0) throw std::logic_error("lanes hold more rows than they have room for together");
  for (int64_t& c : capacity) c += rows / std::ssize(capacity);
  // What does not share out evenly is the next round's: lost each time, it would be lanes' room.
  capacity.back() += rows % std::ssize(capacity);
  return capacity;
}

void SequenceCache::LayOut(const std::vector<int64_t>& capacity) {
  std::vector<int64_t> offset = OffsetsOf(capacity);
  const int64_t first = pool_.first_row(id_);
  std::vector<RowMove> moves;
  auto move = [&](size_t lane) {
    moves.push_back({.from = first + offset_[lane],
                     .to = first + offset[lane],
                     .count = tables_[lane / LanesPerTable()].used()});
  };
  // Lanes keep their order: those that move down go first, from the lowest, and then those that
  // move up, from the highest; so none is overwritten before it has moved.
  for (size_t lane = 0; lane < offset.size(); ++lane) {
    if (offset[lane] < offset_[lane]) move(lane);
  }
  for (size_t lane = offset.size(); lane-- > 0;) {
    if (offset[lane] > offset_[lane]) move(lane);
  }
  pool_.Copy(moves);
  offset_ = std::move(offset);
  capacity_ = capacity;
}

void SequenceCache::AddMoves(int64_t table, absl::Span<const SlotTable::Copy> copies,
                             std::vector<RowMove>& moves) const {
  for (int64_t lane = table * LanesPerTable(); lane < (table + 1) * LanesPerTable(); ++lane) {
    const int64_t first = pool_.first_row(id_) + offset_[lane];
    for (const SlotTable::Copy& copy : copies) {
      moves.push_back({.from = first + copy.from, .to = first + copy.to, .count = 1});
    }
  }
}

void SequenceCache::ShareRoom() {
  if (SharesBudgets()) LayOut(ShareOut(std::reduce(capacity_.begin(), capacity_.end())));
}

void SequenceCache::ShrinkToDecode() {
  const std::vector<int64_t>& wanted = request_.demand.decode;
  const int64_t rows = std::reduce(wanted.begin(), wanted.end());
  if (capacity_ != wanted) LayOut(SharesBudgets() ? ShareOut(rows) : wanted);
  pool_.Shrink(id_, rows);
}

bool SequenceCache::Untouched() const {
  return std::all_of(tables_.begin(), tables_.end(),
                     [this](const SlotTable& table) { return table.live() == newest_ + 1; });
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
  return entries() * (layout_.row_bytes + layout_.bound_bytes) + slots * layout_.slot_bytes +
         longest * layout_.state_bytes_per_token + layout_.state_bytes;
}

int64_t SequenceCache::PackedBytes() const {
  struct Group {
    int64_t rows = 0, bits = 0;
  };
  const auto prompt = static_cast<int64_t>(request_.prompt.size());
  int64_t whole = 0;  // rows that are as they were cached
  double packed = 0;
  for (const SlotTable& table : tables_) {
    const absl::Span<const float> bits = table.column(0);
    std::map<int64_t, Group> groups;
    for (int64_t slot = 0; slot < table.used(); ++slot) {
      if (slot == table.hole()) continue;
      if (bits[slot] == 0) {
        ++whole;
        continue;
      }
      Group& group = groups[(table.index()[slot] - prompt) / kRoundingGroup];
      ++group.rows;
      group.bits = static_cast<int64_t>(bits[slot]);
    }
    for (const auto& [place, group] : groups) {
      const double bytes =
          epikv::PackedBytes(group.rows, shape_.key_width, shape_.value_width, group.bits);
      packed += std::min(bytes, static_cast<double>(group.rows * layout_.row_bytes));
    }
  }
  if (packed == 0) return 0;
  const double bytes = packed + static_cast<double>(whole * layout_.row_bytes);
  return std::llround(std::ceil(bytes * static_cast<double>(LanesPerTable())));
}

void SequenceCache::ForgetPeak() {
  peak_entries_ = peak_bytes_ = 0;
  NotePeak();
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
