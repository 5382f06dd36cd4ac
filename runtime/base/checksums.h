#pragma once

#include <string>

#include "absl/status/status.h"

namespace caffe2::serialize {
class PyTorchStreamReader;
}

namespace epikv {

// Compares every record of a TorchScript file, a ZIP archive, with its checksum. torch's reader
// does not: it would load a flipped bit as a weight. `reader` has `path` open. DATA_LOSS names the
// damaged record. Throws what the reader throws.
absl::Status VerifyChecksums(caffe2::serialize::PyTorchStreamReader& reader,
                             const std::string& path);

}  // namespace epikv
