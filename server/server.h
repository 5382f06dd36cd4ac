#pragma once

#include <grpcpp/server.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/generation_service.h"
#include "server/lifecycle.h"
#include "server/model_service.h"
#include "server/models.h"
#include "server/policy_service.h"
#include "server/tls.h"
#include "server/tokenization_service.h"
#include "server/transport.h"

namespace epikv {

struct ServerOptions {
  std::string listen = "127.0.0.1:0";
  TransportLimits transport;
  bool reflection = true;
  bool channelz = false;
  OutboxLimits outbox;
  TlsFiles tls;
};

// The gRPC port: our services, grpc.health.v1 and reflection. What it is given outlives it.
class Server {
 public:
  // Answers at once, whatever the models; health says what `lifecycle` says. The error names the
  // address.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, Models& models,
                                                       Lifecycle& lifecycle, Courier& courier,
                                                       const Frontend& frontend);
  ~Server();

  int port() const { return port_; }

  // Waits for the streams to end, at most until `deadline`, then cuts what is left. Precondition:
  // the models accept no more.
  void Shutdown(absl::Time deadline);

 private:
  Server(Models& models, Lifecycle& lifecycle, Courier& courier, const Frontend& frontend,
         const ServerOptions& options);

  Lifecycle& lifecycle_;
  GenerationService generation_;
  TokenizationService tokenization_;
  ModelService model_service_;
  PolicyService policies_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace epikv
