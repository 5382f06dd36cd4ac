#pragma once

#include "server/base/lifecycle.h"
#include "server/call/service.h"
#include "server/metrics/load_reports.h"

namespace epikv {

// The service xds.service.orca.v3.OpenRcaService: reports of the daemon's load, for balancers that
// watch it apart from calls. Thread-safe; what it is given outlives it, and it outlives its calls.
class OrcaService final : public Service {
 public:
  OrcaService(const LoadReports& reports, const Lifecycle& lifecycle, const Frontend& frontend);

 private:
  class ReportCall;

  const LoadReports& reports_;
  const Lifecycle& lifecycle_;
};

}  // namespace epikv
