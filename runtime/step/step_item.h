#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "policies/policy.h"
#include "runtime/attention/attention.h"
#include "runtime/kv/page_index.h"
#include "runtime/kv/prefix_cache.h"
#include "runtime/kv/sequence_cache.h"
#include "runtime/kv/sequence_tier.h"
#include "runtime/model/model.h"
#include "runtime/request/draft.h"
#include "runtime/sampling/sampler.h"
#include "runtime/signals/query_moments.h"
#include "runtime/signals/signals.h"
#include "runtime/step/step_executor.h"

// What an executor knows of a sequence, and of its share of the step that runs.

namespace epikv {

inline PageIndex PagesOf(const ModelShape& shape, const ReadLimit& read, const KvFormat& format) {
  return {shape.num_layers * shape.num_kv_heads, read.rule.page, shape.key_width, format};
}

// A sequence between Open and Close.
struct OpenSequence {
  OpenSequence(KvPool& pool, SequenceId id, const Request& r, const ModelShape& shape)
      : request(r),
        cache(pool, id, r, shape),
        tap(r.tap_layers, shape.hidden_size),
        queries(shape.num_layers, r.traits.window,
                shape.num_heads * shape.key_width * ElementBytes(pool.format().model)),
        moments(r.traits.signals.Has(Signal::kQueryMoments) ? shape.num_layers : 0, shape.num_heads,
                shape.key_width, pool.device()),
        attention_rows(r.traits.attention_layers, shape.num_kv_heads) {
    if (r.steering.has_value()) steering.emplace(*r.steering);
    if (r.read.tokens > 0) pages.emplace(PagesOf(shape, r.read, pool.format()));
  }
  // Goes on from where another is, between two steps; the policy's state is the caller's to clone.
  OpenSequence(SequenceId id, const Request& r, const OpenSequence& from)
      : request(r),
        cache(id, r, from.cache, from.cache.capacities()),
        tap(from.tap),
        queries(from.queries),
        moments(from.moments.Clone()),
        attention_rows(from.attention_rows),
        steering(from.steering),
        tapped(from.tapped),
        prefix(from.prefix) {
    if (from.pages.has_value()) pages.emplace(*from.pages);
    if (from.tier != nullptr) tier = from.tier->Clone();
    policy = from.policy;
    cache.ForgetPeak();
  }
  // The same in lanes of other capacities, of a sequence in its prompt that measures nothing and
  // has no tier: as if it had come as far itself.
  OpenSequence(SequenceId id, const Request& r, const OpenSequence& from,
               std::vector<int64_t> capacity, const ModelShape& shape)
      : request(r),
        cache(id, r, from.cache, std::move(capacity)),
        tap(from.tap),
        queries(from.queries),
        moments(from.moments.Clone()),
        attention_rows(r.traits.attention_layers, shape.num_kv_heads),
        tapped(from.tapped),
        rounds(from.rounds),
        evicted_entries(from.evicted_entries),
        asked(from.asked) {
    if (r.read.tokens > 0) pages.emplace(*from.pages);
  }

  // Goes on from where another is without what lies in `left_out`, and measures nothing.
  OpenSequence(SequenceId id, const Request& r, const OpenSequence& from,
               const SequenceCache::Slots& left_out, const ModelShape& shape)
      : request(r),
        cache(id, r, from.cache, left_out),
        tap({}, shape.hidden_size),
        queries(/*num_layers=*/0, /*capacity=*/0, /*row_bytes=*/0),
        moments(/*num_layers=*/0, shape.num_heads, shape.key_width, at::kCPU),
        attention_rows({}, shape.num_kv_heads) {}

  // Of an item that is so far ahead.
  LaneRowsOfStep& RowsOf(int64_t ahead) {
    while (std::ssize(rows_ahead) < ahead) {
      rows_ahead.emplace_back(request.traits.attention_layers, cache.num_kv_heads());
    }
    return ahead == 0 ? attention_rows : rows_ahead[ahead - 1];
  }

  // Of attention's rows and logits, kept from step to step, and of keys that were turned.
  int64_t signal_bytes() const {
    int64_t bytes = attention_rows.bytes() + (turned.defined() ? turned.numel() : 0);
    for (const LaneRowsOfStep& rows : rows_ahead) bytes += rows.bytes();
    for (const std::vector<float>& logits : decode_logits) {
      bytes += static_cast<int64_t>(logits.capacity() * sizeof(float));
    }
    return bytes;
  }
  // Of an item that is so far ahead.
  std::vector<float>& LogitsOf(int64_t ahead) {
    decode_logits.reserve(kMostGuesses + 1);  // they are pointed to
    if (std::ssize(decode_logits) <= ahead) decode_logits.resize(ahead + 1);
    return decode_logits[ahead];
  }

