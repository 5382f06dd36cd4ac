#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "runtime/admission.h"
#include "runtime/tokenizer.h"
#include "server/errors.h"

namespace epikv {

inline absl::string_view DTypeName(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : "bfloat16";
}

// The one model that this daemon serves, as its services see it. Immutable.
struct ServedModel {
  std::string name;
  const Admission& admission;
  const Tokenizer& tokenizer;
  int64_t kv_capacity_bytes = 0;
  int64_t threads = 0;
  std::string decode_kernel;
  bool deterministic = false;

  int64_t kv_capacity_tokens() const { return kv_capacity_bytes / admission.kv_bytes_per_token(); }

  // The error for a client that asks for another model; an empty name asks for this one.
  std::optional<grpc::Status> Refuse(absl::string_view asked) const {
    if (asked.empty() || asked == name) return std::nullopt;
    return NotFound("model", asked,
                    absl::StrCat("model '", asked, "' is not served here; this is '", name, "'"));
  }
};

}  // namespace epikv
