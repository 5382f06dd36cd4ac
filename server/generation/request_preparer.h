#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "epikv/v1/experiment_record.pb.h"
#include "epikv/v1/generation.pb.h"
#include "server/call/call_scope.h"
#include "server/experiments/participation.h"
#include "server/generation/call_facts.h"
#include "server/messages/generation_messages.h"
#include "server/models/served_model.h"
#include "server/packets/packet_store.h"
#include "server/sessions/sessions.h"

namespace epikv {

// After which a compilation, or some, will have come to its end.
constexpr absl::Duration kCompileRetryDelay = absl::Seconds(1);

// Of a request of a session: which, and its whole prompt. The answer is not among what is kept: the
// next request brings it as text, which may have other tokens.
struct AskedSession {
  Sessions::Name name;
  std::vector<int32_t> tokens;
};

// Whose packets a model's requests may leave and read, and of which model they are.
v1::PacketHead HeadOf(const ServedModel& model, const std::string& tenant);

struct PreparerOptions {
  bool shared_prefixes = false;  // tenants who show tokens may find each other's prefixes cached
  bool pairs = false;            // a Shadow is there, who has hidden answers generated
};

// Makes of a call's message a request that the engine can take: whose it is, the arms of its
// experiments, its compiled constraint, and admission. Thread-safe.
class RequestPreparer {
 public:
  // experiments: outlives it; null: there are none. packets, sessions: outlive it; sessions null:
  // there are none.
  RequestPreparer(Participation* experiments, PacketStore& packets, Sessions* sessions,
                  const PreparerOptions& options)
      : experiments_(experiments), packets_(packets), sessions_(sessions), options_(options) {}

  // The model does not remember the request's constraint, a packet is in a file, or the request is
  // of a session: nothing has been done.
  struct MustWait {};
  using Result = std::variant<Prepared, grpc::Status, MustWait>;

  // Message: GenerateRequest or ScoreRequest. A refusal has been counted in the model's metrics.
  // may_wait: for what takes a while; or MustWait is the answer. leaves: a packet, or none.
  template <typename Message>
  Result Prepare(CallScope& scope, const Message& message, const ServedModel& model, bool may_wait,
                 const PacketAsked& leaves);

 private:
  // A request with the options of another arm (see Pairing), before it is admitted.
  struct Hidden {
    AskedRequest asked;
    int part = 0;
    std::string arm;
  };
  // What experiments are to be told of a request if it is taken.
  struct Dealt {
    std::optional<v1::RequestBegan> began;  // it takes part in some
    std::vector<std::string> excluded;      // see Assignment
    bool steers = false;                    // see Assignment
    std::optional<Hidden> hidden;           // both arms are to answer
  };
  // Gives a request the options of its arms.
  std::variant<Dealt, grpc::Status> Deal(const CallScope& scope, const v1::GenerateRequest& message,
                                         const ServedModel& model, AskedRequest& asked);
  // Admits the hidden request of one that is admitted, and has `began` say so. Absent: there is
  // none, or its arm refuses it; then it has no pair, whichever of both arms is the unit's.
  static std::optional<Request> Admit(Dealt& dealt, const Request& shown, const ServedModel& model);
  // Has a request of a session go on from its episodes. Null: it is of none, or at fault.
  std::shared_ptr<AskedSession> GoOn(CallScope& scope, const v1::GenerateRequest& message,
                                     const ServedModel& model, AskedRequest& asked);
  // False: it takes no part, or the call's request did before.
  bool TakePart(CallScope& scope, const Dealt& dealt);

  Participation* const experiments_;
  PacketStore& packets_;
  Sessions* const sessions_;
  const PreparerOptions options_;
};

}  // namespace epikv
