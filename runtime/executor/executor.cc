#include "runtime/executor/executor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "policies/guarded_policy.h"
#include "policies/loops.h"
#include "policies/policy.h"
#include "runtime/base/reason.h"
#include "runtime/base/require.h"
#include "runtime/executor/outputs.h"
#include "runtime/executor/policy_calls.h"
#include "runtime/executor/policy_view.h"
#include "runtime/kv/packet_rows.h"
#include "runtime/model/model_contract.h"
#include "runtime/model/model_shape.h"
#include "runtime/ranks/ranks.h"
#include "runtime/step/stage_timer.h"
#include "runtime/step/step_item.h"

namespace epikv {
namespace {

std::vector<float> Floats(const at::Tensor& tensor) {
  const at::Tensor rows = tensor.contiguous();
  return {rows.const_data_ptr<float>(), rows.const_data_ptr<float>() + rows.numel()};
}

// TorchScript's tracebacks end with what went wrong; CUDA's errors begin with it.
std::string WhyItFailed(const std::exception& e) {
  const auto* const error = dynamic_cast<const c10::Error*>(&e);
  const absl::string_view what = error == nullptr ? e.what() : error->what_without_backtrace();
  return absl::StartsWith(what, "CUDA") ? std::string(what.substr(0, what.find('\n')))
                                        : LastLine(what);
}

const absl::Status& NoMemory() {
  static const auto& status = *new absl::Status(absl::InternalError("out of memory"));
  return status;
}

// The pool's name for the draft of a sequence: one that no sequence has, nor a cached prefix, whose
// names count down from -1.
SequenceId DraftOf(SequenceId id) {
  return SequenceId{std::numeric_limits<int64_t>::min() + static_cast<int64_t>(id)};
}

// Of the last row of logits.
int32_t Likeliest(const at::Tensor& logits) {
  return static_cast<int32_t>(logits[logits.size(0) - 1].argmax().item<int64_t>());
}

// Commits a step of a scratch pass: rows behind those in use, but of a draft, whose tokens they
// are.
void FinishPassStep(StepItem& item) {
  RunningPass& pass = *item.pass;
  SequenceCache& cache = item.sequence->cache;
  if (pass.draft != nullptr) {
    cache.Append(cache.next(), item.num_rows());
  } else {
    cache.SetScratch(cache.scratch() + item.num_rows());
  }
  if (!pass.segments.empty()) pass.queries.Clear();
  pass.queries.Commit(item.num_rows());
  if (item.wants(Signal::kGate)) pass.gate = Floats(item.gate);
  pass.next = Likeliest(item.logits);
}

// Whether its next token is so uncertain that it is to attend to the tier, where something lies.
bool InDoubt(const StepItem& item) {
  const OpenSequence& sequence = *item.sequence;
  const double doubt = sequence.request.tier.doubt;
  if (doubt == 0 || !item.work->decode || item.pass != nullptr || sequence.tier == nullptr ||
      sequence.tier->empty()) {
    return false;
  }
  const auto vocab = static_cast<size_t>(item.logits.size(1));
  return Entropy({item.logits.const_data_ptr<float>(), vocab}) > doubt;
}

// Bytes and entries that a pass holds beside its sequence's own.
int64_t EntriesOf(const RunningPass& pass, const OpenSequence& sequence) {
  return pass.draft != nullptr ? pass.draft->sequence.cache.entries()
                               : sequence.cache.scratch_entries();
}
int64_t BytesOfPass(const RunningPass& pass, const OpenSequence& sequence) {
  return pass.queries.bytes() + (pass.draft != nullptr ? pass.draft->sequence.cache.bytes()
                                                       : sequence.cache.scratch_bytes());
}

// The tokens are cached.
void FollowSteering(absl::Span<const int32_t> tokens, OpenSequence& sequence) {
  if (!sequence.steering.has_value()) return;
  for (const int32_t token : tokens) sequence.steering->Add(token);
}

void NotePeakOf(const RunningPass& pass, OpenSequence& sequence) {
  const SequenceCache& cache = sequence.cache;
  sequence.peak_entries =
      std::max(sequence.peak_entries, cache.entries() + EntriesOf(pass, sequence));
  sequence.peak_bytes = std::max(sequence.peak_bytes, cache.bytes() + BytesOfPass(pass, sequence));
}

// Whether a round is due though lanes are within their budgets.
bool UnaskedRound(const WorkItem& item, const PolicyTraits& traits) {
  if (traits.rounds_every == 0) return false;
  const int64_t cached = item.first + std::ssize(item.tokens);
  return item.decode ? cached % traits.rounds_every == 0 : item.ends_prefill;
}

// A sequence of ours failed, which none of the others need know. Throws nothing.
absl::Status OwnFailure(absl::string_view what, const std::exception& e) {
  try {
    return absl::InternalError(absl::StrCat(what, ": ", WhyItFailed(e)));
  } catch (const std::exception&) {
    return NoMemory();
  }
}

}  // namespace

Executor::Executor(std::unique_ptr<Model> model, ExecutorOptions options)
    : model_(std::move(model)),
      options_(std::move(options)),
      shape_(ShapeOf(model_->manifest())),
      output_grams_(OutputGrams(*model_)),
      scratch_(options_.scratch_bytes),
      pool_(options_.pool_rows, shape_.key_width, shape_.value_width,
            {model_->manifest().dtype, options_.kv_dtype},
            {.device = model_->device(), .by_gather = options_.device_path}),
      prefixes_(pool_, shape_.num_layers * shape_.num_kv_heads, options_.prefix_block_tokens,
                shape_.num_layers * shape_.hidden_size),
      evicted_(pool_, options_.prefill_chunk_tokens),
      mass_rows_({}, shape_.num_kv_heads) {
  NoMemory();  // made while there is some
  const Manifest& manifest = model_->manifest();
  for (const Rope& rope : manifest.ropes) ropes_.emplace_back(rope, manifest.context_length);
  if (options_.device_path) {
    device_ = std::make_unique<DeviceForward>(*model_, shape_, ropes_, pool_, mass_rows_,
                                              options_.recorder, options_.head_tokens);
  } else {
    const CpuForwardOptions cpu{.decode_kernel = options_.decode_kernel,
                                .prefill_kernel = options_.prefill_kernel,
                                .deterministic = options_.deterministic};
    cpu_ = std::make_unique<CpuForward>(*model_, shape_, ropes_, pool_, cpu, mass_rows_, times_);
  }
}

Executor::~Executor() = default;

absl::StatusOr<int64_t> Executor::Open(SequenceId id, const Request& request,
                                       int64_t prefix_bytes) {
  constexpr absl::string_view kWhat = "the request could not be started";
  try {
    if (pool_.lost() && open_.empty()) {
      DropPrefixes();
      pool_.StartAnew();
    }
    std::vector<PrefixCache::Block> blocks = prefixes_.Match(request);  // now the last to go
    evicted_.Match(request);                                            // it, too
    LimitPrefixes(prefix_bytes);
    const EvictedPrefixes::Found found = evicted_.Match(request);
    auto sequence = GoOnFromEvicted(id, request, found);
    if (sequence != nullptr) {
      sequence->keep_at = evicted_.PlacesOf(request);
      open_.emplace(id, std::move(sequence));
      return found.tokens;
    }
    std::erase_if(blocks, [this](PrefixCache::Block block) { return !prefixes_.Contains(block); });
    sequence = std::make_unique<OpenSequence>(pool_, id, request, shape_);
    if (options_.prefix_block_tokens > 0) sequence->keep_at = evicted_.PlacesOf(request);
    if (request.tier.tokens > 0) {
      sequence->tier = std::make_unique<SequenceTier>(
          sequence->cache.layout(), shape_, TierFormat{pool_.format(), request.tier.dtype},
          request.tier.tokens, /*fetches=*/request.tier.fetch > 0, options_.open_tier);
    }
    sequence->policy = request.policy;
    if (request.traits.recalls) {
      sequence->policy =
          GuardedPolicy(request.policy, request.traits.granularity, *request.tier.guard);
    }
    if (request.traits.evicts) {
      absl::Status asked = AskPolicy(request, [&] {
        sequence->state = sequence->policy->NewState(
            {.budget = request.budget, .protection = request.protection});
      });
      if (!asked.ok()) return asked;
    }
    const absl::StatusOr<int64_t> cached =
        request.packets.empty() ? LoadPrefix(*sequence, blocks) : LoadPackets(*sequence);
    if (cached.ok()) open_.emplace(id, std::move(sequence));
    return cached;
  } catch (const std::exception& e) {
    return OwnFailure(kWhat, e);
  }
}

// What lies within its prompt as it was before any round goes to plain prefixes; half of the room
// is theirs in any case. Requests at idle change nothing.
void Executor::LimitPrefixes(int64_t bytes) {
  prefix_limit_ = bytes;
  evicted_.Limit(std::max(bytes / 2, bytes - prefixes_.bytes()));
  prefixes_.Limit(bytes - evicted_.bytes());
}

std::unique_ptr<OpenSequence> Executor::GoOnFromEvicted(SequenceId id, const Request& request,
                                                        const EvictedPrefixes::Found& found) const {
  if (found.sequence == nullptr) return nullptr;
  try {
    auto sequence = std::make_unique<OpenSequence>(id, request, *found.sequence,
                                                   request.demand.prefill, shape_);
    sequence->policy = request.policy;
    if (found.sequence->state == nullptr) return sequence;
    const absl::Status asked =
        AskPolicy(request, [&] { sequence->state = found.sequence->state->Clone(); });
    return asked.ok() ? std::move(sequence) : nullptr;
  } catch (const std::exception&) {  // of memory
    return nullptr;
  }
}

// One for which there is no memory is not kept: the request itself has lost nothing.
void Executor::KeepEvicted(OpenSequence& sequence, const WorkItem& item) {
  const int64_t cached = item.first + std::ssize(item.tokens);
  if (item.decode || !item.evicts_prefill ||
      std::find(sequence.keep_at.begin(), sequence.keep_at.end(), cached) ==
          sequence.keep_at.end()) {
    return;
  }
  try {
    const int64_t bytes = sequence.cache.bytes();
    if (bytes > prefix_limit_ / 2) return;
    prefixes_.Limit(std::max(prefix_limit_ - evicted_.bytes() - bytes, prefix_limit_ / 2));
    evicted_.Limit(prefix_limit_ - prefixes_.bytes());
    evicted_.Keep(sequence, cached);
  } catch (const std::exception&) {
  }
}

// Caches a prompt's first tokens as if it had run them: its policy observes them, too.
absl::StatusOr<int64_t> Executor::LoadPrefix(OpenSequence& sequence,
                                             absl::Span<const PrefixCache::Block> blocks) {
  const int64_t count = prefixes_.block_tokens();
  int64_t cached = 0;
  for (const PrefixCache::Block block : blocks) {
    prefixes_.Load(block, sequence.cache);
    sequence.cache.Append(cached, count);
    absl::Status observed = ObserveLoaded(sequence, cached, count);
    if (!observed.ok()) return observed;
    cached += count;
  }
  if (!blocks.empty()) {
    sequence.prefix = {.last = blocks.back(), .tokens = cached};
    sequence.tap.Restore(prefixes_.residuals(blocks.back()));
  }
  return cached;
}

absl::StatusOr<int64_t> Executor::LoadPackets(OpenSequence& sequence) {
  int64_t cached = 0;
  for (const std::shared_ptr<const Packet>& packet : sequence.request.packets) {
    LoadPacket(*packet, model_->manifest(), sequence.request.positions, sequence.cache);
    absl::Status observed = ObserveLoaded(sequence, cached, packet->num_tokens());
    if (!observed.ok()) return observed;
    cached += packet->num_tokens();
  }
  sequence.cache.ShareRoom();  // a packet's lanes may be unequal
  return cached;
}

// Policies that measure how a prompt is read are told of what is read alone: their columns of these
// tokens stay zero.
absl::Status Executor::ObserveLoaded(OpenSequence& sequence, int64_t first, int64_t count) {
  const Request& request = sequence.request;
  const auto tokens = absl::MakeConstSpan(request.prompt).subspan(first, count);
  FollowSteering(tokens, sequence);
  if (!request.traits.evicts || MeasuresPrompt(request.traits)) return absl::OkStatus();
  PolicyView view(sequence, pool_, *model_, output_grams_);
  SequenceStep step{.state = sequence.state.get(),
                    .cache = view,
                    .phase = Phase::kPrefill,
                    .first = first,
                    .count = count,
                    .tokens = tokens,
                    .signals = {}};
  return AskPolicy(request, [&] { sequence.policy->Observe({&step, 1}); });
}

// Whether this step ends in a round whose victims' attention is to be measured.
bool Executor::MassDue(const OpenSequence& sequence, const WorkItem& work) const {
  if (options_.mass_interval == 0 || work.in_prefill()) return false;
  if (sequence.mass_at.has_value() && work.first - *sequence.mass_at < options_.mass_interval) {
    return false;
  }
  return !ThinkingGoes(sequence, work) && MayRound(work);
}

StepItem Executor::ItemOf(const WorkItem& work) {
  OpenSequence& own = *open_.at(work.id);
  StepItem item{.work = &work,
                .sequence = &own,
                .signals = own.request.traits.signals,
                .queries = &own.queries};
  if (!work.pass) return item;
  item.pass = passes_.at(work.id).get();
  if (item.pass->draft != nullptr) item.sequence = &item.pass->draft->sequence;
  item.queries = &item.pass->queries;
  const bool gate = own.request.traits.signals.Has(Signal::kGate);
  item.signals = gate ? Signal::kQueries | Signal::kGate : SignalSet(Signal::kQueries);
  return item;
}

std::vector<StepItem> Executor::Prepare(absl::Span<const WorkItem> items) {
  mass_of_.reset();
  std::vector<StepItem> step;
  step.reserve(items.size());
  for (const WorkItem& work : items) {
    step.push_back(PrepareOne(work));
  }
  return step;
}

StepItem Executor::PrepareOne(const WorkItem& work) {
  StepItem item = ItemOf(work);
  const SequenceCache& cache = item.sequence->cache;
  Place(item, shape_, model_->manifest().context_length);
  if (item.wants_attention_rows()) {
    item.sequence->RowsOf(work.ahead).Resize(item.used);
  }
  // Decoding and reading the same tokens, bits may differ; where it is steered, or rows are
  // rounded, they do.
  const bool decodes_apart =
      work.decode && (options_.deterministic || item.sequence->steering.has_value() ||
                      item.sequence->request.traits.rounds_rows);
  if (!work.pass && !decodes_apart &&
      prefixes_.Wants(item.sequence->prefix, item.sequence->request, cache,
                      work.first + item.num_rows())) {
    item.last_residuals.resize(shape_.num_layers * shape_.hidden_size);
  }
  if (mass_of_.value_or(work.id) == work.id && MassDue(*item.sequence, work)) {
    mass_of_ = work.id;
    mass_rows_.Resize(item.used);
    item.measures_mass = true;
  }
  return item;
}

void Executor::LookAgain(absl::Span<StepItem> items) {
  std::vector<StepItem> again;
  std::vector<StepItem*> in_doubt;
  for (StepItem& item : items) {
    if (!InDoubt(item)) continue;
    in_doubt.push_back(&item);
    again.push_back(PrepareOne(*item.work));
    again.back().looks_again = true;
    again.back().row = std::ssize(again) - 1;
  }
  if (again.empty()) return;
  std::vector<ReadSlots> reads;  // a step counts once
  for (const StepItem& item : again) reads.push_back(item.sequence->reads);
  cpu_->Run(absl::MakeSpan(again));
  for (size_t i = 0; i < again.size(); ++i) {
    again[i].sequence->reads = reads[i];
    *in_doubt[i] = std::move(again[i]);
  }
}

absl::StatusOr<std::vector<ForwardOutcome>> Executor::Forward(absl::Span<const WorkItem> items) {
  times_ = StepStats();
  ahead_.clear();
  next_ahead_ = 0;
  if (pool_.lost()) {
    return absl::InternalError(
        "the KV cache was lost: moving its rows failed, and they could not be put back");
  }
  std::vector<StepItem> step;
  std::vector<ForwardOutcome> outcomes;
  try {
    outcomes.reserve(items.size());
    step = Prepare(items);
    // Without --deterministic one forward holds all rows.
    size_t begin = 0;
    while (begin < step.size()) {
      size_t end = begin;
      int64_t rows = 0;
      while (end < step.size() &&
             (!options_.deterministic || rows + step[end].num_rows() <= kDeterministicRows)) {
        step[end].row = rows;
        rows += step[end++].num_rows();
      }
      const absl::Span<StepItem> together = absl::MakeSpan(step).subspan(begin, end - begin);
      device_ != nullptr ? device_->Run(together) : cpu_->Run(together);
      LookAgain(together);
      const StageTimer timer(times_, Stage::kSample);
      if (options_.samples) TakeOutputs(together);
      begin = end;
    }
    const auto ahead = std::find_if(step.begin(), step.end(),
                                    [](const StepItem& item) { return item.work->ahead > 0; });
    for (auto item = ahead; item != step.end(); ++item) {
      item->logits = at::Tensor();  // a view of all the forward's
    }
    ahead_.assign(std::make_move_iterator(ahead), std::make_move_iterator(step.end()));
    step.erase(ahead, step.end());
  } catch (const std::exception& e) {
    return absl::InternalError(WhyItFailed(e));
  }
  const StageTimer timer(times_, Stage::kSample);
  for (StepItem& item : step) {
    try {
      outcomes.push_back(Finish(item));
      if (outcomes.back().status.ok() && !item.work->pass) KeepPrefix(item);
    } catch (const std::exception& e) {  // its own alone: the others have committed
      outcomes.resize(&item - step.data());
      outcomes.push_back({.status = OwnFailure("sampling", e)});
    }
  }
  outcomes.resize(items.size());  // those ahead have none yet
  return outcomes;
}

ForwardOutcome Executor::Accept(const WorkItem& work) {
  try {
    // They are accepted in the order in which they stand.
    const auto item = std::find_if(
        ahead_.begin() + next_ahead_, ahead_.end(),
        [&](const StepItem& of) { return of.work->id == work.id && of.work->ahead == work.ahead; });
    Require(item != ahead_.end(), "no such item has run ahead");
    next_ahead_ = item - ahead_.begin() + 1;
    item->sequence->attention_rows.SwapRows(item->sequence->RowsOf(work.ahead));
    ForwardOutcome outcome = Finish(*item);
    if (outcome.status.ok()) KeepPrefix(*item);
    return outcome;
  } catch (const std::exception& e) {
    return {.status = OwnFailure("sampling", e)};
  }
}

// Remembers what was cached for prompts that begin alike. One for which there is no memory is not
// kept, as one for which there is no room: the request itself has lost nothing.
void Executor::KeepPrefix(const StepItem& item) {
  OpenSequence& sequence = *item.sequence;
  try {
    prefixes_.OnCached(sequence.prefix, item.work->tokens);
    if (item.last_residuals.empty()) return;
    prefixes_.Keep(sequence.prefix, sequence.request, sequence.cache, item.last_residuals);
  } catch (const std::exception&) {
  }
}

// Commits one item and takes its output tokens.
ForwardOutcome Executor::Finish(StepItem& item) {
  const WorkItem& work = *item.work;
  OpenSequence& sequence = *item.sequence;
  if (work.pass) {
    FinishPassStep(item);
    return {};
  }
  sequence.cache.Append(work.first, item.num_rows());
  if (item.looks_again) ++sequence.doubted_steps;
  sequence.tap.Commit(work.decode, work.ahead);
  FollowSteering(work.tokens, sequence);
  if (item.wants_queries()) sequence.queries.Commit(item.num_rows(), work.ahead);
  if (item.wants(Signal::kQueryMoments)) sequence.moments.Commit(work.ahead);
  if (item.tapped.defined()) sequence.tapped = item.tapped;
  if (item.wants(Signal::kLogitEntropy)) sequence.logit_entropy = Floats(item.entropies);
  if (item.wants(Signal::kResidualDistance)) sequence.residual_distance = Floats(item.distances);
  if (item.wants(Signal::kGate)) sequence.gate = Floats(item.gate);
  if (item.wants(Signal::kFinalHidden)) sequence.final_hidden = Floats(item.final_hidden);

  ForwardOutcome outcome;
  if (sequence.request.output.residual_steps) {
    const absl::Span<const float> steps = sequence.tap.steps();
    outcome.residual_steps.assign(steps.begin(), steps.end());
  }
  if (item.wants_prompt_logprobs() && options_.samples) {
    absl::StatusOr<PromptLogprobs> prompt = TakePromptLogprobs(item);
    if (!prompt.ok()) return {.status = prompt.status()};
    outcome.prompt = *std::move(prompt);
  }
  if (item.sampling_failed != nullptr) std::rethrow_exception(item.sampling_failed);
  for (absl::StatusOr<OutputToken>& output : item.outputs) {
    if (!output.ok()) {
      outcome.status = output.status();
      return outcome;
    }
    const bool own = std::ssize(outcome.outputs) < work.num_outputs;
    (own ? outcome.outputs : outcome.siblings).push_back(*std::move(output));
  }
  if (work.ends_prefill && !outcome.outputs.empty()) {
    sequence.first_output = outcome.outputs.front().token;
  }
  return outcome;
}

bool Executor::MayRound(const WorkItem& item) const {
  const OpenSequence& sequence = *open_.at(item.id);
  const PolicyTraits& traits = sequence.request.traits;
  if (ThinkingGoes(sequence, item)) return true;
  if (!traits.evicts || item.pass) return traits.evicts;
  return RoundIsDue(sequence, item, item.ahead + std::ssize(item.tokens));
}

// Its first tokens are kept from when it begins.
void Executor::NoteThinking(OpenSequence& sequence, const WorkItem& item) {
  const int64_t most = sequence.request.protection.thinking;
  if (!item.thinking.has_value() || most == 0 || sequence.thinking_ended) return;
  const auto [begin, end] = item.thinking->span;
  sequence.cache.SetThought(
      {.begin = begin, .end = item.thinking->ended ? std::min(begin + most, end) : begin + most});
}

// It has ended with the token that the step cached, and is to go.
bool Executor::ThinkingGoes(const OpenSequence& sequence, const WorkItem& item) {
  return item.thinking.has_value() && item.thinking->ended && !sequence.thinking_ended &&
         !item.pass && sequence.request.evict_thinking;
}

// Rounds in prefill are at fixed places and end at the budget; at decode they allow slack.
bool Executor::RoundIsDue(const OpenSequence& sequence, const WorkItem& item, int64_t coming) {
  const PolicyTraits& traits = sequence.request.traits;
  const bool in_prefill =
      item.evicts_prefill && (traits.prompt != PromptEviction::kAtEnd || item.ends_prefill);
  if (!item.decode && !in_prefill) return false;
  const int64_t slack = item.decode ? traits.slack : 0;
  return sequence.cache.OverBudget(slack, coming) || UnaskedRound(item, traits);
}

// A head that decides for itself may be full where another is not, and one that is has all go.
bool Executor::RoundIsDueAnywhere(const OpenSequence& sequence, const WorkItem& item) const {
  const bool due = RoundIsDue(sequence, item, /*coming=*/0);
  const bool own = sequence.request.traits.granularity == Granularity::kHead;
  if (model_->ranks() == nullptr || !own) return due;
  return model_->ranks()->Least(due ? 0 : 1) == 0;
}

std::vector<SettleOutcome> Executor::Settle(absl::Span<const WorkItem> items) {
  std::vector<SettleOutcome> outcomes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    // One policy call a sequence: whatever it throws has exactly one owner.
    try {
      outcomes[i] = SettleOne(*open_.at(items[i].id), items[i]);
    } catch (const std::exception& e) {
      outcomes[i].status = OwnFailure("the step could not be finished for this request", e);
    }
  }
  return outcomes;
}

