#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "epikv/v1/access_log.pb.h"

namespace epikv {

// Appends one line in JSON for every entry, on a thread of its own. Whoever writes never waits:
// what the file or the queue has no room for is dropped and counted. Thread-safe.
class AccessLog {
 public:
  // path: a file, which is opened anew once it has been renamed or removed; "-": stderr; empty: no
  // log. on_dropped: so many lines were; any thread. The error names the path.
  static absl::StatusOr<std::unique_ptr<AccessLog>> Open(const std::string& path,
                                                         std::function<void(int64_t)> on_dropped);
  // Writes what waits, but for a reader that takes nothing.
  ~AccessLog();

  void Write(v1::AccessLogEntry entry);

 private:
  class Sink;
  AccessLog(std::unique_ptr<Sink> sink, std::function<void(int64_t)> on_dropped);
  void Run();
  std::deque<v1::AccessLogEntry> TakeWaiting();
  bool stopping() const;

  const std::function<void(int64_t)> on_dropped_;
  const std::unique_ptr<Sink> sink_;  // null: no log; of the thread
  mutable absl::Mutex mu_;
  std::deque<v1::AccessLogEntry> waiting_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace epikv
