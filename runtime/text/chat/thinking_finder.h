#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "policies/protection.h"
#include "runtime/text/chat/answer_reader.h"
#include "runtime/text/tokenizer.h"

namespace epikv {

// Finds the thinking among an answer's tokens, as they come. Not thread-safe: owned by the
// request's sequence.
class ThinkingFinder {
 public:
  // `tokenizer` outlives it. markup: special tokens that are a part of the answer, as text, as its
  // reader takes them. begun: it begins within thinking. first: index of its first token.
  ThinkingFinder(const Tokenizer& tokenizer, const ThinkingTags& tags,
                 const std::vector<int32_t>& markup, bool begun, int64_t first);

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
