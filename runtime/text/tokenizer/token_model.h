#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/pre_tokenizer.h"

namespace epikv {

using Vocabulary = absl::flat_hash_map<std::string, int32_t>;  // ids are distinct

// The part `model` of a tokenizer: what pieces of text are in token ids. Immutable, any thread.
class TokenModel {
 public:
  virtual ~TokenModel() = default;

  // `json`: WordLevel, BPE or Unigram. `byte_level`: pieces are to be read in the byte alphabet,
  // which only BPE knows.
  static absl::StatusOr<std::unique_ptr<TokenModel>> FromJson(const Json& json, bool byte_level);

  // Of all pieces, in order. Precondition: they are UTF-8. INVALID_ARGUMENT for text that the
  // vocabulary has no tokens for, not even an unknown one.
  absl::StatusOr<std::vector<int32_t>> Encode(const Pieces& pieces) const;

  const Vocabulary& vocabulary() const { return vocabulary_; }

 protected:
  explicit TokenModel(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}

  // Appends the ids of one piece, which is not empty.
  virtual absl::Status AppendIds(absl::string_view piece, std::vector<int32_t>& ids) const = 0;

  const Vocabulary vocabulary_;
};

// The id of the token "<0x41>" that stands for a byte, by byte; -1 where the vocabulary has none.
std::vector<int32_t> ByteFallbackTokens(const Vocabulary& vocabulary);

// For an error message: at most the first 64 bytes of text, whole characters.
std::string Shown(absl::string_view text);

}  // namespace epikv
