#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "server/call/call_scope.h"
#include "server/call/wire.h"

namespace epikv {

template <typename Response>
using Answer = std::variant<Response, grpc::Status>;

// Runs a unary method that is answered at once: admits, parses, handles, serialises, counts.
// handle: const Request& -> Answer<Response>; or (const Request&, const Identity& caller) ->.
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
  auto answer = [&] {
    if constexpr (std::is_invocable_v<Handler, const Request&, const Identity&>) {
      return handle(std::get<Request>(request), scope.caller());
    } else {
      return handle(std::get<Request>(request));
    }
  }();
  if (auto* status = std::get_if<grpc::Status>(&answer)) return finish(*status);
  out = Serialize(std::get<0>(answer));
  return finish(grpc::Status::OK);
}

// A unary method that is answered later, on any thread, by one call of Finish.
template <typename Response>
class PendingAnswer {
 public:
  PendingAnswer(absl::string_view method, const Frontend& frontend,
                grpc::CallbackServerContext& context, grpc::ByteBuffer& out)
      : scope_(method, frontend, context), out_(out), reactor_(context.DefaultReactor()) {}

  CallScope& scope() { return scope_; }
  // What the method returns.
  grpc::ServerUnaryReactor* reactor() const { return reactor_; }
  void Finish(const Answer<Response>& answer) {
    const auto* status = std::get_if<grpc::Status>(&answer);
    if (status == nullptr) out_ = Serialize(std::get<Response>(answer));
    reactor_->Finish(scope_.Close(status == nullptr ? grpc::Status::OK : *status));
  }

 private:
  CallScope scope_;
  grpc::ByteBuffer& out_;
  grpc::ServerUnaryReactor* const reactor_;
};

// handle: (const Request&, std::shared_ptr<PendingAnswer<Response>>) -> void, and sees to Finish.
template <typename Request, typename Response, typename Handler>
grpc::ServerUnaryReactor* AnswerLater(absl::string_view method, const Frontend& frontend,
                                      grpc::CallbackServerContext& context,
                                      const grpc::ByteBuffer& in, grpc::ByteBuffer& out,
                                      const Handler& handle) {
  auto pending = std::make_shared<PendingAnswer<Response>>(method, frontend, context, out);
  grpc::ServerUnaryReactor* const reactor = pending->reactor();
  const std::variant<Request, grpc::Status> request = pending->scope().template Open<Request>(in);
  if (const auto* refusal = std::get_if<grpc::Status>(&request)) {
    pending->Finish(*refusal);
  } else {
    handle(std::get<Request>(request), std::move(pending));
  }
  return reactor;
}

}  // namespace epikv
