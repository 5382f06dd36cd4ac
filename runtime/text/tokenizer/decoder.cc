#include "runtime/text/tokenizer/decoder.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "runtime/text/tokenizer/byte_alphabet.h"

namespace epikv {
namespace {

// The byte that "<0x41>" stands for.
std::optional<char> FallbackByte(absl::string_view token) {
  if (token.size() != 6 || !absl::StartsWith(token, "<0x") || !absl::EndsWith(token, ">")) {
    return std::nullopt;
  }
  uint32_t byte = 0;
  for (char digit : token.substr(3, 2)) {
    if (!absl::ascii_isxdigit(digit)) return std::nullopt;
  }
  if (!absl::SimpleHexAtoi(token.substr(3, 2), &byte)) return std::nullopt;
  return static_cast<char>(byte);
}

absl::StatusOr<size_t> CountField(const Json& json, const std::string& path, const char* name) {
  const absl::StatusOr<int32_t> count = IdField(json, path, name);
  if (!count.ok()) return Malformed(absl::StrCat(path, ".", name), "must be a small number");
  return static_cast<size_t>(*count);
}

}  // namespace

absl::StatusOr<Decoder> Decoder::FromJson(const Json& json) {
  Decoder result;
  if (json.is_null()) {
    result.separator_ = " ";
    return result;
  }
  const absl::Status status = result.Add(json, "decoder");
  if (!status.ok()) return status;
  return result;
}

absl::Status Decoder::Add(const Json& json, const std::string& path) {
  const absl::StatusOr<std::string> type = TypeOf(json, path);
  if (!type.ok()) return type.status();
  if (*type != "Sequence") return AddStep(json, *type, path);
  return ForEachOfSequence(
      json, path, "decoders",
      [this](const Json& part, const std::string& part_path) { return Add(part, part_path); });
}

absl::Status Decoder::AddStep(const Json& json, const std::string& type, const std::string& path) {
  if (type == "Fuse") {
    fused_ = true;
    return CheckFields(json, path, {"type"});
  }
  if (type == "Strip") return AddStrip(json, path);
  if (fused_ || bytes_made_) {
    return Unsupported(
        path, absl::StrCat("is '", type,
                           "' after ByteFallback, ByteLevel or Fuse, which is not supported"));
  }
  if (type == "ByteLevel") {
    steps_.push_back({.kind = Kind::kByteLevel});
    bytes_made_ = fused_ = true;
    // None of these changes what is decoded.
    return CheckFields(json, path, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  }
  if (type == "ByteFallback") {
    steps_.push_back({.kind = Kind::kByteFallback});
    bytes_made_ = true;
    return CheckFields(json, path, {"type"});
  }
  if (type == "Metaspace") {
    const absl::StatusOr<MetaspaceScheme> scheme = MetaspaceScheme::FromJson(json, path);
    if (!scheme.ok()) return scheme.status();
    steps_.push_back({.kind = Kind::kMetaspace, .metaspace = *scheme});
    return absl::OkStatus();
  }
  if (type == "Replace") {
    absl::StatusOr<SplitRegex> pattern = SplitRegex::FromJson(json, path);
    if (!pattern.ok()) return pattern.status();
    absl::StatusOr<std::string> content = StringField(json, path, "content");
    if (!content.ok()) return content.status();
    steps_.push_back(
        {.kind = Kind::kReplace, .pattern = *std::move(pattern), .content = *std::move(content)});
    return CheckFields(json, path, {"type", "pattern", "content"});
  }
  return Unsupported(absl::StrCat(path, ".type"),
                     absl::StrCat("is '", type,
                                  "'; supported: null, ByteFallback, ByteLevel, Fuse, Metaspace, "
                                  "Replace, Sequence, Strip"));
}

absl::Status Decoder::AddStrip(const Json& json, const std::string& path) {
  const absl::Status known = CheckFields(json, path, {"type", "content", "start", "stop"});
  if (!known.ok()) return known;
  const absl::StatusOr<std::string> content = CharacterField(json, path, "content");
  if (!content.ok()) return content.status();
  const absl::StatusOr<size_t> start = CountField(json, path, "start");
  if (!start.ok()) return start.status();
  if (Field(json, "stop") != 0) return Unsupported(absl::StrCat(path, ".stop"), "must be 0");
  if (!fused_ && !bytes_made_) {
    steps_.push_back({.kind = Kind::kStrip, .content = *content, .count = *start});
    return absl::OkStatus();
  }
  if (!fused_) {
    return Unsupported(path, "is Strip after ByteFallback without Fuse, which is not supported");
  }
  if (strip_.count > 0) return Unsupported(path, "is a second Strip of the text");
  strip_ = {*content, *start};
  return absl::OkStatus();
}

absl::StatusOr<std::string> Decoder::BytesOf(absl::string_view token, bool first) const {
  std::string text(token);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kByteLevel:
        text = BytesOfToken(text).value_or(text);
        break;
      case Kind::kByteFallback:
        if (const std::optional<char> byte = FallbackByte(text); byte.has_value()) text = *byte;
        break;
      case Kind::kMetaspace: {
        const bool drops = first && step.metaspace.prepend != MetaspacePrepend::kNever;
        absl::StrReplaceAll({{step.metaspace.replacement, drops ? "" : " "}}, &text);
        break;
      }
      case Kind::kReplace: {
        absl::StatusOr<std::string> replaced = step.pattern->Replace(text, step.content);
        if (!replaced.ok()) return replaced.status();
        text = *std::move(replaced);
        break;
      }
      case Kind::kStrip:
        for (size_t i = 0; i < step.count && absl::StartsWith(text, step.content); ++i) {
          text.erase(0, step.content.size());
        }
        break;
    }
  }
  return text;
}

bool Decoder::minds_first() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) {
    return step.kind == Kind::kMetaspace && step.metaspace.prepend != MetaspacePrepend::kNever;
  });
}

}  // namespace epikv
