#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/merges.h"
#include "runtime/text/tokenizer/token_model.h"

namespace epikv {

// Byte pair encoding: a piece starts as its bytes or its characters, and the pair of neighbours
// whose merge has the lowest rank is merged, the leftmost first, until no pair has one. A character
// without a token becomes the tokens of its bytes (`byte_fallback`), else the unknown token, else
// nothing.
class Bpe final : public TokenModel {
 public:
  // `byte_level`: pieces start as their bytes, for which there are tokens in the byte alphabet.
  static absl::StatusOr<std::unique_ptr<TokenModel>> FromJson(const Json& json,
                                                              Vocabulary vocabulary,
                                                              bool byte_level);

 private:
  Bpe(Vocabulary vocabulary, bool byte_level)
      : TokenModel(std::move(vocabulary)), byte_level_(byte_level) {}
  absl::Status ReadOptions(const Json& json);
  absl::Status ReadByteTokens();
  absl::Status ReadMerges(const Json& json);
  absl::Status AddMerge(const std::string& left, const std::string& right, int32_t rank,
                        const std::string& path, Merges::Table& table) const;

  // All tokens that a piece may start as; negative ones mean nothing.
  std::vector<int32_t> InitialTokens() const;
  absl::Status AppendIds(absl::string_view piece, std::vector<int32_t>& ids) const override;
  std::optional<int32_t> WholePiece(absl::string_view piece) const;
  // The tokens that a piece of characters starts as.
  absl::StatusOr<std::vector<int32_t>> CharacterTokens(absl::string_view piece) const;
  std::optional<int32_t> CharacterToken(absl::string_view character) const;

  const bool byte_level_;
  // byte_level: of the bytes that occur in UTF-8; else of ASCII's characters, -1: none.
  std::array<int32_t, 256> byte_tokens_{};
  Merges merges_;
  bool ignore_merges_ = false;  // a piece that is a token is that token, whatever merges would give
  bool fuse_unknown_ = false;   // neighbouring unknown characters are one unknown token
  std::vector<int32_t> fallback_;         // [256]; empty: no byte_fallback
  std::optional<std::string> unk_token_;  // absent: unknown characters are left out
  std::optional<int32_t> unknown_;        // its id, if the vocabulary has it
};

}  // namespace epikv
