#include "runtime/kv/sequence_tier.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/time/time.h"
#include "runtime/base/steady_time.h"
#include "runtime/kernels/page_bounds.h"
#include "runtime/kv/page_index.h"

namespace epikv {
namespace {

int64_t PagesOf(int64_t tokens) { return (tokens + kTierPage - 1) / kTierPage; }

}  // namespace

SequenceTier::SequenceTier(const KvLayout& layout, const ModelShape& shape,
                           const TierFormat& format, int64_t tokens_per_table, bool fetches,
                           TierOpener open)
    : layout_(layout),
      shape_(shape),
      format_(format),
      tokens_(tokens_per_table),
      fetches_(fetches),
      key_bytes_(format.pool.RowBytes(shape.key_width)),
      value_bytes_(format.pool.RowBytes(shape.value_width)),
      lanes_per_table_(layout.num_lanes / layout.num_tables),
      bytes_(TierBytes(layout, shape, format, tokens_per_table)),
      open_(std::move(open)),
      tables_(layout.num_tables),
      bounds_(layout.num_lanes) {
  auto store = open_(OffsetOf(Rows::kKeys, layout.num_lanes, 0));
  if (Check(store.status())) store_ = *std::move(store);
}

std::unique_ptr<SequenceTier> SequenceTier::Clone() const {
  auto copy = std::make_unique<SequenceTier>(layout_, shape_, format_, tokens_, fetches_, open_);
  std::vector<char> rows;
  for (int64_t lane = 0; lane < layout_.num_lanes && !failed_ && !copy->failed_; ++lane) {
    const int64_t filled = std::ssize(tables_[lane / lanes_per_table_].places);
    for (const Rows kind : {Rows::kKeys, Rows::kValues}) {
      const int64_t offset = OffsetOf(kind, lane, 0);
      const int64_t bytes = filled * format_.RowBytes(WidthOf(kind));
      rows.resize(bytes);
      if (!Check(store_->Read(offset, rows.data(), bytes)) ||
          !copy->Check(copy->store_->Write(offset, rows.data(), bytes))) {
        break;
      }
    }
  }
  if (failed_) copy->failed_ = true;
  if (copy->failed_) return copy;
  copy->tables_ = tables_;
  copy->bounds_ = bounds_;
  copy->next_order_ = next_order_;
  copy->held_ = held_;
  return copy;
}

int64_t SequenceTier::OffsetOf(Rows kind, int64_t lane, int64_t place) const {
  const int64_t key = format_.RowBytes(shape_.key_width);
  const int64_t value = format_.RowBytes(shape_.value_width);
  const int64_t lane_begins = lane * tokens_ * (key + value);
  return kind == Rows::kKeys ? lane_begins + place * key
                             : lane_begins + tokens_ * key + place * value;
}

bool SequenceTier::Write(Rows kind, int64_t lane, int64_t place, const char* row) {
  const int64_t width = WidthOf(kind), bytes = format_.RowBytes(width);
  const int64_t offset = OffsetOf(kind, lane, place);
  if (format_.same()) return Check(store_->Write(offset, row, bytes));
  thread_local std::vector<char> packed;
  packed.resize(bytes);
  PackRow(row, packed.data(), width, format_);
  return Check(store_->Write(offset, packed.data(), bytes));
}

bool SequenceTier::Read(Rows kind, int64_t lane, int64_t place, int64_t count, char* rows) const {
  const int64_t width = WidthOf(kind), bytes = format_.RowBytes(width);
  const int64_t offset = OffsetOf(kind, lane, place);
  if (format_.same()) return Check(store_->Read(offset, rows, count * bytes));
  thread_local std::vector<char> packed;
  packed.resize(count * bytes);
  if (!Check(store_->Read(offset, packed.data(), count * bytes))) return false;
  const int64_t row_bytes = format_.pool.RowBytes(width);
  for (int64_t i = 0; i < count; ++i) {
    UnpackRow(packed.data() + i * bytes, rows + i * row_bytes, width, format_);
  }
  return true;
}

bool SequenceTier::Check(const absl::Status& status) const {
  if (!status.ok()) failed_ = true;
  return status.ok();
}

bool SequenceTier::Usable() {
  if (!failed_) return true;
  for (Table& table : tables_) table = {};
  held_ = 0;
  return false;
}

// A free place, or that of the token that went first.
int64_t SequenceTier::PlaceFor(Table& table) {
  if (!table.free.empty()) {
    const int64_t place = table.free.back();
    table.free.pop_back();
    return place;
  }
  if (std::ssize(table.places) < tokens_) {
    table.places.emplace_back();
    return std::ssize(table.places) - 1;
  }
  while (true) {
    const std::pair<int64_t, int64_t> first = table.queue.front();
    table.queue.pop_front();
    if (!IsHeld(table, first)) continue;
    const int64_t place = first.first;
    table.at.erase(table.places[place].index);
    usage_.forgotten += lanes_per_table_;
    --held_;
    return place;
  }
}

char* SequenceTier::BoundsOf(int64_t lane, int64_t page) {
  return bounds_[lane].data() + page * PageBoundsBytes(shape_.key_width, format_.pool.model);
}

// Makes the bounds of the pages that have these places, of all lanes of a table, by the rows that
// are held.
void SequenceTier::BoundPages(int64_t table, std::vector<int64_t> places) {
  if (!fetches_) return;
  std::vector<int64_t>& pages = places;
  for (int64_t& place : pages) place /= kTierPage;
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  const Table& own = tables_[table];
  const int64_t filled = std::ssize(own.places);
  std::vector<char> rows(kTierPage * key_bytes_);
  for (int64_t lane = FirstLane(table); lane < FirstLane(table + 1); ++lane) {
    bounds_[lane].resize(PagesOf(filled) * PageBoundsBytes(shape_.key_width, format_.pool.model));
    for (const int64_t page : pages) {
      const int64_t first = page * kTierPage, count = std::min(kTierPage, filled - first);
      if (!Read(Rows::kKeys, lane, first, count, rows.data())) return;
      bool fresh = true;
      for (int64_t i = 0; i < count; ++i) {
        if (own.places[first + i].index < 0) continue;
        BoundRows(rows.data() + i * key_bytes_, 1, shape_.key_width, format_.pool, fresh,
                  BoundsOf(lane, page));
        fresh = false;
      }
    }
  }
}

bool SequenceTier::IsHeld(const Table& table, const std::pair<int64_t, int64_t>& entry) {
  const Token& token = table.places[entry.first];
  return token.index >= 0 && token.order == entry.second;
}

void SequenceTier::Demote(const SequenceCache& cache, int64_t table,
                          absl::Span<const int64_t> slots) {
  if (!Usable()) return;
  const absl::Time begin = SteadyNow();
  const auto timed = absl::MakeCleanup([&] { usage_.time += SteadyNow() - begin; });
  Table& own = tables_[table];
  const SlotTable& from = cache.table(table);
  std::vector<int64_t> order(slots.begin(), slots.end());
  std::sort(order.begin(), order.end(),
            [index = from.index()](int64_t a, int64_t b) { return index[a] < index[b]; });
  std::vector<int64_t> places;
  for (const int64_t slot : order) {
    const int64_t place = PlaceFor(own);
    places.push_back(place);
    for (int64_t lane = FirstLane(table); lane < FirstLane(table + 1); ++lane) {
      const LaneRows rows = cache.Lane(lane / shape_.num_kv_heads, lane % shape_.num_kv_heads);
      if (!Write(Rows::kKeys, lane, place, rows.keys + slot * key_bytes_) ||
          !Write(Rows::kValues, lane, place, rows.values + slot * value_bytes_)) {
        Usable();
        return;
      }
    }
    Token& token = own.places[place];
    token = {.index = from.index()[slot],
             .rope_position = from.rope_position()[slot],
             .order = next_order_++};
    for (int64_t column = 0; column < from.num_columns(); ++column) {
      token.columns.push_back(from.column(column)[slot]);
    }
    own.at[token.index] = place;
    own.queue.emplace_back(place, token.order);
    usage_.demoted += lanes_per_table_;
    ++held_;
  }
  BoundPages(table, std::move(places));
}

std::vector<Recalled> SequenceTier::Take(int64_t table, absl::Span<const int32_t> tokens) {
  std::vector<Recalled> taken;
  if (!Usable()) return taken;
  const absl::Time begin = SteadyNow();
  const auto timed = absl::MakeCleanup([&] { usage_.time += SteadyNow() - begin; });
  Table& own = tables_[table];
  std::vector<int64_t> places;
  for (const int32_t index : tokens) {
    const auto found = own.at.find(index);
    const int64_t place = found->second;
    Token& token = own.places[place];
    places.push_back(place);
    Recalled back{.index = index,
                  .rope_position = token.rope_position,
                  .columns = std::move(token.columns),
                  .keys = std::vector<char>(lanes_per_table_ * key_bytes_),
                  .values = std::vector<char>(lanes_per_table_ * value_bytes_)};
    for (int64_t i = 0; i < lanes_per_table_; ++i) {
      const int64_t lane = FirstLane(table) + i;
      if (!Read(Rows::kKeys, lane, place, 1, back.keys.data() + i * key_bytes_) ||
          !Read(Rows::kValues, lane, place, 1, back.values.data() + i * value_bytes_)) {
        Usable();
        return taken;
      }
    }
    taken.push_back(std::move(back));
    usage_.recalled += lanes_per_table_;
    Free(own, place);
  }
  BoundPages(table, std::move(places));
  DropVoidEntries(own);
  return taken;
}

void SequenceTier::Forget(TokenSpan tokens) {
  if (!Usable()) return;
  for (int64_t t = 0; t < std::ssize(tables_); ++t) {
    Table& own = tables_[t];
    std::vector<int64_t> places;
    for (const auto& [index, place] : own.at) {
      if (index >= tokens.begin && index < tokens.end) places.push_back(place);
    }
    for (const int64_t place : places) Free(own, place);
    BoundPages(t, std::move(places));
    DropVoidEntries(own);
  }
}

void SequenceTier::Free(Table& table, int64_t place) {
  --held_;
  table.at.erase(table.places[place].index);
  table.places[place] = {};
  table.free.push_back(place);
}

void SequenceTier::DropVoidEntries(Table& table) const {
  if (std::ssize(table.queue) <= 2 * std::ssize(table.at) + kTierPage) return;
  std::erase_if(table.queue, [&](const auto& entry) { return !IsHeld(table, entry); });
}

void SequenceTier::PutBack(const Recalled& token, SequenceCache& cache, int64_t table) const {
  const int64_t slot = cache.table(table).NextSlot();
  for (int64_t i = 0; i < lanes_per_table_; ++i) {
    const int64_t lane = FirstLane(table) + i, heads = shape_.num_kv_heads;
    const LaneRows rows = cache.Lane(lane / heads, lane % heads);
    std::memcpy(rows.keys + slot * key_bytes_, token.keys.data() + i * key_bytes_, key_bytes_);
    std::memcpy(rows.values + slot * value_bytes_, token.values.data() + i * value_bytes_,
                value_bytes_);
  }
  cache.Insert(table, token.index, token.rope_position, token.columns);
}

void SequenceTier::Fetch(int64_t lane, const void* q, int64_t group, int64_t most,
                         FarRows& rows) const {
  rows.count = 0;
  const Table& table = tables_[lane / lanes_per_table_];
  const int64_t filled = std::ssize(table.places), pages = PagesOf(filled);
  if (failed_ || filled == 0) return;
  std::vector<SlotRange> ranges = {{.begin = 0, .end = filled}};
  if (std::ssize(table.at) > most) {
    thread_local std::vector<float> scores, scratch;
    scores.resize(pages);
    scratch.resize(PageScoreFloats(group, shape_.key_width));
    PageScores(q, group, shape_.key_width, bounds_[lane].data(), pages, format_.pool.model,
               scores.data(), scratch.data());
    for (int64_t page = 0; page < pages && !table.free.empty(); ++page) {
      const auto begin = table.places.begin() + page * kTierPage;
      const auto end = begin + std::min(kTierPage, filled - page * kTierPage);
      if (std::all_of(begin, end, [](const Token& token) { return token.index < 0; })) {
        scores[page] = -std::numeric_limits<float>::infinity();
      }
    }
    ranges = ChoosePages(scores, most / kTierPage, /*newest=*/-1, kTierPage, filled);
  }
  const int64_t room = std::min(most, std::ssize(table.at));
  rows.keys.resize(room * key_bytes_);
  rows.values.resize(room * value_bytes_);
  auto copy = [&](int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    if (!Read(Rows::kKeys, lane, begin, count, rows.keys.data() + rows.count * key_bytes_) ||
        !Read(Rows::kValues, lane, begin, count, rows.values.data() + rows.count * value_bytes_)) {
      return false;
    }
    rows.count += count;
    return true;
  };
  for (const SlotRange& range : ranges) {
    for (int64_t begin = range.begin; begin < range.end;) {
      if (table.places[begin].index < 0) {  // came back
        ++begin;
        continue;
      }
      int64_t end = begin + 1;
      while (end < range.end && table.places[end].index >= 0) ++end;
      if (!copy(begin, end)) {
        rows.count = 0;
        return;
      }
      begin = end;
    }
  }
  fetched_ += rows.count;
}

TierUsage SequenceTier::usage() const {
  TierUsage usage = usage_;
  usage.bytes = bytes_;
  usage.fetched = fetched_;
  usage.failed = failed_;
  return usage;
}

std::vector<int32_t> SequenceTier::tokens(int64_t table) const {
  std::vector<int32_t> tokens;
  if (failed_) return tokens;
  const Table& own = tables_[table];
  tokens.reserve(own.at.size());
  for (const auto& entry : own.queue) {
    if (IsHeld(own, entry)) tokens.push_back(own.places[entry.first].index);
  }
  return tokens;
}

std::vector<char> SequenceTier::Keys(int64_t lane, absl::Span<const int32_t> tokens) const {
  const Table& table = tables_[lane / lanes_per_table_];
  std::vector<char> rows(std::ssize(tokens) * key_bytes_);
  char* to = rows.data();
  for (const int32_t index : tokens) {
    const auto found = table.at.find(index);
    if (failed_ || found == table.at.end()) break;
    if (!Read(Rows::kKeys, lane, found->second, 1, to)) break;
    to += key_bytes_;
  }
  return rows;
}

}  // namespace epikv
