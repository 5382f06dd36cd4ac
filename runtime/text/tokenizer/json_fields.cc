#include "runtime/text/tokenizer/json_fields.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

// Far above any vocabulary; keeps a damaged file from asking for a table of gigabytes.
constexpr int64_t kIdLimit = int64_t{1} << 24;

}  // namespace

absl::Status Malformed(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("tokenizer.json: ", path, " ", what));
}

absl::Status Unsupported(absl::string_view path, absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("tokenizer.json: ", path, " ", what));
}

absl::Status CheckFields(const Json& object, absl::string_view path,
                         std::initializer_list<absl::string_view> known) {
  if (!object.is_object()) return Malformed(path, "must be an object");
  for (const auto& [name, value] : object.items()) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return Unsupported(absl::StrCat(path, ".", name),
                         "is not supported: this program does not know this field");
    }
  }
  return absl::OkStatus();
}

const Json& Field(const Json& object, const char* name) {
  static const Json& null = *new Json();
  const auto found = object.find(name);
  return found == object.end() ? null : *found;
}

absl::Status ForEachOfSequence(
    const Json& sequence, absl::string_view path, const char* name,
    absl::FunctionRef<absl::Status(const Json& part, const std::string& path)> add) {
  const absl::Status known = CheckFields(sequence, path, {"type", name});
  if (!known.ok()) return known;
  const Json& parts = Field(sequence, name);
  if (!parts.is_array()) return Malformed(absl::StrCat(path, ".", name), "must be a list");
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_path = absl::StrCat(path, ".", name, "[", i, "]");
    const absl::StatusOr<std::string> type = TypeOf(parts[i], part_path);
    if (!type.ok()) return type.status();
    if (*type == "Sequence") return Unsupported(part_path, "is a Sequence inside a Sequence");
    const absl::Status added = add(parts[i], part_path);
    if (!added.ok()) return added;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TypeOf(const Json& object, absl::string_view path) {
  if (object.is_null()) return "";
  if (!object.is_object()) return Malformed(path, "must be an object or null");
  return StringField(object, path, "type");
}

absl::StatusOr<std::string> StringField(const Json& object, absl::string_view path,
                                        const char* name) {
  const Json& value = Field(object, name);
  if (!value.is_string()) return Malformed(absl::StrCat(path, ".", name), "must be a string");
  return value.get<std::string>();
}

absl::StatusOr<std::string> CharacterField(const Json& object, absl::string_view path,
                                           const char* name) {
  absl::StatusOr<std::string> value = StringField(object, path, name);
  if (!value.ok()) return value.status();
  const auto num_characters =
      std::count_if(value->begin(), value->end(), [](char c) { return (c & 0xC0) != 0x80; });
  if (num_characters != 1) return Malformed(absl::StrCat(path, ".", name), "must be one character");
  return value;
}

absl::StatusOr<int32_t> IdField(const Json& object, absl::string_view path, const char* name) {
  return TokenId(Field(object, name), absl::StrCat(path, ".", name));
}

absl::StatusOr<int32_t> TokenId(const Json& value, absl::string_view path) {
  // An unsigned number above int64 reads as negative.
  const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
  if (id < 0 || id >= kIdLimit) {
    return Malformed(path, absl::StrCat("must be a token id: an integer in [0, ", kIdLimit, ")"));
  }
  return static_cast<int32_t>(id);
}

absl::StatusOr<bool> BoolField(const Json& object, absl::string_view path, const char* name,
                               std::optional<bool> fallback) {
  const Json& value = Field(object, name);
  if (value.is_null() && fallback.has_value()) return *fallback;
  if (!value.is_boolean()) return Malformed(absl::StrCat(path, ".", name), "must be a boolean");
  return value.get<bool>();
}

}  // namespace epikv
