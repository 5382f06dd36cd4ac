#include "server/call/service.h"

#include <grpcpp/impl/codegen/rpc_service_method.h>
#include <grpcpp/impl/codegen/server_callback_handlers.h>
#include <grpcpp/support/server_callback.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace epikv {

// What protoc's plugin would generate, but for the kind of method: see Call.
void Service::Add(absl::string_view method,
                  std::function<Call*(grpc::CallbackServerContext& context)> make) {
  using Bytes = grpc::ByteBuffer;
  paths_.push_back(absl::StrCat("/", package_, ".", method));
  const auto index = static_cast<int>(paths_.size()) - 1;
  AddMethod(new grpc::internal::RpcServiceMethod(
      paths_.back().c_str(), grpc::internal::RpcMethod::BIDI_STREAMING, nullptr));
  MarkMethodRawCallback(index, new grpc::internal::CallbackBidiHandler<Bytes, Bytes>(
                                   [make = std::move(make)](grpc::CallbackServerContext* context) {
                                     Call* const call = make(*context);
                                     call->Begin();
                                     return call;
                                   }));
}

}  // namespace epikv
