#pragma once

#include <grpcpp/impl/codegen/service_type.h>
#include <grpcpp/server.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/lifecycle.h"
#include "server/port/connections.h"
#include "server/port/listener.h"
#include "server/port/tls.h"
#include "server/port/transport.h"

namespace epikv {

struct GrpcPortOptions {
  std::string listen = "127.0.0.1:0";
  std::string flag = "--listen";  // to name in errors
  TransportLimits transport;
  TlsFiles tls;
  // Of this port alone.
  std::shared_ptr<Connections> connections = std::make_shared<Connections>(ConnectionLimits());
  bool reflection = true;
  bool channelz = false;
};

// One address with services, grpc.health.v1, and reflection and channelz where asked for.
class GrpcPort {
 public:
  // Answers at once; health says what `lifecycle` says of `names`. All that is given outlives it.
  // The error names the address.
  static absl::StatusOr<std::unique_ptr<GrpcPort>> Open(const GrpcPortOptions& options,
                                                        const std::vector<grpc::Service*>& services,
                                                        std::vector<std::string> names,
                                                        Lifecycle& lifecycle);
  ~GrpcPort();

  int port() const { return listener_->port(); }
  // Refuses new calls and cuts those that are left soon.
  void Close();

 private:
  explicit GrpcPort(Lifecycle& lifecycle) : lifecycle_(lifecycle) {}

  Lifecycle& lifecycle_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Listener> listener_;  // ends before what it hands connections to
};

}  // namespace epikv
