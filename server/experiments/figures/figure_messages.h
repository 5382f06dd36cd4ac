#pragma once

#include <string>

#include "epikv/v1/experiment.pb.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/sample_ratio.h"

namespace epikv {

// Figures as messages of the wire.

v1::Interval ToProto(const Interval& interval);
v1::Basis ToProto(Basis basis);
v1::SampleRatio ToProto(const SampleRatio& ratio);
v1::GuardrailReport::Verdict ToProto(Verdict verdict);
v1::Heterogeneity::Verdict VerdictOf(const Heterogeneity& found, double alpha);
v1::Effect EffectOf(const std::string& arm, const Comparison& comparison, const v1::Metric& metric);

}  // namespace epikv
