#include "runtime/text/tokenizer/post_processor.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

// The ids a template's special token stands for.
absl::StatusOr<std::vector<int32_t>> SpecialTokenIds(const Json& specials, const std::string& name,
                                                     const std::string& path) {
  const std::string special_path = absl::StrCat(path, ".special_tokens['", name, "']");
  if (!specials.is_object()) return Malformed(special_path, "is missing");
  const Json& special = Field(specials, name.c_str());
  if (!special.is_object()) return Malformed(special_path, "must be an object");
  const Json& ids = Field(special, "ids");
  if (!ids.is_array()) return Malformed(absl::StrCat(special_path, ".ids"), "must be a list");
  std::vector<int32_t> result;
  for (const Json& value : ids) {
    const absl::StatusOr<int32_t> id = TokenId(value, absl::StrCat(special_path, ".ids"));
    if (!id.ok()) return id.status();
    result.push_back(*id);
  }
  return result;
}

absl::StatusOr<PostProcessor> TemplateFromJson(const Json& json, const std::string& path) {
  // `pair` is for two sequences at once, which nobody encodes here.
  const absl::Status status = CheckFields(json, path, {"type", "single", "pair", "special_tokens"});
  if (!status.ok()) return status;
  const Json& parts = Field(json, "single");
  if (!parts.is_array()) return Malformed(absl::StrCat(path, ".single"), "must be a list");
  PostProcessor result;
  bool seen_text = false;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_path = absl::StrCat(path, ".single[", i, "]");
    const absl::Status known = CheckFields(parts[i], part_path, {"SpecialToken", "Sequence"});
    if (!known.ok()) return known;
    const bool is_text = parts[i].contains("Sequence");
    const Json& part = Field(parts[i], is_text ? "Sequence" : "SpecialToken");
    if (!part.is_object()) return Malformed(part_path, "must be a Sequence or a SpecialToken");
    const absl::StatusOr<std::string> id = StringField(part, part_path, "id");
    if (!id.ok()) return id.status();
    if (is_text) {
      if (*id != "A" || seen_text) return Unsupported(part_path, "must be the sequence A, once");
      seen_text = true;
      continue;
    }
    const auto ids = SpecialTokenIds(Field(json, "special_tokens"), *id, path);
    if (!ids.ok()) return ids.status();
    std::vector<int32_t>& side = seen_text ? result.suffix : result.prefix;
    side.insert(side.end(), ids->begin(), ids->end());
  }
  if (!seen_text) return Unsupported(absl::StrCat(path, ".single"), "lacks the sequence A");
  return result;
}

absl::StatusOr<PostProcessor> ProcessorFromJson(const Json& json, const std::string& path) {
  const absl::StatusOr<std::string> type = TypeOf(json, path);
  if (!type.ok()) return type.status();
  if (type->empty() || *type == "ByteLevel") return PostProcessor();
  if (*type == "TemplateProcessing") return TemplateFromJson(json, path);
  if (*type != "Sequence") {
    return Unsupported(
        absl::StrCat(path, ".type"),
        absl::StrCat("is '", *type, "'; supported: ByteLevel, Sequence, TemplateProcessing"));
  }
  PostProcessor result;
  const absl::Status status = ForEachOfSequence(
      json, path, "processors",
      [&result](const Json& part_json, const std::string& part_path) -> absl::Status {
        const absl::StatusOr<PostProcessor> part = ProcessorFromJson(part_json, part_path);
        if (!part.ok()) return part.status();
        result.prefix.insert(result.prefix.begin(), part->prefix.begin(), part->prefix.end());
        result.suffix.insert(result.suffix.end(), part->suffix.begin(), part->suffix.end());
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  return result;
}

}  // namespace

absl::StatusOr<PostProcessor> PostProcessor::FromJson(const Json& json) {
  return ProcessorFromJson(json, "post_processor");
}

}  // namespace epikv
