// Requests against the services, through a channel: every call ends with what was promised of it or
// an error of the closed set, and leaves an engine that holds nothing.

#include <google/protobuf/stubs/logging.h>
#include <grpcpp/generic/generic_stub.h>

#include <deque>
#include <map>
#include <set>

#include "epikv/v1/errors.pb.h"
#include "tests/fake_server.h"
#include "tests/fuzz/answers.h"
#include "tests/fuzz/calls.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

constexpr size_t kMostCalls = 4;

// A call of any kind, and all that came back.
class Call final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Call(const std::shared_ptr<grpc::Channel>& channel, const FuzzCall& call) : stub_(channel) {
    const auto message = call.wire ? nullptr : call.ParseBody();
    grpc::Slice bytes(message != nullptr ? message->SerializeAsString() : call.body);
    request_ = grpc::ByteBuffer(&bytes, 1);
    stub_.PrepareBidiStreamingCall(&context_, call.path(), {}, this);
    StartWriteLast(&request_, {});
    StartRead(&message_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    std::vector<grpc::Slice> slices;
    Require(message_.Dump(&slices).ok(), "a message has bytes");
    messages_.emplace_back();
    for (const grpc::Slice& slice : slices) messages_.back().append(AsText(slice));
    StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    absl::MutexLock lock(&mu_);
    status_ = status;
  }
  grpc::Status Await() {
    absl::MutexLock lock(&mu_);
    auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return status_.has_value(); };
    Require(mu_.AwaitWithTimeout(absl::Condition(&done), kGenerous), "a call ends");
    return *status_;
  }
  // Once it has ended.
  const std::vector<std::string>& messages() const { return messages_; }

 private:
  static std::string AsText(const grpc::Slice& slice) {
    return {reinterpret_cast<const char*>(slice.begin()), slice.size()};
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_, message_;
  std::vector<std::string> messages_;
  absl::Mutex mu_;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mu_);
};

// A server, as long as nothing has changed it.
struct World {
  static FakeServerOptions Options() {
    FakeServerOptions options{.manifest = FakeManifest(/*context_length=*/128),
                              .kv_capacity_tokens = 64,
                              .default_policy = "window",
                              .access_log = "/dev/null"};
    options.engine.scheduler.prefill_chunk_tokens = 16;
    return options;
  }
  std::shared_ptr<FakeScript> script = std::make_shared<FakeScript>();
  std::unique_ptr<FakeServer> server = std::make_unique<FakeServer>(Options(), script);
  std::shared_ptr<grpc::Channel> clients = server->Connect(), admins = server->ConnectAdmin();
};

bool Changes(const FuzzCall& call) {
  static const auto& names =
      *new std::set<std::string>{"Drain", "LoadModel", "UnloadModel", "UpdateConfig"};
  return names.contains(call.method->name());
}

void CheckInput(absl::string_view input) {
  static World* world = new World;
  std::vector<FuzzCall> calls = ParseCalls(input);
  calls.resize(std::min(calls.size(), kMostCalls));
  std::deque<Call> started;
  for (const FuzzCall& call : calls) {
    const bool admin = call.method->service()->name() == "AdminService";
    started.emplace_back(admin ? world->admins : world->clients, call);
  }
  bool changed = false;
  for (size_t i = 0; i < calls.size(); ++i) {
    const grpc::Status status = started[i].Await();
    CheckAnswer(calls[i], status, started[i].messages());
    changed |= status.ok() && Changes(calls[i]);
  }
  if (changed) {
    world->server = nullptr;
  } else {
    world->server->engine().Wake();  // an engine without work says nothing
    Require(world->server->AwaitEmpty(), "nothing is reserved in the end");
  }
  Require(world->script->used_bytes == 0 && world->script->open_sequences == 0, "KV is free");
  if (changed) delete std::exchange(world, new World);
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
