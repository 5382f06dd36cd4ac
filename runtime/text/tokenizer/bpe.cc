#include "runtime/text/tokenizer/bpe.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "runtime/text/tokenizer/byte_alphabet.h"

namespace epikv {
namespace {

bool OccursInUtf8(int byte) { return byte != 0xC0 && byte != 0xC1 && byte < 0xF5; }

// Bytes of the character that a byte begins.
size_t CharacterSize(char byte) {
  const auto lead = static_cast<uint8_t>(byte);
  return lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TokenModel>> Bpe::FromJson(const Json& json, Vocabulary vocabulary,
                                                          bool byte_level) {
  std::unique_ptr<Bpe> bpe(new Bpe(std::move(vocabulary), byte_level));
  const absl::Status options = bpe->ReadOptions(json);
  if (!options.ok()) return options;
  const absl::Status bytes = bpe->ReadByteTokens();
  if (!bytes.ok()) return bytes;
  const absl::Status merges = bpe->ReadMerges(Field(json, "merges"));
  if (!merges.ok()) return merges;
  return bpe;
}

absl::Status Bpe::ReadOptions(const Json& json) {
  const absl::Status status = CheckFields(
      json, "model",
      {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
       "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (!status.ok()) return status;
  const Json& dropout = Field(json, "dropout");
  if (!dropout.is_null() && dropout != 0) return Unsupported("model.dropout", "must be null or 0");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const Json& value = Field(json, affix);
    if (!value.is_null() && value != "") {
      return Unsupported(absl::StrCat("model.", affix), "must be null or empty");
    }
  }
  bool byte_fallback = false;
  const std::pair<const char*, bool*> flags[] = {{"ignore_merges", &ignore_merges_},
                                                 {"fuse_unk", &fuse_unknown_},
                                                 {"byte_fallback", &byte_fallback}};
  for (const auto& [name, flag] : flags) {
    const absl::StatusOr<bool> value = BoolField(json, "model", name, false);
    if (!value.ok()) return value.status();
    *flag = *value;
  }
  if (byte_fallback && byte_level_) {
    return Unsupported("model.byte_fallback", "must be false with a ByteLevel pre_tokenizer");
  }
  if (byte_fallback) fallback_ = ByteFallbackTokens(vocabulary_);
  if (Field(json, "unk_token").is_null()) return absl::OkStatus();
  const absl::StatusOr<std::string> unknown = StringField(json, "model", "unk_token");
  if (!unknown.ok()) return unknown.status();
  unk_token_ = *unknown;
  const auto found = vocabulary_.find(*unknown);
  if (found != vocabulary_.end()) unknown_ = found->second;
  return absl::OkStatus();
}

absl::Status Bpe::ReadByteTokens() {
  byte_tokens_.fill(-1);
  for (int byte = 0; byte < 256; ++byte) {
    if (byte_level_ ? !OccursInUtf8(byte) : byte >= 0x80) continue;
    const auto found =
        vocabulary_.find(byte_level_ ? std::string(ByteCharacter(static_cast<uint8_t>(byte)))
                                     : std::string(1, static_cast<char>(byte)));
    if (found == vocabulary_.end()) {
      if (!byte_level_) continue;
      return Unsupported("model.vocab",
                         absl::StrCat("has no token for the byte 0x", absl::Hex(byte)));
    }
    byte_tokens_[byte] = found->second;
  }
  return absl::OkStatus();
}

absl::Status Bpe::ReadMerges(const Json& json) {
  if (!json.is_array()) return Malformed("model.merges", "must be a list");
  Merges::Table table;
  table.reserve(json.size());
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("model.merges[", i, "]");
    std::vector<std::string> pair;
    if (json[i].is_string()) {  // old files: the two tokens and a space between them
      const std::string& line = json[i].get_ref<const std::string&>();
      if (absl::StartsWith(line, "#version")) continue;
      pair = absl::StrSplit(line, ' ');
    } else if (json[i].is_array()) {
      for (const Json& token : json[i]) {
        if (token.is_string()) pair.push_back(token.get<std::string>());
      }
    }
    if (pair.size() != 2) return Malformed(path, "must be a pair of tokens");
    // Ranks need only ascend.
    const absl::Status status = AddMerge(pair[0], pair[1], static_cast<int32_t>(i), path, table);
    if (!status.ok()) return status;
  }
  merges_ = Merges(std::move(table), InitialTokens());
  return absl::OkStatus();
}

std::vector<int32_t> Bpe::InitialTokens() const {
  std::vector<int32_t> tokens(byte_tokens_.begin(), byte_tokens_.end());
  if (byte_level_) return tokens;
  for (const auto& [token, id] : vocabulary_) {
    if (!token.empty() && token.size() == CharacterSize(token[0])) tokens.push_back(id);
  }
  tokens.insert(tokens.end(), fallback_.begin(), fallback_.end());
  if (unknown_.has_value()) tokens.push_back(*unknown_);
  return tokens;
}

absl::Status Bpe::AddMerge(const std::string& left, const std::string& right, int32_t rank,
                           const std::string& path, Merges::Table& table) const {
  int32_t ids[3];
  const std::string tokens[3] = {left, right, left + right};
  for (int i = 0; i < 3; ++i) {
    const auto found = vocabulary_.find(tokens[i]);
    if (found == vocabulary_.end()) {
      return Malformed(path,
                       absl::StrCat("names '", tokens[i], "', which is not in the vocabulary"));
    }
    ids[i] = found->second;
  }
  // A pair given twice has the later rank, as in `tokenizers`.
  table.insert_or_assign(Merges::Pair(ids[0], ids[1]), Merges::Merge{rank, ids[2]});
  return absl::OkStatus();
}

absl::Status Bpe::AppendIds(absl::string_view piece, std::vector<int32_t>& ids) const {
  if (ignore_merges_) {
    const std::optional<int32_t> whole = WholePiece(piece);
    if (whole.has_value()) {
      ids.push_back(*whole);
      return absl::OkStatus();
    }
  }
  std::vector<int32_t> tokens;
  if (byte_level_) {
    tokens.reserve(piece.size());
    for (char byte : piece) tokens.push_back(byte_tokens_[static_cast<uint8_t>(byte)]);
  } else {
    absl::StatusOr<std::vector<int32_t>> characters = CharacterTokens(piece);
    if (!characters.ok()) return characters.status();
    tokens = *std::move(characters);
  }
  merges_.Apply(tokens, ids);
  return absl::OkStatus();
}

std::optional<int32_t> Bpe::WholePiece(absl::string_view piece) const {
  std::string spelling;
  if (byte_level_) {
    for (char byte : piece) absl::StrAppend(&spelling, ByteCharacter(static_cast<uint8_t>(byte)));
  }
  const auto found = vocabulary_.find(byte_level_ ? absl::string_view(spelling) : piece);
  if (found == vocabulary_.end()) return std::nullopt;
  return found->second;
}

std::optional<int32_t> Bpe::CharacterToken(absl::string_view character) const {
  if (character.size() == 1) {
    const int32_t token = byte_tokens_[static_cast<uint8_t>(character[0])];
    if (token < 0) return std::nullopt;
    return token;
  }
  const auto found = vocabulary_.find(character);
  if (found == vocabulary_.end()) return std::nullopt;
  return found->second;
}

absl::StatusOr<std::vector<int32_t>> Bpe::CharacterTokens(absl::string_view piece) const {
  std::vector<int32_t> tokens;
  tokens.reserve(piece.size());
  bool unknown_due = false;  // an unknown token that is not there yet, in case it is fused
  while (!piece.empty()) {
    const absl::string_view character = piece.substr(0, CharacterSize(piece[0]));
    piece.remove_prefix(character.size());
    const std::optional<int32_t> token = CharacterToken(character);
    if (token.has_value()) {
      if (std::exchange(unknown_due, false)) tokens.push_back(*unknown_);
      tokens.push_back(*token);
      continue;
    }
    const auto fallback = [this](char byte) { return fallback_[static_cast<uint8_t>(byte)]; };
    if (!fallback_.empty() && std::all_of(character.begin(), character.end(),
                                          [&](char byte) { return fallback(byte) >= 0; })) {
      // As in `tokenizers`, these go before an unknown token that is due.
      for (char byte : character) tokens.push_back(fallback(byte));
      continue;
    }
    if (!unk_token_.has_value()) continue;
    if (!unknown_.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the character '", character, "' is not in the model's vocabulary"));
    }
    if (std::exchange(unknown_due, true) && !fuse_unknown_) tokens.push_back(*unknown_);
  }
  if (unknown_due) tokens.push_back(*unknown_);
  return tokens;
}

}  // namespace epikv
