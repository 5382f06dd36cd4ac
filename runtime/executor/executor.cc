#include "runtime/executor/executor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "policies/policy.h"
#include "runtime/base/reason.h"
#include "runtime/executor/outputs.h"
#include "runtime/executor/policy_calls.h"
#include "runtime/executor/policy_view.h"
#include "runtime/model/model_contract.h"
#include "runtime/model/model_shape.h"
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

// The pool's name for the copy of a sequence over which tokens are told ahead: one that no sequence
// has.
SequenceId CopyOf(SequenceId id) { return SequenceId{-1 - static_cast<int64_t>(id)}; }

// Of the last row of logits.
int32_t Likeliest(const at::Tensor& logits) {
  return static_cast<int32_t>(logits[logits.size(0) - 1].argmax().item<int64_t>());
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
      options_(options),
      shape_(ShapeOf(model_->manifest())),
      output_grams_(OutputGrams(*model_)),
      scratch_(options.scratch_bytes),
      pool_(options.pool_rows, shape_.key_width, shape_.value_width,
            {model_->manifest().dtype, options.kv_dtype},
            {.device = model_->device(), .by_gather = options.device_path}),
      prefixes_(pool_, shape_.num_layers * shape_.num_kv_heads, options.prefix_block_tokens,
                shape_.num_layers * shape_.hidden_size),
      mass_rows_({}, shape_.num_kv_heads) {
  NoMemory();  // made while there is some
  const Manifest& manifest = model_->manifest();
  for (const Rope& rope : manifest.ropes) ropes_.emplace_back(rope, manifest.context_length);
  if (options.device_path) {
    device_ = std::make_unique<DeviceForward>(*model_, shape_, ropes_, pool_, mass_rows_);
  } else {
    const CpuForwardOptions cpu{.decode_kernel = options.decode_kernel,
                                .prefill_kernel = options.prefill_kernel,
                                .deterministic = options.deterministic};
    cpu_ = std::make_unique<CpuForward>(*model_, shape_, ropes_, pool_, cpu, mass_rows_, times_);
  }
}

Executor::~Executor() = default;

absl::StatusOr<int64_t> Executor::Open(SequenceId id, const Request& request,
                                       int64_t prefix_bytes) {
  constexpr absl::string_view kWhat = "the request could not be started";
  try {
    if (pool_.lost() && open_.empty()) {
      prefixes_.Clear();
      pool_.StartAnew();
    }
    std::vector<PrefixCache::Block> blocks = prefixes_.Match(request);  // now the last to go
    prefixes_.Limit(prefix_bytes);
    std::erase_if(blocks, [this](PrefixCache::Block block) { return !prefixes_.Contains(block); });
    auto sequence = std::make_unique<OpenSequence>(pool_, id, request, shape_);
    if (request.traits.evicts) {
      absl::Status asked = AskPolicy(request, [&] {
        sequence->state =
            request.policy->NewState({.prompt_tokens = static_cast<int64_t>(request.prompt.size()),
                                      .budget = request.budget,
                                      .protection = request.protection});
      });
      if (!asked.ok()) return asked;
    }
    const absl::StatusOr<int64_t> cached = LoadPrefix(*sequence, blocks);
    if (cached.ok()) open_.emplace(id, std::move(sequence));
    return cached;
  } catch (const std::exception& e) {
    return OwnFailure(kWhat, e);
  }
}

// Caches a prompt's first tokens as if it had run them: its policy observes them, too.
absl::StatusOr<int64_t> Executor::LoadPrefix(OpenSequence& sequence,
                                             absl::Span<const PrefixCache::Block> blocks) {
  const Request& request = sequence.request;
  const int64_t count = prefixes_.block_tokens();
  int64_t cached = 0;
  for (const PrefixCache::Block block : blocks) {
    prefixes_.Load(block, sequence.cache);
    sequence.cache.Append(cached, count);
    if (request.traits.evicts) {
      PolicyView view(sequence, pool_, *model_, output_grams_);
      SequenceStep step{.state = sequence.state.get(),
                        .cache = view,
                        .phase = Phase::kPrefill,
                        .first = cached,
                        .count = count,
                        .tokens = absl::MakeConstSpan(request.prompt).subspan(cached, count),
                        .signals = {}};
      absl::Status asked = AskPolicy(request, [&] { request.policy->Observe({&step, 1}); });
      if (!asked.ok()) return asked;
    }
    cached += count;
  }
  if (!blocks.empty()) {
    sequence.prefix = {.last = blocks.back(), .tokens = cached};
    sequence.tap.Restore(prefixes_.residuals(blocks.back()));
  }
  return cached;
}

// Whether this step ends in a round whose victims' attention is to be measured.
bool Executor::MassDue(const OpenSequence& sequence, const WorkItem& work) const {
  const PolicyTraits& traits = sequence.request.traits;
  if (options_.mass_interval == 0 || work.in_prefill() || !traits.evicts) return false;
  if (sequence.mass_at.has_value() && work.first - *sequence.mass_at < options_.mass_interval) {
    return false;
  }
  return sequence.cache.OverBudget(traits.slack, /*coming=*/1) || UnaskedRound(work, traits);
}

OpenSequence& Executor::SequenceOf(const WorkItem& work) {
  return work.pass ? lookaheads_.at(work.id)->sequence : *open_.at(work.id);
}

std::vector<StepItem> Executor::Prepare(absl::Span<const WorkItem> items) {
  mass_of_.reset();
  std::vector<StepItem> step;
  step.reserve(items.size());
  for (const WorkItem& work : items) {
    StepItem item{.work = &work, .sequence = &SequenceOf(work)};
    const SequenceCache& cache = item.sequence->cache;
    for (int64_t t = 0; t < cache.num_tables(); ++t) {
      item.slots.push_back(cache.table(t).NextSlot());
      item.positions.push_back(cache.NextPosition(t, cache.newest() + 1));
    }
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        item.used.push_back(cache.table(cache.TableOf(layer, head)).UsedAfter(item.num_rows()));
        if (item.used.back() > cache.capacity(layer, head)) {
          throw std::logic_error("a lane has no room for its next token");
        }
      }
    }
    if (item.wants_attention_rows()) {
      item.sequence->attention_rows.Resize(item.used);
    }
    // Decoding and reading the same tokens, bits may differ.
    if (!work.pass && !(work.decode && options_.deterministic) &&
        prefixes_.Wants(item.sequence->prefix, item.sequence->request, cache,
                        work.first + item.num_rows())) {
      item.last_residuals.resize(shape_.num_layers * shape_.hidden_size);
    }
    if (!mass_of_.has_value() && MassDue(*item.sequence, work)) {
      mass_of_ = work.id;
      mass_rows_.Resize(item.used);
      item.measures_mass = true;
    }
    step.push_back(std::move(item));
  }
  return step;
}

