#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "server/errors.h"
#include "server/metrics.h"
#include "server/wire.h"

namespace epikv {

template <typename Response>
using Answer = std::variant<Response, grpc::Status>;

// Runs a unary method that is answered at once: parses, handles, serialises, counts.
// handle: const Request& -> Answer<Response>.
template <typename Request, typename Handler>
grpc::ServerUnaryReactor* AnswerAtOnce(absl::string_view method, Metrics& metrics,
                                       grpc::CallbackServerContext& context,
                                       const grpc::ByteBuffer& in, grpc::ByteBuffer& out,
                                       const Handler& handle) {
  auto finish = [&](const grpc::Status& status) {
    metrics.OnRpcFinished(method, status.error_code());
    grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
    reactor->Finish(status);
    return reactor;
  };
  std::variant<Request, Rejection> request = Parse<Request>(in);
  if (auto* rejection = std::get_if<Rejection>(&request)) return finish(ToGrpc(*rejection));
  auto answer = handle(std::get<Request>(request));
  if (auto* status = std::get_if<grpc::Status>(&answer)) return finish(*status);
  out = Serialize(std::get<0>(answer));
  return finish(grpc::Status::OK);
}

}  // namespace epikv