SettleOutcome Executor::SettleOne(OpenSequence& sequence, const WorkItem& item) {
  if (item.pass) return SettlePass(sequence, item);
  const PolicyTraits& traits = sequence.request.traits;
  SettleOutcome outcome;
  NoteThinking(sequence, item);
  if (traits.evicts) {
    PolicyView view(sequence, pool_, *model_, output_grams_);
    {
      const StageTimer timer(times_, Stage::kObserve);
      outcome.status = ObserveStep(sequence, item, view);
    }
    if (outcome.status.ok() && ThinkingGoes(sequence, item)) {
      outcome.status = EvictThinking(sequence, item.thinking->span, outcome);
    }
    const bool due = RoundIsDueAnywhere(sequence, item);
    const bool passes = sequence.request.demand.passes && !item.decode &&
                        (traits.prompt == PromptEviction::kByChunk ? due : item.ends_prefill);
    if (outcome.status.ok() && passes) {
      absl::StatusOr<std::vector<int32_t>> first = BeginPass(sequence, item.id, view);
      if (!first.ok()) {
        outcome.status = std::move(first).status();
        return outcome;
      }
      outcome.pass = *std::move(first);
      if (!outcome.pass.empty()) return outcome;
    }
    if (outcome.status.ok() && due) {
      outcome.status =
          RunRound(sequence, item, view, mass_of_ == item.id ? &mass_rows_ : nullptr, outcome);
    }
    if (!outcome.status.ok()) return outcome;
    KeepEvicted(sequence, item);
  } else if (ThinkingGoes(sequence, item)) {
    outcome.status = EvictThinking(sequence, item.thinking->span, outcome);
  }
  sequence.thinking_ended = item.thinking.has_value() && item.thinking->ended;
  if (item.ends_prefill) EndPrompt(sequence);
  return outcome;
}

