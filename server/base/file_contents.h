#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace epikv {

// Tells a file from one that replaced it, and from itself before it was written to.
struct FileVersion {
  dev_t device = 0;
  ino_t inode = 0;
  int64_t bytes = 0;
  int64_t modified_ns = 0;

  bool operator==(const FileVersion&) const = default;
};

struct FileContents {
  std::string text;
  FileVersion version;
};

// The whole of a regular file: a pipe would be empty at the second reading. The error names the
// path and says what is wrong with it.
absl::StatusOr<FileContents> ReadFile(const std::string& path);

// Of the file that lies at `path` now; all zero where there is none.
FileVersion VersionOf(const std::string& path);

}  // namespace epikv
