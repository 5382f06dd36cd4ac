// Guesses: what a step runs ahead of its items, and what comes of it.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "runtime/engine/engine.h"
#include "runtime/engine/guess_plan.h"
#include "runtime/engine/prompt_lookup.h"
#include "runtime/engine/sequence.h"
#include "runtime/engine/stage_clock.h"

namespace epikv {

void Engine::AddGuesses(std::vector<WorkItem>& items, std::vector<Sequence*>& sequences,
                        StageClock& clock) {
  const bool asked = std::any_of(sequences.begin(), sequences.end(),
                                 [](const Sequence* s) { return s->request.guess_tokens > 0; });
  if (!asked) return;
  const size_t planned = items.size();
  int64_t rows = 0, decoding = 0;
  for (const WorkItem& item : items) {
    rows += std::ssize(item.tokens);
    decoding += item.in_prefill() ? 0 : 1;
  }
  const SchedulerOptions& scheduler = options_.scheduler;
  const int64_t unused = scheduler.max_step_tokens - rows;
  int64_t room = unused;
  if (const int64_t fixed = scheduler.fixed_chunk_tokens; fixed > 0) {
    room = std::min(room, (fixed - rows % fixed) % fixed);  // another row is another forward
  }

  std::vector<std::vector<int32_t>> tokens(planned);
  std::vector<Drafting> drafts;
  for (size_t i = 0; i < planned; ++i) {
    Sequence& s = *sequences[i];
    if (s.request.guess_tokens == 0 || items[i].in_prefill()) continue;
    if (s.looks_rest > 0) {
      --s.looks_rest;
      continue;
    }
    if (!step_cost_.MayPay(s.guess_record.chance(), decoding)) {
      s.guess_record.OnLeftOut();
      continue;
    }
    const int64_t most = MostGuesses(s, items[i]);
    if (most == 0) continue;
    if (room <= 0) {
      s.guess_record.OnLeftOut();
      continue;
    }
    if (Drafts(s)) {
      drafts.push_back({.sequence = &s, .most = most, .guesses = &tokens[i]});
    } else {
      tokens[i] = LookUpPrompt(s.tokens, most);
    }
  }
  if (!drafts.empty()) {
    clock.Charge(Stage::kSchedule);
    AskDrafter(drafts, {.rows = rows, .decoding = decoding, .room = room, .unused = unused});
    clock.Charge(Stage::kDraft);
  }

  std::vector<Guesses> guesses(planned);
  bool any = false;
  for (size_t i = 0; i < planned; ++i) {
    if (tokens[i].empty()) continue;
    CutGuesses(*sequences[i], items[i], tokens[i]);
    if (tokens[i].empty()) OnUnused(*sequences[i]);
    guesses[i] = {.count = std::ssize(tokens[i]), .chance = sequences[i]->guess_record.chance()};
    any |= !tokens[i].empty();
  }
  if (!any) return;
  std::vector<int64_t> taken = PlanGuesses(guesses, rows, decoding, room, step_cost_);
  int64_t work = options_.constraint_work;
  for (size_t i = 0; i < planned; ++i) {
    Sequence& s = *sequences[i];
    if (taken[i] > 0 && s.constraint.has_value()) {
      taken[i] = AllowedGuesses(s, absl::MakeConstSpan(tokens[i]).first(taken[i]), work);
      if (taken[i] == 0) {
        OnUnused(s);
        continue;
      }
    }
    if (taken[i] == 0) {
      if (!tokens[i].empty()) s.guess_record.OnLeftOut();
      continue;
    }
    s.guessed.assign(s.tokens.end() - s.num_outputs, s.tokens.end());
    s.guessed.insert(s.guessed.end(), tokens[i].begin(), tokens[i].begin() + taken[i]);
    s.guesses_run = taken[i];
    s.guesses_accepted = 0;
    s.guesses_hold = true;
  }
  for (int64_t ahead = 1; ahead <= *std::max_element(taken.begin(), taken.end()); ++ahead) {
    for (size_t i = 0; i < planned; ++i) {
      if (taken[i] < ahead) continue;
      items.push_back(sequences[i]->GuessedWork(ahead));
      sequences.push_back(sequences[i]);
    }
  }
}

int64_t Engine::MostGuesses(const Sequence& s, const WorkItem& work) const {
  const Request& request = s.request;
  // Of a cached prefix one block at most is kept in a step.
  const int64_t most =
      std::min({request.guess_tokens, request.max_output_tokens - s.num_outputs - 1,
                options_.scheduler.prefill_chunk_tokens - 1});
  // A round changes what the next token attends to: it may come behind the last guess alone.
  return most <= 0 || executor_->MayRound(work) ? 0 : most;
}

GuessRecord& Engine::RecordOf(const Sequence& s) {
  const bool asks = drafter_ != nullptr && s.request.guess_source == GuessSource::kDraft;
  return s.drafts.value_or(asks) ? draft_record_ : guess_record_;
}

void Engine::OnUnused(Sequence& s) {
  if (s.drafts.value_or(false)) {
    s.guess_record.OnVerified(1, 0);  // it was drafted for nothing
  } else {
    s.guess_record.OnLeftOut();
  }
}

bool Engine::Drafts(Sequence& s) {
  if (drafter_ == nullptr || s.request.guess_source != GuessSource::kDraft) return false;
  if (s.drafts.has_value()) return *s.drafts;
  s.drafts = false;
  // To read so long a prompt for so few tokens does not pay.
  constexpr int64_t kLongest = 32;
  const auto prompt = std::ssize(s.request.prompt);
  try {
    s.drafts = prompt <= kLongest * s.request.max_output_tokens &&
               drafter_->Open(s.id, s.request.prompt, prompt + s.request.max_output_tokens);
  } catch (const std::exception&) {  // of memory: it has lost nothing
  }
  s.guess_record = RecordOf(s);
  return *s.drafts;
}

void Engine::EndDraft(Sequence& s) {
  drafter_->Close(s.id);
  s.drafts = false;
  s.guess_record = RecordOf(s);
}

void Engine::AskDrafter(absl::Span<const Drafting> drafts, const StepRows& step) {
  std::vector<double> chances;
  int64_t most = 0;
  for (const Drafting& draft : drafts) {
    chances.push_back(draft.sequence->guess_record.chance());
    most = std::max(most, draft.most);
  }
  // What is left out is tried now and then: what it takes is known from trying alone.
  constexpr int64_t kTryEach = 64, kTried = 2;
  int64_t depth = PlanDrafts(chances, step.rows, step.decoding, most, step.room,
                             drafter_->guess_time(), step_cost_);
  if (depth == 0 && ++drafts_left_out_ % kTryEach == 0) depth = kTried;
  if (depth == 0) {
    for (const Drafting& draft : drafts) draft.sequence->guess_record.OnLeftOut();
    return;
  }
  std::vector<DraftItem> asked;
  for (const Drafting& draft : drafts) {
    asked.push_back({.id = draft.sequence->id,
                     .tokens = draft.sequence->tokens,
                     .most = std::min(draft.most, depth),
                     .logit_bias = &draft.sequence->request.sampling.logit_bias});
  }
  try {
    std::vector<std::vector<int32_t>> guessed = drafter_->Guess(asked, step.unused);
    for (size_t i = 0; i < drafts.size(); ++i) *drafts[i].guesses = std::move(guessed[i]);
  } catch (const std::exception&) {
    for (const Drafting& draft : drafts) EndDraft(*draft.sequence);
  }
}

void Engine::CutGuesses(const Sequence& s, const WorkItem& work,
                        std::vector<int32_t>& guesses) const {
  for (int64_t ahead = 1; ahead <= std::ssize(guesses); ++ahead) {
    const int32_t& guess = guesses[ahead - 1];
    if (std::find(s.ends.begin(), s.ends.end(), guess) != s.ends.end()) {
      guesses.resize(ahead - 1);  // nothing comes behind it
      break;
    }
    WorkItem item = work;
    item.tokens = {&guess, 1};
    item.first += ahead;
    item.ahead = ahead;
    if (!executor_->MayRound(item)) continue;
    // A step's rounds have their room (WithoutRoom), in which this one was not counted.
    guesses.resize(s.request.demand.decode_round_pairs > 0 ? ahead - 1 : ahead);
    break;
  }
}

int64_t Engine::AllowedGuesses(Sequence& s, absl::Span<const int32_t> guesses,
                               int64_t& work) const {
  constexpr int64_t kShare = 8, kRest = 64;  // steps
  if (work <= 0) return 0;                   // others have had it
  const int64_t most = std::min(work, options_.constraint_work / kShare);
  int64_t left = most;
  const int64_t allowed = s.constraint->LookAhead(guesses, left);
  work -= most - left;
  if (left <= 0) s.looks_rest = kRest;
  return allowed;
}

// What comes of each guess is what a step of its own would have done: it is cached, told and
// settled before the next one is.
void Engine::ConcludeGuesses(absl::Span<const WorkItem> items,
                             absl::Span<Sequence* const> sequences, StepStats& step,
                             StageClock& clock, Done& done) {
  for (size_t begin = 0, end = 0; begin < items.size(); begin = end) {
    std::vector<WorkItem> came_true;
    std::vector<Sequence*> owners;
    std::vector<ForwardOutcome> outcomes;
    for (end = begin; end < items.size() && items[end].ahead == items[begin].ahead; ++end) {
      Sequence& s = *sequences[end];
      if (!CameTrue(s, items[end])) continue;
      if (s.unread.has_value()) ReadAtOnce(s);
      if (s.finished) continue;
      came_true.push_back(items[end]);
      owners.push_back(&s);
      outcomes.push_back(executor_->Accept(items[end]));
      if (!outcomes.back().status.ok()) continue;
      ++s.guesses_accepted;
      ++s.accepted_tokens;
      ++step.accepted_tokens;
    }
    Conclude(came_true, owners, std::move(outcomes), step, clock, done);
  }
  for (size_t i = 0; i < items.size() && items[i].ahead == 1; ++i) {
    Sequence& s = *sequences[i];
    s.guess_record.OnVerified(s.guesses_run, s.guesses_accepted);
    RecordOf(s).OnVerified(s.guesses_run, s.guesses_accepted);
  }
}

void Engine::ReadAtOnce(Sequence& s) {
  const auto queue = unread_.find(s.request.scheduling.tenant);
  if (queue != unread_.end()) std::erase(queue->second, &s);
  Guard(s, [&] { ReadToken(s); });
}

bool Engine::CameTrue(const Sequence& s, const WorkItem& item) const {
  return !s.finished && s.guesses_hold && s.num_outputs == item.draw &&
         s.tokens.back() == item.tokens.front();
}

}  // namespace epikv
