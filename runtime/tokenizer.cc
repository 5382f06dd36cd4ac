#include "runtime/tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/tokenizer/added_tokens.h"
#include "runtime/tokenizer/byte_alphabet.h"
#include "runtime/tokenizer/json_fields.h"
#include "runtime/tokenizer/nfc.h"
#include "runtime/tokenizer/post_processor.h"
#include "runtime/tokenizer/pre_tokenizer.h"
#include "runtime/tokenizer/token_model.h"
#include "runtime/utf8.h"

namespace epikv {
namespace {

enum class Normalizer { kNone, kNfc };
enum class Decoder { kJoinWithSpaces, kByteLevel };

// What an id stands for in decoded text.
struct DecodedToken {
  bool exists = false;
  bool special = false;
  std::string bytes;
};

absl::StatusOr<Normalizer> NormalizerFromJson(const Json& json) {
  const absl::StatusOr<std::string> type = TypeOf(json, "normalizer");
  if (!type.ok()) return type.status();
  if (type->empty()) return Normalizer::kNone;
  if (*type != "NFC") {
    return Unsupported("normalizer.type", absl::StrCat("is '", *type, "'; supported: null, NFC"));
  }
  const absl::Status status = CheckFields(json, "normalizer", {"type"});
  if (!status.ok()) return status;
  return Normalizer::kNfc;
}

absl::StatusOr<Decoder> DecoderFromJson(const Json& json) {
  const absl::StatusOr<std::string> type = TypeOf(json, "decoder");
  if (!type.ok()) return type.status();
  if (type->empty()) return Decoder::kJoinWithSpaces;
  if (*type != "ByteLevel") {
    return Unsupported("decoder.type",
                       absl::StrCat("is '", *type, "'; supported: null, ByteLevel"));
  }
  // None of these changes what is decoded.
  const absl::Status status =
      CheckFields(json, "decoder", {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (!status.ok()) return status;
  return Decoder::kByteLevel;
}

absl::Status CheckTopLevel(const Json& json) {
  if (!json.is_object()) return Malformed("the file", "must be a JSON object");
  const absl::Status status =
      CheckFields(json, "the file",
                  {"version", "truncation", "padding", "added_tokens", "normalizer",
                   "pre_tokenizer", "post_processor", "decoder", "model"});
  if (!status.ok()) return status;
  const Json& version = Field(json, "version");
  if (version != "1.0") return Unsupported("version", "must be \"1.0\"");
  for (const char* name : {"truncation", "padding"}) {
    if (!Field(json, name).is_null()) {
      return Unsupported(name, "must be null: prompts are neither cut nor filled up");
    }
  }
  return absl::OkStatus();
}

std::string BytesOf(const std::string& token, Decoder decoder) {
  if (decoder == Decoder::kJoinWithSpaces) return token;
  return BytesOfToken(token).value_or(token);
}

// An added token that the model has too must have the same id there, and no other token may.
absl::Status CheckAdded(const std::vector<AddedToken>& tokens, const Vocabulary& vocabulary,
                        Normalizer normalizer) {
  absl::flat_hash_map<int32_t, absl::string_view> by_id;
  for (const auto& [token, id] : vocabulary) by_id[id] = token;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const std::string path = absl::StrCat("added_tokens[", i, "]");
    const auto in_model = vocabulary.find(tokens[i].content);
    const auto same_id = by_id.find(tokens[i].id);
    if ((in_model != vocabulary.end() && in_model->second != tokens[i].id) ||
        (same_id != by_id.end() && same_id->second != tokens[i].content)) {
      return Malformed(path, "contradicts model.vocab");
    }
    if (tokens[i].normalized && normalizer == Normalizer::kNfc &&
        Nfc(tokens[i].content) != tokens[i].content) {
      return Unsupported(absl::StrCat(path, ".content"), "is changed by the normalizer");
    }
  }
  return absl::OkStatus();
}

// By id.
std::vector<DecodedToken> DecodedTokens(const Vocabulary& vocabulary,
                                        const std::vector<AddedToken>& added, Decoder decoder) {
  int32_t largest = -1;
  for (const auto& [token, id] : vocabulary) largest = std::max(largest, id);
  for (const AddedToken& token : added) largest = std::max(largest, token.id);
  std::vector<DecodedToken> decoded(static_cast<size_t>(largest) + 1);
  for (const auto& [token, id] : vocabulary) decoded[id] = {true, false, BytesOf(token, decoder)};
  for (const AddedToken& token : added) {
    decoded[token.id] = {true, token.special, BytesOf(token.content, decoder)};
  }
  return decoded;
}

absl::Status CheckAround(const PostProcessor& around, const std::vector<DecodedToken>& decoded) {
  for (const std::vector<int32_t>& side : {around.prefix, around.suffix}) {
    for (int32_t id : side) {
      if (static_cast<size_t>(id) < decoded.size() && decoded[id].exists) continue;
      return Malformed("post_processor", absl::StrCat("adds ", id, ", which is no token's id"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

struct Tokenizer::Parts {
  std::string json;
  Normalizer normalizer;
  Decoder decoder;
  PreTokenizer pre_tokenizer;
  std::unique_ptr<const TokenModel> model;
  PostProcessor around;
  // Added tokens found before and after normalizing.
  AddedTokenFinder raw_finder, normalized_finder;
  Vocabulary added_ids;
  std::vector<DecodedToken> decoded;  // by id

  static absl::StatusOr<Parts> FromJson(const Json& json);

  // Token ids of text, without what goes around it. Precondition: UTF-8.
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text) const;
  // Of text without added tokens.
  absl::StatusOr<std::vector<int32_t>> EncodePlain(absl::string_view text) const;
};

absl::StatusOr<Tokenizer::Parts> Tokenizer::Parts::FromJson(const Json& json) {
  const absl::Status status = CheckTopLevel(json);
  if (!status.ok()) return status;
  const auto normalizer = NormalizerFromJson(Field(json, "normalizer"));
  if (!normalizer.ok()) return normalizer.status();
  const auto decoder = DecoderFromJson(Field(json, "decoder"));
  if (!decoder.ok()) return decoder.status();
  auto pre_tokenizer = PreTokenizer::FromJson(Field(json, "pre_tokenizer"));
  if (!pre_tokenizer.ok()) return pre_tokenizer.status();
  auto model = TokenModel::FromJson(Field(json, "model"), pre_tokenizer->byte_level());
  if (!model.ok()) return model.status();
  auto around = PostProcessor::FromJson(Field(json, "post_processor"));
  if (!around.ok()) return around.status();
  auto added = AddedTokensFromJson(Field(json, "added_tokens"));
  if (!added.ok()) return added.status();
  const absl::Status consistent = CheckAdded(*added, (*model)->vocabulary(), *normalizer);
  if (!consistent.ok()) return consistent;
  std::vector<DecodedToken> decoded = DecodedTokens((*model)->vocabulary(), *added, *decoder);
  const absl::Status around_status = CheckAround(*around, decoded);
  if (!around_status.ok()) return around_status;

  Vocabulary added_ids;
  for (const AddedToken& token : *added) added_ids.emplace(token.content, token.id);
  const auto normalized = std::stable_partition(
      added->begin(), added->end(), [](const AddedToken& token) { return !token.normalized; });
  return Parts{.json = "",
               .normalizer = *normalizer,
               .decoder = *decoder,
               .pre_tokenizer = *std::move(pre_tokenizer),
               .model = *std::move(model),
               .around = *std::move(around),
               .raw_finder = AddedTokenFinder({added->begin(), normalized}),
               .normalized_finder = AddedTokenFinder({normalized, added->end()}),
               .added_ids = std::move(added_ids),
               .decoded = std::move(decoded)};
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Parts::Encode(absl::string_view text) const {
  std::vector<int32_t> ids;
  for (const AddedTokenFinder::Segment& raw : raw_finder.Split(text)) {
    if (raw.token.has_value()) {
      ids.push_back(*raw.token);
      continue;
    }
    const std::string normalized =
        normalizer == Normalizer::kNfc ? Nfc(raw.text) : std::string(raw.text);
    for (const AddedTokenFinder::Segment& segment : normalized_finder.Split(normalized)) {
      if (segment.token.has_value()) {
        ids.push_back(*segment.token);
        continue;
      }
      const auto plain = EncodePlain(segment.text);
      if (!plain.ok()) return plain.status();
      ids.insert(ids.end(), plain->begin(), plain->end());
    }
  }
  return ids;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Parts::EncodePlain(absl::string_view text) const {
  std::vector<int32_t> ids;
  const auto pieces = pre_tokenizer.Split(text);
  if (!pieces.ok()) return pieces.status();
  for (const std::string& piece : *pieces) {
    const auto tokens = model->Encode(piece);
    if (!tokens.ok()) return tokens.status();
    ids.insert(ids.end(), tokens->begin(), tokens->end());
  }
  return ids;
}

Tokenizer::Tokenizer(std::unique_ptr<const Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::FromJson(absl::string_view tokenizer_json) {
  const Json json = Json::parse(tokenizer_json.begin(), tokenizer_json.end(), nullptr,
                                /*allow_exceptions=*/false);
  if (json.is_discarded()) return Malformed("the file", "is not JSON");
  absl::StatusOr<Parts> parts = Parts::FromJson(json);
  if (!parts.ok()) return parts.status();
  parts->json = std::string(tokenizer_json);
  return std::unique_ptr<Tokenizer>(
      new Tokenizer(std::make_unique<const Parts>(*std::move(parts))));
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(absl::string_view text,
                                                       const EncodeOptions& options) const {
  const std::optional<size_t> invalid = FirstInvalidUtf8(text);
  if (invalid.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("text is not UTF-8 at byte ", *invalid));
  }
  absl::StatusOr<std::vector<int32_t>> ids = parts_->Encode(text);
  if (ids.ok() && options.add_special) {
    const PostProcessor& around = parts_->around;
    ids->insert(ids->begin(), around.prefix.begin(), around.prefix.end());
    ids->insert(ids->end(), around.suffix.begin(), around.suffix.end());
  }
  return ids;
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids, const DecodeOptions& options) const {
  std::string bytes;
  bool first = true;
  for (int32_t id : ids) {
    const std::optional<absl::string_view> token = TokenBytes(id);
    if (!token.has_value() || (options.skip_special && IsSpecial(id))) continue;
    absl::StrAppend(&bytes, first ? "" : separator(), *token);
    first = false;
  }
  Utf8Repair repair;
  std::string text = repair.Append(bytes);
  return text + repair.Flush();
}

std::optional<absl::string_view> Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size() || !parts_->decoded[id].exists) return std::nullopt;
  return parts_->decoded[id].bytes;
}

absl::string_view Tokenizer::separator() const {
  return parts_->decoder == Decoder::kJoinWithSpaces ? " " : "";
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && id < vocab_size() && parts_->decoded[id].special;
}

std::optional<int32_t> Tokenizer::TokenToId(absl::string_view token) const {
  const auto added = parts_->added_ids.find(token);
  if (added != parts_->added_ids.end()) return added->second;
  const auto found = parts_->model->vocabulary().find(token);
  if (found == parts_->model->vocabulary().end()) return std::nullopt;
  return found->second;
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(parts_->decoded.size()); }

const std::string& Tokenizer::json() const { return parts_->json; }

}  // namespace epikv
