#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "policies/aged_policy.h"
#include "policies/frozen_policy.h"
#include "policies/spec.h"

// A linear probe of the residual stream after one block, fitted beforehand to say how much
// attention a token will get from tokens far behind it. One score at birth, as the rest of the
// family; or, `aged`, a read-out for each of several distances, of which the one counts that the
// token's age has come to: what the next tokens look at stays as long as they do.

namespace epikv {
namespace {

const ParamSpec kEpikvProbeParams[] = {
    {.name = "aged",
     .type = ParamType::kBool,
     .fallback = false,
     .help = "whether a token's score is of the attention from its own age on, which its artefact "
             "has to have, and not of that from afar"},
    SlackParam(0),
};

// What a token will be worth from an age on: bias + weights . residual.
struct ReadOut {
  float bias = 0;
  std::vector<float> weights;  // [hidden_size]
};

struct Probe final : public PolicyData {
  int64_t layer = 0;
  std::vector<float> weights;  // [hidden_size]
  // Empty: the artefact has none.
  std::vector<int64_t> ages;  // in tokens, ascending
  std::vector<ReadOut> by_age;
};

bool IsFinite(const nlohmann::json& x) { return x.is_number() && std::isfinite(x.get<float>()); }

absl::StatusOr<std::vector<float>> ReadWeights(const nlohmann::json& of, const ModelShape& shape) {
  const nlohmann::json weights = of.value("weights", nlohmann::json());
  if (!weights.is_array() || static_cast<int64_t>(weights.size()) != shape.hidden_size ||
      !std::all_of(weights.begin(), weights.end(), IsFinite)) {
    return absl::InvalidArgumentError(
        absl::StrCat("weights must be finite numbers [", shape.hidden_size, "]"));
  }
  return weights.get<std::vector<float>>();
}

absl::Status ReadAges(const nlohmann::json& by_age, const ModelShape& shape, Probe& probe) {
  if (!by_age.is_array()) return absl::InvalidArgumentError("by_age must be a list");
  for (const nlohmann::json& entry : by_age) {
    if (!entry.is_object()) return absl::InvalidArgumentError("by_age must be of objects");
    const nlohmann::json age = entry.value("age", nlohmann::json());
    const int64_t least = probe.ages.empty() ? 1 : probe.ages.back() + 1;
    if (!age.is_number_integer() || age < least || age > Ages::kOldest) {
      return absl::InvalidArgumentError(
          absl::StrCat("by_age must be of ages that ascend, from 1 to ", Ages::kOldest));
    }
    const nlohmann::json bias = entry.value("bias", nlohmann::json());
    if (!IsFinite(bias)) return absl::InvalidArgumentError("by_age.bias must be a finite number");
    absl::StatusOr<std::vector<float>> weights = ReadWeights(entry, shape);
    if (!weights.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("by_age.", weights.status().message()));
    }
    probe.ages.push_back(age.get<int64_t>());
    probe.by_age.push_back({.bias = bias.get<float>(), .weights = *std::move(weights)});
  }
  return absl::OkStatus();
}

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
  absl::StatusOr<std::vector<float>> weights = ReadWeights(data, shape);
  if (!weights.ok()) return weights.status();
  probe->weights = *std::move(weights);
  if (data.contains("by_age")) {
    if (absl::Status read = ReadAges(data["by_age"], shape, *probe); !read.ok()) return read;
  }
  return probe;
}

// Null: there is no artefact, and nobody can use the policy.
std::shared_ptr<const Probe> ProbeOf(const ModelShape& shape) {
  const auto found = shape.artefacts.find("epikv_probe");
  return found == shape.artefacts.end() ? nullptr
                                        : std::static_pointer_cast<const Probe>(found->second);
}

double Dot(absl::Span<const float> a, absl::Span<const float> b) {
  double dot = 0;
  for (size_t c = 0; c < a.size(); ++c) dot += double{a[c]} * b[c];
  return dot;
}

// rms(h), by which h is divided, as blocks read the stream: its scale grows from token to token and
// block to block.
double ScaleOf(absl::Span<const float> residual) {
  constexpr double kEpsilon = 1e-6;
  const double squares = Dot(residual, residual);
  return std::sqrt(squares / static_cast<double>(residual.size()) + kEpsilon);
}

FrozenPolicy::Scorer EpikvProbeScorer(const ModelShape& shape) {
  return [probe = ProbeOf(shape)](const SequenceStep& step) {
    const absl::Span<const float> residual = step.signals.residual[0];
    return static_cast<float>(Dot(probe->weights, residual) / ScaleOf(residual));
  };
}

AgedPolicy::Scorer AgedProbeScorer(const ModelShape& shape) {
  return [probe = ProbeOf(shape)](const SequenceStep& step, absl::Span<float> worth) {
    const absl::Span<const float> residual = step.signals.residual[0];
    const double scale = ScaleOf(residual);
    for (size_t i = 0; i < worth.size(); ++i) {
      const ReadOut& of = probe->by_age[i];
      worth[i] = static_cast<float>(of.bias + Dot(of.weights, residual) / scale);
    }
  };
}

absl::Status CompleteEpikvProbe(Params& params, const ModelShape& shape) {
  const std::shared_ptr<const Probe> probe = ProbeOf(shape);
  if (!params.Bool("aged") || probe == nullptr || !probe->ages.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "aged: the artefact says nothing of ages; make it anew (epikv calibrate epikv_probe)");
}

PolicyTraits EpikvProbeTraits(const Params& params, const ModelShape& shape) {
  const std::shared_ptr<const Probe> probe = ProbeOf(shape);
  return {
      .signals = Signal::kResidual,
      .residual_layers = {probe == nullptr ? 0 : probe->layer},
      .slack = params.Int("slack"),
      .state_bytes_per_token = params.Bool("aged") && probe != nullptr
                                   ? AgedPolicy::StateBytesPerToken(std::ssize(probe->ages))
                                   : FrozenPolicy::kStateBytesPerToken,
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
    .complete = &CompleteEpikvProbe,
    .traits = &EpikvProbeTraits,
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      if (params.Bool("aged")) {
        return std::make_shared<AgedPolicy>(Ages(ProbeOf(shape)->ages), AgedProbeScorer(shape));
      }
      return std::make_shared<FrozenPolicy>(EpikvProbeScorer(shape));
    },
};

}  // namespace epikv
