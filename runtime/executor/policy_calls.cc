#include "runtime/executor/policy_calls.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "absl/strings/str_cat.h"
#include "runtime/admission/kv_demand.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

EvictionTrace TraceOf(const std::vector<std::vector<int32_t>>& victims,
                      const std::vector<std::vector<Recalled>>& back, const SequenceCache& cache,
                      Granularity granularity) {
  EvictionTrace trace{.at_token = cache.newest()};
  for (size_t t = 0; t < victims.size(); ++t) {
    EvictionTrace::Victims of{.index = victims[t]};
    if (!back.empty()) {
      for (const Recalled& token : back[t]) of.recalled.push_back(token.index);
    }
    if (of.index.empty() && of.recalled.empty()) continue;
    const int64_t table = static_cast<int64_t>(t);
    if (granularity == Granularity::kLayer) of.layer = table;
    if (granularity == Granularity::kHead) {
      of.layer = table / cache.num_kv_heads();
      of.head = table % cache.num_kv_heads();
    }
    trace.victims.push_back(std::move(of));
  }
  return trace;
}

// The share of attention that what lies in `slots` has, on average over lanes. rows: over each
// lane's slots.
double MassOf(const SequenceCache::Slots& slots, const SequenceCache& cache,
              const LaneRowsOfStep& rows) {
  double mass = 0;
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      const absl::Span<const float> row = rows.at(layer, head);
      for (int64_t slot : slots[cache.TableOf(layer, head)]) mass += row[slot];
    }
  }
  return mass / static_cast<double>(cache.num_layers() * cache.num_kv_heads());
}

// Whether what a policy takes back lies in the tier, and has room once `slots` are evicted.
absl::Status CheckRecalled(const OpenSequence& sequence, const SequenceCache::Slots& slots,
                           const std::vector<std::vector<int32_t>>& recalled) {
  const SequenceCache& cache = sequence.cache;
  if (sequence.tier == nullptr || !sequence.request.traits.recalls) {
    return absl::InternalError("the policy takes tokens back, and there is no tier");
  }
  if (std::ssize(recalled) != cache.num_tables()) {
    return absl::InternalError(absl::StrCat("the policy takes tokens back into ", recalled.size(),
                                            " lane groups, there are ", cache.num_tables()));
  }
  for (int64_t t = 0; t < cache.num_tables(); ++t) {
    const std::set<int32_t> once(recalled[t].begin(), recalled[t].end());
    const int64_t freed = std::ssize(slots[t]) - cache.Excess(t);
    if (once.size() != recalled[t].size() || std::ssize(recalled[t]) > freed) {
      return absl::InternalError(absl::StrCat("the policy takes ", recalled[t].size(),
                                              " tokens back where ", freed, " have room"));
    }
    for (const int32_t token : once) {
      if (sequence.tier->Holds(t, token)) continue;
      return absl::InternalError(
          absl::StrCat("the policy takes token ", token, " back, which is not in the tier"));
    }
  }
  return absl::OkStatus();
}

using TokensOfTables = std::vector<std::vector<int32_t>>;

void AddTrace(const TokensOfTables& victims, const std::vector<std::vector<Recalled>>& back,
              const OpenSequence& sequence, SettleOutcome& outcome) {
  EvictionTrace trace = TraceOf(victims, back, sequence.cache, sequence.request.traits.granularity);
  outcome.trace.at_token = trace.at_token;
  std::move(trace.victims.begin(), trace.victims.end(), std::back_inserter(outcome.trace.victims));
}

// Takes what lies in `slots` out of the lanes.
void Drop(OpenSequence& sequence, const SequenceCache::Slots& slots, bool leave_hole,
          SettleOutcome& outcome) {
  const int64_t entries = sequence.cache.Evict(slots, leave_hole);
  outcome.evicted_entries += entries;
  sequence.evicted_entries += entries;
  if (entries > 0) ++sequence.rounds;
}

absl::Status InvalidSet(absl::Status status) {
  return WithReason(WithPolicyError(std::move(status), kPolicyInvalidSet), kPolicyFailed);
}

}  // namespace

