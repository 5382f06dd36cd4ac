#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment_record.pb.h"
#include "server/experiments/store/sql_session.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Finds the requests of a batch's outcomes, as Source says, and writes the outcomes. Load, then
// Began and Seen in the order of the records, then, once the requests are written, Write. Of one
// transaction and thread.
class OutcomeJoiner {
 public:
  // definitions: outlive it, as do the records.
  OutcomeJoiner(SqlSession& session, const Definitions& definitions, Source source);

  // All requests that outcomes of these records may be of, and outcomes that have waited for
  // requests of theirs.
  absl::Status Load(absl::Span<const v1::ExperimentRecord> records);
  // A request that was not there.
  void Began(const v1::RequestBegan& began);
  // result: outlives it; set now or by Write.
  void Seen(const v1::OutcomeSeen& outcome, Recorded& result);
  absl::Status Write();
  // What Write has written.
  const std::vector<CountedOutcome>& counted() const { return counted_; }

 private:
  using Client = std::pair<std::string, std::string>;                   // tenant, request_id
  using OutcomeId = std::tuple<std::string, std::string, std::string>;  // request, metric, key
  struct Part {
    std::string experiment, arm;
    bool forced = false;
  };
  struct Request {
    std::string id;
    int64_t began_us = 0;
    std::vector<Part> parts;
  };
  using Requests = std::vector<Request>;  // of one client, in the order in which they began
  struct Kept {
    double value = 0;
    int64_t received_us = 0;
  };
  // An outcome that has a request.
  struct Joined {
    const v1::OutcomeSeen* outcome = nullptr;
    Request request;
    Requests near;            // this one and those that it might have been joined to
    int64_t received_us = 0;  // not before the request, where that is certain
    Recorded* result = nullptr;
  };

  static OutcomeId IdOf(const std::string& request, const v1::OutcomeSeen& outcome);
  absl::Status LoadWaiting(absl::Span<const v1::ExperimentRecord> records);
  absl::Status CountWaiting();
  absl::Status LoadClients(absl::Span<const v1::ExperimentRecord> records);
  Request& RequestOf(const Client& client, const std::string& id, int64_t began_us);
  static Requests Near(const Requests& requests, Requests::const_iterator request);
  bool JoinByTime(const v1::OutcomeSeen& outcome, Recorded& result);
  void JoinSpooled();
  absl::Status MoveKept();
  absl::Status LoadKept();
  Recorded Settle(const Joined& joined);
  bool CameBefore(const Joined& joined) const;
  std::vector<const v1::Experiment*> Declaring(const Request& request,
                                               const std::string& metric) const;
  void Count(const Joined& joined, const std::vector<const v1::Experiment*>& declaring);

  SqlSession& session_;
  const Definitions& definitions_;
  const Source source_;
  std::map<Client, Requests> requests_;  // as far as loaded, and new ones
  std::vector<std::pair<const v1::OutcomeSeen*, Recorded*>> spooled_;
  std::vector<v1::OutcomeSeen> waiting_;
  std::map<std::string, int64_t> num_waiting_;  // by tenant, in the store and to be written
  int64_t all_waiting_ = 0;
  Recorded waiting_result_ = Recorded::kWaiting;  // nobody asks for it
  std::vector<Joined> joined_;
  std::map<OutcomeId, Kept> kept_;
  std::vector<SqlRow> late_requests_;  // id, tenant, request_id, began_us
  std::vector<SqlRow> new_outcomes_, new_waiting_, no_longer_waiting_;
  std::vector<CountedOutcome> counted_;
};

}  // namespace epikv
