#include "server/experiments/store/outcome_joiner.h"

#include <google/protobuf/util/time_util.h>

#include <algorithm>
#include <limits>
#include <set>

#include "absl/strings/string_view.h"
#include "server/base/durations.h"

namespace epikv {
namespace {

using google::protobuf::util::TimeUtil;

// So many requests before and after an outcome's own are looked through for the same outcome.
constexpr std::ptrdiff_t kNear = 3;

// Requests that an outcome received at $3 may be of: the newest that began by then (more than one,
// to see whether it was joined to another before), and those that follow, where clocks leave none.
// Few, since a client may use one id for ever.
constexpr absl::string_view kSelectByClient =
    "SELECT c.id, c.began_us, p.experiment, p.arm, p.forced FROM ("
    "SELECT * FROM (SELECT id, began_us FROM requests WHERE tenant = $1 AND request_id = $2 "
    "AND began_us <= $3 ORDER BY began_us DESC, id DESC LIMIT 4) earlier UNION ALL "
    "SELECT * FROM (SELECT id, began_us FROM requests WHERE tenant = $1 AND request_id = $2 "
    "AND began_us > $3 ORDER BY began_us, id LIMIT 2) later) c "
    "JOIN participations p ON p.request = c.id";
constexpr absl::string_view kSelectOutcome =
    "SELECT value, received_us FROM outcomes "
    "WHERE request = $1 AND metric = $2 AND outcome_key = $3";
// Outcomes that may wait for their requests, of all and of one tenant. Of more it is not known
// whether their requests exist, and they are dropped.
constexpr int64_t kMostWaiting = 100'000, kMostOfTenant = kMostWaiting / 4;
constexpr absl::string_view kAnyWaiting = "SELECT 1 FROM waiting_outcomes LIMIT 1";
constexpr absl::string_view kCountWaiting =
    "SELECT tenant, COUNT(*) FROM waiting_outcomes GROUP BY tenant";
constexpr absl::string_view kSelectWaiting =
    "SELECT tenant, request_id, metric, outcome_key, value, happened_us, received_us "
    "FROM waiting_outcomes WHERE tenant = $1 AND request_id = $2 ORDER BY received_us";
constexpr absl::string_view kInsertOutcome =
    "INSERT INTO outcomes (request, metric, outcome_key, value, happened_us, received_us) "
    "VALUES ($1, $2, $3, $4, $5, $6)";
constexpr absl::string_view kInsertWaiting =
    "INSERT INTO waiting_outcomes (tenant, request_id, metric, outcome_key, value, happened_us, "
    "received_us) VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING";
constexpr absl::string_view kDeleteWaiting =
    "DELETE FROM waiting_outcomes WHERE tenant = $1 AND request_id = $2 AND metric = $3 "
    "AND outcome_key = $4 AND received_us = $5";
// Of client $2 $3, request $1, which began at $4, comes late, from a spool: it gets the outcomes
// that were joined to the one before it for the lack of it, and of the one after it those that
// began before that one did, and so were there for the lack of any.
constexpr absl::string_view kTakeFromEarlier =
    "UPDATE outcomes SET request = $1 WHERE received_us >= $4 AND request = (SELECT id FROM "
    "requests WHERE tenant = $2 AND request_id = $3 AND began_us < $4 "
    "ORDER BY began_us DESC, id DESC LIMIT 1) AND NOT EXISTS (SELECT 1 FROM outcomes o "
    "WHERE o.request = $1 AND o.metric = outcomes.metric "
    "AND o.outcome_key = outcomes.outcome_key)";
constexpr absl::string_view kTakeFromLater =
    "UPDATE outcomes SET request = $1 WHERE request = (SELECT id FROM requests WHERE tenant = $2 "
    "AND request_id = $3 AND began_us > $4 ORDER BY began_us, id LIMIT 1) "
    "AND received_us < (SELECT began_us FROM requests r WHERE r.id = outcomes.request) "
    "AND NOT EXISTS (SELECT 1 FROM outcomes o WHERE o.request = $1 AND o.metric = outcomes.metric "
    "AND o.outcome_key = outcomes.outcome_key)";

v1::OutcomeSeen WaitingOf(const SqlRow& row) {
  v1::OutcomeSeen outcome;
  outcome.set_tenant(TextOf(row[0]));
  outcome.set_request_id(TextOf(row[1]));
  outcome.set_metric(TextOf(row[2]));
  outcome.set_key(TextOf(row[3]));
  outcome.set_value(DoubleOf(row[4]));
  *outcome.mutable_time() = TimeUtil::MicrosecondsToTimestamp(IntOf(row[5]));
  *outcome.mutable_received() = TimeUtil::MicrosecondsToTimestamp(IntOf(row[6]));
  return outcome;
}

}  // namespace

OutcomeJoiner::OutcomeJoiner(SqlSession& session, const Definitions& definitions, Source source)
    : session_(session), definitions_(definitions), source_(source) {}

OutcomeJoiner::OutcomeId OutcomeJoiner::IdOf(const std::string& request,
                                             const v1::OutcomeSeen& outcome) {
  return {request, outcome.metric(), outcome.key()};
}

absl::Status OutcomeJoiner::Load(absl::Span<const v1::ExperimentRecord> records) {
  if (absl::Status status = LoadWaiting(records); !status.ok()) return status;
  return LoadClients(records);
}

absl::Status OutcomeJoiner::LoadWaiting(absl::Span<const v1::ExperimentRecord> records) {
  const absl::StatusOr<std::vector<SqlRow>> any = session_.Query(kAnyWaiting);
  if (!any.ok() || any->empty()) return any.status();
  if (absl::Status status = CountWaiting(); !status.ok()) return status;
  std::set<Client> clients;
  for (const v1::ExperimentRecord& record : records) {
    if (!record.has_began()) continue;
    clients.emplace(record.began().tenant(), record.began().request_id());
  }
  std::vector<SqlRow> calls;
  for (const auto& [tenant, request_id] : clients) calls.push_back({tenant, request_id});
  return session_.RunEach(kSelectWaiting, calls, [this](size_t, const SqlRow& row) {
    waiting_.push_back(WaitingOf(row));
  });
}

// Reads them all, and so only for records that may add to them: those of a spool.
absl::Status OutcomeJoiner::CountWaiting() {
  if (source_ != Source::kSpool) return absl::OkStatus();
  const absl::StatusOr<std::vector<SqlRow>> counts = session_.Query(kCountWaiting);
  if (!counts.ok()) return counts.status();
  for (const SqlRow& row : *counts) {
    num_waiting_[TextOf(row[0])] = IntOf(row[1]);
    all_waiting_ += IntOf(row[1]);
  }
  return absl::OkStatus();
}

absl::Status OutcomeJoiner::LoadClients(absl::Span<const v1::ExperimentRecord> records) {
  std::set<std::pair<Client, int64_t>> wanted;
  auto want = [&wanted](const v1::OutcomeSeen& outcome, int64_t by_us) {
    wanted.emplace(Client(outcome.tenant(), outcome.request_id()), by_us);
  };
  for (const v1::OutcomeSeen& outcome : waiting_) want(outcome, MicrosOf(outcome.received()));
  for (const v1::ExperimentRecord& record : records) {
    if (!record.has_outcome()) continue;
    const v1::OutcomeSeen& outcome = record.outcome();
    want(outcome, source_ == Source::kSpool ? MicrosOf(outcome.received())
                                            : std::numeric_limits<int64_t>::max());
  }
  const std::vector<std::pair<Client, int64_t>> order(wanted.begin(), wanted.end());
  std::vector<SqlRow> calls;
  for (const auto& [client, by_us] : order) calls.push_back({client.first, client.second, by_us});
  return session_.RunEach(kSelectByClient, calls, [this, &order](size_t call, const SqlRow& row) {
    Request& request = RequestOf(order[call].first, TextOf(row[0]), IntOf(row[1]));
    request.parts.push_back({TextOf(row[2]), TextOf(row[3]), IntOf(row[4]) != 0});
  });
}

// Loaded, new, or made.
OutcomeJoiner::Request& OutcomeJoiner::RequestOf(const Client& client, const std::string& id,
                                                 int64_t began_us) {
  Requests& requests = requests_[client];
  Request request{.id = id, .began_us = began_us, .parts = {}};
  const auto at = std::lower_bound(requests.begin(), requests.end(), request,
                                   [](const Request& a, const Request& b) {
                                     return std::tie(a.began_us, a.id) < std::tie(b.began_us, b.id);
                                   });
  if (at != requests.end() && at->id == id) return *at;
  return *requests.insert(at, std::move(request));
}

void OutcomeJoiner::Began(const v1::RequestBegan& began) {
  const int64_t began_us = MicrosOf(began.time());
  Request& request = RequestOf({began.tenant(), began.request_id()}, began.id(), began_us);
  for (const v1::RequestBegan::Part& part : began.parts()) {
    request.parts.push_back({part.experiment(), part.arm(), part.forced()});
  }
  if (source_ == Source::kNow) return;  // no outcome of its can have come before it
  late_requests_.push_back({began.id(), began.tenant(), began.request_id(), began_us});
}

void OutcomeJoiner::Seen(const v1::OutcomeSeen& outcome, Recorded& result) {
  // Of a spool it is joined once all requests of the batch are known, whatever their order.
  if (source_ == Source::kSpool) return spooled_.push_back({&outcome, &result});
  const Requests& requests = requests_[{outcome.tenant(), outcome.request_id()}];
  if (requests.empty()) {
    result = Recorded::kUnknownRequest;
    return;
  }
  const Request& newest = requests.back();
  joined_.push_back({.outcome = &outcome,
                     .request = newest,
                     .near = Near(requests, requests.end() - 1),
                     .received_us = std::max(MicrosOf(outcome.received()), newest.began_us),
                     .result = &result});
}

OutcomeJoiner::Requests OutcomeJoiner::Near(const Requests& requests,
                                            Requests::const_iterator request) {
  return {request - std::min(kNear, request - requests.begin()),
          request + std::min(kNear, requests.end() - request)};
}

// Told before: of the newest that began by then; of the oldest where the clocks of two replicas
// leave none. False: no request at all.
bool OutcomeJoiner::JoinByTime(const v1::OutcomeSeen& outcome, Recorded& result) {
  const Requests& requests = requests_[{outcome.tenant(), outcome.request_id()}];
  if (requests.empty()) return false;
  const int64_t received_us = MicrosOf(outcome.received());
  auto at =
      std::upper_bound(requests.begin(), requests.end(), received_us,
                       [](int64_t us, const Request& request) { return us < request.began_us; });
  if (at != requests.begin()) --at;
  joined_.push_back({.outcome = &outcome,
                     .request = *at,
                     .near = Near(requests, at),
                     .received_us = received_us,
                     .result = &result});
  return true;
}

void OutcomeJoiner::JoinSpooled() {
  for (const auto& [outcome, result] : spooled_) {
    if (JoinByTime(*outcome, *result)) continue;
    int64_t& of_tenant = num_waiting_[outcome->tenant()];
    if (of_tenant >= kMostOfTenant || all_waiting_ >= kMostWaiting) {
      *result = Recorded::kUnknownRequest;
      continue;
    }
    ++of_tenant;
    ++all_waiting_;
    *result = Recorded::kWaiting;
    new_waiting_.push_back({outcome->tenant(), outcome->request_id(), outcome->metric(),
                            outcome->key(), outcome->value(), MicrosOf(outcome->time()),
                            MicrosOf(outcome->received())});
  }
  for (const v1::OutcomeSeen& outcome : waiting_) {
    if (!JoinByTime(outcome, waiting_result_)) continue;
    no_longer_waiting_.push_back({outcome.tenant(), outcome.request_id(), outcome.metric(),
                                  outcome.key(), MicrosOf(outcome.received())});
  }
}

absl::Status OutcomeJoiner::Write() {
  if (absl::Status status = MoveKept(); !status.ok()) return status;
  JoinSpooled();
  if (absl::Status status = LoadKept(); !status.ok()) return status;
  for (const Joined& joined : joined_) *joined.result = Settle(joined);
  absl::Status status = session_.RunEach(kInsertOutcome, new_outcomes_);
  if (status.ok()) status = session_.RunEach(kInsertWaiting, new_waiting_);
  if (status.ok()) status = session_.RunEach(kDeleteWaiting, no_longer_waiting_);
  return status;
}

// To the late requests what is theirs. Each takes from its neighbour only, so that what is to go
// further goes from one of them to the next.
absl::Status OutcomeJoiner::MoveKept() {
  std::sort(late_requests_.begin(), late_requests_.end(),
            [](const SqlRow& a, const SqlRow& b) { return IntOf(a[3]) < IntOf(b[3]); });
  absl::Status status = session_.RunEach(kTakeFromEarlier, late_requests_);
  std::reverse(late_requests_.begin(), late_requests_.end());
  if (status.ok()) status = session_.RunEach(kTakeFromLater, late_requests_);
  return status;
}

// What is there under the joined outcomes' keys.
absl::Status OutcomeJoiner::LoadKept() {
  std::set<OutcomeId> wanted;
  for (const Joined& joined : joined_) {
    for (const Request& request : joined.near) wanted.insert(IdOf(request.id, *joined.outcome));
  }
  const std::vector<OutcomeId> order(wanted.begin(), wanted.end());
  std::vector<SqlRow> calls;
  for (const auto& [request, metric, key] : order) calls.push_back({request, metric, key});
  return session_.RunEach(kSelectOutcome, calls, [this, &order](size_t call, const SqlRow& row) {
    kept_[order[call]] = {.value = DoubleOf(row[0]), .received_us = IntOf(row[1])};
  });
}

Recorded OutcomeJoiner::Settle(const Joined& joined) {
  const v1::OutcomeSeen& outcome = *joined.outcome;
  if (CameBefore(joined)) return Recorded::kDuplicate;
  const OutcomeId id = IdOf(joined.request.id, outcome);
  if (const auto there = kept_.find(id); there != kept_.end()) {
    return there->second.value == outcome.value() ? Recorded::kDuplicate : Recorded::kConflict;
  }
  const auto declaring = Declaring(joined.request, outcome.metric());
  if (declaring.empty()) return Recorded::kUndeclaredMetric;
  absl::Duration window;
  for (const v1::Experiment* experiment : declaring) {
    window = std::max(window, OutcomeWindow(*experiment));
  }
  if (absl::Microseconds(joined.received_us - joined.request.began_us) > window) {
    return Recorded::kLate;
  }
  Count(joined, declaring);
  kept_[id] = {.value = outcome.value(), .received_us = joined.received_us};
  new_outcomes_.push_back({joined.request.id, outcome.metric(), outcome.key(), outcome.value(),
                           MicrosOf(outcome.time()), joined.received_us});
  return Recorded::kWritten;
}

// Whether this very record is there, whichever request it was joined to when it came first.
bool OutcomeJoiner::CameBefore(const Joined& joined) const {
  const int64_t received_us = MicrosOf(joined.outcome->received());
  for (const Request& request : joined.near) {
    const auto there = kept_.find(IdOf(request.id, *joined.outcome));
    if (there == kept_.end() || there->second.value != joined.outcome->value()) continue;
    const int64_t then_us = there->second.received_us;
    if (then_us == received_us || then_us == std::max(received_us, request.began_us)) return true;
  }
  return false;
}

// Of the request's experiments.
std::vector<const v1::Experiment*> OutcomeJoiner::Declaring(const Request& request,
                                                            const std::string& metric) const {
  std::vector<const v1::Experiment*> declaring;
  for (const v1::Experiment& experiment : definitions_.experiments) {
    const bool takes_part =
        std::any_of(request.parts.begin(), request.parts.end(),
                    [&](const Part& part) { return part.experiment == experiment.name(); });
    const bool declares =
        std::any_of(experiment.metrics().begin(), experiment.metrics().end(),
                    [&](const v1::Metric& declared) { return declared.name() == metric; });
    if (takes_part && declares) declaring.push_back(&experiment);
  }
  return declaring;
}

// For each of them by itself, as its report will.
void OutcomeJoiner::Count(const Joined& joined,
                          const std::vector<const v1::Experiment*>& declaring) {
  const absl::Duration after = absl::Microseconds(joined.received_us - joined.request.began_us);
  for (const v1::Experiment* experiment : declaring) {
    if (after > OutcomeWindow(*experiment)) continue;
    for (const Part& part : joined.request.parts) {
      if (part.experiment != experiment->name() || part.forced) continue;
      counted_.push_back({.experiment = part.experiment,
                          .arm = part.arm,
                          .metric = joined.outcome->metric(),
                          .value = joined.outcome->value()});
    }
  }
}

absl::Duration OutcomeWindow(const v1::Experiment& experiment) {
  return experiment.has_outcome_window() ? DurationOf(experiment.outcome_window())
                                         : absl::Hours(24);
}

}  // namespace epikv
