#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "policies/ages.h"
#include "policies/expected_queries.h"
#include "policies/gated_policy.h"
#include "policies/mlp_gate.h"
#include "policies/recipe.h"

// Two forecasts of the attention that a head will give a token, multiplied. The first is of the
// head's own layer's input at the token's birth: a linear read-out, fitted beforehand, for each of
// several ages, of which the token's own counts. The second is of its key: what queries such as the
// model's were on the texts of its calibration would ask of it (Expected Attention), reckoned once,
// in the first round that finds the token.

namespace epikv {
namespace {

const ParamSpec kForecastParams[] = {SlackParam(63)};

constexpr std::array<absl::string_view, 12> kSaidAtAge = {
    "worth_0", "worth_1", "worth_2", "worth_3", "worth_4",  "worth_5",
    "worth_6", "worth_7", "worth_8", "worth_9", "worth_10", "worth_11"};

// Says of each head the log of the largest attention from queries at least as much younger as each
// age; and has the moments of each layer's queries.
class ForecastGate final : public MlpGate {
 public:
  ForecastGate(std::vector<std::vector<Linear>> layers, Ages ages,
               std::vector<CacheView::QueryMoments> moments)
      : MlpGate(std::move(layers), Activation::kGelu),
        ages_(std::move(ages)),
        moments_(std::move(moments)) {}

  int64_t numbers() const override { return ages_.count(); }
  const Ages& ages() const { return ages_; }
  const CacheView::QueryMoments& moments(int64_t layer) const { return moments_[layer]; }

 private:
  const Ages ages_;
  const std::vector<CacheView::QueryMoments> moments_;
};

std::shared_ptr<const ForecastGate> GateOf(const ModelShape& shape) {
  const auto found = shape.artefacts.find("epikv_forecast");
  return found == shape.artefacts.end()
             ? nullptr
             : std::static_pointer_cast<const ForecastGate>(found->second);
}

// Of x[0], x[stride] and so on. Infinite where the largest is, NaN where one of them is.
float LogSumOfExp(const float* x, int64_t count, int64_t stride) {
  float largest = x[0], sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(x[i * stride])) return x[i * stride];
    largest = std::max(largest, x[i * stride]);
  }
  if (std::isinf(largest)) return largest;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(x[i * stride] - largest);
  return largest + std::log(sum);
}

class Forecast final : public GatedPolicy {
 public:
  Forecast(const ModelShape& shape, std::shared_ptr<const ForecastGate> gate)
      : GatedPolicy({.granularity = Granularity::kHead}, gate),
        gate_(std::move(gate)),
        ropes_(shape.ropes) {}

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override {
    CacheView& cache = lane.cache();
    const int64_t layer = lane.layer(), head = lane.head(), ages = gate_->numbers();
    AskFresh(lane);
    const absl::Span<const int32_t> index = cache.index(layer, head);
    std::vector<const float*> worth;
    for (int64_t at = 0; at < ages; ++at) worth.push_back(cache.column(at, layer, head).data());
    const absl::Span<const float> asked = cache.column(ages, layer, head);
    at::Tensor score = at::empty({std::ssize(index)}, at::kFloat);
    float* const scores = score.mutable_data_ptr<float>();
    for (size_t slot = 0; slot < index.size(); ++slot) {
      const int64_t age = cache.newest() - index[slot];
      scores[slot] =
          asked[slot] + gate_->ages().At(age, [&](int64_t at) { return worth[at][slot]; });
    }
    const std::optional<int64_t> window = cache.attention(layer).window;
    return window.has_value() ? score + queries_.LogVisible(lane, *window) : score;
  }

  // Fills the column behind the gate's for tokens that were cached since the last round, whose
  // column is 0.
  void AskFresh(Lane& lane) const {
    CacheView& cache = lane.cache();
    const absl::Span<float> asked = cache.column(gate_->numbers(), lane.layer(), lane.head());
    std::vector<int64_t> fresh;
    for (size_t slot = 0; slot < asked.size(); ++slot) {
      if (asked[slot] == 0) fresh.push_back(static_cast<int64_t>(slot));
    }
    if (fresh.empty()) return;
    const std::vector<float> answers = Ask(lane, fresh);
    const absl::Span<const int32_t> index = cache.index(lane.layer(), lane.head());
    for (size_t i = 0; i < fresh.size(); ++i) {
      // The first tokens are outliers as keys, and no such query is of them: they rank first.
      const bool outlier = index[fresh[i]] < CacheView::kFirstMeasuredQuery;
      asked[fresh[i]] = outlier ? kMost : answers[i] == 0 ? kLeast : answers[i];
    }
  }

