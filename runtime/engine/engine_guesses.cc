// Guesses: what a step runs ahead of its items, and what comes of it.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/engine/engine.h"
#include "runtime/engine/guess_plan.h"
#include "runtime/engine/prompt_lookup.h"
#include "runtime/engine/sequence.h"
#include "runtime/engine/stage_clock.h"

namespace epikv {

void Engine::AddGuesses(std::vector<WorkItem>& items, std::vector<Sequence*>& sequences) {
  const bool asked = std::any_of(sequences.begin(), sequences.end(),
                                 [](const Sequence* s) { return s->request.guess_tokens > 0; });
  if (!asked) return;
  const size_t planned = items.size();
  int64_t rows = 0, decoding = 0;
  for (const WorkItem& item : items) {
    rows += std::ssize(item.tokens);
    decoding += item.in_prefill() ? 0 : 1;
  }
  std::vector<std::vector<int32_t>> tokens(planned);
  std::vector<Guesses> guesses(planned);
  bool any = false;
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
    tokens[i] = GuessesOf(s, items[i]);
    guesses[i] = {.count = std::ssize(tokens[i]), .chance = s.guess_record.chance()};
    any |= !tokens[i].empty();
  }
  if (!any) return;
  const SchedulerOptions& scheduler = options_.scheduler;
  int64_t room = scheduler.max_step_tokens - rows;
  if (const int64_t fixed = scheduler.fixed_chunk_tokens; fixed > 0) {
    room = std::min(room, (fixed - rows % fixed) % fixed);  // another row is another forward
  }
  std::vector<int64_t> taken = PlanGuesses(guesses, rows, decoding, room, step_cost_);
  int64_t work = options_.constraint_work;
  for (size_t i = 0; i < planned; ++i) {
    Sequence& s = *sequences[i];
    if (taken[i] > 0 && s.constraint.has_value()) {
      taken[i] = AllowedGuesses(s, absl::MakeConstSpan(tokens[i]).first(taken[i]), work);
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

std::vector<int32_t> Engine::GuessesOf(const Sequence& s, const WorkItem& work) const {
  const Request& request = s.request;
  // Of a cached prefix one block at most is kept in a step.
  const int64_t most =
      std::min({request.guess_tokens, request.max_output_tokens - s.num_outputs - 1,
                options_.scheduler.prefill_chunk_tokens - 1});
  // A round changes what the next token attends to: it may come behind the last guess alone.
  if (most <= 0 || executor_->MayRound(work)) return {};
  std::vector<int32_t> guesses = LookUpPrompt(s.tokens, most);
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
    guesses.resize(request.demand.decode_round_pairs > 0 ? ahead - 1 : ahead);
    break;
  }
  return guesses;
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
    guess_record_.OnVerified(s.guesses_run, s.guesses_accepted);
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
