#include <ATen/ATen.h>

#include "policies/decorator.h"
#include "policies/recipe.h"

namespace epikv {
namespace {

// What leaving out a token changes of the lane's attention output o, once the others' weights are
// brought back to a sum of 1: a / (1 - a) |o - v|, with the scores as weights a. Tokens that have
// no score of their own have no weight; they rank first, as before.
class Caote final : public Decorator {
 public:
  explicit Caote(bool fast) : fast_(fast) {}

  at::Tensor Apply(const at::Tensor& score, Lane& lane) const override {
    constexpr double kLeast = 1e-6;
    // In double: where a token has nearly all, 1 - a and o - v are small differences.
    const at::Tensor mass = score.to(at::kDouble).index_fill(0, lane.unscored(), 0);
    const at::Tensor values = lane.values().to(at::kDouble);
    const at::Tensor weight = mass / mass.sum().clamp_min(kLeast);             // [n]
    const at::Tensor output = fast_ ? values.mean(0) : weight.matmul(values);  // [value_width]
    const at::Tensor change =
        (weight / (1 - weight).clamp_min(kLeast) * (values - output).norm(2, -1)).to(at::kFloat);
    return change.index_fill(0, lane.unscored(), change.max());
  }

 private:
  const bool fast_;
};

}  // namespace

extern constinit const DecoratorSpec kCaote{
    .name = "caote",
    .summary = "the error of the attention output without the token, scores being the weights",
    .paper = "arXiv 2504.14051 (CAOTE)",
    .takes = ScoreKind::kMass,
    .gives = {.kind = ScoreKind::kMass, .comparable = Comparable::kLayer},
    .signals = Signal::kValues,
    .make = [](int64_t) -> std::shared_ptr<const Decorator> {
      return std::make_shared<Caote>(false);
    },
};

extern constinit const DecoratorSpec kFastCaote{
    .name = "fast_caote",
    .summary = "caote with the plain mean of the cached values for the output",
    .paper = "arXiv 2504.14051 (FastCAOTE)",
    .takes = ScoreKind::kMass,
    .gives = {.kind = ScoreKind::kMass, .comparable = Comparable::kLayer},
    .signals = Signal::kValues,
    .make = [](int64_t) -> std::shared_ptr<const Decorator> {
      return std::make_shared<Caote>(true);
    },
};

}  // namespace epikv
