#include "server/sessions/episodes.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

namespace epikv {
namespace {

constexpr uint64_t kSeed = 42;
constexpr int kTries = 10, kMostIterations = 100;

double Product(const Embedding& a, const Embedding& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

double Distance(const Embedding& a, const Embedding& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// Of [0, 1): the same with every standard library.
double Uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1.0p-53; }

struct Clustering {
  std::vector<Embedding> centroids;
  std::vector<int64_t> of;  // each window
  double spread = std::numeric_limits<double>::infinity();
};

int64_t Nearest(absl::Span<const Embedding> centroids, const Embedding& window, double& distance) {
  int64_t nearest = 0;
  distance = std::numeric_limits<double>::infinity();
  for (int64_t c = 0; c < std::ssize(centroids); ++c) {
    const double d = Distance(centroids[c], window);
    if (d >= distance) continue;
    distance = d;
    nearest = c;
  }
  return nearest;
}

// Far from those before, by chance.
std::vector<Embedding> FirstCentroids(absl::Span<const Embedding> windows, int64_t count,
                                      std::mt19937_64& random) {
  const int64_t size = std::ssize(windows);
  std::vector<Embedding> centroids = {windows[static_cast<int64_t>(Uniform(random) * size)]};
  while (std::ssize(centroids) < count) {
    std::vector<double> far(size);
    for (int64_t w = 0; w < size; ++w) Nearest(centroids, windows[w], far[w]);
    double left = Uniform(random) * std::reduce(far.begin(), far.end());
    int64_t chosen = 0;
    while (chosen + 1 < size && (left -= far[chosen]) >= 0) ++chosen;
    centroids.push_back(windows[chosen]);
  }
  return centroids;
}

Clustering Cluster(absl::Span<const Embedding> windows, int64_t count, std::mt19937_64& random) {
  Clustering found{.centroids = FirstCentroids(windows, count, random),
                   .of = std::vector<int64_t>(windows.size(), -1)};
  for (int i = 0; i < kMostIterations; ++i) {
    bool changed = false;
    found.spread = 0;
    for (int64_t w = 0; w < std::ssize(windows); ++w) {
      double distance = 0;
      const int64_t nearest = Nearest(found.centroids, windows[w], distance);
      changed |= nearest != std::exchange(found.of[w], nearest);
      found.spread += distance;
    }
    if (!changed) break;
    for (int64_t c = 0; c < count; ++c) {
      Embedding mean(windows[0].size());
      int64_t members = 0;
      for (int64_t w = 0; w < std::ssize(windows); ++w) {
        if (found.of[w] != c) continue;
        ++members;
        for (size_t d = 0; d < mean.size(); ++d) mean[d] += windows[w][d];
      }
      if (members == 0) continue;  // it stays where it is
      for (float& value : mean) value /= static_cast<float>(members);
      found.centroids[c] = std::move(mean);
    }
  }
  return found;
}

}  // namespace

std::vector<Episode> EpisodesOf(absl::Span<const Embedding> windows, int64_t count) {
  count = std::min(count, std::ssize(windows));
  if (count == 0) return {};
  // NOLINTNEXTLINE(bugprone-random-generator-seed): the same for the same windows
  std::mt19937_64 random(kSeed);
  Clustering best;
  for (int i = 0; i < kTries; ++i) {
    Clustering tried = Cluster(windows, count, random);
    if (tried.spread < best.spread) best = std::move(tried);
  }
  std::vector<Episode> episodes;
  for (int64_t c = 0; c < count; ++c) {
    Episode episode{.centroid = best.centroids[c]};
    for (int64_t w = 0; w < std::ssize(windows); ++w) {
      if (best.of[w] == c) episode.windows.push_back(w);
    }
    if (episode.windows.empty()) continue;
    std::stable_sort(episode.windows.begin(), episode.windows.end(), [&](int64_t a, int64_t b) {
      return Product(windows[a], episode.centroid) > Product(windows[b], episode.centroid);
    });
    episodes.push_back(std::move(episode));
  }
  return episodes;
}

int64_t NearestEpisode(absl::Span<const Embedding> centroids, const Embedding& question) {
  int64_t nearest = 0;
  for (int64_t c = 1; c < std::ssize(centroids); ++c) {
    if (Product(centroids[c], question) > Product(centroids[nearest], question)) nearest = c;
  }
  return nearest;
}

}  // namespace epikv
