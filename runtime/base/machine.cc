#include "runtime/base/machine.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace epikv {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The first whitespace-separated words of a file; nothing if it cannot be read.
std::optional<std::pair<std::string, std::string>> FirstWords(const std::string& path) {
  std::ifstream file(path);
  std::pair<std::string, std::string> words;
  if (!(file >> words.first)) return std::nullopt;
  file >> words.second;
  return words;
}

int64_t NumberIn(const std::string& path) {
  const auto words = FirstWords(path);
  if (!words.has_value() || words->first == "max") return kUnlimited;
  return std::stoll(words->first);
}

// The folder of this process's cgroup in the v2 hierarchy; containers see theirs as the root.
std::string CgroupFolder() {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) != 0) continue;
    const std::string folder = "/sys/fs/cgroup" + line.substr(3);
    if (std::ifstream(folder + "/cgroup.controllers")) return folder;
  }
  return "/sys/fs/cgroup";
}

int64_t QuotaOfCgroup() {
  if (const auto words = FirstWords(CgroupFolder() + "/cpu.max"); words.has_value()) {
    if (words->first == "max") return kUnlimited;
    return std::stoll(words->first) / std::stoll(words->second);
  }
  const int64_t quota = NumberIn("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  const int64_t period = NumberIn("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (quota == kUnlimited || quota <= 0 || period == kUnlimited) return kUnlimited;
  return quota / period;
}

// One of the lines "name number" of a file; 0 where it is not.
int64_t StatIn(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  for (int64_t number; file >> word >> number;) {
    if (word == name) return number;
  }
  return 0;
}

// Cached files that were read once, a model's among them, count as used but make room when asked.
int64_t MemoryLeftInCgroup() {
  const std::string folder = CgroupFolder();
  int64_t limit = NumberIn(folder + "/memory.max");
  int64_t used = NumberIn(folder + "/memory.current");
  int64_t cached = StatIn(folder + "/memory.stat", "inactive_file");
  if (limit == kUnlimited) {
    const std::string v1 = "/sys/fs/cgroup/memory";
    limit = NumberIn(v1 + "/memory.limit_in_bytes");
    used = NumberIn(v1 + "/memory.usage_in_bytes");
    cached = StatIn(v1 + "/memory.stat", "total_inactive_file");
  }
  if (limit == kUnlimited || used == kUnlimited) return kUnlimited;
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, used - cached));
}

// All reserved memory of this process, and what is set aside.
struct Reserved {
  absl::Mutex mu;
  std::set<const ReservedMemory*> all ABSL_GUARDED_BY(mu);
  int64_t aside ABSL_GUARDED_BY(mu) = 0;  // bytes
};
Reserved& TheReserved() {
  static Reserved& reserved = *new Reserved;
  return reserved;
}

uintptr_t PageBytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int64_t MemoryAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (int64_t kilobytes; file >> name >> kilobytes; std::getline(file, unit)) {
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return kUnlimited;
}

}  // namespace

int64_t CpuQuota() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  const int64_t affinity = sched_getaffinity(0, sizeof(mask), &mask) == 0 ? CPU_COUNT(&mask) : 1;
  return std::max<int64_t>(1, std::min(affinity, QuotaOfCgroup()));
}

int64_t AvailableMemoryBytes() {
  int64_t promised = 0;
  {
    absl::MutexLock lock(&TheReserved().mu);
    for (const ReservedMemory* memory : TheReserved().all) promised += memory->UntouchedBytes();
    promised += TheReserved().aside;
  }
  return std::max<int64_t>(0, std::min(MemoryAvailable(), MemoryLeftInCgroup()) - promised);
}

MemorySetAside::MemorySetAside(int64_t bytes) : bytes_(bytes) {
  absl::MutexLock lock(&TheReserved().mu);
  TheReserved().aside += bytes_;
}

MemorySetAside::~MemorySetAside() {
  absl::MutexLock lock(&TheReserved().mu);
  TheReserved().aside -= bytes_;
}

ReservedMemory::ReservedMemory(const void* begin, int64_t bytes)
    : begin_((reinterpret_cast<uintptr_t>(begin) + PageBytes() - 1) / PageBytes() * PageBytes()),
      end_((reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes)) / PageBytes() *
           PageBytes()) {
  absl::MutexLock lock(&TheReserved().mu);
  TheReserved().all.insert(this);
}

ReservedMemory::~ReservedMemory() {
  absl::MutexLock lock(&TheReserved().mu);
  TheReserved().all.erase(this);
}

int64_t ReservedMemory::UntouchedBytes() const {
  const uintptr_t page = PageBytes();
  std::vector<unsigned char> resident(65536);  // a byte a page
  int64_t untouched = 0;
  for (uintptr_t at = begin_; at < end_;) {
    const uintptr_t bytes = std::min<uintptr_t>(end_ - at, resident.size() * page);
    if (mincore(reinterpret_cast<void*>(at), bytes, resident.data()) != 0) return 0;
    for (uintptr_t i = 0; i < bytes / page; ++i) untouched += (resident[i] & 1) == 0 ? page : 0;
    at += bytes;
  }
  return untouched;
}

}  // namespace epikv