void Executor::EndPrompt(OpenSequence& sequence) {
  sequence.cache.ShrinkToDecode();
  sequence.turned = at::Tensor();  // of a whole prompt
  sequence.gate = {};              // of its last chunk, as the next
  sequence.final_hidden = {};
}

absl::StatusOr<std::vector<int32_t>> Executor::BeginPass(OpenSequence& sequence, SequenceId id,
                                                         PolicyView& view) {
  const Request& request = sequence.request;
  const ScratchPass& traits = request.traits.pass;
  const int64_t queries = traits.chunk > 0 ? ScratchPass::kStepTokens : traits.lookahead;
  auto pass = std::make_unique<RunningPass>(
      RunningPass{.queries = QueryWindow(
                      shape_.num_layers, queries,
                      shape_.num_heads * shape_.key_width * ElementBytes(pool_.format().model))});
  if (traits.chunk > 0) {
    absl::Status asked =
        AskPolicy(request, [&] { pass->segments = sequence.policy->PassSegments(request.prompt); });
    asked.Update(CheckSegments(request, pass->segments, model_->manifest().vocab_size));
    if (!asked.ok()) return asked;
  } else {
    pass->next = sequence.first_output;  // run even where it is an end, as in LAQ's code
    pass->left =
        std::min(traits.lookahead, model_->manifest().context_length - sequence.cache.next());
    if (pass->left == 0) return std::vector<int32_t>();
  }
  if (traits.drafts) {
    const absl::StatusOr<SequenceCache::Slots> left_out = AskDraft(sequence, view);
    if (!left_out.ok()) return left_out.status();
    pass->draft = std::make_unique<Draft>(DraftOf(id), request, sequence, *left_out, shape_);
  }
  RunningPass& running = *(passes_[id] = std::move(pass));
  if (traits.chunk > 0) return running.segments.front();
  return std::vector<int32_t>{running.next};
}