  // Of some of a lane's tokens: the log of what the head's queries can be expected to give the key,
  // summed over those queries, times the value's norm. [fresh]
  std::vector<float> Ask(const Lane& lane, const std::vector<int64_t>& fresh) const {
    const CacheView& cache = lane.cache();
    const at::Tensor slots = at::tensor(fresh);
    const auto rows_of = [&](const at::Tensor& all) {
      return all.index_select(0, slots).to(at::kFloat);
    };
    const at::Tensor logits =
        queries_.Logits(lane, rows_of(cache.keys(lane.layer(), lane.head())),
                        gate_->moments(lane.layer()), ropes_.at(lane.layer()));
    const at::Tensor norms = rows_of(cache.values(lane.layer(), lane.head())).norm(2, -1);
    const float* const logit = logits.const_data_ptr<float>();
    const float* const norm = norms.const_data_ptr<float>();
    std::vector<float> answers(fresh.size());
    for (int64_t i = 0; i < std::ssize(answers); ++i) {
      const float expected = LogSumOfExp(logit + i, lane.group(), std::ssize(answers));
      answers[i] = std::clamp(expected + std::log(std::max(norm[i], kLeast)), -kMost, kMost);
    }
    return answers;
  }

  static constexpr float kLeast = std::numeric_limits<float>::min(), kMost = 1e30f;

  const std::shared_ptr<const ForecastGate> gate_;
  const std::vector<RopeShape> ropes_;
  const ExpectedQueries queries_;
};

// Takes the array `name`, of this shape, out of `arrays`.
absl::StatusOr<at::Tensor> TakeArray(NamedArrays& arrays, const std::string& name,
                                     const std::vector<int64_t>& shape) {
  absl::StatusOr<at::Tensor> array = ArrayOf(arrays, name, shape);
  arrays.erase(name);
  return array;
}

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadForecast(const ArtefactData& artefact,
                                                               const ModelShape& shape) {
  const nlohmann::json data = nlohmann::json::parse(artefact.json.begin(), artefact.json.end());
  if (!data.is_object()) return absl::InvalidArgumentError("must be an object");
  const nlohmann::json given = data.value("ages", nlohmann::json());
  const auto wrong = [] {
    return absl::InvalidArgumentError(absl::StrCat("ages must be 1 to ", kSaidAtAge.size(),
                                                   " numbers that ascend, from 1 to ",
                                                   Ages::kOldest));
  };
  if (!given.is_array() || given.empty() || given.size() > kSaidAtAge.size()) return wrong();
  std::vector<int64_t> ages;
  for (const nlohmann::json& age : given) {
    const int64_t least = ages.empty() ? 1 : ages.back() + 1;
    if (!age.is_number_integer() || age < least || age > Ages::kOldest) return wrong();
    ages.push_back(age.get<int64_t>());
  }
  NamedArrays arrays = artefact.arrays;
  std::vector<CacheView::QueryMoments> moments;
  const int64_t heads = shape.num_heads, width = shape.key_width;
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    const std::string name = absl::StrCat("layers.", layer, ".query_");
    absl::StatusOr<at::Tensor> mean = TakeArray(arrays, name + "mean", {heads, width});
    if (!mean.ok()) return mean.status();
    absl::StatusOr<at::Tensor> spread =
        TakeArray(arrays, name + "covariance", {heads, width, width});
    if (!spread.ok()) return spread.status();
    moments.push_back({.mean = *std::move(mean), .covariance = *std::move(spread)});
  }
  auto maps = MlpGate::Read(arrays, shape, 1, std::ssize(ages));
  if (!maps.ok()) return maps.status();
  return std::make_shared<ForecastGate>(*std::move(maps), Ages(ages), std::move(moments));
}

PolicyTraits ForecastTraits(const Params& params, const ModelShape& shape) {
  const std::shared_ptr<const ForecastGate> gate = GateOf(shape);
  const int64_t ages = gate == nullptr ? 1 : gate->numbers();
  PolicyTraits traits{.granularity = Granularity::kHead,
                      .signals = Signal::kGate | Signal::kKeys | Signal::kValues,
                      .gate_numbers = ages,
                      .columns = {kSaidAtAge.begin(), kSaidAtAge.begin() + ages},
                      .prompt = PromptEviction::kByChunk,
                      .slack = params.Int("slack"),
                      .published = {.sinks = 4}};
  traits.columns.emplace_back("asked");
  return traits;
}

}  // namespace

extern constinit const PolicySpec kEpikvForecast{
    .name = "epikv_forecast",
    .summary =
        "drops the tokens of which least is foretold: by what a read-out of their layer's input "
        "says of their age, and by what queries such as the model's are would ask of their keys",
    .paper = "ours; read-outs by age as in epikv_probe, queries as in expected_attention",
    .evidence = "cases: forecast_test.cc",
    .params = kForecastParams,
    .scores = true,
    .read_data = &ReadForecast,
    .traits = &ForecastTraits,
    .make = [](const Params&, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<Forecast>(shape, GateOf(shape));
    },
};

}  // namespace epikv
