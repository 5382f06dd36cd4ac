#include "runtime/tokenizer/token_model.h"

#include <optional>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "runtime/tokenizer/bpe.h"

namespace epikv {
namespace {

// For an error message: at most the first 64 bytes of a word, whole characters.
std::string Shown(absl::string_view word) {
  constexpr size_t kMost = 64;
  if (word.size() <= kMost) return std::string(word);
  size_t size = kMost;
  while (size > 0 && (word[size] & 0xC0) == 0x80) --size;
  return absl::StrCat(word.substr(0, size), "...");
}

// One token a piece.
class WordLevel final : public TokenModel {
 public:
  WordLevel(Vocabulary vocabulary, std::optional<int32_t> unknown)
      : vocabulary_(std::move(vocabulary)), unknown_(unknown) {}

  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view piece) const override {
    const auto found = vocabulary_.find(piece);
    if (found != vocabulary_.end()) return std::vector<int32_t>{found->second};
    if (unknown_.has_value()) return std::vector<int32_t>{*unknown_};
    return absl::InvalidArgumentError(
        absl::StrCat("the word '", Shown(piece), "' is not in the model's vocabulary"));
  }

  const Vocabulary& vocabulary() const override { return vocabulary_; }

 private:
  const Vocabulary vocabulary_;
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
  if (byte_level) return Unsupported("model.type", "is WordLevel behind a ByteLevel pre_tokenizer");
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
  if (*type != "BPE") {
    return Unsupported("model.type", absl::StrCat("is '", *type, "'; supported: BPE, WordLevel"));
  }
  if (!byte_level) {
    return Unsupported("model.type", "is BPE without a ByteLevel pre_tokenizer");
  }
  absl::StatusOr<Vocabulary> vocabulary = VocabularyFromJson(Field(json, "vocab"));
  if (!vocabulary.ok()) return vocabulary.status();
  return Bpe::FromJson(json, *std::move(vocabulary));
}

}  // namespace epikv
