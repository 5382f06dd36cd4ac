#include "runtime/executor/ranked_executor.h"

#include <exception>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/executor/policy_calls.h"
#include "runtime/executor/rank_messages.h"

namespace epikv {
namespace {

using nlohmann::json;

void Tell(Ranks& ranks, const json& call) {
  const std::vector<uint8_t> bytes = json::to_msgpack(call);
  ranks.Send({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

int64_t Number(SequenceId id) { return static_cast<int64_t>(id); }

// One number of what has come of a call, by which ranks see that they came to the same.
uint64_t Mix(uint64_t seen, int64_t value) {
  return (seen ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u + (seen >> 7);
}
uint64_t ResultOf(const absl::Status& status) { return Mix(1, static_cast<int>(status.code())); }
uint64_t ResultOf(const absl::StatusOr<int64_t>& cached) {
  return cached.ok() ? Mix(2, *cached) : ResultOf(cached.status());
}

// Settles on a rank, as all do at once. Who fails in one has failed in all; and the others have to
// hold the same, where heads do not decide for themselves.
std::vector<SettleOutcome> SettleTogether(Executor& own, Ranks& ranks,
                                          absl::Span<const WorkItem> items) {
  std::vector<SettleOutcome> outcomes = own.Settle(items);
  std::vector<char> failed, all(items.size() * ranks.size());
  for (const SettleOutcome& outcome : outcomes) failed.push_back(outcome.status.ok() ? 0 : 1);
  ranks.Gather(failed.data(), std::ssize(failed), all.data());
  uint64_t seen = 3;
  for (size_t i = 0; i < items.size(); ++i) {
    for (int r = 0; r < ranks.size() && outcomes[i].status.ok(); ++r) {
      if (all[r * items.size() + i] == 0) continue;
      outcomes[i].status = PolicyFailure(*items[i].request, kPolicyStatus,
                                         absl::StrCat("on the KV heads of rank ", r));
    }
    if (!outcomes[i].status.ok()) continue;
    seen = Mix(seen, outcomes[i].pass.empty());
    const bool shared = items[i].request->traits.granularity != Granularity::kHead;
    if (shared && outcomes[i].evicted_entries > 0) {
      seen = Mix(seen, static_cast<int64_t>(own.SharedSlots(items[i].id)));
    }
  }
  ranks.Agree(seen, "what its policies drop");
  return outcomes;
}

// Of a rank that draws no tokens: no item of its own can fail but for want of memory.
void Expect(const ForwardOutcome& outcome) {
  if (!outcome.status.ok()) throw std::runtime_error(std::string(outcome.status.message()));
}

// A forward that ends before its end leaves the other ranks waiting.
void FailIf(Ranks& ranks, const absl::Status& forward) {
  if (forward.ok()) return;
  ranks.Fail(absl::StrCat("rank ", ranks.rank(), ": a forward failed: ", forward.message()));
}

absl::Status Failed(const std::exception& failure) { return absl::InternalError(failure.what()); }

}  // namespace

RankedExecutor::RankedExecutor(std::unique_ptr<Executor> own, std::shared_ptr<Ranks> ranks)
    : own_(std::move(own)), ranks_(std::move(ranks)) {}

RankedExecutor::~RankedExecutor() {
  try {
    Tell(*ranks_, {{"call", "end"}});
  } catch (const std::exception&) {  // they have ended
  }
}

absl::StatusOr<int64_t> RankedExecutor::Open(SequenceId id, const Request& request,
                                             int64_t prefix_bytes) {
  try {
    Tell(*ranks_, {{"call", "open"},
                   {"id", Number(id)},
                   {"request", RequestMessage(request)},
                   {"prefix_bytes", prefix_bytes}});
    absl::StatusOr<int64_t> cached = own_->Open(id, request, prefix_bytes);
    ranks_->Agree(ResultOf(cached), "what it has cached of a prompt");
    return cached;
  } catch (const RankFailure& failure) {
    return Failed(failure);
  }
}

absl::StatusOr<std::vector<ForwardOutcome>> RankedExecutor::Forward(
    absl::Span<const WorkItem> items) {
  try {
    Tell(*ranks_, {{"call", "forward"}, {"items", ItemsMessage(items)}});
    absl::StatusOr<std::vector<ForwardOutcome>> outcomes = own_->Forward(items);
    FailIf(*ranks_, outcomes.status());
    if (outcomes.ok() &&
        !absl::c_all_of(*outcomes, [](const auto& of) { return of.status.ok(); })) {
      DropPrefixes();  // others, who draw no tokens, may have kept what this rank has not
    }
    return outcomes;
  } catch (const RankFailure& failure) {
    return Failed(failure);
  }
}

ForwardOutcome RankedExecutor::Accept(const WorkItem& item) {
  try {
    Tell(*ranks_, {{"call", "accept"}, {"items", ItemsMessage({&item, 1})}});
    ForwardOutcome outcome = own_->Accept(item);
    if (!outcome.status.ok()) DropPrefixes();  // as in Forward
    return outcome;
  } catch (const RankFailure& failure) {
    return {.status = Failed(failure)};
  }
}

bool RankedExecutor::MayRound(const WorkItem& item) const {
  const bool here = own_->MayRound(item);
  const PolicyTraits& traits = item.request->traits;
  if (here || !traits.evicts || traits.granularity != Granularity::kHead) return here;
  try {
    Tell(*ranks_, {{"call", "may_round"}, {"items", ItemsMessage({&item, 1})}});
    return ranks_->Least(1) == 0;
  } catch (const RankFailure&) {
    return true;  // nothing is guessed
  }
}

std::vector<SettleOutcome> RankedExecutor::Settle(absl::Span<const WorkItem> items) {
  try {
    Tell(*ranks_, {{"call", "settle"}, {"items", ItemsMessage(items)}});
    return SettleTogether(*own_, *ranks_, items);
  } catch (const RankFailure& failure) {
    std::vector<SettleOutcome> outcomes(items.size());
    for (SettleOutcome& outcome : outcomes) outcome.status = Failed(failure);
    return outcomes;
  }
}

absl::Status RankedExecutor::Fork(SequenceId parent, SequenceId child, const Request& request) {
  try {
    Tell(*ranks_, {{"call", "fork"},
                   {"parent", Number(parent)},
                   {"id", Number(child)},
                   {"request", RequestMessage(request)}});
    absl::Status forked = own_->Fork(parent, child, request);
    ranks_->Agree(ResultOf(forked), "whether a completion could begin");
    return forked;
  } catch (const RankFailure& failure) {
    return Failed(failure);
  }
}

void RankedExecutor::Close(SequenceId id) {
  own_->Close(id);
  try {
    Tell(*ranks_, {{"call", "close"}, {"id", Number(id)}});
  } catch (const RankFailure&) {  // the next call says so
  }
}

void RankedExecutor::DropPrefixes() {
  own_->DropPrefixes();
  try {
    Tell(*ranks_, {{"call", "drop_prefixes"}});
  } catch (const RankFailure&) {
  }
}

absl::Status ServeRank(Executor& own, Ranks& ranks, PolicyCatalog catalog,
                       const ModelShape& shape) try {
  std::unordered_map<SequenceId, std::unique_ptr<const Request>> requests;
  ReceivedItems forwarded;  // guesses among them may still be accepted
  const auto of = [&](SequenceId id) { return requests.at(id).get(); };
  for (;;) {
    const std::string message = ranks.Receive();
    const json call = json::from_msgpack(message);
    const auto name = call.at("call").get<std::string>();
    const SequenceId id{call.value("id", int64_t{0})};
    if (name == "end") return absl::OkStatus();
    if (name == "open" || name == "fork") {
      requests[id] = RequestOf(call.at("request"), catalog, shape);
    }
    if (name == "open") {
      ranks.Agree(ResultOf(own.Open(id, *of(id), call.at("prefix_bytes"))),
                  "what it has cached of a prompt");
    } else if (name == "fork") {
      const SequenceId parent{call.at("parent").get<int64_t>()};
      ranks.Agree(ResultOf(own.Fork(parent, id, *of(id))), "whether a completion could begin");
    } else if (name == "forward") {
      forwarded = ReceivedItems(call.at("items"), of);
      const auto outcomes = own.Forward(forwarded.items());
      FailIf(ranks, outcomes.status());
      if (!outcomes.ok()) return outcomes.status();
      for (const ForwardOutcome& outcome : *outcomes) Expect(outcome);
    } else if (name == "accept") {
      const ReceivedItems accepted(call.at("items"), of);
      Expect(own.Accept(accepted.items()[0]));
    } else if (name == "may_round") {
      const ReceivedItems asked(call.at("items"), of);
      ranks.Least(own.MayRound(asked.items()[0]) ? 0 : 1);
    } else if (name == "settle") {
      const ReceivedItems settled(call.at("items"), of);
      SettleTogether(own, ranks, settled.items());
    } else if (name == "close") {
      own.Close(id);
      requests.erase(id);
    } else if (name == "drop_prefixes") {
      own.DropPrefixes();
    }
  }
} catch (const std::exception& e) {
  ranks.Fail(absl::StrCat("rank ", ranks.rank(), ": ", e.what()));
  return Failed(e);
}

}  // namespace epikv
