#include "server/port/received_bytes.h"

// The kernel's own header: the C library's has an older tcp_info.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace epikv {

std::optional<int64_t> ReceivedBytes(int socket) {
  tcp_info facts{};
  socklen_t size = sizeof(facts);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &facts, &size) != 0) return std::nullopt;
  constexpr size_t kEnd =
      offsetof(tcp_info, tcpi_bytes_received) + sizeof(facts.tcpi_bytes_received);
  if (size < kEnd) return std::nullopt;
  return static_cast<int64_t>(facts.tcpi_bytes_received);
}

}  // namespace epikv
