#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "policies/frozen_policy.h"
#include "policies/spec.h"

// A linear probe of the residual stream after one block, fitted beforehand to say how much
// attention a token will get from tokens far behind it. One score at birth, as the rest of the
// family.

namespace epikv {
namespace {

const ParamSpec kEpikvProbeParams[] = {SlackParam(0)};

struct Probe final : public PolicyData {
  int64_t layer = 0;
  std::vector<float> weights;  // [hidden_size]
};

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadProbe(const ArtefactData& artefact,
                                                            const ModelShape& shape) {
  const nlohmann::json data = nlohmann::json::parse(artefact.json.begin(), artefact.json.end());
  if (!data.is_object()) return absl::InvalidArgumentError("must be an object");
  auto probe = std::make_shared<Probe>();
  const nlohmann::json layer = data.value("layer", nlohmann::json());
  if (!layer.is_number_integer() || layer < 0 || layer >= shape.num_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer must be a block of the model, 0 to ", shape.num_layers - 1));
  }
  probe->layer = layer.get<int64_t>();
  const nlohmann::json weights = data.value("weights", nlohmann::json());
  auto finite = [](const nlohmann::json& x) {
    return x.is_number() && std::isfinite(x.get<float>());
  };
  if (!weights.is_array() || static_cast<int64_t>(weights.size()) != shape.hidden_size ||
      !std::all_of(weights.begin(), weights.end(), finite)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights must be finite numbers [", shape.hidden_size, "]"));
  }
  probe->weights = weights.get<std::vector<float>>();
  return probe;
}

// Null: there is no artefact, and nobody can use the policy.
std::shared_ptr<const Probe> ProbeOf(const ModelShape& shape) {
  const auto found = shape.artefacts.find("epikv_probe");
  return found == shape.artefacts.end() ? nullptr
                                        : std::static_pointer_cast<const Probe>(found->second);
}

// weights . h / rms(h): as blocks read the stream, whose scale grows from token to token and block
// to block.
float ReadOut(absl::Span<const float> weights, absl::Span<const float> residual) {
  constexpr double kEpsilon = 1e-6;
  double dot = 0, squares = 0;
  for (size_t c = 0; c < residual.size(); ++c) {
    dot += double{weights[c]} * residual[c];
    squares += double{residual[c]} * residual[c];
  }
  return static_cast<float>(dot /
                            std::sqrt(squares / static_cast<double>(residual.size()) + kEpsilon));
}

FrozenPolicy::Scorer EpikvProbeScorer(const ModelShape& shape) {
  return [probe = ProbeOf(shape)](const SequenceStep& step) {
    return ReadOut(probe->weights, step.signals.residual[0]);
  };
}

PolicyTraits EpikvProbeTraits(const Params& params, const ModelShape& shape) {
  const std::shared_ptr<const Probe> probe = ProbeOf(shape);
  return {
      .signals = Signal::kResidual,
      .residual_layers = {probe == nullptr ? 0 : probe->layer},
      .slack = params.Int("slack"),
      .state_bytes_per_token = FrozenPolicy::kStateBytesPerToken,
  };
}

}  // namespace

extern constinit const PolicySpec kEpikvProbe{
    .name = "epikv_probe",
    .summary =
        "drops the tokens whose residual after one block, as a linear probe reads it, promises the "
        "least attention from far behind",
    .paper = "ours; a linear read-out in the style of EpiKV's residual-stream scores",
    .evidence = "cases: epikv_probe_test.cc",
    .params = kEpikvProbeParams,
    .read_data = &ReadProbe,
    .traits = &EpikvProbeTraits,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<FrozenPolicy>(EpikvProbeScorer(shape));
    },
};

}  // namespace epikv
