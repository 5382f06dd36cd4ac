#include "server/probe/health_check.h"

#include <google/protobuf/wrappers.pb.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_certificate_verifier.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "server/base/file_contents.h"

namespace epikv {
namespace {

// grpc.health.v1, whose messages Debian does not package: a string in field 1, an enum in field 1.
using HealthCheckRequest = google::protobuf::StringValue;
using HealthCheckResponse = google::protobuf::Int32Value;
constexpr int32_t kServing = 1;

using CredentialsPtr = std::shared_ptr<grpc::ChannelCredentials>;

absl::StatusOr<CredentialsPtr> ClientCredentials(const TlsFiles& files) {
  if (files.certificate.empty()) return grpc::InsecureChannelCredentials();
  namespace tls = grpc::experimental;
  tls::TlsChannelCredentialsOptions options;
  options.set_verify_server_certs(false);
  options.set_check_call_host(false);
  options.set_certificate_verifier(std::make_shared<tls::NoOpCertificateVerifier>());
  if (!files.client_ca.empty()) {
    absl::StatusOr<FileContents> certificate = ReadFile(files.certificate);
    if (!certificate.ok()) return certificate.status();
    absl::StatusOr<FileContents> key = ReadFile(files.key);
    if (!key.ok()) return key.status();
    options.set_certificate_provider(
        std::make_shared<tls::StaticDataCertificateProvider>(std::vector<tls::IdentityKeyCertPair>{
            {.private_key = key->text, .certificate_chain = certificate->text}}));
    options.watch_identity_key_cert_pairs();
  }
  return tls::TlsCredentials(options);
}

// A socket on every interface takes IPv4 as well, whichever kind it is.
std::string LocalAddress(const std::string& listen) {
  const size_t colon = listen.rfind(':');
  const absl::string_view host = absl::string_view(listen).substr(0, colon);
  const bool everywhere = host == "0.0.0.0" || host == "[::]" || host == "::";
  return everywhere ? absl::StrCat("127.0.0.1", listen.substr(colon)) : listen;
}

std::string StatusName(int32_t status) {
  switch (status) {
    case 1:
      return "SERVING";
    case 2:
      return "NOT_SERVING";
    default:
      return absl::StrCat("health status ", status);
  }
}

}  // namespace

absl::Status CheckHealth(const HealthCheckOptions& options) {
  if (absl::EndsWith(options.listen, ":0")) {
    return absl::InvalidArgumentError(
        "--listen has port 0: the daemon then takes a free port and prints it; give that port in "
        "--listen");
  }
  const std::string address = LocalAddress(options.listen);
  const absl::StatusOr<CredentialsPtr> credentials = ClientCredentials(options.tls);
  if (!credentials.ok()) return credentials.status();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const auto channel = grpc::CreateCustomChannel(address, *credentials, arguments);
  const grpc::internal::RpcMethod check("/grpc.health.v1.Health/Check",
                                        grpc::internal::RpcMethod::NORMAL_RPC, channel);
  HealthCheckRequest request;
  request.set_value(options.service);
  HealthCheckResponse response;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + options.timeout));
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall<HealthCheckRequest, HealthCheckResponse,
                                        google::protobuf::MessageLite,
                                        google::protobuf::MessageLite>(
          channel.get(), check, &context, request, &response);
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      break;
    case grpc::StatusCode::NOT_FOUND:
      return absl::NotFoundError(
          absl::StrCat(address, " has no service or model named '", options.service, "'"));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::DeadlineExceededError(
          absl::StrCat(address, " did not answer within ", absl::FormatDuration(options.timeout)));
    default:
      return absl::UnavailableError(absl::StrCat(address, ": ", status.error_message()));
  }
  if (response.value() == kServing) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(address, " is ", StatusName(response.value())));
}

}  // namespace epikv
