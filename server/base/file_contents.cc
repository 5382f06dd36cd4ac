#include "server/base/file_contents.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

FileVersion VersionOf(const struct stat& facts) {
  return {.device = facts.st_dev,
          .inode = facts.st_ino,
          .bytes = facts.st_size,
          .modified_ns = facts.st_mtim.tv_sec * int64_t{1'000'000'000} + facts.st_mtim.tv_nsec};
}

}  // namespace

absl::StatusOr<FileContents> ReadFile(const std::string& path) {
  auto error = [&path] {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read '", path, "'"));
  };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // of a pipe, not to wait
  if (file < 0) return error();
  const absl::Cleanup close_file = [file] { close(file); };
  struct stat facts = {};
  if (fstat(file, &facts) != 0) return error();
  if (!S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot read '", path, "': it is not a regular file"));
  }
  FileContents contents{.version = VersionOf(facts)};
  std::string part(65536, '\0');  // not on the stack: an HTTP server's threads have little
  for (;;) {
    const ssize_t got = read(file, part.data(), part.size());
    if (got < 0) return error();
    if (got == 0) return contents;
    contents.text.append(part, 0, static_cast<size_t>(got));
  }
}

FileVersion VersionOf(const std::string& path) {
  struct stat facts = {};
  return stat(path.c_str(), &facts) == 0 ? VersionOf(facts) : FileVersion();
}

}  // namespace epikv
