#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/token_model.h"
#include "runtime/text/tokenizer/trie.h"

namespace epikv {

// Unigram language model (SentencePiece): of all ways to cut a piece into tokens the one whose
// scores have the largest sum (Viterbi). A character that is no token costs more than any token;
// neighbouring ones become the tokens of their bytes (`byte_fallback`), else one unknown token.
class Unigram final : public TokenModel {
 public:
  static absl::StatusOr<std::unique_ptr<TokenModel>> FromJson(const Json& json, bool byte_level);

 private:
  struct Entries {
    Vocabulary ids;
    std::vector<double> scores;  // [id], log-probabilities
  };

  Unigram(Entries entries, std::optional<int32_t> unknown, bool byte_fallback);
  static absl::StatusOr<Entries> EntriesFromJson(const Json& json);

  absl::Status AppendIds(absl::string_view piece, std::vector<int32_t>& ids) const override;
  // Of neighbouring unknown characters.
  void AppendUnknown(absl::string_view text, std::vector<int32_t>& ids) const;

  const std::vector<double> scores_;  // [id]
  const Trie trie_;                   // the vocabulary
  const std::optional<int32_t> unknown_;
  const double unknown_score_;
  const std::vector<int32_t> fallback_;  // [256]; empty: no byte_fallback
};

}  // namespace epikv
