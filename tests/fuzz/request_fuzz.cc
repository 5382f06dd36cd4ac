// Requests against the services, through a channel: every call ends with what was promised of it or
// an error of the closed set, and leaves an engine that holds nothing.

#include <algorithm>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/fixtures/fake_server.h"
#include "tests/fuzz/answers.h"
#include "tests/fuzz/call_client.h"
#include "tests/fuzz/calls.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

constexpr size_t kMostCalls = 4;

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
  // Destroyed with the process: no thread of gRPC runs while leaks are looked for.
  static std::unique_ptr<World> world = std::make_unique<World>();
  std::vector<FuzzCall> calls = ParseCalls(input);
  calls.resize(std::min(calls.size(), kMostCalls));
  std::deque<ClientCall> started;
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
  if (changed) world = std::make_unique<World>();
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
