#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/alarm.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/call/call_scope.h"

namespace epikv {

// Of one client's long requests while they wait, of those whose constraints are to be compiled, and
// of answers that he has not read: of each.
inline constexpr int64_t kMostClientBytes = int64_t{64} << 20;

// A call of a method of ours. To gRPC each is a stream both ways, which is the same on the wire as
// what the protos say: so gRPC reads nothing of a request, and holds no memory for it, before its
// caller was admitted.
//
// Deletes itself when gRPC is done with it, which comes after its end.
class Call : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Admits the caller and reads his request, or ends the call. Once, by who made it.
  void Begin();

  CallScope& scope() { return scope_; }

 protected:
  // method: as CallScope has it.
  Call(absl::string_view method, const Frontend& frontend, grpc::CallbackServerContext& context);
  ~Call() override;

  // The request is there. The call ends in time, on any thread. A long request comes on the thread
  // of Frontend::long_requests, any other on gRPC's, of which there are two.
  virtual void OnRequest(const grpc::ByteBuffer& request) = 0;

  // Once: the last that is done with the call.
  void End(const grpc::Status& status) { Finish(scope_.Close(status)); }
  // A long answer has its time to be read, and ends otherwise where the client leaves too many.
  void EndWith(const google::protobuf::Message& answer);

  // Breaks the call off if this is not called again, or with zero, within `most`.
  void Expect(absl::Duration most);
  // A client that reads nothing for so long is given up.
  absl::Duration stall() const { return frontend_.stall; }

 private:
  class Timeout;

  void OnReadDone(bool ok) final;
  void OnDone() final;
  // False: it could not, and the call has been ended.
  void HandOver(const grpc::ByteBuffer& request);

  const Frontend& frontend_;
  CallScope scope_;
  grpc::ByteBuffer request_;            // gRPC's until OnReadDone
  grpc::ByteBuffer answer_;             // gRPC's from EndWith on
  int64_t answer_bytes_ = 0;            // of Frontend::answers
  std::shared_ptr<Timeout> timeout_;    // null: none runs
  std::unique_ptr<grpc::Alarm> alarm_;  // of timeout_
};

}  // namespace epikv
