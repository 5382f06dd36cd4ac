#include "runtime/kv/page_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "runtime/kernels/page_bounds.h"

namespace epikv {
namespace page_index_test {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int64_t kWidth = 24, kGroup = 3, kPage = 8;

// Keys of one lane in fp32, whose rows a test overwrites.
class Keys {
 public:
  explicit Keys(int seed) : random_(seed) {}
  void Add() {
    for (int64_t i = 0; i < kWidth; ++i) rows_.push_back(normal_(random_));
  }
  void Overwrite(int64_t slot) {
    for (int64_t i = 0; i < kWidth; ++i) rows_[slot * kWidth + i] = normal_(random_);
  }
  int64_t used() const { return std::ssize(rows_) / kWidth; }
  const char* data() const { return reinterpret_cast<const char*>(rows_.data()); }
  std::vector<float> Query() {
    std::vector<float> q;
    for (int64_t i = 0; i < kGroup * kWidth; ++i) q.push_back(normal_(random_));
    return q;
  }
  // The definition, page by page.
  std::vector<double> Scores(const std::vector<float>& q) const {
    std::vector<double> scores;
    for (int64_t begin = 0; begin < used(); begin += kPage) {
      double best = -INFINITY;
      for (int64_t g = 0; g < kGroup; ++g) {
        double sum = 0;
        for (int64_t i = 0; i < kWidth; ++i) {
          double most = -INFINITY, least = INFINITY;
          for (int64_t j = begin; j < std::min(used(), begin + kPage); ++j) {
            most = std::max<double>(most, rows_[j * kWidth + i]);
            least = std::min<double>(least, rows_[j * kWidth + i]);
          }
          const double x = q[g * kWidth + i];
          sum += std::max(x * most, x * least);
        }
        best = std::max(best, sum);
      }
      scores.push_back(best);
    }
    return scores;
  }

