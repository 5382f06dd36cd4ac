#include "runtime/text/tokenizer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "runtime/text/tokenizer/added_tokens.h"
#include "runtime/text/tokenizer/decoder.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/normalizer.h"
#include "runtime/text/tokenizer/post_processor.h"
#include "runtime/text/tokenizer/pre_tokenizer.h"
#include "runtime/text/tokenizer/token_model.h"
#include "runtime/text/utf8.h"

namespace epikv {
namespace {

// What an id stands for in decoded text.
struct DecodedToken {
  bool exists = false;
  bool special = false;
  std::string bytes;
};

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
      return Unsupported(name, "must be null: prompts are neither truncated nor padded");
    }
  }
  return absl::OkStatus();
}

// An added token that the model has too must have the same id there, and no other token may.
absl::Status CheckAdded(const std::vector<AddedToken>& tokens, const Vocabulary& vocabulary) {
  absl::flat_hash_map<int32_t, absl::string_view> by_id;
  for (const auto& [token, id] : vocabulary) by_id[id] = token;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto in_model = vocabulary.find(tokens[i].content);
    const auto same_id = by_id.find(tokens[i].id);
    if ((in_model != vocabulary.end() && in_model->second != tokens[i].id) ||
        (same_id != by_id.end() && same_id->second != tokens[i].content)) {
      return Malformed(absl::StrCat("added_tokens[", i, "]"), "contradicts model.vocab");
    }
  }
  return absl::OkStatus();
}

// Finds the tokens that are searched before normalizing (`normalized` is false) or after it.
AddedTokenFinder FinderOf(const std::vector<AddedToken>& tokens, bool normalized) {
  std::vector<AddedToken> found;
  std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(found),
               [&](const AddedToken& token) { return token.normalized == normalized; });
  return AddedTokenFinder(std::move(found));
}

