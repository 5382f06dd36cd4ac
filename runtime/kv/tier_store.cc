#include "runtime/kv/tier_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

absl::Status SystemError(absl::string_view what, int error) {
  return absl::ErrnoToStatus(error, absl::StrCat("the tier: ", what));
}

class MemoryStore final : public TierStore {
 public:
  MemoryStore(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  ~MemoryStore() override { munmap(data_, bytes_); }
  MemoryStore(const MemoryStore&) = delete;

  absl::Status Write(int64_t offset, const void* data, int64_t bytes) override {
    std::memcpy(data_ + offset, data, bytes);
    return absl::OkStatus();
  }
  absl::Status Read(int64_t offset, void* data, int64_t bytes) const override {
    std::memcpy(data, data_ + offset, bytes);
    return absl::OkStatus();
  }

 private:
  char* const data_;
  const int64_t bytes_;
};

class FileStore final : public TierStore {
 public:
  explicit FileStore(int descriptor) : descriptor_(descriptor) {}
  ~FileStore() override { close(descriptor_); }
  FileStore(const FileStore&) = delete;

  absl::Status Write(int64_t offset, const void* data, int64_t bytes) override {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t done = pwrite(descriptor_, from, bytes, offset);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return SystemError("writing", done < 0 ? errno : EIO);
      from += done;
      offset += done;
      bytes -= done;
    }
    return absl::OkStatus();
  }
  absl::Status Read(int64_t offset, void* data, int64_t bytes) const override {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t done = pread(descriptor_, to, bytes, offset);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return SystemError("reading", done < 0 ? errno : EIO);
      to += done;
      offset += done;
      bytes -= done;
    }
    return absl::OkStatus();
  }

 private:
  const int descriptor_;
};

// Open for this process alone, without a name.
int OpenUnnamed(const std::string& folder) {
  const int made = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (made >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return made;
  std::string path = folder + "/epikv-tier-XXXXXX";  // a file system that has none such
  const int named = mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) unlink(path.c_str());
  return named;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TierStore>> OpenTierStore(const std::string& folder, int64_t bytes) {
  if (folder.empty()) {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) return SystemError("taking memory", errno);
    return std::make_unique<MemoryStore>(static_cast<char*>(data), bytes);
  }
  const int descriptor = OpenUnnamed(folder);
  if (descriptor < 0) return SystemError(absl::StrCat("a file in ", folder), errno);
  auto store = std::make_unique<FileStore>(descriptor);
  if (const int error = posix_fallocate(descriptor, 0, bytes); error != 0) {
    return SystemError(absl::StrCat("room for ", bytes, " bytes in ", folder), error);
  }
  return store;
}

}  // namespace epikv
