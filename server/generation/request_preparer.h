#pragma once

#include <grpcpp/support/status.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "epikv/v1/experiment_record.pb.h"
#include "epikv/v1/generation.pb.h"
#include "server/call/call_scope.h"
#include "server/experiments/participation.h"
#include "server/messages/generation_messages.h"
#include "server/models/served_model.h"

namespace epikv {

// After which a compilation, or some, will have come to its end.
constexpr absl::Duration kCompileRetryDelay = absl::Seconds(1);

// Makes of a call's message a request that the engine can take: whose it is, the arms of its
// experiments, its compiled constraint, and admission. Thread-safe.
class RequestPreparer {
 public:
  // experiments: outlives it; null: there are none. shared_prefixes: whether tenants who show
  // tokens may find each other's prefixes cached.
  RequestPreparer(Participation* experiments, bool shared_prefixes)
      : experiments_(experiments), shared_prefixes_(shared_prefixes) {}

  // The model does not remember the request's constraint: nothing has been done.
  struct MustCompile {};
  using Result = std::variant<Prepared, grpc::Status, MustCompile>;

  // Message: GenerateRequest or ScoreRequest. A refusal has been counted in the model's metrics.
  // may_compile: or MustCompile is the answer.
  template <typename Message>
  Result Prepare(CallScope& scope, const Message& message, const ServedModel& model,
                 bool may_compile);

 private:
  // What experiments are to be told of a request if it is taken.
  struct Dealt {
    std::optional<v1::RequestBegan> began;  // it takes part in some
    std::vector<std::string> excluded;      // see Assignment
    bool steers = false;                    // see Assignment
  };
  // Gives a request the options of its arms.
  std::variant<Dealt, grpc::Status> Deal(const CallScope& scope, const v1::GenerateRequest& message,
                                         const ServedModel& model, AskedRequest& asked);
  // False: it takes no part, or the call's request did before.
  bool TakePart(CallScope& scope, const Dealt& dealt);

  Participation* const experiments_;
  const bool shared_prefixes_;
};

}  // namespace epikv
