#include "runtime/text/text_stream.h"

#include <algorithm>
#include <utility>

namespace epikv {

TextStream::Matcher::Matcher(std::string pattern)
    : pattern_(std::move(pattern)), borders_(pattern_.size() + 1, 0) {
  for (size_t n = 2; n <= pattern_.size(); ++n) {
    size_t border = borders_[n - 1];
    while (border > 0 && pattern_[border] != pattern_[n - 1]) border = borders_[border];
    borders_[n] = pattern_[border] == pattern_[n - 1] ? border + 1 : 0;
  }
}

void TextStream::Matcher::Advance(char byte) {
  while (matched_ > 0 && pattern_[matched_] != byte) matched_ = borders_[matched_];
  if (pattern_[matched_] == byte) ++matched_;
}

TextStream::TextStream(const Tokenizer& tokenizer, TextStreamOptions options)
    : options_(std::move(options)),
      detokenizer_(tokenizer, {.skip_special = options_.skip_special, .shown = options_.shown}) {
  for (const std::string& stop : options_.stop_strings) matchers_.emplace_back(stop);
}

TextStream::Piece TextStream::Append(int32_t token) {
  if (ended_) return {};
  ++num_tokens_;
  const std::vector<int32_t>& stops = options_.stop_token_ids;
  if (std::find(stops.begin(), stops.end(), token) != stops.end()) return EndAtToken(token);
  return Search(detokenizer_.Append(token));
}

TextStream::Piece TextStream::Flush() {
  if (ended_) return {};
  Piece piece = Search(detokenizer_.Flush());
  ended_ = true;
  piece.text += std::exchange(held_, "");
  return piece;
}

TextStream::Piece TextStream::EndAtToken(int32_t token) {
  ended_ = true;
  std::string text = std::exchange(held_, "");
  if (options_.include_stop) text += detokenizer_.Append(token);
  text += detokenizer_.Flush();
  return {std::move(text), StopToken{token}};
}

TextStream::Piece TextStream::Search(const std::string& text) {
  for (char byte : text) {
    held_.push_back(byte);
    for (Matcher& matcher : matchers_) matcher.Advance(byte);
    const std::optional<size_t> match = CompleteMatch();
    if (!match.has_value()) continue;
    if (num_tokens_ <= options_.min_tokens) {
      for (Matcher& matcher : matchers_) {
        if (matcher.complete()) matcher.Dismiss();
      }
      continue;
    }
    ended_ = true;
    if (!options_.include_stop) held_.resize(held_.size() - matchers_[*match].matched());
    return {std::exchange(held_, ""), StopString{*match}};
  }
  size_t keep = 0;
  for (const Matcher& matcher : matchers_) keep = std::max(keep, matcher.matched());
  if (options_.include_stop) keep = 0;  // the match is emitted anyway
  Piece piece{held_.substr(0, held_.size() - keep), std::nullopt};
  held_.erase(0, held_.size() - keep);
  return piece;
}

std::optional<size_t> TextStream::CompleteMatch() const {
  std::optional<size_t> longest;
  for (size_t i = 0; i < matchers_.size(); ++i) {
    if (!matchers_[i].complete()) continue;
    if (!longest.has_value() || matchers_[i].matched() > matchers_[*longest].matched()) longest = i;
  }
  return longest;
}

}  // namespace epikv
