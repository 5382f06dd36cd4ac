#include "runtime/text/tokenizer/token_model.h"

#include <optional>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/text/tokenizer/bpe.h"
#include "runtime/text/tokenizer/unigram.h"

namespace epikv {
namespace {

constexpr size_t kLongestKnown = 64;  // bytes of a piece whose ids are looked up

// One token a piece.
class WordLevel final : public TokenModel {
 public:
  WordLevel(Vocabulary vocabulary, std::optional<int32_t> unknown)
      : TokenModel(std::move(vocabulary)), unknown_(unknown) {}

 private:
  absl::Status AppendIds(absl::string_view piece, std::vector<int32_t>& ids) const override {
    const auto found = vocabulary_.find(piece);
    if (found == vocabulary_.end() && !unknown_.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the word '", Shown(piece), "' is not in the model's vocabulary"));
    }
    ids.push_back(found == vocabulary_.end() ? *unknown_ : found->second);
    return absl::OkStatus();
  }

  const std::optional<int32_t> unknown_;  // what an unknown word becomes; absent: an error
};

absl::StatusOr<Vocabulary> VocabularyFromJson(const Json& json) {
  if (!json.is_object()) return Malformed("model.vocab", "must be an object");
  Vocabulary vocabulary;
  absl::flat_hash_set<int32_t> ids;
  vocabulary.reserve(json.size());
  ids.reserve(json.size());
  for (const auto& [token, value] : json.items()) {
    const std::string path = absl::StrCat("model.vocab['", token, "']");
    const absl::StatusOr<int32_t> id = TokenId(value, path);
    if (!id.ok()) return id.status();
    if (!ids.insert(*id).second) return Malformed(path, "repeats the id of another token");
    vocabulary.emplace(token, *id);
  }
  return vocabulary;
}

absl::StatusOr<std::unique_ptr<TokenModel>> WordLevelFromJson(const Json& json, bool byte_level) {
  const absl::Status status = CheckFields(json, "model", {"type", "vocab", "unk_token"});
  if (!status.ok()) return status;
  if (byte_level) {
    return Unsupported("model.type", "WordLevel with a ByteLevel pre_tokenizer is not supported");
  }
  absl::StatusOr<Vocabulary> vocabulary = VocabularyFromJson(Field(json, "vocab"));
  if (!vocabulary.ok()) return vocabulary.status();
  const absl::StatusOr<std::string> unknown = StringField(json, "model", "unk_token");
  if (!unknown.ok()) return unknown.status();
  std::optional<int32_t> unknown_id;
  const auto found = vocabulary->find(*unknown);
  if (found != vocabulary->end()) unknown_id = found->second;
  return std::make_unique<WordLevel>(*std::move(vocabulary), unknown_id);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenModel>> TokenModel::FromJson(const Json& json,
                                                                 bool byte_level) {
  if (!json.is_object()) return Malformed("model", "must be an object");
  // Old files leave the type of a BPE out.
  const bool old_bpe = !json.contains("type") && json.contains("merges");
  const absl::StatusOr<std::string> type =
      old_bpe ? std::string("BPE") : StringField(json, "model", "type");
  if (!type.ok()) return type.status();
  if (*type == "WordLevel") return WordLevelFromJson(json, byte_level);
  if (*type == "Unigram") return Unigram::FromJson(json, byte_level);
  if (*type != "BPE") {
    return Unsupported("model.type",
                       absl::StrCat("is '", *type, "'; supported: BPE, Unigram, WordLevel"));
  }
  absl::StatusOr<Vocabulary> vocabulary = VocabularyFromJson(Field(json, "vocab"));
  if (!vocabulary.ok()) return vocabulary.status();
  return Bpe::FromJson(json, *std::move(vocabulary), byte_level);
}

absl::StatusOr<std::vector<int32_t>> TokenModel::Encode(const Pieces& pieces) const {
  struct Span {
    size_t begin, end;
  };
  // Where the ids of a piece are that came before: words repeat.
  absl::flat_hash_map<absl::string_view, Span> known;
  std::vector<int32_t> ids;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const absl::string_view piece = pieces[i];
    const size_t begin = ids.size();
    if (piece.size() > kLongestKnown || pieces.size() == 1) {
      const absl::Status status = AppendIds(piece, ids);
      if (!status.ok()) return status;
      continue;
    }
    const auto [entry, is_new] = known.try_emplace(piece, Span{begin, begin});
    if (!is_new) {
      const Span span = entry->second;
      for (size_t k = span.begin; k < span.end; ++k) ids.push_back(ids[k]);
      continue;
    }
    const absl::Status status = AppendIds(piece, ids);
    if (!status.ok()) return status;
    entry->second.end = ids.size();
  }
  return ids;
}

std::vector<int32_t> ByteFallbackTokens(const Vocabulary& vocabulary) {
  std::vector<int32_t> tokens(256, -1);
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = vocabulary.find(absl::StrFormat("<0x%02X>", byte));
    if (found != vocabulary.end()) tokens[byte] = found->second;
  }
  return tokens;
}

std::string Shown(absl::string_view text) {
  constexpr size_t kMost = 64;
  if (text.size() <= kMost) return std::string(text);
  size_t size = kMost;
  while (size > 0 && (text[size] & 0xC0) == 0x80) --size;
  return absl::StrCat(text.substr(0, size), "...");
}

}  // namespace epikv
