#include "server/metrics/load_reports.h"

#include <algorithm>
#include <iterator>

#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

// For which nobody but the server, or its load, is to blame.
bool IsServers(grpc::StatusCode code) {
  switch (code) {
    case grpc::INTERNAL:
    case grpc::UNKNOWN:
    case grpc::DATA_LOSS:
    case grpc::UNAVAILABLE:
    case grpc::RESOURCE_EXHAUSTED:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool LoadReports::AreRequests(absl::string_view method) {
  constexpr absl::string_view kRequests[] = {"GenerationService/Generate",
                                             "GenerationService/GenerateOnce",
                                             "GenerationService/Score", "VllmEngine/Generate"};
  return std::find(std::begin(kRequests), std::end(kRequests), method) != std::end(kRequests);
}

void LoadReports::OnRequestEnded(grpc::StatusCode code) {
  const absl::Time now = SteadyNow();
  absl::MutexLock lock(&mu_);
  ended_.Add(1, now);
  if (IsServers(code)) failed_.Add(1, now);
}

xds::data::orca::v3::OrcaLoadReport LoadReports::Report() const {
  const DaemonLoad load = metrics_.Load();
  xds::data::orca::v3::OrcaLoadReport report;
  report.set_application_utilization(load.kv_reserved_ratio);
  auto& named = *report.mutable_named_metrics();
  named["running_requests"] = static_cast<double>(load.running_requests);
  named["waiting_requests"] = static_cast<double>(load.waiting_requests);
  if (load.predicted_wait.has_value()) {
    named["predicted_wait_seconds"] = Seconds(*load.predicted_wait);
  }
  const absl::Time now = SteadyNow();
  absl::MutexLock lock(&mu_);
  report.set_rps_fractional(ended_.At(now));
  report.set_eps(failed_.At(now));
  return report;
}

}  // namespace epikv