  const Request& request;
  SequenceCache cache;
  ResidualTap tap;
  QueryWindow queries;
  QueryMomentsTap moments;
  // Of the tokens that the last step cached, where the policy declared them.
  std::vector<float> logit_entropy;      // [count]
  std::vector<float> residual_distance;  // [layers, count]
  std::vector<float> gate;               // [layers, count, kv_heads, numbers]
  std::vector<float> final_hidden;       // [count, hidden]
  LaneRowsOfStep attention_rows;
  std::vector<LaneRowsOfStep> rows_ahead;  // the same of items ahead, until they are accepted
  std::optional<SteeringState> steering;
  // Of Request::read. Counted with a step's forward, whatever becomes of it.
  std::optional<PageIndex> pages;
  ReadSlots reads;
  std::unique_ptr<SequenceTier> tier;  // of Request::tier, or null
  int64_t doubted_steps = 0;           // of which a second run was kept: TierOptions::doubt
  // Scratch of the layer that runs, kept from step to step.
  std::vector<std::vector<float>> decode_logits;  // AttentionItem::logits, by WorkItem::ahead
  // PositionMode::kCache: keys at their ranks. [rows, bytes of one], uint8
  at::Tensor turned;
  // On the device path: the residuals that the next step's are compared with, which `tap` has on
  // the CPU; undefined: they are still there. fp32 [taps, hidden_size], never written.
  at::Tensor tapped;
  std::shared_ptr<const Policy> policy;  // the request's, or a guard around it; null: see there
  std::unique_ptr<PolicyState> state;    // null: the policy keeps none
  int64_t rounds = 0, evicted_entries = 0;
  bool thinking_ended = false;  // with a token that is cached
  // What its policy has asked of the request, on which what it does may depend.
  struct Asked {
    bool seed = false, prompt_tokens = false;
  };
  Asked asked;
  std::vector<int64_t> keep_at;  // where its prompt is kept as it was evicted: EvictedPrefixes
  PrefixCache::Kept prefix;
  int64_t peak_entries = 0, peak_bytes = 0;  // with what a scratch pass had; 0: there was none
  int32_t first_output = 0;                  // once the prompt is cached
  std::optional<int64_t> mass_at;  // index of the token that was newest when it was measured last
};

// The copy of a prompt's cache over which tokens are told ahead.
struct Draft {
  Draft(SequenceId id, const Request& r, const OpenSequence& from,
        const SequenceCache::Slots& left_out, const ModelShape& shape)
      : request(DraftRequest(r)), sequence(id, request, from, left_out, shape) {}

  const Request request;
  OpenSequence sequence;
};

// A policy's scratch pass over a prompt, while it runs.
struct RunningPass {
  // Of what runs: the newest tokens that were told ahead, or the last step of a segment.
  QueryWindow queries;
  std::vector<float> gate;       // of that step
  std::unique_ptr<Draft> draft;  // null: it runs behind the prompt itself
  // Tokens told ahead: the next one, and how many there are to come with it.
  int32_t next = 0;
  int64_t left = 0;
  std::vector<std::vector<int32_t>> segments;
  size_t segment = 0;  // that runs
};

// A work item while its forward runs.
struct StepItem {
  const WorkItem* work = nullptr;
  OpenSequence* sequence = nullptr;  // whose cache its tokens go to
  SignalSet signals;                 // that are measured
  QueryWindow* queries = nullptr;    // where its queries go, if wanted
  RunningPass* pass = nullptr;       // of a scratch pass
  int64_t row = 0;                   // its first row in the forward
  std::vector<int64_t> slots;        // [tables] that its first token takes
  std::vector<int64_t> positions;    // [tables] RoPE position of its first token
  std::vector<int64_t> used;         // [layers x kv_heads] slots that attention reads
  // SequenceCache::PositionsAfter, once a layer has asked. [tables][slots]
  std::vector<std::vector<int64_t>> slot_positions;
  std::vector<LanePositions> lane_positions;  // of the layer that runs, if its window hides any
  // AttentionItem::reads of the layer that runs. [kv_heads], or empty
  std::vector<std::vector<SlotRange>> reads;
  // PositionMode::kCache: keys are turned at every step, into scratch for one layer.
  std::vector<char*> turned_keys;  // [kv_heads]: each lane's in there
  at::Tensor logits;               // of its last rows, [at least num_outputs, vocab]
  // In place of them, of a device: what it found of each row that gives an output. See RowNeedOf.
  struct Found {
    float highest = 0;      // of the row
    int32_t likeliest = 0;  // whose that is
    int32_t token = 0;      // what Sample gives
  };
  std::vector<Found> found;
  // What they became, in order: num_outputs tokens, then those of completions 1, 2 ..
  std::vector<absl::StatusOr<OutputToken>> outputs;
  std::exception_ptr sampling_failed;
  at::Tensor entropies;               // Signals::logit_entropy, if wanted. [num_rows]
  std::vector<at::Tensor> residuals;  // [num_rows, hidden] after each block so far, if wanted
  at::Tensor distances;               // [layers, num_rows], once the last block has run, if wanted
  std::vector<at::Tensor> gates;  // [num_rows, kv_heads x numbers] of each layer so far, if wanted
  at::Tensor gate;                // of all, [layers, num_rows, kv_heads x numbers], on the host
  at::Tensor final_hidden;        // [num_rows, hidden], fp32, if wanted
  at::Tensor log_sum_exp;         // of the layer that runs
  at::Tensor tapped;              // OpenSequence::tapped once it is committed
  // Residuals of the last row after every block, fp32 [layers, hidden]; empty: not kept.
  std::vector<float> last_residuals;
  bool measures_mass = false;
  bool looks_again = false;  // its first run left doubts (TierOptions::doubt)

