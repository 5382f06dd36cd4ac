#pragma once

#include <cstdint>
#include <optional>

namespace epikv {

// What has come over a TCP connection since it was made, in bytes. Absent where the system cannot
// tell, or this is no such socket.
std::optional<int64_t> ReceivedBytes(int socket);

}  // namespace epikv
