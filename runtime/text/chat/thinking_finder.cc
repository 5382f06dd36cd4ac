#include "runtime/text/chat/thinking_finder.h"

namespace epikv {

ThinkingFinder::ThinkingFinder(const Tokenizer& tokenizer, const ThinkingTags& tags,
                               const std::vector<int32_t>& markup, bool begun, int64_t first)
    : detokenizer_(tokenizer, {.shown = markup}),
      reader_({.thinking = tags, .thinks = begun}),
      next_(first) {
  if (begun) found_ = Found{.span = {first, first}};
}

void ThinkingFinder::Append(int32_t token) {
  const int64_t index = next_++;
  if (!reader_.may_think()) return;
  reader_.Append(detokenizer_.Append(token));
  if (reader_.thinks()) {
    if (!found_.has_value()) found_ = Found{.span = {next_, next_}};
    found_->span.end = next_;
  } else if (found_.has_value()) {
    found_->span.end = index;
    found_->ended = true;
  }
}

}  // namespace epikv
