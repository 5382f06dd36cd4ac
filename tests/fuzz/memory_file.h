#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/fuzz/require.h"

namespace epikv {

// A file without a folder.
class MemoryFile {
 public:
  MemoryFile() : file_(memfd_create("config", MFD_CLOEXEC)) {}
  ~MemoryFile() { close(file_); }
  std::string With(absl::string_view text) {
    Require(ftruncate(file_, 0) == 0 &&
                pwrite(file_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()),
            "the file is written");
    return absl::StrCat("/proc/self/fd/", file_);
  }

 private:
  const int file_;
};

}  // namespace epikv
