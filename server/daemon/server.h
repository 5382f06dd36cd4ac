#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/lifecycle.h"
#include "server/dialect/orca_service.h"
#include "server/dialect/vllm_service.h"
#include "server/experiments/experiment_service.h"
#include "server/generation/generation_service.h"
#include "server/models/model_service.h"
#include "server/models/models.h"
#include "server/models/policy_service.h"
#include "server/models/tokenization_service.h"
#include "server/port/grpc_port.h"

namespace epikv {

struct ServerOptions {
  GrpcPortOptions port;
  OutboxLimits outbox;
  // Both outlive the server and are null where there are no experiments: what deals requests to
  // arms, and what the service manages.
  Participation* participation = nullptr;
  Experiments* experiments = nullptr;
  Shadow* shadow = nullptr;  // outlives the server; null: nothing is replayed
  bool shared_prefixes = false;
  bool vllm_dialect = false;       // whether VllmService is served, too
  PacketStore* packets = nullptr;  // outlives the server; null: there are none
  Sessions* sessions = nullptr;    // the same
};

// The gRPC port: our services, grpc.health.v1 and reflection. What it is given outlives it.
class Server {
 public:
  // Answers at once, whatever the models; health says what `lifecycle` says. The error names the
  // address.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options, Models& models,
                                                       Lifecycle& lifecycle, Courier& courier,
                                                       const Frontend& frontend);

  int port() const { return port_->port(); }

  // Waits for the streams to end, at most until `deadline` or, if that is later, for a second.
  // Precondition: the models accept no more.
  void AwaitStreams(absl::Time deadline);
  // Cuts what is left.
  void Close() { port_->Close(); }

 private:
  Server(Models& models, const Lifecycle& lifecycle, Courier& courier, const Frontend& frontend,
         const ServerOptions& options);

  PacketStore no_packets_;
  GenerationService generation_;
  TokenizationService tokenization_;
  ModelService model_service_;
  PolicyService policies_;
  PacketService packets_;
  ExperimentService experiments_;
  std::unique_ptr<VllmService> vllm_;  // null: it is not served
  std::unique_ptr<OrcaService> orca_;  // the same
  std::unique_ptr<GrpcPort> port_;     // ends before its services
};

}  // namespace epikv
