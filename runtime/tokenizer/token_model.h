#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/tokenizer/json_fields.h"

namespace epikv {

using Vocabulary = absl::flat_hash_map<std::string, int32_t>;  // ids are distinct

// The part `model` of a tokenizer: what a piece of text is in token ids. Immutable, any thread.
class TokenModel {
 public:
  virtual ~TokenModel() = default;

  // `json`: WordLevel or BPE. `byte_level`: pieces are to be read in the byte alphabet, which BPE
  // needs and WordLevel does not know.
  static absl::StatusOr<std::unique_ptr<TokenModel>> FromJson(const Json& json, bool byte_level);

  // Precondition: `piece` is UTF-8 and not empty.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view piece) const = 0;

  virtual const Vocabulary& vocabulary() const = 0;
};

}  // namespace epikv
