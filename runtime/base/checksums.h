#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace caffe2::serialize {
class PyTorchStreamReader;
}

namespace epikv {

// Of every record of a TorchScript file, a ZIP archive: its name, without the archive's own before
// it, to its CRC-32. DATA_LOSS: it is no such file.
using Checksums = std::unordered_map<std::string, uint32_t>;
absl::StatusOr<Checksums> ReadChecksums(const std::string& path);

// Compares every record of a TorchScript file, a ZIP archive, with its checksum. torch's reader
// does not: it would load a flipped bit as a weight. `reader` has `path` open. DATA_LOSS names the
// damaged record. Throws what the reader throws.
absl::Status VerifyChecksums(caffe2::serialize::PyTorchStreamReader& reader,
                             const std::string& path);

}  // namespace epikv
