#include "runtime/text/tokenizer/normalizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/text/tokenizer/characters.h"

namespace epikv {
namespace {

std::optional<UnicodeForm> FormOf(absl::string_view type) {
  if (type == "NFC") return UnicodeForm::kNfc;
  if (type == "NFD") return UnicodeForm::kNfd;
  if (type == "NFKC") return UnicodeForm::kNfkc;
  if (type == "NFKD") return UnicodeForm::kNfkd;
  return std::nullopt;
}

std::string Stripped(absl::string_view text, bool left, bool right) {
  if (left) text.remove_prefix(LeadingSpace(text));
  if (right) text.remove_suffix(TrailingSpace(text));
  return std::string(text);
}

}  // namespace

absl::StatusOr<Normalizer> Normalizer::FromJson(const Json& json) {
  Normalizer result;
  const absl::Status status = result.Add(json, "normalizer");
  if (!status.ok()) return status;
  return result;
}

absl::Status Normalizer::Add(const Json& json, const std::string& path) {
  const absl::StatusOr<std::string> type = TypeOf(json, path);
  if (!type.ok()) return type.status();
  if (type->empty()) return absl::OkStatus();
  if (*type != "Sequence") return AddStep(json, *type, path);
  return ForEachOfSequence(
      json, path, "normalizers",
      [this](const Json& part, const std::string& part_path) { return Add(part, part_path); });
}

absl::Status Normalizer::AddStep(const Json& json, const std::string& type,
                                 const std::string& path) {
  if (const std::optional<UnicodeForm> form = FormOf(type); form.has_value()) {
    steps_.push_back({.kind = Kind::kForm, .form = *form});
    return CheckFields(json, path, {"type"});
  }
  if (type == "Lowercase") {
    steps_.push_back({.kind = Kind::kLowerCase});
    return CheckFields(json, path, {"type"});
  }
  if (type == "Strip") {
    const absl::StatusOr<bool> left = BoolField(json, path, "strip_left", std::nullopt);
    if (!left.ok()) return left.status();
    const absl::StatusOr<bool> right = BoolField(json, path, "strip_right", std::nullopt);
    if (!right.ok()) return right.status();
    steps_.push_back({.kind = Kind::kStrip, .left = *left, .right = *right});
    return CheckFields(json, path, {"type", "strip_left", "strip_right"});
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
  if (type == "Prepend") {
    absl::StatusOr<std::string> content = StringField(json, path, "prepend");
    if (!content.ok()) return content.status();
    steps_.push_back({.kind = Kind::kPrepend, .content = *std::move(content)});
    return CheckFields(json, path, {"type", "prepend"});
  }
  return Unsupported(absl::StrCat(path, ".type"),
                     absl::StrCat("is '", type,
                                  "'; supported: Lowercase, NFC, NFD, NFKC, NFKD, Prepend, "
                                  "Replace, Sequence, Strip"));
}

absl::StatusOr<std::string> Normalizer::Normalize(absl::string_view text) const {
  std::string result(text);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kForm:
        result = ToForm(result, step.form);
        break;
      case Kind::kLowerCase:
        result = ToLowerCase(result);
        break;
      case Kind::kStrip:
        result = Stripped(result, step.left, step.right);
        break;
      case Kind::kReplace: {
        absl::StatusOr<std::string> replaced = step.pattern->Replace(result, step.content);
        if (!replaced.ok()) return replaced.status();
        result = *std::move(replaced);
        break;
      }
      case Kind::kPrepend:
        if (!result.empty()) result.insert(0, step.content);
        break;
    }
  }
  return result;
}

bool Normalizer::may_cut_beginning() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) {
    return (step.kind == Kind::kStrip && step.left) ||
           (step.kind == Kind::kReplace && step.content.empty());
  });
}

}  // namespace epikv
