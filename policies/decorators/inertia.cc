#include <ATen/ATen.h>

#include "policies/decorator.h"
#include "policies/recipe.h"

namespace epikv {
namespace {

constexpr absl::string_view kInertiaColumns[] = {"inertia", "ranked"};
constexpr double kKept = 0.7;  // of a token's mean from one round to the next; ours

// An exponential mean of a token's scores over the rounds that ranked it.
class Inertia final : public Decorator {
 public:
  explicit Inertia(int64_t column) : column_(column) {}

  at::Tensor Apply(const at::Tensor& score, Lane& lane) const override {
    at::Tensor mean = lane.column(column_), ranked = lane.column(column_ + 1);  // 1: by some round
    const at::Tensor now = at::where(ranked.eq(0), score, mean * kKept + score * (1 - kKept));
    // A window's tokens have no scores of their own yet.
    const at::Tensor unscored = lane.unscored();
    mean.copy_(now);
    ranked.fill_(1).index_fill_(0, unscored, 0);
    return now.index_copy(0, unscored, score.index_select(0, unscored));
  }

 private:
  const int64_t column_;
};

}  // namespace

extern constinit const DecoratorSpec kInertia{
    .name = "inertia",
    .summary = "an exponential mean of a token's scores over the rounds that ranked it",
    .paper = "arXiv 2609.03515 (InertiaKV), after its abstract; the weight is ours",
    .takes = ScoreKind::kValue,
    .gives = {.kind = ScoreKind::kValue, .comparable = Comparable::kModel},
    .columns = kInertiaColumns,
    .make = [](int64_t column) -> std::shared_ptr<const Decorator> {
      return std::make_shared<Inertia>(column);
    },
};

}  // namespace epikv