absl::StatusOr<std::vector<int32_t>> Executor::GoOnWithPass(OpenSequence& sequence,
                                                            RunningPass& pass,
                                                            const WorkItem& item) {
  const Request& request = sequence.request;
  if (pass.segments.empty()) {
    const std::vector<int32_t>& ends = model_->manifest().eos_tokens;
    --pass.left;
    if (pass.left == 0 || std::find(ends.begin(), ends.end(), pass.next) != ends.end()) {
      return std::vector<int32_t>();
    }
    return std::vector<int32_t>{pass.next};
  }
  const int64_t done = sequence.cache.scratch(), count = std::ssize(item.tokens);
  PolicyView view(sequence, pool_, *model_, output_grams_, &pass);
  PassStep step{.state = sequence.state.get(),
                .cache = view,
                .segment = static_cast<int64_t>(pass.segment),
                .first = done - count,
                .count = count,
                .signals = {.gate = pass.gate}};
  absl::Status asked = AskPolicy(request, [&] { sequence.policy->ObservePass({&step, 1}); });
  if (!asked.ok()) return asked;
  if (done < std::ssize(pass.segments[pass.segment])) return std::vector<int32_t>();
  sequence.cache.SetScratch(0);
  if (++pass.segment == pass.segments.size()) return std::vector<int32_t>();
  return pass.segments[pass.segment];
}

