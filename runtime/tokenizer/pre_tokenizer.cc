#include "runtime/tokenizer/pre_tokenizer.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

using Dialect = SplitRegex::Dialect;

// How GPT-2 cuts text; what ByteLevel does unless told otherwise.
constexpr absl::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const Json& json) {
  PreTokenizer result;
  const absl::Status status = result.Add(json, "pre_tokenizer");
  if (!status.ok()) return status;
  return result;
}

absl::Status PreTokenizer::Add(const Json& json, const std::string& path) {
  const absl::StatusOr<std::string> type = TypeOf(json, path);
  if (!type.ok()) return type.status();
  if (type->empty()) return absl::OkStatus();
  if (byte_level_) return Unsupported(path, "follows ByteLevel, which must be last");
  if (*type == "Sequence") return AddSequence(json, path);
  if (*type == "Split") return AddSplit(json, path);
  if (*type == "ByteLevel") return AddByteLevel(json, path);
  if (*type == "Whitespace" || *type == "WhitespaceSplit") {
    const absl::Status status = CheckFields(json, path, {"type"});
    if (!status.ok()) return status;
    return *type == "Whitespace"
               ? AddCut(SplitRegex::Compile(R"(\w+|[^\w\s]+)", Dialect::kRustRegex), Keep::kMatches,
                        path)
               : AddCut(SplitRegex::Compile(R"(\s+)", Dialect::kRustRegex), Keep::kGaps, path);
  }
  if (*type == "Digits") {
    const absl::Status status = CheckFields(json, path, {"type", "individual_digits"});
    if (!status.ok()) return status;
    const absl::StatusOr<bool> individual = BoolField(json, path, "individual_digits", false);
    if (!individual.ok()) return individual.status();
    const absl::string_view pattern = *individual ? R"(\p{N})" : R"(\p{N}+)";
    return AddCut(SplitRegex::Compile(pattern, Dialect::kRustRegex), Keep::kAll, path);
  }
  return Unsupported(absl::StrCat(path, ".type"),
                     absl::StrCat("is '", *type,
                                  "'; supported: ByteLevel, Digits, Sequence, Split, Whitespace, "
                                  "WhitespaceSplit"));
}

absl::Status PreTokenizer::AddSequence(const Json& json, const std::string& path) {
  const absl::Status status = CheckFields(json, path, {"type", "pretokenizers"});
  if (!status.ok()) return status;
  const Json& parts = Field(json, "pretokenizers");
  if (!parts.is_array()) return Malformed(absl::StrCat(path, ".pretokenizers"), "must be a list");
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_path = absl::StrCat(path, ".pretokenizers[", i, "]");
    const absl::StatusOr<std::string> type = TypeOf(parts[i], part_path);
    if (!type.ok()) return type.status();
    if (*type == "Sequence") return Unsupported(part_path, "is a Sequence inside a Sequence");
    const absl::Status added = Add(parts[i], part_path);
    if (!added.ok()) return added;
  }
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddSplit(const Json& json, const std::string& path) {
  const absl::Status status = CheckFields(json, path, {"type", "pattern", "behavior", "invert"});
  if (!status.ok()) return status;
  const absl::StatusOr<std::string> behavior = StringField(json, path, "behavior");
  if (!behavior.ok()) return behavior.status();
  if (*behavior != "Isolated" && *behavior != "Removed") {
    return Unsupported(absl::StrCat(path, ".behavior"),
                       absl::StrCat("is '", *behavior, "'; supported: Isolated, Removed"));
  }
  const absl::StatusOr<bool> invert = BoolField(json, path, "invert", false);
  if (!invert.ok()) return invert.status();
  const Keep keep = *behavior == "Isolated" ? Keep::kAll : *invert ? Keep::kMatches : Keep::kGaps;

  const std::string pattern_path = absl::StrCat(path, ".pattern");
  const Json& pattern = Field(json, "pattern");
  const absl::Status pattern_status = CheckFields(pattern, pattern_path, {"Regex", "String"});
  if (!pattern_status.ok()) return pattern_status;
  if (pattern.size() != 1) return Malformed(pattern_path, "must have one of Regex and String");
  const bool literal = pattern.contains("String");
  const absl::StatusOr<std::string> text =
      StringField(pattern, pattern_path, literal ? "String" : "Regex");
  if (!text.ok()) return text.status();
  return AddCut(
      literal ? SplitRegex::Literal(*text) : SplitRegex::Compile(*text, Dialect::kOniguruma), keep,
      pattern_path);
}

absl::Status PreTokenizer::AddByteLevel(const Json& json, const std::string& path) {
  const absl::Status status =
      CheckFields(json, path, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (!status.ok()) return status;
  const absl::StatusOr<bool> prefix_space = BoolField(json, path, "add_prefix_space", true);
  if (!prefix_space.ok()) return prefix_space.status();
  const absl::StatusOr<bool> use_regex = BoolField(json, path, "use_regex", true);
  if (!use_regex.ok()) return use_regex.status();
  byte_level_ = true;
  if (*prefix_space) steps_.push_back({.prefix_space = true});
  if (!*use_regex) return absl::OkStatus();
  return AddCut(SplitRegex::Compile(kGpt2Pattern, Dialect::kOniguruma), Keep::kAll, path);
}

absl::Status PreTokenizer::AddCut(absl::StatusOr<SplitRegex> regex, Keep keep,
                                  const std::string& path) {
  if (!regex.ok()) return Unsupported(path, regex.status().message());
  steps_.push_back({.regex = *std::move(regex), .keep = keep});
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> PreTokenizer::Split(absl::string_view text) const {
  std::vector<std::string> pieces;
  if (!text.empty()) pieces.emplace_back(text);
  for (const Step& step : steps_) {
    std::vector<std::string> finer;
    for (std::string& piece : pieces) {
      if (step.prefix_space && !absl::StartsWith(piece, " ")) piece.insert(0, 1, ' ');
      if (!step.regex.has_value()) {
        finer.push_back(std::move(piece));
        continue;
      }
      const auto matches = step.regex->FindAll(piece);
      if (!matches.ok()) return matches.status();
      size_t end = 0;
      for (const SplitRegex::Match& match : *matches) {
        if (match.begin > end && step.keep != Keep::kMatches) {
          finer.push_back(piece.substr(end, match.begin - end));
        }
        if (step.keep != Keep::kGaps) {
          finer.push_back(piece.substr(match.begin, match.end - match.begin));
        }
        end = match.end;
      }
      if (end < piece.size() && step.keep != Keep::kMatches) finer.push_back(piece.substr(end));
    }
    pieces = std::move(finer);
  }
  return pieces;
}

}  // namespace epikv