absl::Status CheckAround(const PostProcessor& around, const std::vector<DecodedToken>& decoded) {
  for (const std::vector<int32_t>& side : {around.prefix, around.suffix}) {
    for (int32_t id : side) {
      if (static_cast<size_t>(id) < decoded.size() && decoded[id].exists) continue;
      return Malformed("post_processor", absl::StrCat("adds the id ", id, ", which no token has"));
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
  bool normalized_special = false;  // one of those found after normalizing is special
  Vocabulary added_ids;
  std::vector<DecodedToken> decoded;                           // by id
  absl::flat_hash_map<int32_t, std::string> first_bytes = {};  // where a first token's are others

  static absl::StatusOr<Parts> FromJson(const Json& json);
  // Fills `decoded` and `first_bytes`.
  absl::Status ReadTokens(const std::vector<AddedToken>& added);
  absl::Status ReadToken(absl::string_view token, int32_t id, bool special);

  // Token ids of text, without what goes around it. plain: EncodeOptions'. Precondition: UTF-8.
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              absl::Span<const TextRange> plain) const;
  // Appends those of text without added tokens that are found before normalizing. `at_start`: no
  // text stands before it. `has_plain`: the model must find no special token in it.
  absl::Status EncodeRaw(absl::string_view text, bool at_start, bool has_plain,
                         std::vector<int32_t>& ids) const;
  // That this text, normalized, has no special token.
  absl::Status CheckPlain(absl::string_view text) const;
  // That none of these tokens of a text is special and spelled in it. One for what is unknown is
  // special, too, and nobody has spelled it.
  absl::Status CheckSpelled(const std::vector<int32_t>& ids, absl::string_view text) const;
  absl::Status NotPlain(int32_t id) const;
};

absl::StatusOr<Tokenizer::Parts> Tokenizer::Parts::FromJson(const Json& json) {
  const absl::Status status = CheckTopLevel(json);
  if (!status.ok()) return status;
  auto normalizer = Normalizer::FromJson(Field(json, "normalizer"));
  if (!normalizer.ok()) return normalizer.status();
  auto decoder = Decoder::FromJson(Field(json, "decoder"));
  if (!decoder.ok()) return decoder.status();
  auto pre_tokenizer = PreTokenizer::FromJson(Field(json, "pre_tokenizer"));
  if (!pre_tokenizer.ok()) return pre_tokenizer.status();
  if (pre_tokenizer->minds_beginning() && normalizer->may_cut_beginning()) {
    return Unsupported(
        "pre_tokenizer",
        "has the prepend_scheme 'first' after a normalizer that strips, which is not supported");
  }
  auto model = TokenModel::FromJson(Field(json, "model"), pre_tokenizer->byte_level());
  if (!model.ok()) return model.status();
  auto around = PostProcessor::FromJson(Field(json, "post_processor"));
  if (!around.ok()) return around.status();
  const auto added = AddedTokensFromJson(Field(json, "added_tokens"), *normalizer);
  if (!added.ok()) return added.status();
  const absl::Status consistent = CheckAdded(*added, (*model)->vocabulary());
  if (!consistent.ok()) return consistent;
  Vocabulary added_ids;
  for (const AddedToken& token : *added) added_ids.emplace(token.content, token.id);
  Parts parts{
      .json = "",
      .normalizer = *std::move(normalizer),
      .decoder = *std::move(decoder),
      .pre_tokenizer = *std::move(pre_tokenizer),
      .model = *std::move(model),
      .around = *std::move(around),
      .raw_finder = FinderOf(*added, /*normalized=*/false),
      .normalized_finder = FinderOf(*added, /*normalized=*/true),
      .normalized_special = absl::c_any_of(
          *added, [](const AddedToken& token) { return token.normalized && token.special; }),
      .added_ids = std::move(added_ids),
      .decoded = {}};
  const absl::Status tokens = parts.ReadTokens(*added);
  if (!tokens.ok()) return tokens;
  const absl::Status around_status = CheckAround(parts.around, parts.decoded);
  if (!around_status.ok()) return around_status;
  return parts;
}

absl::Status Tokenizer::Parts::ReadTokens(const std::vector<AddedToken>& added) {
  int32_t largest = -1;
  for (const auto& [token, id] : model->vocabulary()) largest = std::max(largest, id);
  for (const AddedToken& token : added) largest = std::max(largest, token.id);
  decoded.resize(static_cast<size_t>(largest) + 1);
  for (const auto& [token, id] : model->vocabulary()) {
    const absl::Status status = ReadToken(token, id, /*special=*/false);
    if (!status.ok()) return status;
  }
  for (const AddedToken& token : added) {
    const absl::Status status = ReadToken(token.text, token.id, token.special);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Parts::ReadToken(absl::string_view token, int32_t id, bool special) {
  absl::StatusOr<std::string> bytes = decoder.BytesOf(token, /*first=*/false);
  if (!bytes.ok()) return Malformed("decoder", bytes.status().message());
  if (decoder.minds_first()) {
    absl::StatusOr<std::string> first = decoder.BytesOf(token, /*first=*/true);
    if (!first.ok()) return Malformed("decoder", first.status().message());
    if (*first != *bytes) first_bytes.insert_or_assign(id, *std::move(first));
  }
  decoded[id] = {true, special, *std::move(bytes)};
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Parts::Encode(
    absl::string_view text, absl::Span<const TextRange> plain) const {
  for (const TextRange& range : plain) {
    if (!normalized_special) break;
    const absl::Status status = CheckPlain(text.substr(range.begin, range.end - range.begin));
    if (!status.ok()) return status;
  }
  std::vector<int32_t> ids;
  for (const AddedTokenFinder::Segment& segment : raw_finder.Split(text, plain)) {
    if (segment.token.has_value()) {
      ids.push_back(*segment.token);
      continue;
    }
    const size_t begin = segment.text.data() - text.data();
    const bool has_plain = Overlaps(plain, begin, begin + segment.text.size());
    const absl::Status status = EncodeRaw(segment.text, begin == 0, has_plain, ids);
    if (!status.ok()) return status;
  }
  return ids;
}

absl::Status Tokenizer::Parts::NotPlain(int32_t id) const {
  return absl::InvalidArgumentError(absl::StrCat("the text holds the special token '",
                                                 decoded[id].bytes,
                                                 "', which this tokenizer cannot read as text"));
}

absl::Status Tokenizer::Parts::CheckPlain(absl::string_view text) const {
  const absl::StatusOr<std::string> normalized = normalizer.Normalize(text);
  if (!normalized.ok()) return normalized.status();
  for (const AddedTokenFinder::Segment& segment : normalized_finder.Split(*normalized)) {
    if (segment.token.has_value() && decoded[*segment.token].special) {
      return NotPlain(*segment.token);
    }
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Parts::CheckSpelled(const std::vector<int32_t>& ids,
                                            absl::string_view text) const {
  absl::flat_hash_set<int32_t> looked_for;  // each once: a text may be all unknown
  for (const int32_t id : ids) {
    if (!decoded[id].special || !looked_for.insert(id).second) continue;
    if (absl::StrContains(text, decoded[id].bytes)) return NotPlain(id);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::Parts::EncodeRaw(absl::string_view text, bool at_start, bool has_plain,
                                         std::vector<int32_t>& ids) const {
  const absl::StatusOr<std::string> normalized = normalizer.Normalize(text);
  if (!normalized.ok()) return normalized.status();
  for (const AddedTokenFinder::Segment& segment : normalized_finder.Split(*normalized)) {
    if (segment.token.has_value()) {
      ids.push_back(*segment.token);
      continue;
    }
    const bool first = at_start && segment.text.data() == normalized->data();
    const absl::StatusOr<Pieces> pieces = pre_tokenizer.Split(segment.text, first);
    if (!pieces.ok()) return pieces.status();
    const absl::StatusOr<std::vector<int32_t>> tokens = model->Encode(*pieces);
    if (!tokens.ok()) return tokens.status();
    if (has_plain) {
      const absl::Status plain = CheckSpelled(*tokens, segment.text);
      if (!plain.ok()) return plain;
    }
    ids.insert(ids.end(), tokens->begin(), tokens->end());
  }
  return absl::OkStatus();
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
  absl::StatusOr<std::vector<int32_t>> ids = parts_->Encode(text, options.plain);
  if (ids.ok() && options.add_special) {
    const PostProcessor& around = parts_->around;
    ids->insert(ids->begin(), around.prefix.begin(), around.prefix.end());
    ids->insert(ids->end(), around.suffix.begin(), around.suffix.end());
  }
  return ids;
}

std::string Tokenizer::Decode(absl::Span<const int32_t> ids, const DecodeOptions& options) const {
  Detokenizer detokenizer(*this, options);
  std::string text;
  for (int32_t id : ids) text += detokenizer.Append(id);
  return text + detokenizer.Flush();
}

std::optional<absl::string_view> Tokenizer::TokenBytes(int32_t id) const {
  if (id < 0 || id >= vocab_size() || !parts_->decoded[id].exists) return std::nullopt;
  return parts_->decoded[id].bytes;
}

std::optional<std::string> Tokenizer::FirstTokenBytes(int32_t id) const {
  const std::optional<absl::string_view> bytes = TokenBytes(id);
  if (!bytes.has_value()) return std::nullopt;
  const auto first = parts_->first_bytes.find(id);
  absl::string_view text = first == parts_->first_bytes.end() ? *bytes : first->second;
  const auto& strip = parts_->decoder.strip();
  size_t left = strip.count;
  while (left > 0 && absl::ConsumePrefix(&text, strip.content)) --left;
  // Of the next token more would be taken.
  if (left > 0 && left < strip.count && text.empty()) return std::nullopt;
  return std::string(text);
}

absl::string_view Tokenizer::separator() const { return parts_->decoder.separator(); }

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

Detokenizer::Detokenizer(const Tokenizer& tokenizer, const DecodeOptions& options)
    : tokenizer_(tokenizer),
      options_(options),
      strip_left_(tokenizer.parts_->decoder.strip().count) {}

std::string Detokenizer::Append(int32_t id) {
  std::optional<absl::string_view> bytes = tokenizer_.TokenBytes(id);
  if (!bytes.has_value() || (options_.skip_special && tokenizer_.IsSpecial(id) && !Shown(id))) {
    return "";
  }
  if (std::exchange(contributed_, true)) {
    const absl::string_view separator = tokenizer_.separator();
    if (!separator.empty()) return WithoutStrip(repair_.Append(absl::StrCat(separator, *bytes)));
    return WithoutStrip(repair_.Append(*bytes));
  }
  const auto& first_bytes = tokenizer_.parts_->first_bytes;
  const auto first = first_bytes.find(id);
  return WithoutStrip(repair_.Append(first == first_bytes.end() ? *bytes : first->second));
}

bool Detokenizer::Shown(int32_t id) const {
  return std::find(options_.shown.begin(), options_.shown.end(), id) != options_.shown.end();
}

std::string Detokenizer::Flush() { return WithoutStrip(repair_.Flush()); }

std::string Detokenizer::WithoutStrip(std::string text) {
  const std::string& content = tokenizer_.parts_->decoder.strip().content;
  while (strip_left_ > 0 && !text.empty()) {
    if (!absl::StartsWith(text, content)) {
      strip_left_ = 0;
      break;
    }
    text.erase(0, content.size());
    --strip_left_;
  }
  return text;
}

}  // namespace epikv
