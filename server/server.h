#pragma once

#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/generation_service.h"
#include "server/model_service.h"
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
  // Serves at once. The error names the address.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       const ServedModel& model,
                                                       EngineThread& engine, Courier& courier,
                                                       const Frontend& frontend);

  // Whether `listen` can be bound now. Loading a model takes long: better to know before.
  static absl::Status CheckAddress(const std::string& listen);

  int port() const { return port_; }

  // Health says NOT_SERVING for every name from now on; calls go on.
  void StopAdvertising();
  // Waits for the streams to end, at most until `deadline`, then cuts what is left. Precondition:
  // the engine accepts no more.
  void Shutdown(absl::Time deadline);

 private:
  Server(const ServedModel& model, EngineThread& engine, Courier& courier, const Frontend& frontend,
         const ServerOptions& options);
  void Advertise(const std::string& model);

  GenerationService generation_;
  TokenizationService tokenization_;
  ModelService models_;
  PolicyService policies_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace epikv
