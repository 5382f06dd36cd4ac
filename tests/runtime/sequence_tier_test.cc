#include "runtime/kv/sequence_tier.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "runtime/kernels/kernels.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace sequence_tier_test {

constexpr int64_t kLayers = 2, kHeads = 2, kWidth = 16, kCapacity = 64;

// A cache of random rows, its tier, and what each row was when its token was cached.
class TieredCache {
 public:
  TieredCache(KvFormat format, Granularity granularity, int64_t tokens, const std::string& folder)
      : format_(format),
        shape_{.num_layers = kLayers,
               .num_heads = 2 * kHeads,
               .num_kv_heads = kHeads,
               .key_width = kWidth,
               .value_width = kWidth},
        pool_(kLayers * kHeads * kCapacity, kWidth, kWidth, format) {
    request_.traits.granularity = granularity;
    request_.traits.columns = {{"a"}, {"b"}};
    request_.demand.budget.assign(kLayers * kHeads, kCapacity);
    request_.demand.prefill = request_.demand.decode = request_.demand.budget;
    cache = std::make_unique<SequenceCache>(pool_, SequenceId(0), request_, shape_);
    tier = std::make_unique<SequenceTier>(cache->layout(), shape_, TierFormat{format}, tokens,
                                          /*fetches=*/true, TiersIn(folder));
  }

  // Caches one more token, of random rows and columns.
  void Append() {
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < cache->num_tables(); ++t) slots.push_back(cache->NextSlot(t));
    for (int64_t lane = 0; lane < kLayers * kHeads; ++lane) {
      const int64_t slot = slots[cache->TableOf(lane / kHeads, lane % kHeads)];
      const LaneRows rows = cache->Lane(lane / kHeads, lane % kHeads);
      for (char* row : {rows.keys + slot * RowBytes(), rows.values + slot * RowBytes()}) {
        std::vector<float> wide(kWidth);
        for (float& x : wide) x = std::normal_distribution<float>()(random_);
        std::vector<char> narrow(kWidth * ElementBytes(format_.model));
        FromFloat(wide.data(), narrow.data(), kWidth, format_.model);
        WriteRow(narrow.data(), row, kWidth, format_);
      }
    }
    cache->Append(cache->next(), 1);
    for (int64_t t = 0; t < cache->num_tables(); ++t) {
      SlotTable& table = cache->table(t);
      for (int64_t c = 0; c < 2; ++c) table.column(c)[slots[t]] = static_cast<float>(random_());
    }
    for (int64_t t = 0; t < cache->num_tables(); ++t) {
      facts_[{t, cache->newest()}] = FactsOf(t, slots[t]);
    }
  }
  // Demotes and evicts tokens of one table.
  void Evict(int64_t table, const std::vector<int32_t>& tokens, bool leave_hole) {
    std::vector<std::vector<int32_t>> victims(cache->num_tables());
    victims[table] = tokens;
    SequenceCache::Slots slots = *cache->SlotsOf(victims);
    tier->Demote(*cache, table, slots[table]);
    cache->Evict(slots, leave_hole);
  }
  // All that is known of a token that is cached: that it is what it was.
  void ExpectAsItWas(int64_t table, int32_t token) const {
    const auto index = cache->table(table).index();
    const auto at = std::find(index.begin(), index.end(), token);
    ASSERT_NE(at, index.end());
    EXPECT_EQ(FactsOf(table, at - index.begin()), facts_.at({table, token}));
  }
  int64_t RowBytes() const { return format_.RowBytes(kWidth); }
  int64_t lanes_per_table() const { return kLayers * kHeads / cache->num_tables(); }

  // Its bytes: K and V of each lane of the table, position and columns.
  std::string FactsOf(int64_t table, int64_t slot) const {
    std::string facts;
    for (int64_t i = 0; i < lanes_per_table(); ++i) {
      const int64_t lane = table * lanes_per_table() + i;
      const LaneRows rows = cache->Lane(lane / kHeads, lane % kHeads);
      facts.append(rows.keys + slot * RowBytes(), RowBytes());
      facts.append(rows.values + slot * RowBytes(), RowBytes());
    }
    const SlotTable& own = cache->table(table);
    for (int64_t c = 0; c < 2; ++c) facts += std::to_string(own.column(c)[slot]) + " ";
    return facts + std::to_string(own.rope_position()[slot]);
  }

  std::mt19937& random() { return random_; }

 private:
  const KvFormat format_;
  const ModelShape shape_;
  Request request_;
  KvPool pool_;

 public:
  std::unique_ptr<SequenceCache> cache;
  std::unique_ptr<SequenceTier> tier;

 private:
  std::mt19937 random_{7};
  std::map<std::pair<int64_t, int32_t>, std::string> facts_;  // by table and token
};