absl::Status PolicyFailure(const Request& request, absl::string_view kind, absl::string_view why) {
  absl::Status status =
      absl::InternalError(absl::StrCat("policy '", request.spec->name, "' failed: ", why));
  return WithReason(WithPolicyError(std::move(status), kind), kPolicyFailed);
}

absl::Status ObserveStep(OpenSequence& sequence, const WorkItem& item, CacheView& view) {
  const PolicyTraits& traits = sequence.request.traits;
  std::vector<float> steps;
  std::vector<absl::Span<const float>> residuals;
  if (traits.signals.Has(Signal::kResidualStep)) {
    steps = sequence.tap.StepsOf(traits.residual_layers);
  }
  if (traits.signals.Has(Signal::kResidual)) {
    residuals = sequence.tap.ResidualsOf(traits.residual_layers);
  }
  SequenceStep step{.state = sequence.state.get(),
                    .cache = view,
                    .phase = item.decode ? Phase::kDecode : Phase::kPrefill,
                    .first = item.first,
                    .count = static_cast<int64_t>(item.tokens.size()),
                    .tokens = item.tokens,
                    .signals = {.residual_step = steps,
                                .residual = residuals,
                                .logit_entropy = sequence.logit_entropy,
                                .residual_distance = sequence.residual_distance,
                                .gate = sequence.gate,
                                .final_hidden = sequence.final_hidden}};
  if (traits.signals.Has(item.decode ? Signal::kAttentionRow : Signal::kPromptAttention)) {
    step.signals.attention = &sequence.attention_rows;
  }
  return AskPolicy(sequence.request, [&] { sequence.policy->Observe({&step, 1}); });
}

