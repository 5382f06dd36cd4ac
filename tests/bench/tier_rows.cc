// How fast rows go into a tier below the KV cache and come back, over copying as many bytes.
//
//   tier_rows [FOLDER] [ROUNDS]
//
// A cache of a 0.5B model's shape, 24 layers x 2 KV heads x 64 channels in bfloat16, lets tokens go
// a layer at a time, in no order. FOLDER: where the tier's file lies; none or "-": in memory.
// Prints, of each format of a tier, what a round moves; seconds of copying as many bytes of the
// cache's rows, as memcpy does in one piece; and seconds of demoting and recalling over those. Then
// the same of demoting into a tier that attention reads, which bounds the keys of its pages, and of
// fetching from it. Medians [lowest, highest] of ROUNDS, 7 if not told. One thread.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/time.h"
#include "runtime/base/steady_time.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kv/sequence_tier.h"

namespace epikv {
namespace {

constexpr int64_t kLayers = 24, kHeads = 2, kGroup = 7, kWidth = 64;
constexpr int64_t kTokens = 4096;   // that the cache has room for, and the tier
constexpr int64_t kMoved = 2048;    // of each layer that go, and come back
constexpr int64_t kFetched = 1024;  // of each lane that attention is given

double Seconds(const auto& work) {
  const absl::Time start = SteadyNow();
  work();
  return absl::ToDoubleSeconds(SteadyNow() - start);
}

struct Round {
  double copy = 0, demote = 0, recall = 0, fetch_copy = 0, fetch = 0;
};

class Bench {
 public:
  Bench(TierDType stored, bool fetches, const std::string& folder)
      : fetches_(fetches),
        format_{.pool = {DType::kBFloat16}, .stored = stored},
        shape_{.num_layers = kLayers,
               .num_heads = kGroup * kHeads,
               .num_kv_heads = kHeads,
               .key_width = kWidth,
               .value_width = kWidth},
        pool_(kLayers * kHeads * kTokens, kWidth, kWidth, format_.pool) {
    request_.traits.granularity = Granularity::kLayer;
    request_.demand.budget.assign(kLayers * kHeads, kTokens);
    request_.demand.prefill = request_.demand.decode = request_.demand.budget;
    cache_ = std::make_unique<SequenceCache>(pool_, SequenceId(0), request_, shape_);
    tier_ = std::make_unique<SequenceTier>(cache_->layout(), shape_, format_, kTokens, fetches,
                                           TiersIn(folder));
    std::vector<float> wide(kWidth);
    for (int64_t lane = 0; lane < kLayers * kHeads; ++lane) {
      const LaneRows rows = cache_->Lane(lane / kHeads, lane % kHeads);
      for (int64_t row = 0; row < kTokens; ++row) {
        for (float& x : wide) x = std::normal_distribution<float>()(random_);
        FromFloat(wide.data(), rows.keys + row * kRowBytes, kWidth, DType::kBFloat16);
        FromFloat(wide.data(), rows.values + row * kRowBytes, kWidth, DType::kBFloat16);
      }
    }
    cache_->Append(0, kTokens);
    from_.resize(kLayers * kHeads * kMoved * 2 * kRowBytes, 1);
    to_.resize(from_.size(), 1);
  }

  Round Run() {
    Round round;
    round.copy = Seconds([&] { std::memcpy(to_.data(), from_.data(), from_.size()); });
    std::vector<std::vector<int32_t>> tokens;
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const auto index = cache_->table(layer).index();
      tokens.emplace_back(index.begin(), index.end());
      std::shuffle(tokens.back().begin(), tokens.back().end(), random_);
      tokens.back().resize(kMoved);
      std::sort(tokens.back().begin(), tokens.back().end());
    }
    const SequenceCache::Slots slots = *cache_->SlotsOf(tokens);
    round.demote = Seconds([&] {
      for (int64_t layer = 0; layer < kLayers; ++layer) tier_->Demote(*cache_, layer, slots[layer]);
    });
    cache_->Evict(slots, /*leave_hole=*/false);
    if (fetches_) Fetch(round);
    round.recall = Seconds([&] {
      for (int64_t layer = 0; layer < kLayers; ++layer) {
        for (const Recalled& token : tier_->Take(layer, tokens[layer])) {
          tier_->PutBack(token, *cache_, layer);
        }
      }
    });
    return round;
  }
  bool failed() const { return tier_->failed() || cache_->table(0).live() != kTokens; }

