#include "server/call/access_log.h"

#include <fcntl.h>
#include <google/protobuf/util/json_util.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace epikv {
namespace {

// A second's worth of short requests; some MB.
constexpr size_t kMaxWaiting = 8192;
// How long a pipe that nobody empties keeps us from looking whether to stop.
constexpr int kPatienceMs = 100;

std::optional<std::string> LineOf(const v1::AccessLogEntry& entry) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string line;
  if (!google::protobuf::util::MessageToJsonString(entry, &line, options).ok()) return std::nullopt;
  return line + "\n";
}

}  // namespace

// Where the lines go. Of one thread.
class AccessLog::Sink {
 public:
  static absl::StatusOr<std::unique_ptr<Sink>> Open(const std::string& path) {
    std::unique_ptr<Sink> sink(new Sink(path));
    if (absl::Status status = sink->Reopen(); !status.ok()) return status;
    return sink;
  }
  ~Sink() { Close(); }

  // Follows a rename. Where the file cannot be made anew, the renamed one goes on.
  void FollowPath() {
    struct stat there = {}, ours = {};
    if (to_stderr() || fstat(file_, &ours) != 0) return;
    if (stat(path_.c_str(), &there) == 0 && there.st_dev == ours.st_dev &&
        there.st_ino == ours.st_ino) {
      return;
    }
    Reopen().IgnoreError();
  }

  // Whether the whole line was written. give_up: asked now and then while a pipe has no room.
  bool Write(std::string line, const std::function<bool()>& give_up) {
    if (torn_) line.insert(line.begin(), '\n');
    absl::string_view left = line;
    while (!left.empty() && AwaitRoom(give_up)) {
      const ssize_t written = write(file_, left.data(), left.size());
      if (written > 0) left.remove_prefix(static_cast<size_t>(written));
      if (written <= 0 && errno != EINTR && errno != EAGAIN) break;
    }
    if (left.size() < line.size()) torn_ = !left.empty();
    return left.empty();
  }

 private:
  explicit Sink(std::string path) : path_(std::move(path)) {}
  bool to_stderr() const { return path_ == "-"; }

  absl::Status Reopen() {
    // Not blocking: of a pipe, opening and writing would wait for a reader.
    constexpr int kFlags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK;
    const int file = to_stderr() ? STDERR_FILENO : open(path_.c_str(), kFlags, 0640);
    if (file < 0) {
      return absl::ErrnoToStatus(errno, absl::StrCat("--access_log: cannot write '", path_, "'"));
    }
    Close();
    file_ = file;
    torn_ = false;
    return absl::OkStatus();
  }
  void Close() {
    if (!to_stderr() && file_ >= 0) close(file_);
  }
  bool AwaitRoom(const std::function<bool()>& give_up) {
    pollfd room{.fd = file_, .events = POLLOUT, .revents = 0};
    for (;;) {
      const bool last = give_up();
      if (poll(&room, 1, last ? 0 : kPatienceMs) != 0) return true;
      if (last) return false;
    }
  }

  const std::string path_;
  int file_ = -1;
  bool torn_ = false;  // the last line lacks its end
};

absl::StatusOr<std::unique_ptr<AccessLog>> AccessLog::Open(
    const std::string& path, std::function<void(int64_t)> on_dropped) {
  std::unique_ptr<Sink> sink;
  if (!path.empty()) {
    absl::StatusOr<std::unique_ptr<Sink>> opened = Sink::Open(path);
    if (!opened.ok()) return opened.status();
    sink = *std::move(opened);
  }
  return std::unique_ptr<AccessLog>(new AccessLog(std::move(sink), std::move(on_dropped)));
}

AccessLog::AccessLog(std::unique_ptr<Sink> sink, std::function<void(int64_t)> on_dropped)
    : on_dropped_(std::move(on_dropped)), sink_(std::move(sink)) {
  if (sink_ != nullptr) thread_ = std::thread([this] { Run(); });
}

AccessLog::~AccessLog() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void AccessLog::Write(v1::AccessLogEntry entry) {
  if (sink_ == nullptr) return;
  {
    absl::MutexLock lock(&mu_);
    if (waiting_.size() < kMaxWaiting) {
      waiting_.push_back(std::move(entry));
      return;
    }
  }
  on_dropped_(1);
}

// Empty once it is time to stop.
std::deque<v1::AccessLogEntry> AccessLog::TakeWaiting() {
  absl::MutexLock lock(&mu_);
  auto called = [this]()
                    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !waiting_.empty() || stopping_; };
  mu_.Await(absl::Condition(&called));
  return std::exchange(waiting_, {});
}

bool AccessLog::stopping() const {
  absl::MutexLock lock(&mu_);
  return stopping_;
}

void AccessLog::Run() {
  for (;;) {
    const std::deque<v1::AccessLogEntry> entries = TakeWaiting();
    if (entries.empty()) return;
    sink_->FollowPath();
    int64_t dropped = 0;
    for (const v1::AccessLogEntry& entry : entries) {
      std::optional<std::string> line = LineOf(entry);
      const bool written =
          line.has_value() && sink_->Write(*std::move(line), [this] { return stopping(); });
      if (!written) ++dropped;
    }
    if (dropped > 0) on_dropped_(dropped);
  }
}

}  // namespace epikv
