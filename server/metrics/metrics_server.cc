#include "server/metrics/metrics_server.h"

#include <CivetServer.h>

#include <exception>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace epikv {
namespace {

// Who opens the port in a browser finds /metrics from here. 0: the request is left to the library.
int AnswerRoot(mg_connection* connection) {
  constexpr absl::string_view kPage = "<a href=\"/metrics\">/metrics</a>\n";
  const mg_request_info& asked = *mg_get_request_info(connection);
  if (absl::NullSafeStringView(asked.request_method) != "GET" ||
      absl::NullSafeStringView(asked.local_uri) != "/") {
    return 0;
  }
  mg_send_http_ok(connection, "text/html", kPage.size());
  mg_write(connection, kPage.data(), kPage.size());
  return 200;
}

// The library copies them.
const CivetCallbacks* Callbacks() {
  static const CivetCallbacks callbacks = [] {
    CivetCallbacks made;
    made.begin_request = AnswerRoot;
    return made;
  }();
  return &callbacks;
}

}  // namespace

// By default the library waits 30 s for a request, and a silent connection holds a thread.
MetricsServer::MetricsServer(const std::string& address)
    : exposer_(std::vector<std::string>{"listening_ports", address, "num_threads", "8",
                                        "request_timeout_ms", "2000"},
               Callbacks()) {}

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address) try {
  return std::unique_ptr<MetricsServer>(new MetricsServer(address));
} catch (const std::exception&) {  // the library's way to say that it cannot bind
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address,
                   " for /metrics: the port is in use, or the host is not this machine's; choose "
                   "another with --metrics_listen"));
}

void MetricsServer::Serve(const Metrics& metrics) { exposer_.RegisterCollectable(metrics.page()); }

}  // namespace epikv
