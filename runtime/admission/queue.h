#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/time/time.h"
#include "runtime/admission/forecast.h"
#include "runtime/request/request.h"
#include "runtime/request/sequence_id.h"

namespace epikv {

struct QueueRule {
  // Waiting this long, a request rises one class, up to the highest: nobody waits for ever.
  absl::Duration ageing = absl::Seconds(30);
  // What each tenant may have admitted in its turn, in tokens (prompts + max outputs).
  int64_t quantum_tokens = 2048;
};

// Which waiting request is next. Classes by priority, the highest first; in a class deficit round
// robin over tenants, in tokens; of one tenant, first come, first served.
//
// A tenant's turn gives it a quantum; it keeps the turn while what it has saved pays for its next
// request, and saves the rest for its next turn. So of two tenants that both wait all the time,
// neither gets more than a quantum and a request ahead of the other. A tenant of which nothing
// waits is forgotten, with what it saved.
//
// A call may throw for lack of memory: then Push has added nothing, and everyone who waited keeps
// their place. So its maps are std's: absl's may break if they cannot grow.
//
// Owned by the engine.
class RequestQueue {
 public:
  explicit RequestQueue(QueueRule rule) : rule_(rule) {}

  // Ids ascend in order of arrival.
  void Push(SequenceId id, const Request& request, absl::Time now);
  // The next one. It stays the next one until it leaves, or one of a higher class waits.
  std::optional<SequenceId> Head(absl::Time now);
  // The head is admitted: its tenant pays.
  void PopHead();
  // Leaves without being admitted. Precondition: it waits.
  void Remove(SequenceId id);

  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  int64_t tenants(Priority priority) const;  // of which something waits in this class
  Backlog backlog() const;
  const QueueRule& rule() const { return rule_; }

 private:
  struct Entry {
    std::string tenant;
    Work work;
    int in_class = 0;
    absl::Time rises;  // to the next class; infinite future in the highest
  };
  struct Tenant {
    std::string name;
    double saved = 0;              // tokens
    std::set<SequenceId> waiting;  // in order of arrival
    Work work;                     // of all that waits
  };
  // The first has the turn and has got its quantum.
  struct Class {
    std::list<Tenant> turns;
    std::unordered_map<std::string, std::list<Tenant>::iterator> by_name;
  };

  void Enter(SequenceId id, const Entry& entry);
  void Leave(SequenceId id, const Entry& entry);
  void Rise(absl::Time now);
  SequenceId PickFrom(Class& from);

  const QueueRule rule_;
  std::unordered_map<SequenceId, Entry> entries_;
  std::array<Class, kNumPriorities> classes_;
  std::set<std::pair<absl::Time, SequenceId>> rises_;
  std::optional<SequenceId> head_;
};

}  // namespace epikv
