#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/normalizer.h"
#include "runtime/text/tokenizer/trie.h"

namespace epikv {

// A token that is found in the text as it stands, before the model sees the rest.
struct AddedToken {
  int32_t id = 0;
  std::string content;       // not empty; its name
  std::string text;          // not empty; what is searched for, and what it is in decoded text
  bool single_word = false;  // only where no word character is next to it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // searched in the normalized text, after the others
  bool special = false;      // left out of decoded text on request
};

// The part `added_tokens` of a tokenizer: null or a list; contents and ids are distinct, and the
// texts of those that are normalized.
absl::StatusOr<std::vector<AddedToken>> AddedTokensFromJson(const Json& json,
                                                            const Normalizer& normalizer);

// Whether one of the ranges, which are in order, has bytes in [begin, end).
bool Overlaps(absl::Span<const TextRange> ranges, size_t begin, size_t end);

// Finds added tokens in text: the one that begins first, and there the longest. Immutable, any
// thread.
class AddedTokenFinder {
 public:
  struct Segment {
    absl::string_view text;
    std::optional<int32_t> token;  // present: the text is this token
  };

  // Precondition: the tokens' texts are distinct.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // All of `text` in segments, which point into it. No special token has bytes in the ranges
  // `plain`, which are in order. Precondition: `text` is UTF-8.
  std::vector<Segment> Split(absl::string_view text, absl::Span<const TextRange> plain = {}) const;

 private:
  struct Found {
    const AddedToken* token;
    size_t size;  // bytes
  };

  // The longest token that begins at this byte.
  std::optional<Found> TokenAt(absl::string_view text, size_t at,
                               absl::Span<const TextRange> plain) const;

  std::vector<AddedToken> tokens_;
  Trie texts_;  // values: indexes into tokens_
};

}  // namespace epikv
