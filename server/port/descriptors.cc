#include "server/port/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <system_error>

namespace epikv {
namespace {

// Where the hard limit is "none": more than any port needs.
constexpr rlim_t kEnough = 1 << 20;

int64_t OpenDescriptors() {
  std::error_code error;
  const std::filesystem::directory_iterator open("/proc/self/fd", error);
  return error ? 0 : std::distance(begin(open), end(open));
}

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlim_t wanted = std::min(limit.rlim_max, std::max(limit.rlim_cur, kEnough));
  if (wanted > limit.rlim_cur) {
    rlimit raised = limit;
    raised.rlim_cur = wanted;
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  }
  return static_cast<int64_t>(std::min(limit.rlim_cur, kEnough));
}

int64_t ConnectionsWithin(int64_t descriptor_limit) {
  constexpr int64_t kReserve = 128;
  const int64_t reserve = std::min(kReserve, descriptor_limit / 4);
  return std::max<int64_t>(descriptor_limit - reserve - OpenDescriptors(), 1);
}

}  // namespace epikv
