#include "server/daemon/server.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/steady_time.h"

namespace epikv {

Server::Server(Models& models, const Lifecycle& lifecycle, Courier& courier,
               const Frontend& frontend, const ServerOptions& options)
    : generation_(models, courier, frontend,
                  {.outbox = options.outbox,
                   .max_answer_bytes = options.port.transport.max_sent_message_bytes,
                   .experiments = options.participation,
                   .shadow = options.shadow,
                   .shared_prefixes = options.shared_prefixes,
                   .packets = options.packets != nullptr ? options.packets : &no_packets_,
                   .sessions = options.sessions}),
      tokenization_(models, frontend, options.port.transport.max_sent_message_bytes),
      model_service_(models, frontend),
      policies_(models, frontend),
      packets_(options.packets != nullptr ? *options.packets : no_packets_, frontend),
      experiments_(options.experiments, models, frontend) {
  if (frontend.load_reports != nullptr) {
    orca_ = std::make_unique<OrcaService>(*frontend.load_reports, lifecycle, frontend);
  }
  if (!options.vllm_dialect) return;
  vllm_ = std::make_unique<VllmService>(generation_, models, lifecycle, frontend,
                                        options.port.transport.max_sent_message_bytes);
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, Models& models,
                                                      Lifecycle& lifecycle, Courier& courier,
                                                      const Frontend& frontend) {
  std::unique_ptr<Server> server(new Server(models, lifecycle, courier, frontend, options));
  std::vector<grpc::Service*> services = {&server->generation_,    &server->tokenization_,
                                          &server->model_service_, &server->policies_,
                                          &server->packets_,       &server->experiments_};
  std::vector<std::string> names = {"",
                                    "epikv.v1.GenerationService",
                                    "epikv.v1.TokenizationService",
                                    "epikv.v1.ModelService",
                                    "epikv.v1.PolicyService",
                                    "epikv.v1.PacketService",
                                    "epikv.v1.ExperimentService"};
  if (server->vllm_ != nullptr) {
    services.push_back(server->vllm_.get());
    names.emplace_back("vllm.grpc.engine.VllmEngine");
  }
  if (server->orca_ != nullptr) {
    services.push_back(server->orca_.get());
    names.emplace_back("xds.service.orca.v3.OpenRcaService");
  }
  absl::StatusOr<std::unique_ptr<GrpcPort>> port =
      GrpcPort::Open(options.port, services, std::move(names), lifecycle);
  if (!port.ok()) return port.status();
  server->port_ = *std::move(port);
  return server;
}

void Server::AwaitStreams(absl::Time deadline) {
  // Requests have been ended by then; what they are told is still on its way.
  constexpr absl::Duration kFarewell = absl::Seconds(1);
  generation_.AwaitCalls(std::max(deadline, SteadyNow() + kFarewell));
}

}  // namespace epikv
