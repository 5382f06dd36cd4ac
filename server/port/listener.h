#pragma once

#include <grpcpp/server_builder.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/port/connections.h"

namespace epikv {

// Listens on a port, hands what it accepts to gRPC, and has floods cut. In place of gRPC's own
// listener, which has no limit of connections and, in 1.51, accepts nothing ever after once
// descriptors have run out (CVE-2023-4785).
class Listener {
 public:
  // At every address that the host of host:port has. The error is about the address.
  // connections: counts what is accepted.
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const std::string& address,
                                                        std::shared_ptr<Connections> connections);
  ~Listener();

  int port() const { return port_; }
  // Accepts from now on, on a thread of its own. What comes before waits in the backlog.
  void Start(std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor);
  // Nothing is accepted afterwards.
  void Stop();

 private:
  // Ends the thread's wait, once for each call. Shared with whoever may call it late.
  class Wake;

  explicit Listener(std::shared_ptr<Connections> connections);

  absl::Status Bind(const std::string& host, const std::string& port);
  void Run();
  // Until nothing waits there. False: descriptors have run out.
  bool Accept(int listening);
  // With none left, closes what waits, so that clients try elsewhere; false: not even that can be.
  bool RefuseWithReserve(int listening);

  const std::shared_ptr<Connections> connections_;
  std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::vector<int> sockets_;
  const std::shared_ptr<Wake> wake_;
  int reserve_ = -1;  // a descriptor to give up when there is no other
  int port_ = 0;
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace epikv
