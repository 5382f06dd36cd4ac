#pragma once

#include <grpcpp/impl/codegen/service_type.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/status.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "server/call/call.h"
#include "server/call/call_scope.h"

namespace epikv {

template <typename Response>
using Answer = std::variant<Response, grpc::Status>;

template <typename Response>
class PendingAnswer;

// A service, whose methods are added one by one. Thread-safe once it is made; `frontend` outlives
// it, and it outlives its calls.
class Service : public grpc::Service {
 protected:
  // package: of the service's proto; lives as long as the program.
  explicit Service(const Frontend& frontend, absl::string_view package = "epikv.v1")
      : frontend_(frontend), package_(package) {}

  // method: "ModelService/GetModel"; lives as long as the program.
  void Add(absl::string_view method,
           std::function<Call*(grpc::CallbackServerContext& context)> make);

  // A unary method that is answered at once, by a member of the service that derives from this.
  template <typename Derived, typename Request, typename Response>
  void AnswerAtOnce(absl::string_view method, Answer<Response> (Derived::*handle)(const Request&));
  template <typename Derived, typename Request, typename Response>
  void AnswerAtOnce(absl::string_view method,
                    Answer<Response> (Derived::*handle)(const Request&, const Identity& caller));

  // A unary method that is answered later, on any thread, by one call of Finish.
  // handle: (const Request&, std::shared_ptr<PendingAnswer<Response>>) -> void.
  template <typename Request, typename Response, typename Handler>
  void AnswerLater(absl::string_view method, Handler handle);
  template <typename Derived, typename Request, typename Response>
  void AnswerLater(absl::string_view method,
                   void (Derived::*handle)(const Request&,
                                           const std::shared_ptr<PendingAnswer<Response>>&));

  const Frontend& frontend() const { return frontend_; }

 private:
  const Frontend& frontend_;
  const absl::string_view package_;
  std::deque<std::string> paths_;  // "/epikv.v1.ModelService/GetModel"; gRPC points to them
};

namespace service_internal {

// A call that calls a function with its request. Use: (const grpc::ByteBuffer&, FunctionCall&).
class FunctionCall final : public Call {
 public:
  using Use = std::function<void(const grpc::ByteBuffer&, FunctionCall&)>;

  // use: outlives the call.
  FunctionCall(absl::string_view method, const Frontend& frontend,
               grpc::CallbackServerContext& context, const Use& use)
      : Call(method, frontend, context), use_(use) {}

  using Call::End;
  using Call::EndWith;

 private:
  void OnRequest(const grpc::ByteBuffer& request) override { use_(request, *this); }

  const Use& use_;
};

}  // namespace service_internal

template <typename Response>
class PendingAnswer {
 public:
  explicit PendingAnswer(service_internal::FunctionCall& call) : call_(call) {}

  CallScope& scope() { return call_.scope(); }
  // Once; nothing of the call is used afterwards.
  void Finish(const Answer<Response>& answer) {
    if (const auto* status = std::get_if<grpc::Status>(&answer)) return call_.End(*status);
    call_.EndWith(std::get<Response>(answer));
  }

 private:
  service_internal::FunctionCall& call_;
};

template <typename Derived, typename Request, typename Response>
void Service::AnswerAtOnce(absl::string_view method,
                           Answer<Response> (Derived::*handle)(const Request&, const Identity&)) {
  AnswerLater<Request, Response>(
      method,
      [this, handle](const Request& request, const std::shared_ptr<PendingAnswer<Response>>& call) {
        call->Finish((static_cast<Derived*>(this)->*handle)(request, call->scope().caller()));
      });
}

template <typename Derived, typename Request, typename Response>
void Service::AnswerAtOnce(absl::string_view method,
                           Answer<Response> (Derived::*handle)(const Request&)) {
  AnswerLater<Request, Response>(
      method,
      [this, handle](const Request& request, const std::shared_ptr<PendingAnswer<Response>>& call) {
        call->Finish((static_cast<Derived*>(this)->*handle)(request));
      });
}

template <typename Derived, typename Request, typename Response>
void Service::AnswerLater(
    absl::string_view method,
    void (Derived::*handle)(const Request&, const std::shared_ptr<PendingAnswer<Response>>&)) {
  AnswerLater<Request, Response>(
      method,
      [this, handle](const Request& request, const std::shared_ptr<PendingAnswer<Response>>& call) {
        (static_cast<Derived*>(this)->*handle)(request, call);
      });
}

template <typename Request, typename Response, typename Handler>
void Service::AnswerLater(absl::string_view method, Handler handle) {
  using service_internal::FunctionCall;
  FunctionCall::Use use = [handle = std::move(handle)](const grpc::ByteBuffer& in,
                                                       FunctionCall& call) {
    const std::variant<Request, grpc::Status> request = call.scope().template Open<Request>(in);
    if (const auto* refusal = std::get_if<grpc::Status>(&request)) return call.End(*refusal);
    handle(std::get<Request>(request), std::make_shared<PendingAnswer<Response>>(call));
  };
  // One for all calls of the method.
  auto shared = std::make_shared<const FunctionCall::Use>(std::move(use));
  Add(method, [this, method, shared = std::move(shared)](grpc::CallbackServerContext& context) {
    return new FunctionCall(method, frontend_, context, *shared);
  });
}

}  // namespace epikv
