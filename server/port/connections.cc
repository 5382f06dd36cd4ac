#include "server/port/connections.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace epikv {
namespace {

// What tells one open socket from all others.
std::optional<struct stat> Stat(int descriptor) {
  struct stat facts {};
  if (fstat(descriptor, &facts) != 0 || !S_ISSOCK(facts.st_mode)) return std::nullopt;
  return facts;
}

}  // namespace

absl::string_view RefusedName(Refused refused) {
  switch (refused) {
    case Refused::kPort:
      return "port_limit";
    case Refused::kPeer:
      return "peer_limit";
    case Refused::kDescriptors:
      return "descriptors";
  }
  return "";
}

Connections::Peer Connections::PeerOf(const sockaddr_storage& address) {
  Peer peer = {};
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    peer[0] = 4;
    std::memcpy(&peer[1], &v4.sin_addr, sizeof(v4.sin_addr));
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    const bool mapped = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
    peer[0] = mapped ? 4 : 6;
    std::memcpy(&peer[1], &v6.sin6_addr.s6_addr[mapped ? 12 : 0], mapped ? 4 : 8);
  }
  return peer;
}

bool Connections::IsOpen(int descriptor, const Socket& socket) {
  const std::optional<struct stat> facts = Stat(descriptor);
  return facts.has_value() && facts->st_dev == socket.device && facts->st_ino == socket.inode;
}

void Connections::Forget(std::map<int, Socket>::iterator at) const {
  const auto of_peer = of_peer_.find(at->second.peer);
  if (--of_peer->second == 0) of_peer_.erase(of_peer);
  open_.erase(at);
}

void Connections::Sweep(const Peer* peer) const {
  for (auto at = open_.begin(); at != open_.end();) {
    const auto next = std::next(at);
    const bool asked = peer == nullptr || at->second.peer == *peer;
    if (asked && !IsOpen(at->first, at->second)) Forget(at);
    at = next;
  }
}

bool Connections::Admit(int socket, const sockaddr_storage& address) {
  const std::optional<struct stat> facts = Stat(socket);
  if (!facts.has_value()) return false;
  const Peer peer = PeerOf(address);
  absl::MutexLock lock(&mu_);
  // The number was another connection's, which has been closed.
  if (const auto before = open_.find(socket); before != open_.end()) Forget(before);
  auto of_peer = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto found = of_peer_.find(peer);
    return found == of_peer_.end() ? 0 : found->second;
  };
  if (of_peer() >= limits_.most_of_peer) Sweep(&peer);
  if (of_peer() >= limits_.most_of_peer) {
    ++refused_[static_cast<size_t>(Refused::kPeer)];
    return false;
  }
  const auto most = static_cast<size_t>(limits_.most);
  if (open_.size() >= most) Sweep(nullptr);
  if (open_.size() >= most) {
    ++refused_[static_cast<size_t>(Refused::kPort)];
    return false;
  }
  open_[socket] = {.device = facts->st_dev, .inode = facts->st_ino, .peer = peer};
  ++of_peer_[peer];
  return true;
}

void Connections::OnRefused(Refused refused) {
  absl::MutexLock lock(&mu_);
  ++refused_[static_cast<size_t>(refused)];
}

int64_t Connections::live() const {
  absl::MutexLock lock(&mu_);
  Sweep(nullptr);
  return static_cast<int64_t>(open_.size());
}

int64_t Connections::refused(Refused refused) const {
  absl::MutexLock lock(&mu_);
  return refused_[static_cast<size_t>(refused)];
}

}  // namespace epikv
