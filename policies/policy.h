#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "policies/cache_view.h"
#include "policies/gate.h"
#include "policies/signals.h"
#include "policies/spec.h"

namespace epikv {

enum class Phase { kPrefill, kDecode };

// What a policy remembers of one sequence. Owned by the sequence.
class PolicyState {
 public:
  virtual ~PolicyState() = default;
  virtual std::unique_ptr<PolicyState> Clone() const = 0;
};

struct SequenceInfo {
  int64_t budget = 0;  // tokens
  Protection protection;
};

// One sequence's tokens that were just cached: indexes [first, first + count). In decode count
// is 1.
struct SequenceStep {
  PolicyState* state;  // what NewState returned
  CacheView& cache;
  Phase phase;
  int64_t first;
  int64_t count;
  absl::Span<const int32_t> tokens;  // their ids, [count]
  Signals signals;
};

// One sequence's tokens that a pass has just run: [first, first + count) of a segment, which came
// behind the prompt. `cache` is the prompt's, and CacheView::scratch_keys the segment's; `queries`
// are those of these tokens, count of them.
struct PassStep {
  PolicyState* state;  // what NewState returned
  CacheView& cache;
  int64_t segment;  // its place in Policy::PassSegments
  int64_t first, count;
  Signals signals;  // Signals::gate alone
};

struct EvictionTask {
  PolicyState* state;  // what NewState returned
  CacheView& cache;
};

// Victims by index. kToken: one list; kLayer: [layers]; kHead: [layers x kv_heads], heads inner.
// Each list holds at least the lane's excess, unprotected and cached, none twice.
struct Eviction {
  absl::Status status;
  std::vector<std::vector<int32_t>> victims;
  // Tokens of the tier that come back in their place, by index, in lists as above; or none at all.
  // Of each lane no more than what leaves it beyond its excess. Of a policy that recalls.
  std::vector<std::vector<int32_t>> recalled;
};

// Decides what to drop. Immutable and shared by all requests with the same name and parameters;
// called on the engine thread only, in batches. A policy that throws or answers an invalid set
// fails its request alone.
class Policy {
 public:
  virtual ~Policy() = default;

  // Of a policy that declares Signal::kGate, and of no other.
  virtual const Gate* gate() const { return nullptr; }

  // Null: the policy keeps no state.
  virtual std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const { return nullptr; }

  // After each step, for every sequence that cached something.
  virtual void Observe(absl::Span<SequenceStep> steps) const {}

  // Of a policy whose pass drafts: what the copy of a prompt's cache leaves out, over which tokens
  // are told ahead. Of each lane as much as it is over its budget, or its share of one, at least;
  // else as in an answer of Evict. Nothing is dropped.
  virtual Eviction Draft(const EvictionTask& task) const {
    return {.status = absl::UnimplementedError("it drafts nothing")};
  }

  // Of a policy whose pass has segments: their tokens, none of them empty.
  virtual std::vector<std::vector<int32_t>> PassSegments(absl::Span<const int32_t> prompt) const {
    return {};
  }
  // After each step of such a pass.
  virtual void ObservePass(absl::Span<PassStep> steps) const {}

  // Tokens that were evicted without being asked for, [begin, end) as far as they were cached: of a
  // policy that remembers tokens by index. Before the round of the step, if there is one.
  virtual void Forget(PolicyState* state, TokenSpan tokens) const {}

  // For the sequences over budget + slack. One Eviction for each task, in order.
  virtual std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const = 0;
};

}  // namespace epikv
