#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/tokenizer/json_fields.h"
#include "runtime/tokenizer/token_model.h"

namespace epikv {

// Byte-level byte pair encoding: a piece starts as its bytes, and the pair of neighbours whose
// merge has the lowest rank is merged, the leftmost first, until no pair has one.
class Bpe final : public TokenModel {
 public:
  static absl::StatusOr<std::unique_ptr<TokenModel>> FromJson(const Json& json,
                                                              Vocabulary vocabulary);

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view piece) const override;
  const Vocabulary& vocabulary() const override { return vocabulary_; }

 private:
  using Pair = std::pair<int32_t, int32_t>;
  struct Merge {
    int32_t rank;    // lower goes first
    int32_t result;  // the token the pair becomes
  };

  explicit Bpe(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  absl::Status ReadByteTokens();
  absl::Status ReadMerges(const Json& json);
  absl::Status AddMerge(const std::string& left, const std::string& right, int32_t rank,
                        const std::string& path);
  std::vector<int32_t> MergeAll(const std::vector<int32_t>& tokens) const;

  const Vocabulary vocabulary_;
  std::array<int32_t, 256> byte_tokens_{};  // of the bytes that occur in UTF-8
  absl::flat_hash_map<Pair, Merge> merges_;
  bool ignore_merges_ = false;  // a piece that is a token is that token, whatever merges would give
};

}  // namespace epikv
