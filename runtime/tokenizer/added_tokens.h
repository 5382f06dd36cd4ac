#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/tokenizer/json_fields.h"

namespace epikv {

// A token that is found in the text as it stands, before the model sees the rest.
struct AddedToken {
  int32_t id = 0;
  std::string content;       // not empty
  bool single_word = false;  // only where no word character is next to it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // searched in the normalized text, after the others
  bool special = false;      // left out of decoded text on request
};

// The part `added_tokens` of a tokenizer: null or a list; contents and ids are distinct.
absl::StatusOr<std::vector<AddedToken>> AddedTokensFromJson(const Json& json);

// Finds added tokens in text: the one that begins first, and there the longest. Immutable, any
// thread.
class AddedTokenFinder {
 public:
  struct Segment {
    absl::string_view text;
    std::optional<int32_t> token;  // present: the text is this token
  };

  // Precondition: the contents are distinct.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // All of `text` in segments, which point into it. Precondition: `text` is UTF-8.
  std::vector<Segment> Split(absl::string_view text) const;

 private:
  // The longest token at the beginning of `text`; null if there is none.
  const AddedToken* TokenAt(absl::string_view text) const;

  std::array<std::vector<AddedToken>, 256> tokens_;  // by first byte; longer ones first
};

}  // namespace epikv
