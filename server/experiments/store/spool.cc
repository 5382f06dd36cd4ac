#include "server/experiments/store/spool.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace epikv {
namespace {

constexpr absl::string_view kMagic = "epikvSP1";
constexpr absl::string_view kSuffix = ".spool";
constexpr size_t kNumberDigits = 16;
constexpr size_t kHeadBytes = 8;

absl::Status ErrorOf(int error, absl::string_view doing, const std::string& path) {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  return absl::Status(full ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable,
                      absl::StrCat("spool: ", doing, " '", path, "': ", std::strerror(error)));
}

std::string LittleEndian(uint32_t value) {
  std::string bytes(4, '\0');
  for (size_t i = 0; i < 4; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}
uint32_t LittleEndian(absl::string_view bytes) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

uint32_t Checksum(absl::string_view length, absl::string_view record) {
  auto add = [](uLong sum, absl::string_view part) {
    return crc32_z(sum, reinterpret_cast<const Bytef*>(part.data()), part.size());
  };
  return static_cast<uint32_t>(add(add(0, length), record));
}

std::string Framed(const v1::ExperimentRecord& record) {
  const std::string bytes = record.SerializeAsString();
  const std::string length = LittleEndian(static_cast<uint32_t>(bytes.size()));
  return absl::StrCat(length, LittleEndian(Checksum(length, bytes)), bytes);
}

// The first record of `bytes`, which are left without it; none if it is not whole.
std::optional<v1::ExperimentRecord> TakeRecord(absl::string_view& bytes) {
  if (bytes.size() < kHeadBytes) return std::nullopt;
  const absl::string_view length = bytes.substr(0, 4);
  const uint32_t size = LittleEndian(length);
  if (bytes.size() - kHeadBytes < size) return std::nullopt;
  const absl::string_view body = bytes.substr(kHeadBytes, size);
  if (Checksum(length, body) != LittleEndian(bytes.substr(4, 4))) return std::nullopt;
  v1::ExperimentRecord record;
  if (!record.ParseFromArray(body.data(), static_cast<int>(body.size()))) return std::nullopt;
  bytes.remove_prefix(kHeadBytes + size);
  return record;
}

absl::Status SyncFolder(const std::string& folder) {
  const int file = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return ErrorOf(errno, "cannot open", folder);
  const int error = fsync(file) == 0 ? 0 : errno;
  close(file);
  return error == 0 ? absl::OkStatus() : ErrorOf(error, "cannot sync", folder);
}

}  // namespace

// An open file.
class Spool::File {
 public:
  static absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path, int flags) {
    const int file = open(path.c_str(), flags | O_CLOEXEC, 0600);
    if (file < 0) return ErrorOf(errno, "cannot open", path);
    return std::unique_ptr<File>(new File(path, file));
  }
  ~File() { close(file_); }