absl::Status CheckSegments(const Request& request,
                           const std::vector<std::vector<int32_t>>& segments, int64_t vocab_size) {
  const int64_t most = ScratchRows(request.traits.pass, request.prefill_tokens());
  auto outside = [=](int32_t token) { return token < 0 || token >= vocab_size; };
  if (segments.empty()) return PolicyFailure(request, kPolicyInvalidSet, "it has no segments");
  for (const std::vector<int32_t>& segment : segments) {
    if (std::any_of(segment.begin(), segment.end(), outside)) {
      return PolicyFailure(request, kPolicyInvalidSet, "a segment has a token that is none");
    }
    if (!segment.empty() && std::ssize(segment) <= most) continue;
    return PolicyFailure(request, kPolicyInvalidSet,
                         absl::StrCat("a segment has ", segment.size(), " tokens, at least 1 and ",
                                      "at most ", most, " are allowed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<SequenceCache::Slots> AskDraft(OpenSequence& sequence, CacheView& view) {
  const Request& request = sequence.request;
  Eviction draft;
  absl::Status asked = AskPolicy(request, [&] {
    draft = sequence.policy->Draft({.state = sequence.state.get(), .cache = view});
  });
  if (!asked.ok()) return asked;
  if (!draft.status.ok()) return PolicyFailure(request, kPolicyStatus, draft.status.message());
  absl::StatusOr<SequenceCache::Slots> slots = sequence.cache.SlotsOf(draft.victims);
  for (size_t lane = 0; slots.ok() && lane < slots->size(); ++lane) {
    const int64_t kept =
        sequence.cache.table(static_cast<int64_t>(lane)).live() - std::ssize((*slots)[lane]);
    const int64_t room = request.demand.draft[lane] - request.traits.pass.lookahead;
    if (kept > room) {
      slots = absl::InternalError(absl::StrCat("the policy's draft keeps ", kept,
                                               " tokens of a lane, which has room for ", room));
    }
  }
  if (!slots.ok()) return InvalidSet(slots.status());
  return slots;
}

absl::Status RunRound(OpenSequence& sequence, const WorkItem& item, CacheView& view,
                      const LaneRowsOfStep* mass_rows, SettleOutcome& outcome) {
  const Request& request = sequence.request;
  const absl::Time begin = SteadyNow();
  EvictionTask task{.state = sequence.state.get(), .cache = view};
  std::vector<Eviction> answers;
  absl::Status asked = AskPolicy(request, [&] { answers = sequence.policy->Evict({&task, 1}); });
  if (!asked.ok()) return asked;
  if (answers.size() != 1) {
    return InvalidSet(absl::InternalError(
        absl::StrCat("the policy gave ", answers.size(), " answers, one was asked for")));
  }
  const Eviction& eviction = answers.front();
  if (!eviction.status.ok()) {
    return PolicyFailure(request, kPolicyStatus, eviction.status.message());
  }
  const absl::StatusOr<SequenceCache::Slots> slots = sequence.cache.SlotsOf(eviction.victims);
  if (!slots.ok()) return InvalidSet(slots.status());
  const bool none =
      std::all_of(slots->begin(), slots->end(),
                  [](const std::vector<int64_t>& of_table) { return of_table.empty(); });
  if (mass_rows != nullptr && !none) {
    outcome.attention_mass = MassOf(*slots, sequence.cache, *mass_rows);
    sequence.mass_at = item.first;
  }
  const bool recalls = std::any_of(eviction.recalled.begin(), eviction.recalled.end(),
                                   [](const auto& of_table) { return !of_table.empty(); });
  if (recalls) {
    absl::Status valid = CheckRecalled(sequence, *slots, eviction.recalled);
    if (!valid.ok()) return InvalidSet(std::move(valid));
  }
  const bool leave_hole = !item.in_prefill();
  std::vector<std::vector<Recalled>> back(recalls ? slots->size() : 0);
  for (int64_t t = 0; sequence.tier != nullptr && t < std::ssize(*slots); ++t) {
    if (recalls) back[t] = sequence.tier->Take(t, eviction.recalled[t]);
    sequence.tier->Demote(sequence.cache, t, (*slots)[t]);
  }
  Drop(sequence, *slots, leave_hole, outcome);
  for (size_t t = 0; t < back.size(); ++t) {
    for (const Recalled& token : back[t]) {
      sequence.tier->PutBack(token, sequence.cache, static_cast<int64_t>(t));
    }
  }
  if (sequence.pages.has_value()) {  // a hole's page is bounded anew once it is filled
    const bool moved =
        recalls || !leave_hole || sequence.cache.SharesBudgets() ||
        std::any_of(slots->begin(), slots->end(), [](const auto& of) { return of.size() > 1; });
    if (moved) sequence.pages->Forget();
  }
  outcome.eviction_time += SteadyNow() - begin;
  if (request.output.kv_trace) AddTrace(eviction.victims, back, sequence, outcome);
  return absl::OkStatus();
}

absl::Status EvictThinking(OpenSequence& sequence, TokenSpan thinking, SettleOutcome& outcome) {
  const absl::Time begin = SteadyNow();
  const SequenceCache& cache = sequence.cache;
  SequenceCache::Slots slots(cache.num_tables());
  TokensOfTables victims(cache.num_tables());
  for (int64_t t = 0; t < cache.num_tables(); ++t) {
    const absl::Span<const int32_t> index = cache.table(t).index();
    for (int64_t slot = 0; slot < std::ssize(index); ++slot) {
      const bool thought = index[slot] >= thinking.begin && index[slot] < thinking.end;
      if (!thought || cache.protection().CoversForever(index[slot])) continue;
      slots[t].push_back(slot);
      if (sequence.request.output.kv_trace) victims[t].push_back(index[slot]);
    }
  }
  if (sequence.policy != nullptr) {
    absl::Status told = AskPolicy(sequence.request,
                                  [&] { sequence.policy->Forget(sequence.state.get(), thinking); });
    if (!told.ok()) return told;
  }
  // It does not go to the tier, nor stay there: it is to be gone.
  if (sequence.tier != nullptr) sequence.tier->Forget(thinking);
  Drop(sequence, slots, /*leave_hole=*/false, outcome);
  if (sequence.pages.has_value()) sequence.pages->Forget();
  if (sequence.request.output.kv_trace) AddTrace(victims, /*back=*/{}, sequence, outcome);
  outcome.eviction_time += SteadyNow() - begin;
  return absl::OkStatus();
}

}  // namespace epikv
