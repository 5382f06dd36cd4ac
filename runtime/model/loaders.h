#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "runtime/model/model.h"

namespace caffe2::serialize {
class PyTorchStreamReader;
}

// The loaders of each kind of model file, of an archive that is not damaged (LoadModelFile).

namespace epikv {

absl::StatusOr<std::unique_ptr<Model>> LoadTorchScript(const std::string& path,
                                                       const ModelOptions& options);

// Whether AOTInductor has compiled the model, which epikv.export.compiled wrote.
bool IsCompiled(caffe2::serialize::PyTorchStreamReader& reader);
// Runs code of the file as it loads, where options.trusts_code; FAILED_PRECONDITION where it does
// not.
absl::StatusOr<std::unique_ptr<Model>> LoadCompiled(const std::string& path,
                                                    const ModelOptions& options);

}  // namespace epikv
