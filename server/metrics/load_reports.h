#pragma once

#include <grpcpp/support/status.h>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics/metrics.h"
#include "server/metrics/recent.h"
#include "xds/data/orca/v3/orca_load_report.pb.h"

namespace epikv {

// What balancers are told of the daemon's load, in the words of ORCA. Thread-safe.
class LoadReports {
 public:
  // `metrics` outlives it.
  explicit LoadReports(const Metrics& metrics) : metrics_(metrics) {}

  // Whether calls of the method are requests, behind which a report goes out.
  static bool AreRequests(absl::string_view method);  // "GenerationService/Score"
  void OnRequestEnded(grpc::StatusCode code);

  xds::data::orca::v3::OrcaLoadReport Report() const;

 private:
  const Metrics& metrics_;
  mutable absl::Mutex mu_;
  RecentRate ended_ ABSL_GUARDED_BY(mu_), failed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace epikv
