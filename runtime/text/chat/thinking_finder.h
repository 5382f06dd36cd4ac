#pragma once

#include <cstdint>
#include <optional>

#include "policies/protection.h"
#include "runtime/text/chat/answer_reader.h"
#include "runtime/text/tokenizer.h"

namespace epikv {

// Finds the thinking among an answer's tokens, as they come. Not thread-safe: owned by the
// request's sequence.
class ThinkingFinder {
 public:
  // `tokenizer` outlives it. first: index of the answer's first token. begun: it begins within
  // thinking.
  ThinkingFinder(const Tokenizer& tokenizer, const ThinkingTags& tags, bool begun, int64_t first);

  void Append(int32_t token);

  // From the token behind the one that completes the first tag, to the one that completes the last;
  // absent: there is none so far.
  struct Found {
    TokenSpan span;
    bool ended = false;  // if not, it goes on
  };
  const std::optional<Found>& found() const { return found_; }
  // Of the answer so far, those that are thinking.
  int64_t num_tokens() const {
    return found_.has_value() ? found_->span.end - found_->span.begin : 0;
  }

 private:
  Detokenizer detokenizer_;
  AnswerReader reader_;
  int64_t next_;  // index of the next token
  std::optional<Found> found_;
};

}  // namespace epikv
