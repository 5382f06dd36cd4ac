#pragma once

#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

namespace caffe2::serialize {
class PyTorchStreamReader;
}

namespace epikv {

// A module, or why it is none of ours.
struct ReadModule {
  torch::jit::Module module;
  std::vector<std::string> violations;  // empty: `module` is there
};

// Reads the module of a TorchScript archive, compiles its code and runs none of it:
// torch::jit::load would run __setstate__, and the expressions behind default arguments and
// constants. Refuses these, operators that are not allowed (allowed_operators.h), methods that
// `forward` does not reach, objects of other classes than the archive's own, and code that is
// nested too deep to be compiled. Throws what LibTorch throws where the archive is damaged or does
// not compile. map_from: the archive's file, whose weights are mapped instead of read: they are no
// memory of the process's own, and have to be copied before the file may change. Empty: they are
// read.
ReadModule ReadModuleWithoutRunning(caffe2::serialize::PyTorchStreamReader& archive,
                                    const std::string& map_from = "");

// Whether the tensor lies in a mapped file. Its storage is as long as its record.
bool IsMapped(const at::Tensor& tensor);

}  // namespace epikv
