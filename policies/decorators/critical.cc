#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "policies/decorator.h"
#include "policies/recipe.h"

namespace epikv {
namespace {

constexpr absl::string_view kColumns[] = {"projected_norm"};

// The best half of what the lane may keep stays by its score; the rest is ranked by score times
// |v W_O|_1, averaged over the group.
class Critical final : public Decorator {
 public:
  explicit Critical(int64_t column) : column_(column) {}

  at::Tensor Apply(const at::Tensor& score, Lane& lane) const override {
    constexpr double kFirstStage = 0.5, kEpsilon = 1e-4;
    const int64_t n = score.numel();
    const int64_t kept = n - lane.cache().excess(lane.layer(), lane.head());
    const int64_t first = std::max<int64_t>(1, static_cast<int64_t>(kept * kFirstStage));
    // Of equals the newer.
    const at::Tensor ascending =
        score.index_select(0, lane.by_birth()).argsort(/*stable=*/true, 0, /*descending=*/false);
    const int64_t stays = std::min(first, n);
    const at::Tensor best = lane.by_birth().index_select(0, ascending.narrow(0, n - stays, stays));
    const at::Tensor weighed = (score + kEpsilon) * ProjectedNorms(lane);
    // What is no number stays none.
    return at::where(weighed.isnan(), weighed,
                     weighed.index_fill(0, best, std::numeric_limits<float>::max()));
  }

 private:
  // A value never changes, and neither does its norm: each is computed once, the first time that it
  // is asked for. 0: not yet.
  at::Tensor ProjectedNorms(Lane& lane) const {
    const at::Tensor norms = lane.column(column_);
    const at::Tensor missing = norms.eq(0).nonzero().flatten();
    if (missing.numel() > 0) {
      const at::Tensor values =
          lane.cache().values(lane.layer(), lane.head()).index_select(0, missing);
      const at::Tensor projected = at::matmul(values.to(at::kFloat), lane.output_projection());
      norms.index_copy_(0, missing, projected.norm(1, -1).mean(0));  // over the group
    }
    return norms;
  }

  const int64_t column_;
};

}  // namespace

extern constinit const DecoratorSpec kCritical{
    .name = "critical",
    .summary = "the best half stays; the rest is ranked by score x |v W_O|_1",
    .paper = "arXiv 2502.03805 (CriticalKV)",
    .takes = ScoreKind::kMass,
    .gives = {.kind = ScoreKind::kValue, .comparable = Comparable::kLane},
    .signals = Signal::kValues | Signal::kOutputProjection,
    .columns = kColumns,
    .make = [](int64_t column) -> std::shared_ptr<const Decorator> {
      return std::make_shared<Critical>(column);
    },
};

}  // namespace epikv
