// An artefact and the arrays beside it: all of both is well, or the error says what is not. An
// input is the JSON, a NUL, and the safetensors file that it may name.

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>

#include "policies/artefact.h"
#include "policies/safetensors.h"
#include "policies/spec.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

constexpr absl::string_view kWeights = "sha256:00";

void RequireTold(const absl::Status& status) {
  Require(!status.message().empty(), "an error says what is wrong");
  Require(!FirstInvalidUtf8(status.message()).has_value(), "and can be told to operators");
}

void CheckArrays(const NamedArrays& arrays) {
  for (const auto& [name, array] : arrays) {
    int64_t count = 1;
    for (const int64_t size : array.shape) {
      Require(size >= 0, "sizes");
      count *= size;
    }
    Require(count == std::ssize(array.values), "a number for each place", name);
    for (const float value : array.values)
      Require(std::isfinite(value), "numbers are finite", name);
  }
}

class Nothing final : public PolicyData {};

// One of a policy that takes a parameter and reads whatever there is.
constexpr ParamSpec kParams[] = {
    {.name = "depth", .type = ParamType::kInt, .min = 1, .max = 64},
    {.name = "weights", .type = ParamType::kIntList, .min = -8, .max = 8}};
const PolicySpec kReader{
    .name = "reader",
    .params = kParams,
    .read_data = [](const ArtefactData& data,
                    const ModelShape&) -> absl::StatusOr<std::shared_ptr<const PolicyData>> {
      CheckArrays(data.arrays);
      return std::make_shared<Nothing>();
    },
    .calibrated = true};

void CheckArtefact(absl::string_view text, absl::string_view arrays) {
  const absl::StatusOr<Safetensors> read = ReadSafetensors(arrays);
  if (read.ok()) {
    CheckArrays(read->arrays);
  } else {
    RequireTold(read.status());
  }
  static const PolicySpec* const kCatalog[] = {&kReader};
  ModelShape shape{.num_layers = 4, .num_heads = 4, .num_kv_heads = 2};
  const auto beside = [&](const std::string& name) -> absl::StatusOr<std::string> {
    Require(!name.empty() && name.find('/') == std::string::npos, "a file beside it", name);
    return std::string(arrays);
  };
  const absl::Status status = AddArtefact(text, kCatalog, kWeights, beside, shape);
  if (!status.ok()) {
    RequireTold(status);
    return;
  }
  Require(shape.artefacts.contains("reader"), "it is known");
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find('\0');
  if (end == input.npos) {
    epikv::CheckArtefact(input, "");
  } else {
    epikv::CheckArtefact(input.substr(0, end), input.substr(end + 1));
  }
  return 0;
}
