#include "server/experiments/figures/figure_messages.h"

#include <cmath>

#include "server/experiments/figures/measures.h"

namespace epikv {
namespace {

v1::Effect::Verdict VerdictOf(const Comparison& comparison, const v1::Metric& metric) {
  if (comparison.basis == Basis::kTooEarly) return v1::Effect::VERDICT_TOO_EARLY;
  const bool higher = comparison.interval.lower > 0, lower = comparison.interval.upper < 0;
  if (!higher && !lower) return v1::Effect::VERDICT_UNDECIDED;
  if (metric.direction() == v1::Metric::DIRECTION_UNSPECIFIED) return v1::Effect::VERDICT_DIFFERS;
  const bool better = higher == (BetterOf(metric) == Better::kHigher);
  return better ? v1::Effect::VERDICT_BETTER : v1::Effect::VERDICT_WORSE;
}

}  // namespace

v1::Interval ToProto(const Interval& interval) {
  v1::Interval proto;
  if (std::isfinite(interval.lower)) proto.set_lower(interval.lower);
  if (std::isfinite(interval.upper)) proto.set_upper(interval.upper);
  return proto;
}

v1::Basis ToProto(Basis basis) {
  switch (basis) {
    case Basis::kTooEarly:
      return v1::BASIS_TOO_EARLY;
    case Basis::kExact:
      return v1::BASIS_EXACT;
    case Basis::kAsymptotic:
      return v1::BASIS_ASYMPTOTIC;
  }
  return v1::BASIS_UNSPECIFIED;
}

v1::SampleRatio ToProto(const SampleRatio& ratio) {
  v1::SampleRatio proto;
  proto.set_statistic(ratio.statistic);
  proto.set_p_value(ratio.p_value);
  proto.set_alarm(ratio.alarm());
  return proto;
}

v1::GuardrailReport::Verdict ToProto(Verdict verdict) {
  switch (verdict) {
    case Verdict::kTooEarly:
      return v1::GuardrailReport::VERDICT_TOO_EARLY;
    case Verdict::kUndecided:
      return v1::GuardrailReport::VERDICT_UNDECIDED;
    case Verdict::kSafe:
      return v1::GuardrailReport::VERDICT_SAFE;
    case Verdict::kBreached:
      return v1::GuardrailReport::VERDICT_BREACHED;
  }
  return v1::GuardrailReport::VERDICT_UNSPECIFIED;
}

v1::Heterogeneity::Verdict VerdictOf(const Heterogeneity& found, double alpha) {
  if (found.num_compared < 2) return v1::Heterogeneity::VERDICT_TOO_EARLY;
  return found.p_value < alpha ? v1::Heterogeneity::VERDICT_DIFFERS
                               : v1::Heterogeneity::VERDICT_UNDECIDED;
}

v1::Effect EffectOf(const std::string& arm, const Comparison& comparison,
                    const v1::Metric& metric) {
  v1::Effect effect;
  effect.set_arm(arm);
  effect.set_basis(ToProto(comparison.basis));
  if (comparison.difference.has_value()) effect.set_difference(*comparison.difference);
  *effect.mutable_interval() = ToProto(comparison.interval);
  effect.set_p_value(comparison.p_value);
  if (comparison.lift.estimate.has_value()) effect.set_lift(*comparison.lift.estimate);
  if (comparison.lift.set != Lift::Set::kAll) {
    *effect.mutable_lift_interval() = ToProto(comparison.lift.interval);
    effect.set_lift_is_outside(comparison.lift.set == Lift::Set::kTwoRays);
  }
  effect.set_verdict(VerdictOf(comparison, metric));
  if (comparison.variance_saved.has_value()) effect.set_variance_saved(*comparison.variance_saved);
  return effect;
}

}  // namespace epikv