SettleOutcome Executor::SettlePass(OpenSequence& sequence, const WorkItem& item) {
  RunningPass& pass = *passes_.at(item.id);
  NotePeakOf(pass, sequence);
  SettleOutcome outcome;
  absl::StatusOr<std::vector<int32_t>> next = GoOnWithPass(sequence, pass, item);
  if (!next.ok()) {
    outcome.status = std::move(next).status();
    return outcome;
  }
  outcome.pass = *std::move(next);
  if (!outcome.pass.empty() || (!pass.segments.empty() && pass.segment < pass.segments.size())) {
    return outcome;
  }
  sequence.cache.SetScratch(0);
  PolicyView view(sequence, pool_, *model_, output_grams_, pass.segments.empty() ? &pass : nullptr);
  outcome.status = RunRound(sequence, item, view, /*mass_rows=*/nullptr, outcome);
  if (!outcome.status.ok()) return outcome;
  passes_.erase(item.id);
  if (sequence.cache.next() == sequence.request.prefill_tokens()) EndPrompt(sequence);
  return outcome;
}

absl::Status Executor::Fork(SequenceId parent, SequenceId child, const Request& request) {
  OpenSequence& from = *open_.at(parent);
  try {
    auto sequence = std::make_unique<OpenSequence>(child, request, from);
    if (from.state != nullptr) {
      absl::Status asked = AskPolicy(request, [&] { sequence->state = from.state->Clone(); });
      if (!asked.ok()) return asked;
    }
    open_.emplace(child, std::move(sequence));
  } catch (const std::exception& e) {
    return OwnFailure("a completion could not be begun", e);
  }
  from.cache.ForgetPeak();
  from.peak_entries = from.peak_bytes = 0;
  return absl::OkStatus();
}

