#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "server/call_scope.h"
#include "server/wire.h"

namespace epikv {

template <typename Response>
using Answer = std::variant<Response, grpc::Status>;

// Runs a unary method that is answered at once: admits, parses, handles, serialises, counts.
// handle: const Request& -> Answer<Response>.
template <typename Request, typename Handler>
grpc::ServerUnaryReactor* AnswerAtOnce(absl::string_view method, const Frontend& frontend,
                                       grpc::CallbackServerContext& context,
                                       const grpc::ByteBuffer& in, grpc::ByteBuffer& out,
                                       const Handler& handle) {
  CallScope scope(method, frontend, context);
  auto finish = [&](const grpc::Status& status) {
    grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
    reactor->Finish(scope.Close(status));
    return reactor;
  };
  const std::variant<Request, grpc::Status> request = scope.Open<Request>(in);
  if (const auto* refusal = std::get_if<grpc::Status>(&request)) return finish(*refusal);
  auto answer = handle(std::get<Request>(request));
  if (auto* status = std::get_if<grpc::Status>(&answer)) return finish(*status);
  out = Serialize(std::get<0>(answer));
  return finish(grpc::Status::OK);
}

}  // namespace epikv
