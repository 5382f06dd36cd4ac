#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace epikv {

struct ConnectionLimits {
  int64_t most = 1024;         // of the port
  int64_t most_of_peer = 256;  // of one IPv4 address, or of one IPv6 network of 64 bits
  // Of all connections, and a quarter of it of one: what they have sent and nobody has read, since
  // it is no request yet.
  int64_t unread_bytes = 256 << 20;
};

// Why a connection was closed.
enum class Refused {
  kPort,         // when it came: the port has as many as it may
  kPeer,         // when it came: its peer has
  kDescriptors,  // when it came: the process could open none
  kUnread        // it had sent too much that is no request
};
inline constexpr Refused kRefusals[] = {Refused::kPort, Refused::kPeer, Refused::kDescriptors,
                                        Refused::kUnread};
absl::string_view RefusedName(Refused refused);  // "port_limit"

// The connections of one port, counted and watched from beside the transport, which owns their
// sockets and closes them without telling. A descriptor that no longer is the socket that was
// counted has been closed. Thread-safe.
//
// gRPC keeps all of a message, however long, before it looks whether it is too long; and all of a
// header. So the bytes that come over each connection are compared with the requests that were made
// of them.
class Connections {
 public:
  explicit Connections(ConnectionLimits limits) : limits_(limits) {}

  // Counts an open socket; false: one too many, which has been counted as refused. peer: its
  // other end.
  bool Admit(int socket, const sockaddr_storage& peer);
  void OnRefused(Refused refused);

  // A call of this peer (as gRPC says it, "ipv4:127.0.0.1:1234") is waited for; and has come, with
  // so many bytes, or will not.
  void OnReading(absl::string_view peer);
  void OnRead(absl::string_view peer, int64_t bytes);

  // Cuts the connections whose unread bytes are too many. To be called again after `WatchAgain`.
  void CutFloods();
  absl::Duration WatchAgain() const;
  // told: once something is to be watched that was not. One function; by any thread.
  void OnWatch(std::function<void()> told);

  int64_t live() const;
  int64_t refused(Refused refused) const;

 private:
  using Network = std::array<uint8_t, 9>;  // a family, then the address or its first bytes
  using Peer = std::array<uint8_t, 19>;    // a family, the address and the port
  struct Socket {
    dev_t device = 0;
    ino_t inode = 0;
    Network network = {};
    Peer peer = {};
    int64_t reading = 0;    // calls
    int64_t accounted = 0;  // bytes received that are no concern any more
  };

  static Network NetworkOf(const Peer& peer);
  static Peer PeerOf(const sockaddr_storage& address);
  static Peer PeerOf(absl::string_view peer);  // zeros: none that we know
  static bool IsOpen(int descriptor, const Socket& socket);
  // Forgets the closed ones: of one network, or of all.
  void Sweep(const Network* network) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(std::map<int, Socket>::iterator at) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::map<int, Socket>::iterator Find(absl::string_view peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Cut(int descriptor, const Socket& socket) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ConnectionLimits limits_;
  mutable absl::Mutex mu_;
  mutable std::map<int, Socket> open_ ABSL_GUARDED_BY(mu_);  // by descriptor; perhaps closed since
  mutable std::map<Peer, int> descriptors_ ABSL_GUARDED_BY(mu_);
  mutable std::map<Network, int64_t> of_network_ ABSL_GUARDED_BY(mu_);
  mutable int64_t reading_ ABSL_GUARDED_BY(mu_) = 0;  // calls of all
  bool watched_closely_ ABSL_GUARDED_BY(mu_) = false;
  std::function<void()> on_watch_ ABSL_GUARDED_BY(mu_);
  std::array<int64_t, std::size(kRefusals)> refused_ ABSL_GUARDED_BY(mu_) = {};
};

}  // namespace epikv