absl::StatusOr<std::vector<ForwardOutcome>> Executor::Forward(absl::Span<const WorkItem> items) {
  times_ = StepStats();
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
      begin = end;
    }
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
  return outcomes;
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
  sequence.cache.Append(sequence.cache.newest() + 1, item.num_rows());
  sequence.tap.Commit(work.decode);
  if (item.wants_queries()) sequence.queries.Commit(item.num_rows());
  if (item.wants(Signal::kQueryMoments)) sequence.moments.Commit();
  if (item.tapped.defined()) sequence.tapped = item.tapped;
  if (item.wants(Signal::kLogitEntropy)) sequence.logit_entropy = Floats(item.entropies);
  if (item.wants(Signal::kResidualDistance)) sequence.residual_distance = Floats(item.distances);
  if (item.wants(Signal::kGate)) sequence.gate = Floats(item.gate);
  if (item.wants(Signal::kFinalHidden)) sequence.final_hidden = Floats(item.final_hidden);

  ForwardOutcome outcome;
  if (work.pass) {
    lookaheads_.at(work.id)->next = Likeliest(item.logits);
    return outcome;
  }
  if (sequence.request.output.residual_steps) {
    const absl::Span<const float> steps = sequence.tap.steps();
    outcome.residual_steps.assign(steps.begin(), steps.end());
  }
  if (item.wants_prompt_logprobs()) {
    absl::StatusOr<PromptLogprobs> prompt = TakePromptLogprobs(item);
    if (!prompt.ok()) return {.status = prompt.status()};
    outcome.prompt = *std::move(prompt);
  }
  for (int64_t i = 0; i < work.num_outputs; ++i) {
    absl::StatusOr<OutputToken> output = TakeOutput(item, i, sequence.request.sampling);
    if (!output.ok()) {
      outcome.status = output.status();
      return outcome;
    }
    outcome.outputs.push_back(*std::move(output));
  }
  if (work.ends_prefill && !outcome.outputs.empty()) {
    sequence.first_output = outcome.outputs.front().token;
  }
  for (int64_t completion = 1; completion < work.completions; ++completion) {
    absl::StatusOr<OutputToken> output =
        TakeOutput(item, work.num_outputs - 1, SamplingOf(sequence.request.sampling, completion));
    if (!output.ok()) {
      outcome.status = output.status();
      return outcome;
    }
    outcome.siblings.push_back(*std::move(output));
  }
  return outcome;
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
  if (item.pass) return SettleLookahead(sequence, item);
  const PolicyTraits& traits = sequence.request.traits;
  SettleOutcome outcome;
  if (traits.evicts) {
    PolicyView view(sequence, pool_, *model_, output_grams_);
    {
      const StageTimer timer(times_, Stage::kObserve);
      outcome.status = ObserveStep(sequence, item, view);
    }
    // Rounds in prefill are at fixed places and end at the budget; at decode they allow slack.
    const bool in_prefill =
        item.evicts_prefill && (traits.prompt != PromptEviction::kAtEnd || item.ends_prefill);
    const int64_t slack = item.decode ? traits.slack : 0;
    const bool due = sequence.cache.OverBudget(slack) || UnaskedRound(item, traits);
    if (outcome.status.ok() && item.ends_prefill && due && traits.lookahead > 0) {
      outcome.status = BeginLookahead(sequence, item.id, view);
      if (outcome.status.ok()) outcome.pass = {sequence.first_output};
      return outcome;
    }
    if (outcome.status.ok() && (item.decode || in_prefill) && due) {
      outcome.status =
          RunRound(sequence, item, view, mass_of_ == item.id ? &mass_rows_ : nullptr, outcome);
    }
    if (!outcome.status.ok()) return outcome;
  }
  if (item.ends_prefill) EndPrompt(sequence);
  return outcome;
}

