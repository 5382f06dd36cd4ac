#include "server/port/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

constexpr int kBacklog = 1024;                // the system may have less (net.core.somaxconn)
constexpr int kUnackedMilliseconds = 20'000;  // as gRPC's own: the keepalive timeout
constexpr int kBackOffMilliseconds = 50;      // while there is no descriptor

void Set(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

// A socket; or -1, and errno says why. Accepted sockets inherit the options.
int ListenAt(const addrinfo& at) {
  const int listening =
      socket(at.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, at.ai_protocol);
  if (listening < 0) return -1;
  Set(listening, SOL_SOCKET, SO_REUSEADDR, 1);
  Set(listening, IPPROTO_TCP, TCP_NODELAY, 1);
  Set(listening, IPPROTO_TCP, TCP_USER_TIMEOUT, kUnackedMilliseconds);
  if (at.ai_family == AF_INET6) Set(listening, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(listening, at.ai_addr, at.ai_addrlen) == 0 && listen(listening, kBacklog) == 0) {
    return listening;
  }
  const int why = errno;
  close(listening);
  errno = why;
  return -1;
}

int PortOf(int listening) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(listening, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// At once and without the goodbyes of TCP, which would keep the port's state for a minute.
void Reset(int socket) {
  const linger now{.l_onoff = 1, .l_linger = 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  close(socket);
}

// For poll: -1 is for ever.
int MillisecondsOf(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return -1;
  return static_cast<int>(std::max<int64_t>(absl::ToInt64Milliseconds(duration), 0));
}

int OpenReserve() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

class Listener::Wake {
 public:
  Wake() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  ~Wake() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  void Call() const {
    const uint64_t one = 1;
    while (write(descriptor_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }
  void Taken() const {
    uint64_t calls = 0;
    while (read(descriptor_, &calls, sizeof(calls)) < 0 && errno == EINTR) {
    }
  }
  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
};

Listener::Listener(std::shared_ptr<Connections> connections)
    : connections_(std::move(connections)), wake_(std::make_shared<Wake>()) {}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const std::string& address,
                                                         std::shared_ptr<Connections> connections) {
  std::unique_ptr<Listener> listener(new Listener(std::move(connections)));
  const size_t colon = address.rfind(':');
  absl::string_view host = absl::string_view(address).substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  absl::Status bound = listener->Bind(std::string(host), address.substr(colon + 1));
  if (!bound.ok()) return bound;
  listener->reserve_ = OpenReserve();
  if (listener->wake_->descriptor() < 0) return absl::UnavailableError(std::strerror(errno));
  return listener;
}

absl::Status Listener::Bind(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    return absl::UnavailableError(gai_strerror(error));
  }
  const auto freed = absl::MakeCleanup([&] { freeaddrinfo(found); });
  int failed = 0;
  for (addrinfo* at = found; at != nullptr; at = at->ai_next) {
    if (port_ != 0) {  // the first may have been given any; the others get the same
      const in_port_t same = htons(static_cast<in_port_t>(port_));
      if (at->ai_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(at->ai_addr)->sin6_port = same;
      if (at->ai_family == AF_INET) reinterpret_cast<sockaddr_in*>(at->ai_addr)->sin_port = same;
    }
    const int listening = ListenAt(*at);
    if (listening < 0) {
      failed = errno;
      continue;
    }
    sockets_.push_back(listening);
    port_ = PortOf(listening);
  }
  // A name of two addresses, of which this machine has one (localhost without IPv6), will do; but
  // a port that somebody else has at one of them will not.
  if (sockets_.empty() || failed == EADDRINUSE) {
    return absl::UnavailableError(std::strerror(failed));
  }
  return absl::OkStatus();
}

Listener::~Listener() {
  Stop();
  if (reserve_ >= 0) close(reserve_);
}

void Listener::Start(std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  connections_->OnWatch([wake = wake_] { wake->Call(); });
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  connections_->OnWatch(nullptr);
  stopping_ = true;
  wake_->Call();
  if (thread_.joinable()) thread_.join();
  for (const int listening : std::exchange(sockets_, {})) close(listening);
}

void Listener::Run() {
  std::vector<pollfd> watched = {{.fd = wake_->descriptor(), .events = POLLIN, .revents = 0}};
  for (const int listening : sockets_) {
    watched.push_back({.fd = listening, .events = POLLIN, .revents = 0});
  }
  absl::Duration checked = SteadyTime();
  while (!stopping_) {
    const absl::Duration left = connections_->WatchAgain() - (SteadyTime() - checked);
    if (poll(watched.data(), watched.size(), MillisecondsOf(left)) < 0) continue;  // interrupted
    if (watched.front().revents != 0) wake_->Taken();
    if (SteadyTime() - checked >= connections_->WatchAgain()) {
      connections_->CutFloods();
      checked = SteadyTime();
    }
    for (size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents == 0 || Accept(watched[i].fd)) continue;
      // Somebody may close one meanwhile.
      if (!RefuseWithReserve(watched[i].fd)) poll(watched.data(), 1, kBackOffMilliseconds);
    }
  }
}

bool Listener::Accept(int listening) {
  constexpr int kAtOnce = 64;  // then others have their turn
  for (int i = 0; i < kAtOnce; ++i) {
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    const int accepted =
        accept4(listening, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (accepted < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
    }
    if (!connections_->Admit(accepted, peer)) {
      Reset(accepted);
      continue;
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters handed;
    handed.listener_fd = listening;
    handed.fd = accepted;
    acceptor_->HandleNewConnection(&handed);
  }
  return true;
}

bool Listener::RefuseWithReserve(int listening) {
  connections_->OnRefused(Refused::kDescriptors);
  if (reserve_ < 0) reserve_ = OpenReserve();
  if (reserve_ < 0) return false;
  close(reserve_);
  const int accepted = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
  if (accepted >= 0) Reset(accepted);
  reserve_ = OpenReserve();
  return accepted >= 0;
}

}  // namespace epikv
