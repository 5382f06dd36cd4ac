#include "server/port/grpc_port.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/channelz_service_plugin.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace epikv {
namespace {

// What calls that were cut still need to wind up.
constexpr absl::Duration kCutGrace = absl::Seconds(1);

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcPort>> GrpcPort::Open(
    const GrpcPortOptions& options, const std::vector<grpc::Service*>& services,
    std::vector<std::string> names, Lifecycle& lifecycle) {
  std::unique_ptr<GrpcPort> port(new GrpcPort(lifecycle));
  absl::StatusOr<std::unique_ptr<Listener>> listener =
      Listener::Open(options.listen, options.connections);
  if (!listener.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options.listen, ": ",
                                               listener.status().message(),
                                               "; choose another address with ", options.flag));
  }
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
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      CredentialsOf(options.tls));
  SetLimits(options.transport, builder);
  for (grpc::Service* service : services) builder.RegisterService(service);
  port->server_ = builder.BuildAndStart();
  if (port->server_ == nullptr) return absl::InternalError("gRPC cannot start a server");
  port->listener_ = *std::move(listener);
  lifecycle.Attach(*port->server_->GetHealthCheckService(), std::move(names));
  port->listener_->Start(std::move(acceptor));
  return port;
}

GrpcPort::~GrpcPort() {
  if (server_ == nullptr) return;
  lifecycle_.Detach(*server_->GetHealthCheckService());
  Close();  // gRPC's own destructor waits for calls without a limit
}

void GrpcPort::Close() {
  listener_->Stop();
  // Soon, whatever is left: a health watch would hold the server for ever.
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoSeconds(kCutGrace));
  server_->Wait();
}

}  // namespace epikv