// (format, granularity, in a file)
class SequenceTierTest : public ::testing::TestWithParam<std::tuple<KvFormat, Granularity, bool>> {
 protected:
  TieredCache Make(int64_t tokens) {
    const auto& [format, granularity, in_file] = GetParam();
    return {format, granularity, tokens, in_file ? folder_.File("") : ""};
  }

 private:
  const TemporaryFolder folder_;
};

// Tokens go, are forgotten and come back at random, some by a copy: what comes back has the very
// bits that went.
TEST_P(SequenceTierTest, WhatComesBackIsWhatWent) {
  constexpr int64_t kTokens = 20;
  TieredCache it = Make(kTokens);
  std::vector<std::vector<int32_t>> held(it.cache->num_tables());  // in order of going
  auto pick = [&](auto tokens, size_t count) {
    std::vector<int32_t> all(tokens.begin(), tokens.end());
    std::shuffle(all.begin(), all.end(), it.random());
    all.resize(std::min(count, all.size()));
    return all;
  };
  for (int step = 0; step < 300; ++step) {
    it.Append();
    for (int64_t t = 0; t < it.cache->num_tables(); ++t) {
      const int64_t live = it.cache->table(t).live();
      if (live < 24) continue;
      // As in a round: those that come back are taken first.
      const std::vector<int32_t> back = pick(held[t], it.random()() % 3);
      std::vector<Recalled> taken = it.tier->Take(t, back);
      ASSERT_EQ(taken.size(), back.size());
      std::erase_if(held[t], [&](int32_t token) {
        return std::find(back.begin(), back.end(), token) != back.end();
      });
      std::vector<int32_t> victims =
          pick(it.cache->table(t).index(), back.size() + live - 24 + it.random()() % 3);
      std::erase(victims, static_cast<int32_t>(it.cache->newest()));
      it.Evict(t, victims, step % 2 == 0);
      std::sort(victims.begin(), victims.end());
      held[t].insert(held[t].end(), victims.begin(), victims.end());
      if (std::ssize(held[t]) > kTokens) {
        held[t].erase(held[t].begin(), held[t].end() - kTokens);
      }
      for (const Recalled& token : taken) it.tier->PutBack(token, *it.cache, t);
      for (const int32_t token : back) it.ExpectAsItWas(t, token);
      ASSERT_EQ(it.tier->tokens(t), held[t]);
    }
    if (step % 50 == 49) it.tier = it.tier->Clone();
  }
  int64_t entries = 0;
  for (const auto& of_table : held) entries += std::ssize(of_table) * it.lanes_per_table();
  EXPECT_EQ(it.tier->entries(), entries);
  EXPECT_FALSE(it.tier->failed());
}

