#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "epikv/v1/experiment.pb.h"
#include "server/experiments/store/sql_session.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Reads an experiment's requests in pages, by the time at which they began; each page may come over
// another session. Of one thread at a time.
class RequestReader {
 public:
  RequestReader(const v1::Experiment& experiment, const Reading& reading);

  bool done() const { return done_; }
  // The next of them; none is also possible before the end.
  absl::StatusOr<std::vector<RequestRow>> Next(SqlSession& session);

 private:
  bool Wanted(const OutcomeRow& outcome, const RequestRow& request) const;

  const std::string experiment_;
  const absl::Duration outcome_window_;
  std::set<std::string> metrics_;
  const int64_t until_us_;
  // What was read last.
  int64_t began_us_;
  std::string request_;
  bool done_ = false;
};

}  // namespace epikv
