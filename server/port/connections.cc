#include "server/port/connections.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "server/port/received_bytes.h"

namespace epikv {
namespace {

// How soon a flood is seen: while calls are being read, and else.
constexpr absl::Duration kClosely = absl::Milliseconds(50);
constexpr absl::Duration kFromAfar = absl::Milliseconds(200);

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
    case Refused::kUnread:
      return "unread_bytes";
  }
  return "";
}

Connections::Peer Connections::PeerOf(const sockaddr_storage& address) {
  Peer peer = {};
  in_port_t port = 0;
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    peer[0] = 4;
    std::memcpy(&peer[1], &v4.sin_addr, sizeof(v4.sin_addr));
    port = v4.sin_port;
  } else if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    const bool mapped = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr);
    peer[0] = mapped ? 4 : 6;
    std::memcpy(&peer[1], &v6.sin6_addr.s6_addr[mapped ? 12 : 0], mapped ? 4 : 16);
    port = v6.sin6_port;
  }
  std::memcpy(&peer[17], &port, sizeof(port));
  return peer;
}

Connections::Peer Connections::PeerOf(absl::string_view text) {
  const size_t colon = text.rfind(':');
  int port = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(text.substr(colon + 1), &port)) {
    return {};
  }
  absl::string_view host = text.substr(0, colon);
  sockaddr_storage address{};
  auto& v4 = reinterpret_cast<sockaddr_in&>(address);
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  if (absl::ConsumePrefix(&host, "ipv4:")) {
    if (inet_pton(AF_INET, std::string(host).c_str(), &v4.sin_addr) != 1) return {};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(static_cast<in_port_t>(port));
  } else if (absl::ConsumePrefix(&host, "ipv6:")) {
    const std::string plain =
        absl::StrReplaceAll(host, {{"%5B", ""}, {"%5D", ""}, {"[", ""}, {"]", ""}});
    if (inet_pton(AF_INET6, plain.c_str(), &v6.sin6_addr) != 1) return {};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(static_cast<in_port_t>(port));
  }
  return PeerOf(address);
}

Connections::Network Connections::NetworkOf(const Peer& peer) {
  Network network = {};
  std::copy_n(peer.begin(), peer[0] == 4 ? 5 : 9, network.begin());
  return network;
}

bool Connections::IsOpen(int descriptor, const Socket& socket) {
  const std::optional<struct stat> facts = Stat(descriptor);
  return facts.has_value() && facts->st_dev == socket.device && facts->st_ino == socket.inode;
}

void Connections::Forget(std::map<int, Socket>::iterator at) const {
  const auto of_network = of_network_.find(at->second.network);
  if (--of_network->second == 0) of_network_.erase(of_network);
  const auto number = descriptors_.find(at->second.peer);
  if (number != descriptors_.end() && number->second == at->first) descriptors_.erase(number);
  reading_ -= at->second.reading;
  open_.erase(at);
}

void Connections::Sweep(const Network* network) const {
  for (auto at = open_.begin(); at != open_.end();) {
    const auto next = std::next(at);
    const bool asked = network == nullptr || at->second.network == *network;
    if (asked && !IsOpen(at->first, at->second)) Forget(at);
    at = next;
  }
}

bool Connections::Admit(int socket, const sockaddr_storage& address) {
  const std::optional<struct stat> facts = Stat(socket);
  if (!facts.has_value()) return false;
  const Peer peer = PeerOf(address);
  const Network network = NetworkOf(peer);
  absl::MutexLock lock(&mu_);
  // The number was another connection's, which has been closed.
  if (const auto before = open_.find(socket); before != open_.end()) Forget(before);
  auto of_network = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto found = of_network_.find(network);
    return found == of_network_.end() ? 0 : found->second;
  };
  if (of_network() >= limits_.most_of_peer) Sweep(&network);
  if (of_network() >= limits_.most_of_peer) {
    ++refused_[static_cast<size_t>(Refused::kPeer)];
    return false;
  }
  const auto most = static_cast<size_t>(limits_.most);
  if (open_.size() >= most) Sweep(nullptr);
  if (open_.size() >= most) {
    ++refused_[static_cast<size_t>(Refused::kPort)];
    return false;
  }
  open_[socket] = {
      .device = facts->st_dev, .inode = facts->st_ino, .network = network, .peer = peer};
  descriptors_[peer] = socket;
  ++of_network_[network];
  return true;
}

void Connections::OnRefused(Refused refused) {
  absl::MutexLock lock(&mu_);
  ++refused_[static_cast<size_t>(refused)];
}

std::map<int, Connections::Socket>::iterator Connections::Find(absl::string_view peer) {
  const auto number = descriptors_.find(PeerOf(peer));
  return number == descriptors_.end() ? open_.end() : open_.find(number->second);
}

void Connections::OnReading(absl::string_view peer) {
  std::function<void()> told;
  {
    absl::MutexLock lock(&mu_);
    const auto at = Find(peer);
    if (at == open_.end()) return;
    Socket& socket = at->second;
    // What came before were the headers of this call.
    if (socket.reading++ == 0) socket.accounted = ReceivedBytes(at->first).value_or(0);
    ++reading_;
    if (!std::exchange(watched_closely_, true)) told = on_watch_;
  }
  if (told) told();
}

void Connections::OnRead(absl::string_view peer, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  const auto at = Find(peer);
  if (at == open_.end() || at->second.reading == 0) return;
  Socket& socket = at->second;
  --reading_;
  socket.accounted += bytes;
  if (--socket.reading == 0) socket.accounted = ReceivedBytes(at->first).value_or(0);
}

void Connections::Cut(int descriptor, const Socket& socket) {
  // Of the copy nobody else can make another file.
  const int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return;
  if (IsOpen(copy, socket)) {
    shutdown(copy, SHUT_RDWR);
    ++refused_[static_cast<size_t>(Refused::kUnread)];
  }
  close(copy);
}

void Connections::CutFloods() {
  struct Unread {
    int64_t bytes;
    int descriptor;
  };
  absl::MutexLock lock(&mu_);
  Sweep(nullptr);
  std::vector<Unread> all;
  int64_t total = 0;
  for (const auto& [descriptor, socket] : open_) {
    const int64_t bytes = ReceivedBytes(descriptor).value_or(0) - socket.accounted;
    if (bytes <= 0) continue;
    all.push_back({bytes, descriptor});
    total += bytes;
  }
  std::sort(all.begin(), all.end(),
            [](const Unread& a, const Unread& b) { return a.bytes > b.bytes; });
  for (const Unread& unread : all) {
    if (unread.bytes <= limits_.unread_bytes / 4 && total <= limits_.unread_bytes) break;
    const auto at = open_.find(unread.descriptor);
    Cut(at->first, at->second);
    total -= unread.bytes;
    at->second.accounted += unread.bytes;  // once
  }
  watched_closely_ = reading_ > 0;
}

absl::Duration Connections::WatchAgain() const {
  absl::MutexLock lock(&mu_);
  if (open_.empty()) return absl::InfiniteDuration();
  return watched_closely_ ? kClosely : kFromAfar;
}

void Connections::OnWatch(std::function<void()> told) {
  absl::MutexLock lock(&mu_);
  on_watch_ = std::move(told);
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
