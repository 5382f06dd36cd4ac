#include "server/dialect/orca_service.h"

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>

#include <algorithm>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/durations.h"
#include "server/call/wire.h"
#include "xds/service/orca/v3/orca.pb.h"

namespace epikv {
namespace {

constexpr absl::Duration kLeastInterval = absl::Seconds(1);
// A call looks so often at least whether the daemon drains.
constexpr absl::Duration kMostInterval = absl::Minutes(1);

}  // namespace

// Writes, or waits for its alarm: one of them at a time, and what ends it comes after that.
class OrcaService::ReportCall final : public Call {
 public:
  ReportCall(const OrcaService& service, grpc::CallbackServerContext& context)
      : Call("OpenRcaService/StreamCoreMetrics", service.frontend(), context), service_(service) {}

 private:
  void OnRequest(const grpc::ByteBuffer& request) override {
    const auto asked = scope().Open<xds::service::orca::v3::OrcaLoadReportRequest>(request);
    if (const auto* refusal = std::get_if<grpc::Status>(&asked)) return End(*refusal);
    const auto& interval =
        std::get<xds::service::orca::v3::OrcaLoadReportRequest>(asked).report_interval();
    interval_ = std::clamp(absl::Seconds(interval.seconds()) + absl::Nanoseconds(interval.nanos()),
                           kLeastInterval, kMostInterval);
    Report();
  }

  void Report() {
    if (service_.lifecycle_.state() == ServerState::kDraining) {
      return End(grpc::Status(grpc::UNAVAILABLE, "the server drains"));
    }
    message_ = Serialize(service_.reports_.Report());
    Expect(stall());
    StartWrite(&message_);
  }

  void OnWriteDone(bool ok) override {
    Expect(absl::ZeroDuration());
    if (!ok) return Leave();
    {
      absl::MutexLock lock(&mu_);
      if (!cancelled_) {
        alarm_.Set(
            gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                         gpr_time_from_millis(absl::ToInt64Milliseconds(interval_), GPR_TIMESPAN)),
            [this](bool on_time) { on_time ? Report() : Leave(); });
        return;
      }
    }
    Leave();
  }

  void OnCancel() override {
    absl::MutexLock lock(&mu_);
    cancelled_ = true;
    alarm_.Cancel();
  }

  void Leave() { End(grpc::Status(grpc::CANCELLED, "the client has gone, or reads too slowly")); }

  const OrcaService& service_;
  absl::Duration interval_;
  grpc::ByteBuffer message_;  // gRPC's until OnWriteDone
  absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  grpc::Alarm alarm_ ABSL_GUARDED_BY(mu_);
};

OrcaService::OrcaService(const LoadReports& reports, const Lifecycle& lifecycle,
                         const Frontend& frontend)
    : Service(frontend, "xds.service.orca.v3"), reports_(reports), lifecycle_(lifecycle) {
  Add("OpenRcaService/StreamCoreMetrics",
      [this](grpc::CallbackServerContext& context) { return new ReportCall(*this, context); });
}

}  // namespace epikv