  absl::Status LockAlone() {
    if (flock(file_, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
    if (errno != EWOULDBLOCK) return ErrorOf(errno, "cannot lock", path_);
    return absl::FailedPreconditionError(absl::StrCat("spool: another process is using '", path_,
                                                      "': give each daemon its own folder"));
  }
  // At the end of the file; synced.
  absl::Status Append(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t written = write(file_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return ErrorOf(written < 0 ? errno : ENOSPC, "cannot write", path_);
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return Sync();
  }
  absl::Status Cut(int64_t bytes) {
    if (ftruncate(file_, bytes) != 0) return ErrorOf(errno, "cannot cut", path_);
    return Sync();
  }
  absl::StatusOr<std::string> ReadFrom(int64_t offset, int64_t bytes) const {
    std::string contents(static_cast<size_t>(bytes), '\0');
    size_t done = 0;
    while (done < contents.size()) {
      const ssize_t got = pread(file_, &contents[done], contents.size() - done,
                                offset + static_cast<int64_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return ErrorOf(errno, "cannot read", path_);
      if (got == 0) break;  // shorter than it was
      done += static_cast<size_t>(got);
    }
    contents.resize(done);
    return contents;
  }

 private:
  File(std::string path, int file) : path_(std::move(path)), file_(file) {}
  absl::Status Sync() {
    return fdatasync(file_) == 0 ? absl::OkStatus() : ErrorOf(errno, "cannot sync", path_);
  }

  const std::string path_;
  const int file_;
};

absl::StatusOr<std::unique_ptr<Spool>> Spool::Open(const std::string& folder,
                                                   const SpoolOptions& options) {
  const bool made = mkdir(folder.c_str(), 0700) == 0;
  if (!made && errno != EEXIST) {
    return absl::FailedPreconditionError(
        absl::StrCat("spool: cannot make '", folder, "': ", std::strerror(errno)));
  }
  if (made) {
    const std::string above = std::filesystem::path(folder + "/..").string();
    if (absl::Status status = SyncFolder(above); !status.ok()) return status;
  }
  absl::StatusOr<std::unique_ptr<File>> lock = File::Open(folder + "/lock", O_RDWR | O_CREAT);
  if (!lock.ok()) return lock.status();
  if (absl::Status status = (*lock)->LockAlone(); !status.ok()) return status;
  std::unique_ptr<Spool> spool(new Spool(folder, options, *std::move(lock)));
  if (absl::Status status = spool->FindSegments(); !status.ok()) return status;
  return spool;
}

Spool::Spool(std::string folder, const SpoolOptions& options, std::unique_ptr<File> lock)
    : folder_(std::move(folder)),
      options_(options),
      lock_(std::move(lock)),
      read_from_(static_cast<int64_t>(kMagic.size())) {}

Spool::~Spool() = default;

std::string Spool::PathOf(uint64_t segment) const {
  return absl::StrFormat("%s/%016x%s", folder_, segment, kSuffix);
}

absl::Status Spool::FindSegments() {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
    const std::string name = entry.path().filename().string();
    uint64_t number = 0;
    if (name.size() != kNumberDigits + kSuffix.size() || !absl::EndsWith(name, kSuffix) ||
        !absl::SimpleHexAtoi(name.substr(0, kNumberDigits), &number)) {
      continue;
    }
    struct stat facts = {};
    if (stat(PathOf(number).c_str(), &facts) != 0) continue;
    segments_.push_back({.number = number, .bytes = facts.st_size});
  }
  if (error) return ErrorOf(error.value(), "cannot read", folder_);
  std::sort(segments_.begin(), segments_.end(),
            [](const Segment& a, const Segment& b) { return a.number < b.number; });
  for (const Segment& segment : segments_) {
    if (absl::Status status = CheckMagic(segment); !status.ok()) return status;
  }
  if (segments_.empty()) return absl::OkStatus();
  next_number_ = segments_.back().number + 1;
  return CutTail();
}

// Another digit is another format; anything else is damage.
absl::Status Spool::CheckMagic(const Segment& segment) const {
  const absl::StatusOr<std::unique_ptr<File>> file = File::Open(PathOf(segment.number), O_RDONLY);
  if (!file.ok()) return file.status();
  const absl::StatusOr<std::string> magic = (*file)->ReadFrom(0, kMagic.size());
  if (!magic.ok()) return magic.status();
  const size_t digit = kMagic.size() - 1;
  if (magic->size() < kMagic.size() || !absl::StartsWith(*magic, kMagic.substr(0, digit)) ||
      !absl::ascii_isdigit(magic->back()) || *magic == kMagic) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("spool: '", folder_,
                   "' was written by a newer epikvd: run that version until the folder is empty, "
                   "or name another folder"));
}

// Only the last segment was being written. It takes no more: the next record begins another.
absl::Status Spool::CutTail() {
  Segment& last = segments_.back();
  const absl::StatusOr<int64_t> sound = SoundBytes(last);
  if (!sound.ok()) return sound.status();
  if (*sound < last.bytes) {
    ++damage_.tails;
    damage_.bytes += last.bytes - *sound;
    absl::StatusOr<std::unique_ptr<File>> file = File::Open(PathOf(last.number), O_WRONLY);
    if (!file.ok()) return file.status();
    if (absl::Status status = (*file)->Cut(*sound); !status.ok()) return status;
    last.bytes = *sound;
  }
  if (last.bytes > static_cast<int64_t>(kMagic.size())) return absl::OkStatus();
  unlink(PathOf(last.number).c_str());
  segments_.pop_back();
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Spool::SoundBytes(const Segment& segment) {
  const absl::StatusOr<std::string> contents = Contents(segment, 0);
  if (!contents.ok()) return contents.status();
  absl::string_view left = *contents;
  if (!absl::StartsWith(left, kMagic)) return 0;
  left.remove_prefix(kMagic.size());
  while (TakeRecord(left).has_value()) {
  }
  return static_cast<int64_t>(contents->size() - left.size());
}

absl::StatusOr<std::string> Spool::Contents(const Segment& segment, int64_t from) const {
  const absl::StatusOr<std::unique_ptr<File>> file = File::Open(PathOf(segment.number), O_RDONLY);
  if (!file.ok()) return file.status();
  return (*file)->ReadFrom(from, std::max(int64_t{0}, segment.bytes - from));
}

int64_t Spool::bytes() const {
  int64_t bytes = 0;
  for (const Segment& segment : segments_) bytes += segment.bytes;
  return bytes;
}

absl::Status Spool::Append(absl::Span<const v1::ExperimentRecord> records) {
  std::string framed;
  for (const v1::ExperimentRecord& record : records) framed += Framed(record);
  if (framed.empty()) return absl::OkStatus();
  const auto size = static_cast<int64_t>(framed.size());
  if (bytes() + size + static_cast<int64_t>(kMagic.size()) > options_.max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("spool: '", folder_, "' is full (", options_.max_bytes, " bytes)"));
  }
  if (appending_ != nullptr && segments_.back().bytes >= options_.segment_bytes) {
    appending_ = nullptr;
  }
  if (appending_ == nullptr) {
    if (absl::Status status = Extend(); !status.ok()) return status;
  }
  if (absl::Status status = appending_->Append(framed); !status.ok()) {
    Seal();
    return status;
  }
  segments_.back().bytes += size;
  return absl::OkStatus();
}

// Begins a segment.
absl::Status Spool::Extend() {
  const uint64_t number = next_number_;
  const std::string path = PathOf(number);
  absl::StatusOr<std::unique_ptr<File>> file =
      File::Open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND);
  if (!file.ok()) return file.status();
  ++next_number_;
  absl::Status status = (*file)->Append(kMagic);
  if (status.ok()) status = SyncFolder(folder_);
  if (!status.ok()) {
    unlink(path.c_str());
    return status;
  }
  appending_ = *std::move(file);
  segments_.push_back({.number = number, .bytes = static_cast<int64_t>(kMagic.size())});
  return absl::OkStatus();
}

// After a failure nobody knows what is on the disk behind the last record that was synced: cut it,
// and write no more after it.
void Spool::Seal() {
  appending_->Cut(segments_.back().bytes).IgnoreError();
  appending_ = nullptr;
  if (segments_.back().bytes > static_cast<int64_t>(kMagic.size())) return;
  unlink(PathOf(segments_.back().number).c_str());
  segments_.pop_back();
}

absl::StatusOr<Spool::Batch> Spool::Read(size_t max_records) {
  while (!segments_.empty()) {
    const Segment& first = segments_.front();
    const absl::StatusOr<std::string> contents = Contents(first, read_from_);
    if (!contents.ok()) return contents.status();
    absl::string_view left = *contents;
    Batch batch{.records = {}, .segment = first.number, .end = read_from_};
    while (batch.records.size() < max_records) {
      std::optional<v1::ExperimentRecord> record = TakeRecord(left);
      if (!record.has_value()) break;
      batch.records.push_back(*std::move(record));
    }
    batch.end = read_from_ + static_cast<int64_t>(contents->size() - left.size());
    if (!batch.records.empty()) return batch;
    if (batch.end < first.bytes) {  // there is no way to tell where its next record begins
      ++damage_.tails;
      damage_.bytes += first.bytes - batch.end;
    }
    RemoveFirst();
  }
  return Batch();
}

void Spool::Remove(const Batch& batch) {
  if (segments_.empty() || segments_.front().number != batch.segment) return;
  read_from_ = batch.end;
  if (read_from_ >= segments_.front().bytes) RemoveFirst();
}

// A crash may bring it back, which is harmless: see above.
void Spool::RemoveFirst() {
  if (segments_.size() == 1) appending_ = nullptr;
  unlink(PathOf(segments_.front().number).c_str());
  segments_.pop_front();
  read_from_ = static_cast<int64_t>(kMagic.size());
}

}  // namespace epikv
