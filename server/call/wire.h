#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <optional>
#include <utility>
#include <variant>

#include "runtime/admission/admission.h"

// Requests and responses as bytes. The services take bytes because gRPC answers a request that
// protobuf cannot parse (text that is not UTF-8, say) with an empty UNIMPLEMENTED.

namespace epikv {

namespace wire_internal {
std::optional<Rejection> ParseInto(const grpc::ByteBuffer& bytes,
                                   google::protobuf::Message& message);
}

// The rejection names every string field that is not UTF-8.
template <typename Request>
std::variant<Request, Rejection> Parse(const grpc::ByteBuffer& bytes) {
  Request request;
  if (auto rejection = wire_internal::ParseInto(bytes, request)) return *std::move(rejection);
  return request;
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message);

}  // namespace epikv
