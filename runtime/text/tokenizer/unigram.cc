#include "runtime/text/tokenizer/unigram.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"

namespace epikv {
namespace {

constexpr double kUnknownPenalty = 10;  // below the worst token; SentencePiece's

// The best way to cut a piece up to some byte of it.
struct Path {
  double score = 0;
  int32_t token = -1;  // its last; negative: no way ends here
  size_t begin = 0;    // of that token
};

size_t CharacterSize(absl::string_view text) {
  size_t size = 1;
  while (size < text.size() && (text[size] & 0xC0) == 0x80) ++size;
  return size;
}

// A number as `tokenizers` reads it: digits and a power of ten as two doubles. It is the nearest to
// what is written, or next to that; which of two ways wins, whose sums are all but equal, depends
// on it. Files have the fewest digits that tell a double.
double AsRead(double nearest) {
  std::array<char, 32> text;  // d.ddde-dd
  const auto written =
      std::to_chars(text.begin(), text.end(), std::abs(nearest), std::chars_format::scientific);
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(
      absl::string_view(text.data(), static_cast<size_t>(written.ptr - text.data())), 'e');
  const std::string digits = absl::StrReplaceAll(parts.first, {{".", ""}});
  uint64_t significand = 0;
  int exponent = 0;
  double power = 0;
  if (!absl::SimpleAtoi(digits, &significand) || !absl::SimpleAtoi(parts.second, &exponent)) {
    return nearest;
  }
  exponent -= static_cast<int>(digits.size()) - 1;
  if (!absl::SimpleAtod(absl::StrCat("1e", std::abs(exponent)), &power) || std::isinf(power)) {
    return nearest;
  }
  const auto whole = static_cast<double>(significand);
  return std::copysign(exponent < 0 ? whole / power : whole * power, nearest);
}

Trie TrieOf(const Vocabulary& vocabulary) {
  std::vector<Trie::Entry> entries;
  for (const auto& [token, id] : vocabulary) {
    if (!token.empty()) entries.push_back({token, id});
  }
  return Trie(std::move(entries));
}

double Lowest(const std::vector<double>& scores) {
  return scores.empty() ? 0 : *std::min_element(scores.begin(), scores.end());
}

}  // namespace

Unigram::Unigram(Entries entries, std::optional<int32_t> unknown, bool byte_fallback)
    : TokenModel(std::move(entries.ids)),
      scores_(std::move(entries.scores)),
      trie_(TrieOf(vocabulary_)),
      unknown_(unknown),
      unknown_score_(Lowest(scores_) - kUnknownPenalty),
      fallback_(byte_fallback ? ByteFallbackTokens(vocabulary_) : std::vector<int32_t>()) {}

absl::StatusOr<Unigram::Entries> Unigram::EntriesFromJson(const Json& json) {
  if (!json.is_array()) return Malformed("model.vocab", "must be a list");
  Entries result;
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("model.vocab[", i, "]");
    const Json& pair = json[i];
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_string() || !pair[1].is_number()) {
      return Malformed(path, "must be a token and its score");
    }
    const absl::StatusOr<int32_t> id = TokenId(i, path);
    if (!id.ok()) return id.status();
    if (!result.ids.emplace(pair[0].get<std::string>(), *id).second) {
      return Malformed(path, "repeats another token");
    }
    result.scores.push_back(AsRead(pair[1].get<double>()));
  }
  return result;
}

absl::StatusOr<std::unique_ptr<TokenModel>> Unigram::FromJson(const Json& json, bool byte_level) {
  const absl::Status status =
      CheckFields(json, "model", {"type", "vocab", "unk_id", "byte_fallback"});
  if (!status.ok()) return status;
  if (byte_level) {
    return Unsupported("model.type", "Unigram with a ByteLevel pre_tokenizer is not supported");
  }
  absl::StatusOr<Entries> entries = EntriesFromJson(Field(json, "vocab"));
  if (!entries.ok()) return entries.status();
  const absl::StatusOr<bool> fallback = BoolField(json, "model", "byte_fallback", false);
  if (!fallback.ok()) return fallback.status();
  std::optional<int32_t> unknown;
  if (!Field(json, "unk_id").is_null()) {
    const absl::StatusOr<int32_t> id = IdField(json, "model", "unk_id");
    if (!id.ok()) return id.status();
    if (static_cast<size_t>(*id) >= entries->scores.size()) {
      return Malformed("model.unk_id", "is outside the vocabulary");
    }
    unknown = *id;
  }
  return std::unique_ptr<TokenModel>(new Unigram(*std::move(entries), unknown, *fallback));
}

absl::Status Unigram::AppendIds(absl::string_view piece, std::vector<int32_t>& ids) const {
  std::vector<Path> best(piece.size() + 1);
  for (size_t at = 0; at < piece.size();) {
    const double score = best[at].score;
    const absl::string_view rest = piece.substr(at);
    const size_t character = CharacterSize(rest);
    // Of equal ways the first one found stays.
    const auto offer = [&](size_t length, int32_t token, double token_score) {
      Path& path = best[at + length];
      const double sum = token_score + score;
      if (path.token < 0 || sum > path.score) path = {sum, token, at};
    };
    bool character_known = false;
    trie_.ForEachPrefix(rest, [&](size_t length, int32_t token) {
      offer(length, token, scores_[token]);
      character_known |= length == character;
    });
    if (!character_known) {
      if (!unknown_.has_value()) {
        return absl::InvalidArgumentError(absl::StrCat("the character '", rest.substr(0, character),
                                                       "' is not in the model's vocabulary"));
      }
      offer(character, *unknown_, unknown_score_);
    }
    at += character;
  }

  struct Span {
    size_t begin, end;
    int32_t token;
  };
  std::vector<Span> spans;  // from the last
  for (size_t end = piece.size(); end > 0; end = best[end].begin) {
    const Path& path = best[end];
    if (!spans.empty() && path.token == unknown_ && spans.back().token == unknown_) {
      spans.back().begin = path.begin;
    } else {
      spans.push_back({path.begin, end, path.token});
    }
  }
  for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
    if (span->token == unknown_) {
      AppendUnknown(piece.substr(span->begin, span->end - span->begin), ids);
    } else {
      ids.push_back(span->token);
    }
  }
  return absl::OkStatus();
}

void Unigram::AppendUnknown(absl::string_view text, std::vector<int32_t>& ids) const {
  if (vocabulary_.contains(text)) {  // the unknown token itself, spelt out
    ids.push_back(*unknown_);
    return;
  }
  const auto fallback = [this](char byte) { return fallback_[static_cast<uint8_t>(byte)]; };
  if (!fallback_.empty() &&
      std::all_of(text.begin(), text.end(), [&](char byte) { return fallback(byte) >= 0; })) {
    for (char byte : text) ids.push_back(fallback(byte));
  } else {
    ids.push_back(*unknown_);
  }
}

}  // namespace epikv
