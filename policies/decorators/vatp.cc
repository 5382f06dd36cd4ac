#include <ATen/ATen.h>

#include "policies/decorator.h"
#include "policies/recipe.h"

namespace epikv {
namespace {

class Vatp final : public Decorator {
 public:
  at::Tensor Apply(const at::Tensor& score, Lane& lane) const override {
    return score * lane.values().norm(1, -1);
  }
};

}  // namespace

extern constinit const DecoratorSpec kVatp{
    .name = "vatp",
    .summary = "scores weighted by the L1 norms of the values",
    .paper = "EMNLP 2024, \"Attention Score is not All You Need for Token Importance Indicator\"",
    .takes = ScoreKind::kMass,
    .gives = {.kind = ScoreKind::kMass, .comparable = Comparable::kLayer},
    .signals = Signal::kValues,
    .make = [](int64_t) -> std::shared_ptr<const Decorator> { return std::make_shared<Vatp>(); },
};

}  // namespace epikv
