#include "server/sessions/episodes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace epikv {
namespace episodes_test {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

Embedding Unit(Embedding e) {
  double norm = 0;
  for (const float x : e) norm += x * x;
  for (float& x : e) x /= static_cast<float>(std::sqrt(norm));
  return e;
}

// Windows near so many directions, in turns.
std::vector<Embedding> Around(int64_t directions, int64_t windows, float noise) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  std::vector<Embedding> all;
  for (int64_t w = 0; w < windows; ++w) {
    Embedding e(8);
    e[w % directions] = 1;
    for (float& x : e) x += noise * normal(random);
    all.push_back(Unit(e));
  }
  return all;
}

TEST(Episodes, AreTheConversationsSubjects) {
  const std::vector<Embedding> windows = Around(3, 30, .1f);
  const std::vector<Episode> episodes = EpisodesOf(windows, 3);
  ASSERT_EQ(episodes.size(), 3u);
  std::vector<int64_t> subjects;
  for (const Episode& episode : episodes) {
    ASSERT_EQ(episode.windows.size(), 10u);
    subjects.push_back(episode.windows.front() % 3);
    for (const int64_t window : episode.windows) EXPECT_EQ(window % 3, subjects.back());
    double before = 2;
    for (const int64_t window : episode.windows) {
      double product = 0;
      for (int d = 0; d < 8; ++d) product += windows[window][d] * episode.centroid[d];
      EXPECT_LE(product, before) << "the nearest comes first";
      before = product;
    }
  }
  EXPECT_THAT(subjects, UnorderedElementsAre(0, 1, 2));
}

TEST(Episodes, AreTheSameForTheSameWindows) {
  const std::vector<Embedding> windows = Around(5, 40, .4f);
  const std::vector<Episode> a = EpisodesOf(windows, 4), b = EpisodesOf(windows, 4);
  ASSERT_EQ(a.size(), b.size());
  for (size_t e = 0; e < a.size(); ++e) {
    EXPECT_EQ(a[e].windows, b[e].windows);
    EXPECT_EQ(a[e].centroid, b[e].centroid);
  }
}

TEST(Episodes, OfFewOrEqualWindows) {
  EXPECT_TRUE(EpisodesOf({}, 4).empty());
  const std::vector<Embedding> one = Around(1, 1, 0);
  ASSERT_EQ(EpisodesOf(one, 4).size(), 1u);
  EXPECT_THAT(EpisodesOf(one, 4)[0].windows, ElementsAre(0));
  const std::vector<Embedding> equal(6, one[0]);
  const std::vector<Episode> episodes = EpisodesOf(equal, 4);
  size_t windows = 0;
  for (const Episode& episode : episodes) windows += episode.windows.size();
  EXPECT_EQ(windows, 6u) << "each is in one";
}

TEST(Episodes, AQuestionIsNearestByItsProduct) {
  const std::vector<Embedding> centroids = {{.5f, 0}, {0, .9f}, {0, .9f}};
  EXPECT_EQ(NearestEpisode(centroids, Unit({1, .1f})), 0);
  EXPECT_EQ(NearestEpisode(centroids, Unit({.1f, 1})), 1) << "the first of several";
  EXPECT_EQ(NearestEpisode(centroids, Unit({.7f, .5f})), 1) << "a wide one is further away";
}

}  // namespace episodes_test
}  // namespace epikv
