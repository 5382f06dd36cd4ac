#include "server/port/grpc_port.h"

#include <grpc/grpc.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace epikv {
namespace {

// What calls that were cut still need to wind up.
constexpr absl::Duration kCutGrace = absl::Seconds(1);

// Builds with gRPC's own log of failed binds silenced: our error says it better.
std::unique_ptr<grpc::Server> BuildQuietly(grpc::ServerBuilder& builder) {
  gpr_set_log_function([](gpr_log_func_args*) {});
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  gpr_set_log_function(nullptr);
  return server;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcPort>> GrpcPort::Open(
    const GrpcPortOptions& options, const std::vector<grpc::Service*>& services,
    std::vector<std::string> names, Lifecycle& lifecycle) {
  std::unique_ptr<GrpcPort> port(new GrpcPort(lifecycle));
  grpc::EnableDefaultHealthCheckService(true);
  // Plugins of the process: every port built from then on has them.
  if (options.reflection) {
    static std::once_flag once;  // naming it also makes the linker keep it
    std::call_once(once, grpc::reflection::InitProtoReflectionServerBuilderPlugin);
  }
  if (options.channelz) {
    static std::once_flag once;
    std::call_once(once, grpc::channelz::experimental::InitChannelzService);
  }
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.listen, CredentialsOf(options.tls), &port->port_);
  // Otherwise a second daemon would share the port in silence.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  SetLimits(options.transport, builder);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = BuildQuietly(builder);
  if (server == nullptr || port->port_ == 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", options.listen,
        ": the port is in use, or the host is not this machine's; choose another with ",
        options.flag));
  }
  port->server_ = std::move(server);
  lifecycle.Attach(*port->server_->GetHealthCheckService(), std::move(names));
  return port;
}

GrpcPort::~GrpcPort() {
  if (server_ == nullptr) return;
  lifecycle_.Detach(*server_->GetHealthCheckService());
  Close();  // gRPC's own destructor waits for calls without a limit
}

void GrpcPort::Close() {
  // Soon, whatever is left: a health watch would hold the server for ever.
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kCutGrace));
  server_->Wait();
}

}  // namespace epikv
