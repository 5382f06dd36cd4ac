#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace epikv {

// An array as a file has it, in fp32: row-major.
struct NamedArray {
  std::vector<int64_t> shape;
  std::vector<float> values;
};
using NamedArrays = std::map<std::string, NamedArray, std::less<>>;

struct Safetensors {
  NamedArrays arrays;
  std::map<std::string, std::string, std::less<>> metadata;
};

// Reads a safetensors file (github.com/huggingface/safetensors, "Format"): 8 bytes of length, a
// header in JSON, arrays one after another. Takes F32, F16 and BF16. INVALID_ARGUMENT says what is
// wrong, and of which array: bytes are missing, left over or claimed twice, so is a name, a type is
// another, a number is not finite.
absl::StatusOr<Safetensors> ReadSafetensors(absl::string_view bytes);

}  // namespace epikv
