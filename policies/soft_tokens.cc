#include "policies/soft_tokens.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace epikv {
namespace {

constexpr int64_t kMostSoftTokens = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadSoftTokens(const ArtefactData& artefact,
                                                                 const ModelShape& shape) {
  if (!nlohmann::json::parse(artefact.json.begin(), artefact.json.end()).is_object()) {
    return absl::InvalidArgumentError("must be an object");
  }
  auto soft = std::make_shared<SoftTokens>();
  for (const auto& [name, count, rows] :
       {std::tuple("header", &soft->header, &soft->header_rows),
        std::tuple("trailer", &soft->trailer, &soft->trailer_rows)}) {
    const auto found = artefact.arrays.find(name);
    if (found == artefact.arrays.end() || found->second.shape.size() != 2 ||
        found->second.shape[0] < 1 || found->second.shape[0] > kMostSoftTokens ||
        found->second.shape[1] != shape.hidden_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "arrays must hold '", name, "' [1 to ", kMostSoftTokens, ", ", shape.hidden_size, "]"));
    }
    *count = found->second.shape[0];
    *rows = found->second.values;
  }
  return soft;
}

std::shared_ptr<const SoftTokens> SoftTokensOf(const ModelShape& shape) {
  const auto found = shape.artefacts.find(kPacketArtefact);
  if (found == shape.artefacts.end()) return nullptr;
  return std::static_pointer_cast<const SoftTokens>(found->second);
}

}  // namespace epikv
