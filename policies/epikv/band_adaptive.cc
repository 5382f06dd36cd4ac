#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "policies/epikv/flat_score.h"
#include "policies/frozen_policy.h"
#include "policies/residual_layers.h"

namespace epikv {
namespace {

// A published block of 32 is at (block + 1) / 32 of the depth: bands 7 to 13 and 18 to 25.
struct BandEnd {
  absl::string_view param;
  double depth;
};
constexpr BandEnd kAFirst{"a_first", 8.0 / 32}, kALast{"a_last", 14.0 / 32},
    kBFirst{"b_first", 19.0 / 32}, kBLast{"b_last", 26.0 / 32};

ParamSpec BandParam(const BandEnd& end, absl::string_view help) {
  return {.name = end.param, .type = ParamType::kInt, .max = 4095, .help = help};
}

const ParamSpec kEpikvBandAdaptiveParams[] = {
    BandParam(kAFirst,
              "first block (0-based) of the band whose large steps mark a token as worth "
              "keeping. Default: at 0.25 of the model's depth"),
    BandParam(kALast, "last block of that band. Default: at 0.438 of the depth"),
    BandParam(kBFirst,
              "first block of the band whose large steps mark a token as worth dropping. "
              "Default: at 0.594 of the depth"),
    BandParam(kBLast, "last block of that band. Default: at 0.813 of the depth"),
    {.name = "weight_a",
     .type = ParamType::kFloat,
     .fallback = 1.29,
     .min = -1000,
     .max = 1000,
     .help = "of the first band's z-score"},
    {.name = "weight_b",
     .type = ParamType::kFloat,
     .fallback = 1.0,
     .min = -1000,
     .max = 1000,
     .help = "of the second band's, which is subtracted"},
    {.name = "window",
     .type = ParamType::kInt,
     .fallback = int64_t{64},
     .min = 2,
     .max = 65536,
     .help = "tokens a step is compared with"},
    SlackParam(0),
};

absl::Status EpikvBandAdaptiveComplete(Params& params, const ModelShape& shape) {
  int64_t free = 0;  // a model of few blocks must not have one in both bands
  for (const BandEnd* end : {&kAFirst, &kALast, &kBFirst, &kBLast}) {
    if (!params.Has(end->param)) {
      params.Set(end->param, std::max(free, BlockAtDepth(end->depth, shape.num_layers)));
    }
    if (absl::Status status = CheckBlock(params, end->param, shape); !status.ok()) return status;
    free = params.Int(end->param) + (end == &kALast ? 1 : 0);
  }
  for (const auto& [first, last] : {std::pair(kAFirst, kALast), std::pair(kBFirst, kBLast)}) {
    if (params.Int(first.param) > params.Int(last.param)) {
      return absl::InvalidArgumentError(
          absl::StrCat(first.param, " must not be larger than ", last.param));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> Blocks(const Params& params) {
  std::set<int64_t> blocks;
  for (const auto& [first, last] : {std::pair(kAFirst, kALast), std::pair(kBFirst, kBLast)}) {
    for (int64_t l = params.Int(first.param); l <= params.Int(last.param); ++l) blocks.insert(l);
  }
  return {blocks.begin(), blocks.end()};
}

// Mean step over the blocks of one band.
class BandMean {
 public:
  BandMean(const Params& params, const BandEnd& first, const BandEnd& last) {
    const std::vector<int64_t> blocks = Blocks(params);
    auto place = [&](const BandEnd& end) {
      return std::find(blocks.begin(), blocks.end(), params.Int(end.param)) - blocks.begin();
    };
    first_ = place(first);
    count_ = place(last) + 1 - first_;
  }

  float operator()(const SequenceStep& step) const {
    double sum = 0;
    for (float moved : step.signals.residual_step.subspan(first_, count_)) sum += moved;
    return static_cast<float>(sum / static_cast<double>(count_));
  }

 private:
  int64_t first_ = 0, count_ = 0;  // places in residual_step
};

FrozenPolicy::Scorer EpikvBandAdaptiveScorer(const Params& params) {
  const int64_t window = params.Int("window");
  return [a = BandMean(params, kAFirst, kALast), b = BandMean(params, kBFirst, kBLast),
          weight_a = params.Float("weight_a"), weight_b = params.Float("weight_b"),
          z_a = RollingZ(window), z_b = RollingZ(window)](const SequenceStep& step) mutable {
    return static_cast<float>(weight_a * z_a.Push(a(step)) - weight_b * z_b.Push(b(step)));
  };
}

PolicyTraits EpikvBandAdaptiveTraits(const Params& params, const ModelShape&) {
  return {
      .signals = Signal::kResidualStep,
      .residual_layers = Blocks(params),
      .slack = params.Int("slack"),
      .state_bytes_per_token = FrozenPolicy::kStateBytesPerToken,
      .state_bytes = static_cast<int64_t>(2 * sizeof(float)) * params.Int("window"),
      .uncalibrated = true,  // no calibration measures bands
  };
}

}  // namespace

extern constinit const PolicySpec kEpikvBandAdaptive{
    .name = "epikv_band_adaptive",
    .summary =
        "drops the tokens over which an early band of blocks moved the residual least and a late "
        "band most, against the last 64",
    .paper = "arXiv 2606.26472, Band-adaptive",
    .evidence = "golden: stevenkolawole/epiphany-kv-cache d424208 `BandAdaptiveHSEviction`",
    .params = kEpikvBandAdaptiveParams,
    .complete = &EpikvBandAdaptiveComplete,
    .traits = &EpikvBandAdaptiveTraits,
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<FrozenPolicy>(EpikvBandAdaptiveScorer(params));
    },
};

}  // namespace epikv
