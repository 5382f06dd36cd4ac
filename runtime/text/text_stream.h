#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "runtime/text/tokenizer.h"

namespace epikv {

struct TextStreamOptions {
  std::vector<std::string> stop_strings;  // UTF-8, none empty
  std::vector<int32_t> stop_token_ids;
  bool include_stop = false;        // leave the match in the text
  bool skip_special = true;         // leave special tokens out of the text
  std::vector<int32_t> shown = {};  // but for these
  int64_t min_tokens = 0;  // stop strings that end in the first this many tokens do not count
};

struct StopString {
  size_t index;  // into stop_strings; of equal strings the first
  bool operator==(const StopString&) const = default;
};
struct StopToken {
  int32_t id;
  bool operator==(const StopToken&) const = default;
};
using StopMatch = std::variant<StopString, StopToken>;

// One request's output text, token by token. What it emits, concatenated, is what Decode gives for
// all the tokens, cut at the stop; each piece is whole code points. Not thread-safe: owned by the
// request's sequence.
//
// A stop string counts as soon as its last byte is there: of several the one that ends first, and
// of those the longest. So where the text stops does not depend on how it was cut into tokens, and
// no token is generated beyond the stop. Text that may be the beginning of a stop string is held
// back. A stop token ends the text before itself; it goes before stop strings that it completes.
class TextStream {
 public:
  struct Piece {
    std::string text;
    std::optional<StopMatch> stop;  // present: the text is complete and nothing follows
  };

  // `tokenizer` outlives the stream.
  TextStream(const Tokenizer& tokenizer, TextStreamOptions options);

  Piece Append(int32_t token);

  // What was held back, when generation ends for another reason than a stop.
  Piece Flush();

 private:
  // A stop string, and how much of it the text so far ends with (Knuth, Morris and Pratt).
  class Matcher {
   public:
    explicit Matcher(std::string pattern);
    void Advance(char byte);                           // precondition: not complete
    void Dismiss() { matched_ = borders_[matched_]; }  // a complete match; another may have begun
    bool complete() const { return matched_ == pattern_.size(); }
    size_t matched() const { return matched_; }

   private:
    std::string pattern_;
    // borders_[n]: length of the longest proper prefix of the first n bytes that also ends them.
    std::vector<size_t> borders_;
    size_t matched_ = 0;
  };

  Piece EndAtToken(int32_t token);
  // Searches new text for stop strings; emits what cannot be part of one.
  Piece Search(const std::string& text);
  // The longest stop string that ends here.
  std::optional<size_t> CompleteMatch() const;

  const TextStreamOptions options_;
  std::vector<Matcher> matchers_;  // [stop_strings]
  Detokenizer detokenizer_;
  std::string held_;        // text not yet emitted
  int64_t num_tokens_ = 0;  // appended
  bool ended_ = false;
};

}  // namespace epikv