// Of more than it may give, those pages whose keys' bounds are highest; never a token that is gone.
TEST_P(SequenceTierTest, FetchesThePagesThatMayMeetTheQueryBest) {
  TieredCache it = Make(48);
  for (int i = 0; i < 60; ++i) it.Append();
  for (int64_t t = 0; t < it.cache->num_tables(); ++t) {
    std::vector<int32_t> victims(50);
    std::iota(victims.begin(), victims.end(), 5);  // 5 and 6 are forgotten
    it.Evict(t, victims, false);
    it.tier->Take(t, std::vector<int32_t>{20, 40});
  }
  const KvFormat format = std::get<0>(GetParam());
  for (int64_t lane = 0; lane < kLayers * kHeads; ++lane) {
    const int64_t table = it.cache->TableOf(lane / kHeads, lane % kHeads);
    std::vector<char> q(2 * kWidth * ElementBytes(format.model));
    std::vector<float> wide(2 * kWidth);
    for (float& x : wide) x = std::normal_distribution<float>()(it.random());
    FromFloat(wide.data(), q.data(), 2 * kWidth, format.model);
    FarRows all, some;
    it.tier->Fetch(lane, q.data(), 2, 48, all);
    const std::vector<int32_t> tokens = it.tier->tokens(table);
    ASSERT_EQ(tokens.size(), 46u);
    const std::vector<char> keys = it.tier->Keys(lane, tokens);
    auto row = [&](const std::vector<char>& rows, int64_t i) {
      return std::string(rows.data() + i * it.RowBytes(), it.RowBytes());
    };
    auto rows_of = [&](const FarRows& rows) {
      std::multiset<std::string> found;
      for (int64_t i = 0; i < rows.count; ++i) found.insert(row(rows.keys, i));
      return found;
    };
    std::multiset<std::string> held;  // all of them, once each
    for (int64_t i = 0; i < 46; ++i) held.insert(row(keys, i));
    EXPECT_EQ(rows_of(all), held);

    // Tokens by page: 48 places were filled in order, and the first two again.
    std::map<int64_t, std::vector<int64_t>> pages;
    for (int64_t i = 0; i < 46; ++i) {
      const int64_t place = tokens[i] >= 53 ? tokens[i] - 53 : tokens[i] - 5;
      pages[place / kTierPage].push_back(i);
    }
    std::vector<std::pair<double, int64_t>> order;  // the best first
    for (const auto& [page, members] : pages) {
      double best = -1e300;
      for (int g = 0; g < 2; ++g) {
        double bound = 0;
        for (int64_t c = 0; c < kWidth; ++c) {
          float most = -1e30f, least = 1e30f;
          for (const int64_t i : members) {
            std::vector<char> narrow(kWidth * ElementBytes(format.model));
            ReadRow(keys.data() + i * it.RowBytes(), narrow.data(), kWidth, format);
            std::vector<float> key(kWidth);
            ToFloat(narrow.data(), key.data(), kWidth, format.model);
            most = std::max(most, key[c]);
            least = std::min(least, key[c]);
          }
          float query = 0;
          ToFloat(q.data() + (g * kWidth + c) * ElementBytes(format.model), &query, 1,
                  format.model);
          bound += std::max(query * most, query * least);
        }
        best = std::max(best, bound);
      }
      order.push_back({-best, page});
    }
    std::sort(order.begin(), order.end());
    for (const int64_t count : {1, 2}) {
      std::multiset<std::string> wanted;
      for (int64_t p = 0; p < count; ++p) {
        for (const int64_t i : pages[order[p].second]) wanted.insert(row(keys, i));
      }
      it.tier->Fetch(lane, q.data(), 2, 16 * count, some);
      EXPECT_EQ(rows_of(some), wanted) << count << " pages";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, SequenceTierTest,
    ::testing::Combine(::testing::Values(KvFormat{DType::kFloat32, KvDType::kModel},
                                         KvFormat{DType::kBFloat16, KvDType::kModel},
                                         KvFormat{DType::kFloat32, KvDType::kInt8}),
                       ::testing::Values(Granularity::kToken, Granularity::kLayer,
                                         Granularity::kHead),
                       ::testing::Bool()));

// A store that fails at some operation: what was evicted is gone, nothing else is, and it is told.
TEST(SequenceTier, AFolderThatIsGoneIsToldAndHoldsNothing) {
  TieredCache it({DType::kFloat32, KvDType::kModel}, Granularity::kHead, 20, "/no/such/folder");
  EXPECT_TRUE(it.tier->failed());
  for (int i = 0; i < 30; ++i) it.Append();
  it.Evict(0, {1, 2, 3}, false);
  EXPECT_TRUE(it.tier->tokens(0).empty());
  EXPECT_TRUE(it.tier->empty());
  EXPECT_TRUE(it.tier->Take(0, {}).empty());
  EXPECT_TRUE(it.tier->usage().failed);
  EXPECT_TRUE(it.tier->Clone()->failed());
}

// Files have no name, and all of their blocks at once.
TEST(TierStore, TakesItsRoomAndLeavesNoFile) {
  const TemporaryFolder folder;
  const auto store = OpenTierStore(folder.File(""), 1 << 20);
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_TRUE(std::filesystem::is_empty(folder.File("")));
  const auto too_large = OpenTierStore(folder.File(""), int64_t{1} << 60);
  EXPECT_FALSE(too_large.ok());
  EXPECT_THAT(std::string(too_large.status().message()), ::testing::HasSubstr("room for"));
  int64_t word = 5;
  ASSERT_TRUE((*store)->Read(4096, &word, sizeof(word)).ok());
  EXPECT_EQ(word, 0);
  EXPECT_FALSE((*store)->Read(1 << 20, &word, sizeof(word)).ok()) << "behind its end";
}

}  // namespace sequence_tier_test
}  // namespace epikv
