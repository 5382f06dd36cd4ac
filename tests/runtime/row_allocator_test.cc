#include "runtime/kv/row_allocator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "runtime/admission/ledger.h"

namespace epikv {
namespace row_allocator_test {

// The pool's memory beside its allocator: each row says which row of which sequence lies there.
class Pool {
 public:
  struct Row {
    SequenceId id{};
    int64_t place = -1;
    bool operator==(const Row&) const = default;
  };

  explicit Pool(int64_t num_rows) : rows_(num_rows), memory_(num_rows) {}

  // Rows moved.
  int64_t Open(SequenceId id, int64_t rows) {
    int64_t moved = 0;
    RowAllocator::Placement placement = rows_.Plan(id, rows);
    for (const RowMove& move : placement.moves) {
      EXPECT_LT(move.to, move.from);
      EXPECT_GE(move.to, 0);
      EXPECT_LE(move.from + move.count, rows_.num_rows());
      const auto from = memory_.begin() + move.from;
      std::copy(from, from + move.count, memory_.begin() + move.to);  // as memmove: to < from
      moved += move.count;
    }
    rows_.Place(std::move(placement));
    sizes_[id] = rows;
    for (int64_t i = 0; i < rows; ++i) memory_[rows_.begin(id) + i] = {id, i};
    return moved;
  }
  void Shrink(SequenceId id, int64_t rows) {
    rows_.Shrink(id, rows);
    sizes_[id] = rows;
  }
  void Close(SequenceId id) {
    rows_.Free(id);
    sizes_.erase(id);
  }

  // Every sequence still has its rows; so extents lie inside the pool and do not overlap.
  void Check() const {
    int64_t held = 0;
    for (const auto& [id, size] : sizes_) {
      held += size;
      const int64_t begin = rows_.begin(id);
      ASSERT_GE(begin, 0);
      ASSERT_LE(begin + size, rows_.num_rows());
      for (int64_t i = 0; i < size; ++i) ASSERT_EQ(memory_[begin + i], (Row{id, i}));
    }
    ASSERT_EQ(rows_.free_rows(), rows_.num_rows() - held);
  }

  const RowAllocator& rows() const { return rows_; }
  const std::map<SequenceId, int64_t>& sizes() const { return sizes_; }

