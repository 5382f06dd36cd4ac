#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "policies/decorator.h"
#include "policies/recipe.h"

namespace epikv {
namespace {

constexpr float kAlike = 0.9f;           // cosine of keys from which on they are twins; ours
constexpr int64_t kDonorsPerVictim = 4;  // kept tokens of the lowest scores that are looked at
// Of a round's victims, the best: after a long prompt all of them would take its square of memory.
constexpr int64_t kMostVictims = 256;

// Of what a round would drop, orphans are those that no kept token is like; of what it would keep,
// donors are those that another kept token is like. The best orphans and the worst donors change
// places, and scores.
class Twin final : public Decorator {
 public:
  at::Tensor Apply(const at::Tensor& score, Lane& lane) const override {
    const CacheView& cache = lane.cache();
    const int64_t excess = cache.excess(lane.layer(), lane.head());
    std::vector<int64_t> open, kept;  // slots
    const absl::Span<const int32_t> index = cache.index(lane.layer(), lane.head());
    const float* const s = score.const_data_ptr<float>();
    for (int64_t slot = 0; slot < std::ssize(index); ++slot) {
      (cache.protection().Covers(index[slot], cache.newest()) ? kept : open).push_back(slot);
    }
    const int64_t drops = std::min(excess, std::ssize(open));
    const int64_t considered = std::min(drops, kMostVictims);
    if (drops == 0 || drops == std::ssize(index) || score.isnan().any().item<bool>()) return score;
    std::sort(open.begin(), open.end(), [&](int64_t a, int64_t b) {
      return std::pair(s[a], index[a]) < std::pair(s[b], index[b]);
    });
    const std::vector<int64_t> victims(open.begin() + drops - considered, open.begin() + drops);
    const int64_t looked_at = std::min(std::ssize(open) - drops, kDonorsPerVictim * considered);
    const std::vector<int64_t> donors(open.begin() + drops, open.begin() + drops + looked_at);
    kept.insert(kept.end(), open.begin() + drops, open.end());

    const at::Tensor keys = lane.keys();
    const at::Tensor unit = keys / keys.norm(2, -1, /*keepdim=*/true).clamp_min(1e-8);
    auto rows = [&](const std::vector<int64_t>& slots) {
      return unit.index_select(0, at::tensor(slots, at::kLong));
    };
    const at::Tensor of_kept = rows(kept).t().contiguous();
    std::vector<int64_t> orphans;  // the best first; no two of them are twins
    const at::Tensor nearest = std::get<0>(rows(victims).matmul(of_kept).max(1));
    const at::Tensor of_orphans = at::empty({considered, unit.size(1)}, unit.options());
    for (int64_t i = considered; i-- > 0;) {
      if (nearest[i].item<float>() >= kAlike) continue;
      const at::Tensor row = unit[victims[i]];
      const int64_t found = std::ssize(orphans);
      if (found > 0 && of_orphans.narrow(0, 0, found).mv(row).max().item<float>() >= kAlike) {
        continue;
      }
      of_orphans[found].copy_(row);
      orphans.push_back(victims[i]);
    }
    if (orphans.empty() || donors.empty()) return score;

    at::Tensor alike = rows(donors).matmul(of_kept).ge(kAlike);  // [donors, kept]
    std::vector<int64_t> place(index.size(), -1);                // in kept
    for (size_t k = 0; k < kept.size(); ++k) place[kept[k]] = static_cast<int64_t>(k);
    at::Tensor result = score.clone();
    auto* const out = result.mutable_data_ptr<float>();
    size_t next = 0;
    for (size_t d = 0; d < donors.size() && next < orphans.size(); ++d) {
      at::Tensor twins = alike[static_cast<int64_t>(d)];
      twins[place[donors[d]]] = false;  // itself
      if (!twins.any().item<bool>()) continue;
      alike.select(1, place[donors[d]]).fill_(false);  // it leaves: nobody's twin any more
      out[orphans[next]] = s[donors[d]];
      out[donors[d]] = s[orphans[next]];
      ++next;
    }
    return result;
  }
};

}  // namespace

extern constinit const DecoratorSpec kTwin{
    .name = "twin",
    .summary = "tokens that no kept one is like take the places of kept ones that have a twin",
    .paper = "arXiv 2608.27128 (TwinKV), after its abstract; thresholds are ours",
    .takes = ScoreKind::kValue,
    .gives = {.kind = ScoreKind::kValue, .comparable = Comparable::kLane},
    .signals = Signal::kKeys,
    .pairs_per_token = (1 + kDonorsPerVictim) * kMostVictims,
    .make = [](int64_t) -> std::shared_ptr<const Decorator> { return std::make_shared<Twin>(); },
};

}  // namespace epikv
