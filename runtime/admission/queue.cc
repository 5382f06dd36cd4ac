#include "runtime/admission/queue.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/require.h"

namespace epikv {

void RequestQueue::Push(SequenceId id, const Request& request, absl::Time now) {
  const int in_class = static_cast<int>(request.scheduling.priority);
  const Entry entry{
      .tenant = request.scheduling.tenant,
      .work = WorkOf(request),
      .in_class = in_class,
      .rises = in_class + 1 < kNumPriorities ? now + rule_.ageing : absl::InfiniteFuture()};
  const auto place = entries_.emplace(id, entry).first;
  try {
    Enter(id, entry);
  } catch (...) {
    entries_.erase(place);
    throw;
  }
}

std::optional<SequenceId> RequestQueue::Head(absl::Time now) {
  Rise(now);
  const auto highest = std::find_if(classes_.rbegin(), classes_.rend(),
                                    [](const Class& c) { return !c.turns.empty(); });
  if (highest == classes_.rend()) return std::nullopt;
  const bool stays = head_.has_value() && &classes_[entries_.at(*head_).in_class] == &*highest;
  if (!stays) head_ = PickFrom(*highest);
  return head_;
}

void RequestQueue::PopHead() {
  Require(head_.has_value(), "nobody is at the head");
  const Entry& entry = entries_.at(*head_);
  classes_[entry.in_class].by_name.at(entry.tenant)->saved -= entry.work.tokens;
  Remove(*head_);
}

void RequestQueue::Remove(SequenceId id) {
  const auto entry = entries_.find(id);
  Require(entry != entries_.end(), "it does not wait");
  Leave(id, entry->second);
  entries_.erase(entry);
  if (head_ == id) head_.reset();
}

int64_t RequestQueue::tenants(Priority priority) const {
  return static_cast<int64_t>(classes_[static_cast<int>(priority)].turns.size());
}

Backlog RequestQueue::backlog() const {
  Backlog backlog;
  for (int i = 0; i < kNumPriorities; ++i) {
    for (const Tenant& tenant : classes_[i].turns) {
      backlog.Add({.priority = static_cast<Priority>(i), .tenant = tenant.name}, tenant.work);
    }
  }
  return backlog;
}

void RequestQueue::Enter(SequenceId id, const Entry& entry) {
  Class& to = classes_[entry.in_class];
  // All that takes memory; then nothing can throw.
  const double saved = to.turns.empty() ? static_cast<double>(rule_.quantum_tokens) : 0;
  std::list<Tenant> stranger;
  stranger.push_back({.name = entry.tenant, .saved = saved});
  std::set<SequenceId> waiting = {id};
  std::set<std::pair<absl::Time, SequenceId>> rises;
  if (entry.rises != absl::InfiniteFuture()) rises.emplace(entry.rises, id);
  const auto [known, is_new] = to.by_name.try_emplace(entry.tenant, stranger.begin());

  if (is_new) to.turns.splice(to.turns.end(), stranger);
  known->second->waiting.merge(waiting);
  known->second->work += entry.work;
  rises_.merge(rises);
}

void RequestQueue::Leave(SequenceId id, const Entry& entry) {
  rises_.erase({entry.rises, id});
  Class& from = classes_[entry.in_class];
  const auto tenant = from.by_name.at(entry.tenant);
  tenant->waiting.erase(id);
  tenant->work -= entry.work;
  if (!tenant->waiting.empty()) return;
  const bool had_turn = tenant == from.turns.begin();
  from.by_name.erase(entry.tenant);
  from.turns.erase(tenant);
  if (had_turn && !from.turns.empty()) {
    from.turns.front().saved += static_cast<double>(rule_.quantum_tokens);
  }
}

void RequestQueue::Rise(absl::Time now) {
  while (!rises_.empty() && rises_.begin()->first <= now) {
    const SequenceId id = rises_.begin()->second;
    Entry& entry = entries_.at(id);
    Entry risen = entry;
    ++risen.in_class;
    risen.rises =
        risen.in_class + 1 < kNumPriorities ? entry.rises + rule_.ageing : absl::InfiniteFuture();
    Enter(id, risen);
    Leave(id, entry);
    entry = std::move(risen);
  }
}

SequenceId RequestQueue::PickFrom(Class& from) {
  const double quantum = static_cast<double>(rule_.quantum_tokens);
  auto lacks = [this](const Tenant& tenant) {
    return entries_.at(*tenant.waiting.begin()).work.tokens - tenant.saved;
  };
  auto pass_turn = [&] {
    from.turns.splice(from.turns.end(), from.turns, from.turns.begin());
    from.turns.front().saved += quantum;
  };
  // One round; then all rounds at once in which nobody could pay; then at most one more.
  for (size_t i = 0; i < from.turns.size() && lacks(from.turns.front()) > 0; ++i) pass_turn();
  if (lacks(from.turns.front()) > 0) {
    double rounds = std::ceil(lacks(from.turns.front()) / quantum);
    for (const Tenant& tenant : from.turns) {
      rounds = std::min(rounds, std::ceil(lacks(tenant) / quantum));
    }
    for (Tenant& tenant : from.turns) tenant.saved += (rounds - 1) * quantum;
  }
  while (lacks(from.turns.front()) > 0) pass_turn();
  return *from.turns.front().waiting.begin();
}

}  // namespace epikv
