#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace epikv {

struct FieldViolation {
  std::string field;  // path in the request: "kv.policy_params.layer_a"
  std::string description;
};

// A request with more faults is told of these: its sender could make us collect millions.
inline constexpr size_t kMaxViolations = 64;

// Why a request is refused: one code, one sentence, and everything that is wrong with it.
struct Rejection {
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  std::string reason;  // of ErrorInfo: "KV_BUDGET", "CONTEXT_LENGTH", "INVALID_REQUEST", ...
  std::string message;
  std::vector<FieldViolation> violations;
  std::map<std::string, std::string> metadata;  // limits and given values
};

// Collects all that is wrong with one request.
class Violations {
 public:
  // The field has to be otherwise. Beyond kMaxViolations nothing is added.
  void Add(absl::string_view field, std::string description);
  // Why the request is refused, as ErrorInfo tells it. The first reason given is the one told;
  // without one it is INVALID_REQUEST.
  void Because(absl::string_view reason, std::map<std::string, std::string> metadata,
               absl::StatusCode code = absl::StatusCode::kInvalidArgument);
  size_t count() const { return rejection_.violations.size(); }
  bool empty() const { return rejection_.violations.empty(); }
  // Requires: not empty. Nothing is left.
  Rejection Take();

 private:
  Rejection rejection_;
};

}  // namespace epikv
