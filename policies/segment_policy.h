#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "policies/frozen_policy.h"
#include "policies/policy.h"
#include "policies/residual_layers.h"
#include "policies/spec.h"

// Policies that cut what is cached, oldest first, into segments of so many tokens, class each as
// reasoning, execution or transition, and keep only so many tokens of each class.

namespace epikv {

ParamSpec SegmentParam();  // `segment`: tokens
// `retain_r`, `retain_e`, `retain_t`: tokens of a segment of reasoning, execution, transition
ParamSpec RetainReasoningParam();
ParamSpec RetainExecutionParam();
ParamSpec RetainTransitionParam();
ParamSpec ClassifierLayersParam();  // `classifier_layers`: of attention, the last ones

enum class SegmentType { kReasoning, kExecution, kTransition };

// The tokens older than the recent window, in segments by birth order; the last may be shorter.
class Segments {
 public:
  Segments(const CacheView& cache, int64_t size);

  // Of each segment, oldest first: the slots of its tokens, oldest first.
  const std::vector<std::vector<int32_t>>& slots() const { return slots_; }

  // Of each segment: the mean of what its tokens have, and the entropy (in nats) of how that is
  // shared out among them.
  std::vector<double> Means(absl::Span<const float> by_slot) const;
  std::vector<double> Entropies(absl::Span<const float> by_slot) const;

 private:
  std::vector<std::vector<int32_t>> slots_;
};

// Types by two bounds on a statistic: at or beyond the first a segment is reasoning, else at or
// beyond the second execution.
enum class Reasoning { kLow, kHigh };
std::vector<SegmentType> TypesByBounds(const std::vector<double>& statistic, Reasoning reasoning,
                                       double low, double high);

// The bounds are the statistics at n / 3 and 2n / 3 in ascending order. One segment is reasoning.
// An error if one of them is NaN.
absl::StatusOr<std::vector<SegmentType>> TypesByTertiles(const std::vector<double>& statistic,
                                                         Reasoning reasoning);

// Column 0 ranks the tokens of a segment: higher stays. Segments are served from the oldest to the
// newest, until the budget is used up; often it is not, and the cache ends below it.
class SegmentPolicy : public Policy {
 public:
  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const final;

 protected:
  explicit SegmentPolicy(const Params& params);

 private:
  virtual absl::StatusOr<std::vector<SegmentType>> Classify(const EvictionTask& task,
                                                            const Segments& segments) const = 0;

  Eviction EvictOne(const EvictionTask& task) const;
  // Trades tokens that are kept, the lowest scores first, for ones that are not, the largest values
  // first. keep: by slot.
  absl::Status SwapInReserve(const CacheView& cache, absl::Span<const float> score,
                             const Segments& segments, std::vector<bool>& keep) const;

  const int64_t segment_, retain_r_, retain_e_, retain_t_;
  const int64_t reserve_;
  const std::string reserve_by_;
};

// PolicyTraits::attention_layers of `classifier_layers`.
std::vector<int64_t> ClassifierLayers(const Params& params, const ModelShape& shape);

// Writes what the newest query gave each token in the last `num_layers` layers, on average, to a
// column.
void ObserveLastLayers(SequenceStep& step, int64_t num_layers, int64_t column);

// Column 0 is EpiKV-Flat's score; of the prompt: -inf.
class FlatSegmentPolicy : public SegmentPolicy {
 public:
  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override;
  void Observe(absl::Span<SequenceStep> steps) const override;

 protected:
  explicit FlatSegmentPolicy(const Params& params)
      : SegmentPolicy(params), fresh_(FlatScorer(params)) {}

 private:
  const FrozenPolicy::Scorer fresh_;
};

}  // namespace epikv