  int64_t num_rows() const { return static_cast<int64_t>(work->tokens.size()); }
  bool wants_attention_rows() const {
    return wants(work->decode ? Signal::kAttentionRow : Signal::kPromptAttention);
  }
  bool wants_attention_rows(int64_t layer) const {
    return wants_attention_rows() && sequence->attention_rows.Has(layer);
  }
  bool wants(Signal signal) const { return signals.Has(signal); }
  bool wants_prompt_logprobs() const {
    return !work->decode && !work->pass && sequence->request.output.prompt_logprobs;
  }
  // Rows whose logits the host reads, at least.
  int64_t num_read_logits() const { return work->pass ? 1 : work->num_outputs; }
  int64_t num_logits() const {
    const bool all = wants(Signal::kLogitEntropy) || wants_prompt_logprobs();
    return all ? num_rows() : num_read_logits();
  }
  bool wants_queries() const { return wants(Signal::kQueries); }
  bool turns_keys() const { return sequence->request.positions == PositionMode::kCache; }
  const std::vector<int64_t>& PositionsOf(int64_t table) {
    slot_positions.resize(sequence->cache.num_tables());
    std::vector<int64_t>& of_slots = slot_positions[table];
    if (of_slots.empty()) {
      of_slots = sequence->cache.PositionsAfter(table, work->ahead + num_rows());
    }
    return of_slots;
  }
};

// Says where in its sequence's cache the item's tokens go, and what they attend to. Throws where
// they do not fit.
void Place(StepItem& item, const ModelShape& shape, int64_t context_length);

// What its outputs need of its rows of logits.
RowNeed RowNeedOf(const StepItem& item);

bool WantsGate(absl::Span<const StepItem> items);

// Lets the gates of items that want one read a layer's attention input [rows of the forward,
// hidden]. together: each gate reads all rows, whosesoever they are.
void TakeGates(absl::Span<StepItem> items, const at::Tensor& input, int64_t layer, bool together);

// Signals::final_hidden of an item, of the residual after the last block [rows of the forward,
// hidden]. fp32 [num_rows, hidden], where the residual is.
at::Tensor TakeFinalHidden(const StepItem& item, const at::Tensor& residual, const Model& model);

// The residual entering the first block, with the rows of soft tokens in place of what was looked
// up for them. It is `residual` itself, never written, where there are none.
at::Tensor WithSoftTokens(absl::Span<const StepItem> items, const at::Tensor& residual);

// The residual entering block `layer`, with the vector of each decode item that is steered there
// added to its row. It is `residual` itself, never written, where none is.
at::Tensor Steered(absl::Span<const StepItem> items, const at::Tensor& residual, int64_t layer);

// Signals::logit_entropy of rows of logits [n, vocab]. [n]
at::Tensor EntropiesOf(const at::Tensor& logits);

// Signals::residual_distance of the residuals after every block, [n, hidden] each. fp32 [layers, n]
at::Tensor DistancesOf(const std::vector<at::Tensor>& residuals);

}  // namespace epikv
