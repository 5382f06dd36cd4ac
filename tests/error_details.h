#pragma once

#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "epikv/v1/errors.pb.h"

namespace epikv {

// What a client reads from the trailer of a failed call.
inline v1::Status DetailsOf(const grpc::Status& status) {
  v1::Status details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  return details;
}

// The first detail called google.rpc.<type>, if there is one.
template <typename T>
std::optional<T> Detail(const grpc::Status& status, const std::string& type) {
  const v1::Status details = DetailsOf(status);
  for (const auto& any : details.details()) {
    T detail;
    if (any.type_url() == "type.googleapis.com/google.rpc." + type &&
        detail.ParseFromString(any.value())) {
      return detail;
    }
  }
  return std::nullopt;
}

inline std::string ReasonIn(const grpc::Status& status) {
  const auto info = Detail<v1::ErrorInfo>(status, "ErrorInfo");
  return info.has_value() ? info->reason() : "";
}

inline std::vector<std::string> FieldsIn(const grpc::Status& status) {
  std::vector<std::string> fields;
  if (const auto bad = Detail<v1::BadRequest>(status, "BadRequest")) {
    for (const auto& violation : bad->field_violations()) fields.push_back(violation.field());
  }
  return fields;
}

}  // namespace epikv
