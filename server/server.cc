#include "server/server.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace epikv {
namespace {

// What calls that were cut still need to wind up.
constexpr absl::Duration kCutGrace = absl::Seconds(1);

void AddPort(grpc::ServerBuilder& builder, const std::string& listen, const TlsFiles& tls,
             int* port) {
  builder.AddListeningPort(listen, CredentialsOf(tls), port);
  // Otherwise a second daemon would share the port in silence.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

// Builds with gRPC's own log of failed binds silenced: our error says it better.
std::unique_ptr<grpc::Server> BuildQuietly(grpc::ServerBuilder& builder) {
  gpr_set_log_function([](gpr_log_func_args*) {});
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  gpr_set_log_function(nullptr);
  return server;
}

absl::Status CannotListen(const std::string& listen) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", listen,
                   ": the port is in use, or the host is not this machine's; choose another with "
                   "--listen"));
}

}  // namespace

Server::Server(Models& models, Lifecycle& lifecycle, Courier& courier, const Frontend& frontend,
               const ServerOptions& options)
    : lifecycle_(lifecycle),
      generation_(models, courier, frontend, options.outbox,
                  options.transport.max_sent_message_bytes),
      tokenization_(models, frontend),
      model_service_(models, frontend),
      policies_(models, frontend) {}

Server::~Server() {
  if (server_ != nullptr) lifecycle_.Detach(*server_->GetHealthCheckService());
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options, Models& models,
                                                      Lifecycle& lifecycle, Courier& courier,
                                                      const Frontend& frontend) {
  std::unique_ptr<Server> server(new Server(models, lifecycle, courier, frontend, options));
  grpc::EnableDefaultHealthCheckService(true);
  if (options.reflection) {
    static std::once_flag once;  // a process-wide plugin; naming it also makes the linker keep it
    std::call_once(once, grpc::reflection::InitProtoReflectionServerBuilderPlugin);
  }
  if (options.channelz) {
    static std::once_flag once;
    std::call_once(once, grpc::channelz::experimental::InitChannelzService);
  }
  grpc::ServerBuilder builder;
  AddPort(builder, options.listen, options.tls, &server->port_);
  SetLimits(options.transport, builder);
  builder.RegisterService(&server->generation_)
      .RegisterService(&server->tokenization_)
      .RegisterService(&server->model_service_)
      .RegisterService(&server->policies_);
  server->server_ = BuildQuietly(builder);
  if (server->server_ == nullptr || server->port_ == 0) {
    server->server_ = nullptr;
    return CannotListen(options.listen);
  }
  lifecycle.Attach(*server->server_->GetHealthCheckService(),
                   {"", "epikv.v1.GenerationService", "epikv.v1.TokenizationService",
                    "epikv.v1.ModelService", "epikv.v1.PolicyService"});
  return server;
}

void Server::Shutdown(absl::Time deadline) {
  generation_.AwaitCalls(deadline);
  // Not `deadline`: a health watch would hold the server until then.
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kCutGrace));
  server_->Wait();
}

}  // namespace epikv