CacheFacts Executor::Facts(SequenceId id) const {
  const auto found = open_.find(id);
  if (found == open_.end()) return {};  // Open failed
  const SequenceCache& cache = found->second->cache;
  CacheFacts facts{.entries = cache.entries(),
                   .peak_entries = std::max(cache.peak_entries(), found->second->peak_entries),
                   .rounds = found->second->rounds,
                   .evicted_entries = found->second->evicted_entries,
                   .bytes = cache.bytes(),
                   .peak_bytes = std::max(cache.peak_bytes(), found->second->peak_bytes),
                   .reads = found->second->reads};
  if (found->second->tier != nullptr) facts.tier = found->second->tier->usage();
  facts.tier.doubted_steps = found->second->doubted_steps;
  if (const auto pass = passes_.find(id); pass != passes_.end()) {
    facts.entries += EntriesOf(*pass->second, *found->second);
    facts.bytes += BytesOfPass(*pass->second, *found->second);
    facts.peak_entries = std::max(facts.peak_entries, facts.entries);
    facts.peak_bytes = std::max(facts.peak_bytes, facts.bytes);
  }
  if (found->second->request.output.kept) facts.kept = cache.KeptIndexes();
  return facts;
}

std::shared_ptr<const Packet> Executor::Export(SequenceId id,
                                               absl::Span<const int32_t> tokens) const {
  const auto found = open_.find(id);
  if (found == open_.end()) return nullptr;
  return PacketOf(found->second->cache, pool_, found->second->request.positions, tokens);
}

