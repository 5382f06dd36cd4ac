#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/file_contents.h"

// Which files a daemon may load as models.

namespace epikv {

struct ModelFileRules {
  std::string root;                  // folder that they lie in; empty: anywhere
  std::vector<std::string> digests;  // "sha256:" and 64 hex digits; empty: any
};

// "sha256:...", separated by commas or spaces.
std::vector<std::string> SplitDigests(absl::string_view text);
bool IsDigest(absl::string_view text);

// A model's file that may be loaded.
class ModelFile {
 public:
  // Symbolic links are resolved before the folder is looked at. PERMISSION_DENIED: it is in another
  // folder; FAILED_PRECONDITION: its digest is none of the rules'.
  static absl::StatusOr<ModelFile> Check(const std::string& path, const ModelFileRules& rules);

  const std::string& path() const { return path_; }

  // Not OK: the file at path() is not the one that was checked any more.
  absl::Status CheckUnchanged() const;

 private:
  std::string path_;
  FileVersion version_;
};

// `path` without links, if it is in `root`, or `root` is empty.
absl::StatusOr<std::string> ResolveIn(const std::string& root, const std::string& path);

}  // namespace epikv
