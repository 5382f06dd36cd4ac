#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "runtime/request/request.h"
#include "runtime/request/sequence_id.h"
#include "runtime/step/step_stats.h"
#include "runtime/text/chat/thinking_finder.h"

namespace epikv {

// One sequence's share of a step.
struct WorkItem {
  SequenceId id{};
  const Request* request = nullptr;
  absl::Span<const int32_t> tokens;  // to cache
  int64_t first = 0;                 // index of tokens[0]
  bool decode = false;               // false: prefill
  bool ends_prefill = false;
  bool evicts_prefill = false;  // at a multiple of the prefill chunk, or at the prompt's end
  int64_t draw = 0;             // output tokens before this step: the random draw's number
  // Where tokens are sampled: the output before this step, and what may not be drawn (see Draw).
  absl::Span<const int32_t> outputs, masked;
  absl::Span<const uint32_t> allowed;
  // The last `num_outputs` rows give an output token each: sampled, or forced where `forced` is
  // not empty (then equally long).
  int64_t num_outputs = 0;
  absl::Span<const int32_t> forced;
  std::optional<ThinkingFinder::Found> thinking;  // of the output before this step
  // Of a scratch pass (SettleOutcome::pass): its tokens are no part of the sequence. `first` counts
  // from the prompt's end.
  bool pass = false;
  bool in_prefill() const { return !decode || pass; }
  // Where the prompt ends: completions that draw their first token from its last row.
  int64_t completions = 1;
  // Not 0: the token is a guess, the ahead-th in a row, at what the item of this sequence gives
  // that has one less. See StepExecutor::Accept.
  int64_t ahead = 0;
};

struct OutputToken {
  int32_t token = 0;
  float logprob = 0;              // where the request asks for it or forces tokens
  bool greedy = false;            // of forced tokens
  std::vector<TokenLogprob> top;  // where asked for
};

struct ForwardOutcome {
  absl::Status status;  // not OK: this sequence alone has failed
  std::vector<OutputToken> outputs;
  std::vector<OutputToken> siblings;  // the first tokens of completions 1, 2 ..
  PromptLogprobs prompt;  // of the prompt tokens that these rows predict, where asked for
  std::vector<float> residual_steps;  // [layers] of a decode token, where asked for
};

struct SettleOutcome {
  absl::Status status;  // not OK: this sequence alone has failed; kPolicyFailed: by its policy
  int64_t evicted_entries = 0;
  absl::Duration eviction_time;  // of choosing and removing them
  // In decode, now and then: the share of its attention that the newest query gave to what was
  // evicted, on average over lanes and query heads.
  std::optional<double> attention_mass;
  EvictionTrace trace;  // where the request asks for it
  // Not empty: tokens to run next of the policy's scratch pass, in one item or several. The prompt
  // has not settled before that is over. One token is run as a decode step is, more as a prompt.
  std::vector<int32_t> pass;
};

struct CacheFacts {
  int64_t entries = 0, peak_entries = 0;
  int64_t rounds = 0, evicted_entries = 0;  // so far, those of what it was opened with included
  int64_t bytes = 0, peak_bytes = 0;
  ReadSlots reads;
  TierUsage tier;
  std::vector<int32_t> kept;  // where the request asks for it; ascending
};

// Runs what the engine has planned: the boundary between scheduling (without torch) and tensors.
// Used by the engine's thread alone. Who fails has a status, and all others are as they were. What
// is thrown all the same was thrown before anything had been done.
class StepExecutor {
 public:
  virtual ~StepExecutor() = default;

  // Makes room and state for a sequence whose demand has been reserved, and caches its packets, or
  // what is known of its prompt: so many tokens, and not all. `request` outlives it. prefix_bytes:
  // what cached prefixes may hold from now on.
  virtual absl::StatusOr<int64_t> Open(SequenceId id, const Request& request,
                                       int64_t prefix_bytes) = 0;

  // One forward over all items; caches their tokens and gives their outputs, in order. Nothing is
  // committed unless it returns OK. Not OK: the forward failed as a whole. Of items ahead, which
  // stand behind those that they follow, nothing is cached or given yet.
  virtual absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) = 0;

  // The guess of an item ahead in the last Forward is what came: caches it and gives its output, as
  // if a Forward had run it alone. Requires: the item before it has settled, without a round.
  virtual ForwardOutcome Accept(const WorkItem& item) = 0;

  // Whether Settle may run a round of eviction once this has been cached: false where it will not.
  // Of an item ahead: once those before it have been cached, too.
  virtual bool MayRound(const WorkItem& item) const { return true; }

  // Lets the policies observe what was cached since the last Settle (by one Forward, or by several
  // where a failed one was repeated item by item) and evicts; in order of `items`, which are those
  // or fewer.
  virtual std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) = 0;

  // Makes a sequence that goes on from where `parent` is, between two steps: lanes, columns and
  // policy state are copied. Its demand has been reserved; the peaks of both begin anew.
  virtual absl::Status Fork(SequenceId parent, SequenceId child, const Request& request) = 0;

  // What the open sequences hold has been lost: they must be closed before another is opened.
  virtual bool lost() const { return false; }

  virtual CacheFacts Facts(SequenceId id) const = 0;
  // What the sequence has cached of `tokens`, all that it was given, between two steps. Null: it is
  // not open.
  virtual std::shared_ptr<const Packet> Export(SequenceId id,
                                               absl::Span<const int32_t> tokens) const {
    return nullptr;
  }
  // SequenceCache::PackedBytes of a sequence whose policy rounds; 0 of others.
  virtual int64_t PackedBytes(SequenceId id) const { return 0; }
  virtual void Close(SequenceId id) = 0;

  // Bytes held by open sequences: entries, columns and state.
  virtual int64_t used_bytes() const = 0;
  // Bytes held by cached prefixes.
  virtual int64_t prefix_bytes() const { return 0; }
  virtual void DropPrefixes() {}
  // kv_rows_moved and kv_longest_move, kv_touched_bytes and signal_bytes, by an executor that has a
  // pool.
  virtual void AddPool(StepStats& step) const {}
  // Moves the times of the last step's parts to their own stages: kSample out of kForward, kObserve
  // out of kEvict; kAttention and kTaps stay parts of kForward.
  virtual void AddStageTimes(StepStats& step) const = 0;
};

}  // namespace epikv