 private:
  static constexpr int64_t kRowBytes = kWidth * 2;

  void Fetch(Round& round) {
    std::vector<char> q(kGroup * kWidth * 2);
    std::vector<float> wide(kGroup * kWidth);
    for (float& x : wide) x = std::normal_distribution<float>()(random_);
    FromFloat(wide.data(), q.data(), kGroup * kWidth, DType::kBFloat16);
    constexpr int64_t kBytes = kLayers * kHeads * kFetched * 2 * kRowBytes;
    round.fetch_copy = Seconds([&] { std::memcpy(to_.data(), from_.data(), kBytes); });
    round.fetch = Seconds([&] {
      for (int64_t lane = 0; lane < kLayers * kHeads; ++lane) {
        tier_->Fetch(lane, q.data(), kGroup, kFetched, far_);
      }
    });
  }

  const bool fetches_;
  const TierFormat format_;
  const ModelShape shape_;
  Request request_;
  KvPool pool_;
  std::unique_ptr<SequenceCache> cache_;
  std::unique_ptr<SequenceTier> tier_;
  std::vector<char> from_, to_;
  FarRows far_;
  std::mt19937 random_{7};
};

std::string Spread(std::vector<double> of) {
  std::sort(of.begin(), of.end());
  char text[64];
  std::snprintf(text, sizeof(text), "%.1f [%.1f, %.1f]", of[of.size() / 2], of.front(), of.back());
  return text;
}

int Main(int argc, char** argv) {
  const std::string folder = argc > 1 && std::string(argv[1]) != "-" ? argv[1] : "";
  int rounds = 7;
  if (argc > 3 || (argc > 2 && (!absl::SimpleAtoi(argv[2], &rounds) || rounds < 1))) {
    std::fprintf(stderr, "tier_rows [FOLDER] [ROUNDS]\n");
    return 2;
  }
  const struct {
    const char* name;
    TierDType stored;
  } formats[] = {
      {"as cached", TierDType::kPool}, {"int8", TierDType::kInt8}, {"int4", TierDType::kInt4}};
  constexpr int64_t kRows = kLayers * kHeads * kMoved;
  std::printf("%lld rows of K and of V a round, %.0f MB; fetched: %lld of %lld tokens a lane\n",
              static_cast<long long>(kRows), kRows * 2 * kWidth * 2 / 1e6,
              static_cast<long long>(kFetched), static_cast<long long>(kMoved));
  for (const auto& [name, stored] : formats) {
    Bench recalled(stored, /*fetches=*/false, folder), fetched(stored, /*fetches=*/true, folder);
    recalled.Run();  // the first takes the memory
    fetched.Run();
    std::vector<double> speed, rows, demote, recall, bound, fetch;
    for (int i = 0; i < rounds; ++i) {
      Round round = recalled.Run();
      speed.push_back(kRows * 2 * kWidth * 2 / round.copy / 1e9);
      rows.push_back(kRows / round.recall / 1e6);
      demote.push_back(round.demote / round.copy);
      recall.push_back(round.recall / round.copy);
      round = fetched.Run();
      bound.push_back(round.demote / round.copy);
      fetch.push_back(round.fetch / round.fetch_copy);
    }
    if (recalled.failed() || fetched.failed()) {
      std::fprintf(stderr, "tier_rows: the tier failed\n");
      return 1;
    }
    std::printf(
        "%-9s  copies %s GB/s; recalls %s million rows/s; over copying: demoted in %s, recalled in "
        "%s; demoted to be fetched in %s, fetched in %s\n",
        name, Spread(speed).c_str(), Spread(rows).c_str(), Spread(demote).c_str(),
        Spread(recall).c_str(), Spread(bound).c_str(), Spread(fetch).c_str());
  }
  return 0;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) { return epikv::Main(argc, argv); }
