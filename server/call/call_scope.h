#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "epikv/v1/access_log.pb.h"
#include "runtime/base/steady_time.h"
#include "server/base/errors.h"
#include "server/base/task_thread.h"
#include "server/call/access_log.h"
#include "server/call/auth.h"
#include "server/call/client_bytes.h"
#include "server/call/trace_context.h"
#include "server/call/traffic.h"
#include "server/call/wire.h"
#include "server/metrics/load_reports.h"
#include "server/metrics/metrics.h"
#include "server/port/connections.h"

namespace epikv {

// What all calls to our services share. Outlives them.
struct Frontend {
  const Authenticator& auth;
  Metrics& metrics;
  AccessLog& access_log;
  Traffic& traffic;
  // Where requests are read and answered that are too long for gRPC's threads; clients take turns.
  TaskThread& long_requests;
  Connections& connections;             // of the port
  ClientBytes& answers;                 // long ones that wait to be read
  LoadReports* load_reports = nullptr;  // null: nobody is told of the load
  // A client that reads nothing of a stream for so long is given up.
  absl::Duration stall = absl::Seconds(30);
};

// One call, from its first byte to its status. The only way to its request leads past the check of
// its caller, and the only way to a status past metrics, access log and trace.
class CallScope {
 public:
  // method: "GenerationService/Generate"; lives as long as the program.
  CallScope(absl::string_view method, const Frontend& frontend,
            grpc::CallbackServerContext& context);

  // Why the caller may not make the call. Before the request is read.
  std::optional<grpc::Status> Admit();
  // The request has come as a whole.
  void OnRead() { arrival_ = SteadyNow(); }
  // The request; or what is wrong with its bytes. Precondition: the caller was admitted.
  template <typename Message>
  std::variant<Message, grpc::Status> Open(const grpc::ByteBuffer& in) {
    RequireAdmitted();
    std::variant<Message, Rejection> parsed = Parse<Message>(in);
    if (const auto* rejection = std::get_if<Rejection>(&parsed)) return Reject(*rejection);
    return std::get<Message>(std::move(parsed));
  }
  // Counts what no model has refused.
  grpc::Status Reject(const Rejection& rejection);

  // What the client is told in the end. Once, before the call is finished with it.
  grpc::Status Close(const grpc::Status& status);

  // told: of the call's line, complete, whether or not a log takes it. Once.
  void OnClose(std::function<void(const v1::AccessLogEntry&)> told) { on_close_ = std::move(told); }
  bool has_on_close() const { return on_close_ != nullptr; }

  const Frontend& frontend() const { return frontend_; }
  // Who calls; known once he was admitted.
  const Identity& caller() const { return caller_; }
  // What the access log will say beside what every call has.
  v1::AccessLogEntry& entry() { return entry_; }
  grpc::CallbackServerContext& context() const { return context_; }
  // Moments of SteadyNow, as are those that the engine is told.
  absl::Time start() const { return start_; }        // of the call
  absl::Time arrival() const { return arrival_; }    // of its request
  absl::Time deadline() const { return deadline_; }  // infinite: none

 private:
  void RequireAdmitted() const;

  const absl::string_view method_;
  const Frontend& frontend_;
  grpc::CallbackServerContext& context_;
  const absl::Time began_ = absl::Now();  // for people
  const absl::Time start_ = SteadyNow();
  const absl::Time deadline_;
  absl::Time arrival_ = start_;
  bool admitted_ = false;
  const std::optional<TraceContext> callers_span_;
  const TraceContext span_;
  Identity caller_;
  v1::AccessLogEntry entry_;
  std::function<void(const v1::AccessLogEntry&)> on_close_;
};

// What a client chose, cut to what a line of the access log has room for.
std::string ForLog(absl::string_view text);

}  // namespace epikv
