#include "policies/retention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "policies/gated_policy.h"

namespace epikv {
namespace {

// log beta of every KV head: at most 0.
class RetentionGate final : public MlpGate {
 public:
  explicit RetentionGate(std::vector<std::vector<Linear>> layers)
      : MlpGate(std::move(layers), Activation::kSilu) {}

  at::Tensor Apply(int64_t layer, const at::Tensor& input) const override {
    return at::log_sigmoid(MlpGate::Apply(layer, input));
  }
};

// log(1 - e^x) of x < 0.
at::Tensor Log1MinusExp(const at::Tensor& x) {
  return at::where(x < std::log(0.5), (-x.exp()).log1p(), (-x.expm1()).log());
}

class RetentionPolicy final : public GatedPolicy {
 public:
  RetentionPolicy(const Params& params, Recipe recipe, std::shared_ptr<const RetentionGate> gate)
      : GatedPolicy(std::move(recipe), std::move(gate)), lookahead_(params.Int("lookahead")) {}

 private:
  // The log of what beta leaves of a token's worth at the next step, or of the sum over the next
  // `lookahead` steps. The next step is taken to be one later than it is, and the first of several
  // two, as the authors' code has it.
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    const at::Tensor log_beta = lane.column(kSaid);
    const at::Tensor age = (task.cache.newest() + 2 - lane.index()).to(at::kFloat);
    if (lookahead_ == 1) return age * log_beta;
    const at::Tensor sum =
        Log1MinusExp(static_cast<double>(lookahead_) * log_beta) - Log1MinusExp(log_beta);
    // What is never forgotten is worth 1 at each of the steps.
    const double all = std::log(static_cast<double>(lookahead_));
    return (age + 1) * log_beta + at::where(log_beta == 0, at::full_like(sum, all), sum);
  }

  const int64_t lookahead_;
};

}  // namespace

ParamSpec LookaheadParam() {
  return {.name = "lookahead",
          .type = ParamType::kInt,
          .fallback = int64_t{1},
          .min = 1,
          .max = 1 << 20,
          .help = "how many of the next steps a token's worth is summed over"};
}

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadRetentionGate(const ArtefactData& artefact,
                                                                    const ModelShape& shape,
                                                                    int64_t depth) {
  auto maps = MlpGate::Read(artefact.arrays, shape, depth);
  if (!maps.ok()) return maps.status();
  return std::make_shared<RetentionGate>(*std::move(maps));
}

PolicyTraits RetentionTraits(const Params& params) {
  return {.granularity = Granularity::kHead,
          .signals = Signal::kGate,
          .columns = {"log_beta"},
          .prompt = PromptEviction::kByChunk,
          .slack = params.Int("slack"),
          .published = {.prompt = false, .recent = 0}};
}

std::shared_ptr<const Policy> MakeRetentionPolicy(const Params& params, Recipe recipe,
                                                  std::shared_ptr<const PolicyData> gate) {
  return std::make_shared<RetentionPolicy>(
      params, std::move(recipe), std::static_pointer_cast<const RetentionGate>(std::move(gate)));
}

}  // namespace epikv