void Executor::EndPrompt(OpenSequence& sequence) {
  sequence.cache.ShrinkToDecode();
  sequence.turned = at::Tensor();  // of a whole prompt
  sequence.gate = {};              // of its last chunk, as the next
  sequence.final_hidden = {};
}

absl::Status Executor::BeginLookahead(OpenSequence& sequence, SequenceId id, PolicyView& view) {
  const absl::StatusOr<SequenceCache::Slots> left_out = AskDraft(sequence, view);
  if (!left_out.ok()) return left_out.status();
  lookaheads_[id] = std::make_unique<Lookahead>(CopyOf(id), sequence.request, sequence, *left_out,
                                                shape_, ElementBytes(pool_.format().model));
  return absl::OkStatus();
}

SettleOutcome Executor::SettleLookahead(OpenSequence& sequence, const WorkItem& item) {
  Lookahead& lookahead = *lookaheads_.at(item.id);
  const std::vector<int32_t>& ends = model_->manifest().eos_tokens;
  SettleOutcome outcome;
  --lookahead.left;
  if (lookahead.left > 0 && std::find(ends.begin(), ends.end(), lookahead.next) == ends.end()) {
    outcome.pass = {lookahead.next};
    return outcome;
  }
  const SequenceCache& copy = lookahead.sequence.cache;
  sequence.peak_entries = sequence.cache.entries() + copy.entries();
  sequence.peak_bytes = sequence.cache.bytes() + copy.bytes();
  PolicyView view(sequence, pool_, *model_, output_grams_, &lookahead.sequence.queries);
  outcome.status = RunRound(sequence, item, view, /*mass_rows=*/nullptr, outcome);
  if (!outcome.status.ok()) return outcome;
  lookaheads_.erase(item.id);
  EndPrompt(sequence);
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
                   .bytes = cache.bytes(),
                   .peak_bytes = std::max(cache.peak_bytes(), found->second->peak_bytes)};
  if (const auto ahead = lookaheads_.find(id); ahead != lookaheads_.end()) {
    const SequenceCache& copy = ahead->second->sequence.cache;
    facts.entries += copy.entries();
    facts.bytes += copy.bytes();
    facts.peak_entries = std::max(facts.peak_entries, facts.entries);
    facts.peak_bytes = std::max(facts.peak_bytes, facts.bytes);
  }
  if (found->second->request.output.kept) facts.kept = cache.KeptIndexes();
  return facts;
}

void Executor::Close(SequenceId id) {
  lookaheads_.erase(id);
  open_.erase(id);
}

int64_t Executor::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [id, sequence] : open_) bytes += sequence->cache.bytes();
  for (const auto& [id, ahead] : lookaheads_) bytes += ahead->sequence.cache.bytes();
  return bytes;
}

void Executor::AddPool(StepStats& step) const {
  step.kv_rows_moved = pool_.rows_moved();
  step.kv_longest_move = pool_.longest_move();
  step.kv_touched_bytes = pool_.touched_bytes();
  step.signal_bytes = mass_rows_.bytes();
  for (const auto& [id, sequence] : open_) step.signal_bytes += sequence->signal_bytes();
  for (const auto& [id, ahead] : lookaheads_) step.signal_bytes += ahead->sequence.signal_bytes();
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