 private:
  RowAllocator rows_;
  std::vector<Row> memory_;
  std::map<SequenceId, int64_t> sizes_;
};

constexpr SequenceId kA{1}, kB{2}, kC{3}, kD{4}, kE{5};

TEST(RowAllocator, FillsThePoolToTheLastRow) {
  Pool pool(10);
  EXPECT_EQ(pool.Open(kA, 4), 0);
  EXPECT_EQ(pool.Open(kB, 6), 0);
  EXPECT_EQ(pool.rows().free_rows(), 0);
  pool.Check();
}

TEST(RowAllocator, TakesTheTightestGap) {
  Pool pool(100);
  for (SequenceId id : {kA, kB, kC, kD}) pool.Open(id, 20);  // 20 free behind them
  pool.Shrink(kA, 12);                                       // 8 free
  pool.Close(kC);                                            // 20 free
  pool.Shrink(kD, 14);                                       // joins the end: 26 free
  EXPECT_EQ(pool.Open(kE, 7), 0);
  EXPECT_EQ(pool.rows().begin(kE), 12);
  pool.Check();
}

TEST(RowAllocator, KnowsUpToWhereRowsWereEverHeld) {
  Pool pool(100);
  EXPECT_EQ(pool.rows().touched_rows(), 0);
  pool.Open(kA, 20);
  pool.Open(kB, 30);
  pool.Close(kB);
  pool.Open(kC, 10);
  EXPECT_EQ(pool.rows().touched_rows(), 50);
  pool.Open(kD, 25);
  EXPECT_EQ(pool.rows().touched_rows(), 55);
}

TEST(RowAllocator, JoinsTheGapsThatCostTheFewestMovedRows) {
  Pool pool(100);
  pool.Open(kA, 30);
  pool.Open(kB, 40);
  pool.Open(kC, 15);
  pool.Open(kD, 15);
  pool.Shrink(kA, 20);  // 10 free before B
  pool.Shrink(kB, 30);  // 10 free before C
  pool.Shrink(kC, 5);   // 10 free behind C: 20 around its 5 rows, 20 around B's 30
  EXPECT_EQ(pool.Open(kE, 20), 5);
  pool.Check();
  EXPECT_EQ(pool.rows().free_rows(), 10);
}

TEST(RowAllocator, MovesEverythingWhereItMust) {
  Pool pool(12);
  for (SequenceId id : {kA, kB, kC, kD}) pool.Open(id, 3);
  for (SequenceId id : {kA, kB, kC, kD}) pool.Shrink(id, 1);
  EXPECT_EQ(pool.Open(kE, 8), 3);  // A lies at the front already
  EXPECT_EQ(pool.rows().free_rows(), 0);
  pool.Check();
}

TEST(RowAllocator, MoveMayOverlapItself) {
  Pool pool(12);
  pool.Open(kA, 1);
  pool.Open(kB, 10);
  pool.Close(kA);
  EXPECT_EQ(pool.Open(kC, 2), 10);
  pool.Check();
}

TEST(RowAllocator, RefusesBreachesAndStaysAsItWas) {
  Pool pool(10);
  pool.Open(kA, 4);
  EXPECT_THROW(pool.Open(kB, 7), std::logic_error);
  EXPECT_THROW(pool.Open(kA, 1), std::logic_error);
  EXPECT_THROW(pool.Shrink(kA, 5), std::logic_error);
  pool.Check();
}

// What has been planned and not placed never was.
TEST(RowAllocator, APlanChangesNothing) {
  RowAllocator rows(10);
  rows.Place(rows.Plan(kA, 4));
  rows.Place(rows.Plan(kB, 4));
  rows.Free(kA);
  const RowAllocator::Placement placement = rows.Plan(kC, 6);
  EXPECT_EQ(placement.moves.size(), 1);
  EXPECT_EQ(rows.begin(kB), 4);
  EXPECT_EQ(rows.free_rows(), 6);
  rows.Place(rows.Plan(kC, 6));
  EXPECT_EQ(rows.begin(kB), 0);
  EXPECT_EQ(rows.free_rows(), 0);
}

// The admission law: whatever the ledger admits can be placed, however the pool has been used
// before. As in the engine, the ledger counts bytes and charges more than the rows alone.
class AdmissionLaw : public testing::TestWithParam<int64_t> {
 protected:
  static constexpr int64_t kRowBytes = 24;

  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  // Sizes of all magnitudes.
  int64_t DrawRows(int64_t most) {
    return std::max<int64_t>(1, most >> Draw(0, 8)) - Draw(0, most >> 9);
  }
  std::mt19937_64 random_{7};
};

TEST_P(AdmissionLaw, WhatFitsIsPlaced) {
  const int64_t capacity = GetParam();
  Ledger ledger(capacity);
  Pool pool(capacity / kRowBytes);
  std::map<SequenceId, int64_t> overhead;  // bytes beside the rows: columns, state
  int64_t admitted = 0, refused = 0, moved = 0, next_id = 0;
  for (int operation = 0; operation < 4000; ++operation) {
    const int64_t kind = Draw(0, 9);
    if (kind < 6 || overhead.empty()) {
      const int64_t rows = std::max<int64_t>(1, DrawRows(pool.rows().num_rows()));
      const int64_t extra = Draw(0, 2) == 0 ? 0 : Draw(0, rows * kRowBytes / 4);
      if (!ledger.Fits(rows * kRowBytes + extra)) {
        ++refused;
        continue;
      }
      const SequenceId id{next_id++};
      ledger.Reserve(id, rows * kRowBytes + extra);
      ASSERT_GE(pool.rows().free_rows(), rows) << "the ledger admits what has no room";
      moved += pool.Open(id, rows);
      overhead[id] = extra;
      ++admitted;
    } else {
      const auto any = std::next(overhead.begin(), Draw(0, overhead.size() - 1));
      const SequenceId id = any->first;
      const int64_t rows = pool.sizes().at(id);
      if (kind < 8) {
        const int64_t less = Draw(1, rows);
        pool.Shrink(id, less);
        ledger.Shrink(id, less * kRowBytes + any->second);
      } else {
        pool.Close(id);
        ledger.Release(id);
        overhead.erase(any);
      }
    }
    ASSERT_LE(ledger.reserved(), ledger.capacity());
    pool.Check();
    if (HasFatalFailure()) FAIL() << "at operation " << operation;
  }
  // Not vacuous: the pool was full and its gaps had to be joined.
  EXPECT_GT(admitted, 500);
  EXPECT_GT(refused, 500);
  EXPECT_GT(moved, 0);

  while (!overhead.empty()) {
    const SequenceId id = overhead.begin()->first;
    pool.Close(id);
    ledger.Release(id);
    overhead.erase(id);
  }
  EXPECT_EQ(ledger.reserved(), 0);
  EXPECT_EQ(pool.rows().free_rows(), pool.rows().num_rows());
  // And in one piece.
  EXPECT_EQ(pool.Open(SequenceId{next_id}, pool.rows().num_rows()), 0);
}

INSTANTIATE_TEST_SUITE_P(PoolBytes, AdmissionLaw,
                         testing::Values(24 * 40, 24 * 512 + 23, 24 * 3000));

}  // namespace row_allocator_test
}  // namespace epikv
