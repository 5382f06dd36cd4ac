#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace epikv {

struct ConnectionLimits {
  int64_t most = 1024;         // of the port
  int64_t most_of_peer = 256;  // of one IPv4 address, or of one IPv6 network of 64 bits
};

// Why a connection was closed as soon as it was accepted.
enum class Refused { kPort, kPeer, kDescriptors };
absl::string_view RefusedName(Refused refused);  // "port_limit"

// The connections of one port, counted without being told when they end: the transport owns and
// closes their sockets. A descriptor that no longer is the socket that was counted has been closed.
// Thread-safe.
class Connections {
 public:
  explicit Connections(ConnectionLimits limits) : limits_(limits) {}

  // Counts an open socket; false: one too many, which has been counted as refused. peer: its
  // other end.
  bool Admit(int socket, const sockaddr_storage& peer);
  void OnRefused(Refused refused);

  int64_t live() const;
  int64_t refused(Refused refused) const;

 private:
  using Peer = std::array<uint8_t, 9>;  // a family, then the address or its first bytes
  struct Socket {
    dev_t device = 0;
    ino_t inode = 0;
    Peer peer = {};
  };

  static Peer PeerOf(const sockaddr_storage& address);
  static bool IsOpen(int descriptor, const Socket& socket);
  // Forgets the closed ones: of one peer, or of all.
  void Sweep(const Peer* peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Forget(std::map<int, Socket>::iterator at) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ConnectionLimits limits_;
  mutable absl::Mutex mu_;
  mutable std::map<int, Socket> open_ ABSL_GUARDED_BY(mu_);  // by descriptor; perhaps closed since
  mutable std::map<Peer, int64_t> of_peer_ ABSL_GUARDED_BY(mu_);
  std::array<int64_t, 3> refused_ ABSL_GUARDED_BY(mu_) = {};
};

}  // namespace epikv