 private:
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::vector<float> rows_;
};

// The pages of ranges of whole pages.
std::vector<int64_t> PagesOf(const std::vector<SlotRange>& reads) {
  std::vector<int64_t> pages;
  for (const SlotRange& range : reads) {
    EXPECT_EQ(range.begin % kPage, 0);
    for (int64_t begin = range.begin; begin < range.end; begin += kPage) {
      pages.push_back(begin / kPage);
    }
  }
  return pages;
}

TEST(PageIndex, ReadsThePagesWithTheHighestBounds) {
  Keys keys(1);
  PageIndex index(2, kPage, kWidth, {});
  std::mt19937 random(2);
  for (int step = 0; step < 300; ++step) {
    int64_t written = keys.used();
    if (step > 50 && random() % 3 == 0) {  // in the place of one that went
      written = static_cast<int64_t>(random() % keys.used());
      keys.Overwrite(written);
    } else {
      keys.Add();
    }
    index.Update(1, keys.data(), written, keys.used());
    if (step % 40 == 39) {
      for (int64_t slot = 0; slot < keys.used(); slot += 5) keys.Overwrite(slot);
      index.Forget();
      index.Update(1, keys.data(), keys.used() - 1, keys.used());
    }
    const std::vector<float> q = keys.Query();
    std::vector<SlotRange> reads;
    constexpr int64_t kTokens = 4 * kPage + 3;  // four pages
    index.Choose(1, q.data(), kGroup, written, kTokens, reads);
    const std::vector<double> scores = keys.Scores(q);
    if (std::ssize(scores) <= 4) {
      EXPECT_THAT(reads, IsEmpty());
      continue;
    }
    const std::vector<int64_t> pages = PagesOf(reads);
    ASSERT_EQ(pages.size(), 4);
    EXPECT_EQ(reads.back().end, std::min(keys.used(), (pages.back() + 1) * kPage));
    ASSERT_THAT(pages, testing::Contains(written / kPage)) << "the newest token is read";
    double worst_read = INFINITY, best_unread = -INFINITY;
    for (int64_t page = 0; page < std::ssize(scores); ++page) {
      if (page == written / kPage) continue;
      const bool read = std::find(pages.begin(), pages.end(), page) != pages.end();
      if (read) worst_read = std::min(worst_read, scores[page]);
      if (!read) best_unread = std::max(best_unread, scores[page]);
    }
    ASSERT_GT(worst_read, best_unread - 1e-4) << "at step " << step;
  }
}

// Their attention's own choice, of one query head a KV head.
TEST(PageIndex, ReadsWhatTheAuthorsRead) {
  std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/quest.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  ASSERT_GE(cases.size(), 7);
  for (const nlohmann::json& given : cases) {
    const int64_t page = given["page"], width = given["width"], budget = given["budget"];
    const std::vector<float> query = given["query"], keys = given["keys"];
    const int64_t used = std::ssize(keys) / width;
    SCOPED_TRACE(testing::Message() << used << " tokens, pages of " << page << ", " << budget);
    PageIndex index(1, page, width, {});
    index.Update(0, reinterpret_cast<const char*>(keys.data()), used - 1, used);
    std::vector<SlotRange> reads;
    // Theirs reads three pages at least; ours refuses a request for fewer.
    index.Choose(0, query.data(), 1, used - 1, std::max(budget, 3 * page), reads);
    if (reads.empty()) reads = {{0, used}};
    std::vector<int64_t> read;
    for (const SlotRange& range : reads) {
      for (int64_t slot = range.begin; slot < range.end; ++slot) read.push_back(slot);
    }
    EXPECT_EQ(read, given["read"].get<std::vector<int64_t>>());
  }
}

TEST(PageIndex, LanesAreTheirOwn) {
  Keys a(3), b(4);
  PageIndex index(2, kPage, kWidth, {});
  for (int i = 0; i < 100; ++i) {
    a.Add();
    b.Add();
  }
  index.Update(0, a.data(), 99, 100);
  index.Update(1, b.data(), 99, 100);
  const std::vector<float> q = a.Query();
  std::vector<SlotRange> of_a, of_b, alone;
  index.Choose(0, q.data(), kGroup, 99, 3 * kPage, of_a);
  index.Choose(1, q.data(), kGroup, 99, 3 * kPage, of_b);
  PageIndex other(1, kPage, kWidth, {});
  other.Update(0, b.data(), 99, 100);
  other.Choose(0, q.data(), kGroup, 99, 3 * kPage, alone);
  EXPECT_NE(of_a, of_b);
  EXPECT_EQ(of_b, alone);
}

TEST(ChoosePages, NeighboursAreOneRangeAndTheLastPageIsShort) {
  const std::vector<float> scores = {5, 1, 7, 6, 1, 0};
  EXPECT_THAT(ChoosePages(scores, 4, 5, 16, 83),
              ElementsAre(SlotRange{0, 16}, SlotRange{32, 64}, SlotRange{80, 83}));
  EXPECT_THAT(ChoosePages(scores, 1, 5, 16, 83), ElementsAre(SlotRange{80, 83}));
  EXPECT_THAT(ChoosePages(scores, 0, 5, 16, 83), ElementsAre(SlotRange{80, 83}))
      << "the newest is always read";
  EXPECT_THAT(ChoosePages(scores, 9, 5, 16, 83), ElementsAre(SlotRange{0, 83}));
}

TEST(ChoosePages, TiesGoToTheOlder) {
  EXPECT_THAT(ChoosePages({2, 2, 2, 2}, 3, 3, 4, 16),
              ElementsAre(SlotRange{0, 8}, SlotRange{12, 16}));
}

TEST(PageScores, NoNumberIsTheLeastOfAll) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> q = {1, 1}, bounds = {nan, nan, nan, nan, 1, 1, 0, 0};
  std::vector<float> scores(2), scratch(PageScoreFloats(1, 2));
  PageScores(q.data(), 1, 2, bounds.data(), 2, DType::kFloat32, scores.data(), scratch.data());
  EXPECT_THAT(scores, ElementsAre(-INFINITY, 2));
}

// Of every format: bounds are those of the rows as they are read.
class PageBoundsTest : public testing::TestWithParam<KvFormat> {};

TEST_P(PageBoundsTest, AreTheMostAndTheLeastOfEachChannel) {
  const KvFormat format = GetParam();
  constexpr int64_t kRows = 7;
  Keys keys(5);
  for (int64_t i = 0; i < kRows; ++i) keys.Add();
  const int64_t element = ElementBytes(format.model), row_bytes = format.RowBytes(kWidth);
  std::vector<char> narrow(kWidth * element), rows(kRows * row_bytes), read(kWidth * element);
  std::vector<float> most(kWidth, -INFINITY), least(kWidth, INFINITY), wide(kWidth);
  for (int64_t row = 0; row < kRows; ++row) {
    FromFloat(reinterpret_cast<const float*>(keys.data()) + row * kWidth, narrow.data(), kWidth,
              format.model);
    WriteRow(narrow.data(), rows.data() + row * row_bytes, kWidth, format);
    ReadRow(rows.data() + row * row_bytes, read.data(), kWidth, format);
    ToFloat(read.data(), wide.data(), kWidth, format.model);
    for (int64_t i = 0; i < kWidth; ++i) {
      most[i] = std::max(most[i], wide[i]);
      least[i] = std::min(least[i], wide[i]);
    }
  }
  std::vector<char> bounds(PageBoundsBytes(kWidth, format.model));
  BoundRows(rows.data(), 3, kWidth, format, /*fresh=*/true, bounds.data());
  BoundRows(rows.data() + 3 * row_bytes, kRows - 3, kWidth, format, /*fresh=*/false, bounds.data());
  ToFloat(bounds.data(), wide.data(), kWidth, format.model);
  EXPECT_EQ(wide, most);
  ToFloat(bounds.data() + kWidth * element, wide.data(), kWidth, format.model);
  EXPECT_EQ(wide, least);
}

INSTANTIATE_TEST_SUITE_P(Formats, PageBoundsTest,
                         testing::Values(KvFormat{DType::kFloat32, KvDType::kModel},
                                         KvFormat{DType::kBFloat16, KvDType::kModel},
                                         KvFormat{DType::kFloat16, KvDType::kModel},
                                         KvFormat{DType::kFloat32, KvDType::kInt8},
                                         KvFormat{DType::kBFloat16, KvDType::kInt8},
                                         KvFormat{DType::kFloat16, KvDType::kInt8}));

}  // namespace page_index_test
}  // namespace epikv
