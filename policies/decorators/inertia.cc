#include <ATen/ATen.h>

#include "policies/decorator.h"
#include "policies/recipe.h"

namespace epikv {
namespace {

constexpr absl::string_view kColumns[] = {"inertia"};
constexpr double kKept = 0.7;  // of a token's mean from one round to the next; ours

// An exponential mean of a token's scores over the rounds that ranked it.
class Inertia final : public Decorator {
 public:
  explicit Inertia(int64_t column) : column_(column) {}

  at::Tensor Apply(const at::Tensor& score, Lane& lane) const override {
    const at::Tensor mean = lane.column(column_);  // 0: no round has ranked it
    const at::Tensor now = at::where(mean.eq(0), score, mean * kKept + score * (1 - kKept));
    // A window's tokens have no scores of their own yet.
    const at::Tensor result = now.index_copy(0, lane.unscored(), score.index_select(0, lane.unscored()));
    mean.copy_(now.index_fill(0, lane.unscored(), 0));
    return result;
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
    .columns = kColumns,
    .make = [](int64_t column) -> std::shared_ptr<const Decorator> {
      return std::make_shared<Inertia>(column);
    },
};

}  // namespace epikv
