#include "runtime/text/tokenizer/metaspace.h"

#include "absl/strings/str_cat.h"

namespace epikv {

absl::StatusOr<MetaspaceScheme> MetaspaceScheme::FromJson(const Json& json,
                                                          const std::string& path) {
  // `str_rep`, of old files, says the same as `replacement`.
  const absl::Status known = CheckFields(
      json, path,
      {"type", "replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
  if (!known.ok()) return known;
  MetaspaceScheme result;
  absl::StatusOr<std::string> replacement = CharacterField(json, path, "replacement");
  if (!replacement.ok()) return replacement.status();
  result.replacement = *std::move(replacement);
  const absl::StatusOr<bool> prefix = BoolField(json, path, "add_prefix_space", true);
  if (!prefix.ok()) return prefix.status();
  const std::string scheme_path = absl::StrCat(path, ".prepend_scheme");
  const absl::StatusOr<std::string> scheme = json.contains("prepend_scheme")
                                                 ? StringField(json, path, "prepend_scheme")
                                                 : std::string("always");
  if (!scheme.ok()) return scheme.status();
  if (*scheme == "never") {
    result.prepend = MetaspacePrepend::kNever;
  } else if (*scheme == "first") {
    result.prepend = MetaspacePrepend::kFirst;
  } else if (*scheme != "always") {
    return Unsupported(scheme_path,
                       absl::StrCat("is '", *scheme, "'; supported: always, first, never"));
  }
  // What old files have instead.
  if (!*prefix && result.prepend != MetaspacePrepend::kNever) {
    return Malformed(scheme_path, "contradicts add_prefix_space");
  }
  return result;
}

}  // namespace epikv
