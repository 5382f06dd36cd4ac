#include "runtime/text/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "runtime/text/tokenizer/characters.h"

namespace epikv {
namespace {

absl::StatusOr<AddedToken> AddedTokenFromJson(const Json& json, const std::string& path,
                                              const Normalizer& normalizer) {
  const absl::Status status = CheckFields(
      json, path, {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  if (!status.ok()) return status;
  AddedToken token;
  const absl::StatusOr<int32_t> id = IdField(json, path, "id");
  if (!id.ok()) return id.status();
  token.id = *id;
  absl::StatusOr<std::string> content = StringField(json, path, "content");
  if (!content.ok()) return content.status();
  if (content->empty()) return Malformed(absl::StrCat(path, ".content"), "must not be empty");
  token.content = *std::move(content);
  const std::pair<const char*, bool AddedToken::*> flags[] = {
      {"single_word", &AddedToken::single_word}, {"lstrip", &AddedToken::lstrip},
      {"rstrip", &AddedToken::rstrip},           {"normalized", &AddedToken::normalized},
      {"special", &AddedToken::special},
  };
  for (const auto& [name, flag] : flags) {
    const absl::StatusOr<bool> value = BoolField(json, path, name, std::nullopt);
    if (!value.ok()) return value.status();
    token.*flag = *value;
  }
  token.text = token.content;
  if (!token.normalized) return token;
  absl::StatusOr<std::string> text = normalizer.Normalize(token.content);
  if (!text.ok()) return text.status();
  if (text->empty()) return Malformed(absl::StrCat(path, ".content"), "is normalized to nothing");
  token.text = *std::move(text);
  return token;
}

std::vector<Trie::Entry> TextsOf(const std::vector<AddedToken>& tokens) {
  std::vector<Trie::Entry> entries;
  for (size_t i = 0; i < tokens.size(); ++i) {
    entries.push_back({tokens[i].text, static_cast<int32_t>(i)});
  }
  return entries;
}

}  // namespace

absl::StatusOr<std::vector<AddedToken>> AddedTokensFromJson(const Json& json,
                                                            const Normalizer& normalizer) {
  std::vector<AddedToken> tokens;
  if (json.is_null()) return tokens;
  if (!json.is_array()) return Malformed("added_tokens", "must be a list");
  absl::flat_hash_set<std::string> contents, normalized_texts;
  absl::flat_hash_set<int32_t> ids;
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("added_tokens[", i, "]");
    absl::StatusOr<AddedToken> token = AddedTokenFromJson(json[i], path, normalizer);
    if (!token.ok()) return token.status();
    if (!contents.insert(token->content).second || !ids.insert(token->id).second) {
      return Malformed(path, "repeats the content or the id of another added token");
    }
    if (token->normalized && !normalized_texts.insert(token->text).second) {
      return Malformed(path, "is the same as another added token after normalization");
    }
    tokens.push_back(*std::move(token));
  }
  return tokens;
}

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), texts_(TextsOf(tokens_)) {}

bool Overlaps(absl::Span<const TextRange> ranges, size_t begin, size_t end) {
  const auto* const next = std::partition_point(
      ranges.begin(), ranges.end(), [begin](const TextRange& range) { return range.end <= begin; });
  return next != ranges.end() && next->begin < end && next->begin < next->end;
}

std::vector<AddedTokenFinder::Segment> AddedTokenFinder::Split(
    absl::string_view text, absl::Span<const TextRange> plain) const {
  std::vector<Segment> segments;
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const std::optional<Found> found = TokenAt(text, at, plain);
    if (!found.has_value()) {
      ++at;
      continue;
    }
    const AddedToken* token = found->token;
    size_t begin = at;
    size_t end = at + found->size;
    at = end;  // the search goes on behind the token itself, whatever it strips
    if (token->single_word &&
        (EndsWithWord(text.substr(0, begin)) || BeginsWithWord(text.substr(end)))) {
      continue;
    }
    if (token->lstrip) begin = std::max(begin - TrailingSpace(text.substr(0, begin)), done);
    if (token->rstrip) end += LeadingSpace(text.substr(end));
    if (begin > done) segments.push_back({text.substr(done, begin - done), std::nullopt});
    segments.push_back({text.substr(begin, end - begin), token->id});
    done = end;
  }
  if (done < text.size()) segments.push_back({text.substr(done), std::nullopt});
  return segments;
}

std::optional<AddedTokenFinder::Found> AddedTokenFinder::TokenAt(
    absl::string_view text, size_t at, absl::Span<const TextRange> plain) const {
  std::optional<Found> longest;
  texts_.ForEachPrefix(text.substr(at), [&](size_t size, int32_t index) {
    if (tokens_[index].special && Overlaps(plain, at, at + size)) return;
    longest = Found{&tokens_[index], size};
  });
  return longest;
}

}  // namespace epikv
