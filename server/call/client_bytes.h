#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace epikv {

// Bytes that are held for clients, each of which may have so many. Thread-safe.
class ClientBytes {
 public:
  explicit ClientBytes(int64_t most) : most_(most) {}

  // False: he has too many, and gets none. What he has alone may be more than that: it would be
  // refused for ever.
  bool Take(const std::string& client, int64_t bytes) {
    absl::MutexLock lock(&mu_);
    const auto held = held_.find(client);
    if (held != held_.end() && held->second + bytes > most_) return false;
    held_[client] += bytes;
    return true;
  }
  void Give(const std::string& client, int64_t bytes) {
    absl::MutexLock lock(&mu_);
    const auto held = held_.find(client);
    held->second -= bytes;
    if (held->second == 0) held_.erase(held);
  }

  int64_t most() const { return most_; }

 private:
  const int64_t most_;
  absl::Mutex mu_;
  std::map<std::string, int64_t> held_ ABSL_GUARDED_BY(mu_);  // not 0
};

}  // namespace epikv