int64_t Executor::PackedBytes(SequenceId id) const {
  const auto found = open_.find(id);
  if (found == open_.end() || !found->second->request.traits.rounds_rows) return 0;
  return found->second->cache.PackedBytes();
}

void Executor::Close(SequenceId id) {
  passes_.erase(id);
  open_.erase(id);
}

uint64_t Executor::SharedSlots(SequenceId id) const {
  const OpenSequence& sequence = *open_.at(id);
  uint64_t seen = 1;
  for (int64_t t = 0; t < sequence.cache.num_tables(); ++t) {
    for (const int32_t token : sequence.cache.table(t).index()) {
      seen = (seen ^ static_cast<uint64_t>(token)) * 0x100000001b3u;  // FNV-1a
    }
  }
  return seen;
}

int64_t Executor::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [id, sequence] : open_) bytes += sequence->cache.bytes();
  for (const auto& [id, pass] : passes_) bytes += BytesOfPass(*pass, *open_.at(id));
  return bytes;
}

bool Executor::PagesHold() const {
  for (const auto& [id, sequence] : open_) {
    if (!sequence->pages.has_value()) continue;
    const SequenceCache& cache = sequence->cache;
    for (int64_t lane = 0; lane < shape_.num_layers * shape_.num_kv_heads; ++lane) {
      const int64_t layer = lane / shape_.num_kv_heads, head = lane % shape_.num_kv_heads;
      const std::optional<int64_t> hole = cache.table(cache.TableOf(layer, head)).hole();
      if (!sequence->pages->Holds(lane, cache.Lane(layer, head).keys, hole)) return false;
    }
  }
  return true;
}

void Executor::AddPool(StepStats& step) const {
  step.kv_rows_moved = pool_.rows_moved();
  step.kv_longest_move = pool_.longest_move();
  step.kv_touched_bytes = pool_.touched_bytes();
  step.signal_bytes = mass_rows_.bytes();
  for (const auto& [id, sequence] : open_) step.signal_bytes += sequence->signal_bytes();
  for (const auto& [id, pass] : passes_) {
    if (pass->draft != nullptr) step.signal_bytes += pass->draft->sequence.signal_bytes();
  }
}

void Executor::AddStageTimes(StepStats& step) const {
  auto charge = [&](Stage part, std::optional<Stage> whole) {
    const int p = static_cast<int>(part);
    step.wall[p] += times_.wall[p];
    step.cpu[p] += times_.cpu[p];
    if (!whole.has_value()) return;
    const int w = static_cast<int>(*whole);
    step.wall[w] -= times_.wall[p];
    step.cpu[w] -= times_.cpu[p];
  };
  charge(Stage::kAttention, std::nullopt);
  charge(Stage::kTaps, std::nullopt);
  charge(Stage::kSample, Stage::kForward);
  charge(Stage::kObserve, Stage::kEvict);
}

}  // namespace epikv
