#include "runtime/constraints/json_schema.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace epikv {
namespace {

using Json = nlohmann::ordered_json;
using Names = std::set<std::string, std::less<>>;

constexpr int kMostDepth = 64;
// Of a property's name: the keys beside it are told apart from it character by character, in depth.
constexpr size_t kMostNameBytes = 512;

const Names& Descriptions() {
  static const auto& names =
      *new Names{"$comment", "$schema",  "default", "deprecated", "description",
                 "examples", "readOnly", "title",   "writeOnly"};
  return names;
}

// What holds schemas, by name or in a row.
const Names& NamesSchemas() {
  static const auto& names = *new Names{"$defs", "definitions", "properties"};
  return names;
}
const Names& ListsSchemas() {
  static const auto& names = *new Names{"prefixItems", "anyOf", "oneOf", "allOf"};
  return names;
}

// What a value of each type may be asked to be.
const Names& KeywordsOf(absl::string_view type) {
  static const auto& object =
      *new Names{"properties", "required", "additionalProperties", "unevaluatedProperties"};
  static const auto& array =
      *new Names{"prefixItems", "items", "unevaluatedItems", "minItems", "maxItems"};
  static const auto& string = *new Names{"minLength", "maxLength", "pattern", "format"};
  static const auto& integer =
      *new Names{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"};
  static const auto& none = *new Names{};
  if (type == "object") return object;
  if (type == "array") return array;
  if (type == "string") return string;
  if (type == "integer" || type == "number") return integer;
  return none;
}

// Those that xgrammar knows, and none that allows quotes: it would not escape them.
const Names& Formats() {
  static const auto& names = *new Names{"date", "date-time", "duration",      "hostname", "ipv4",
                                        "ipv6", "time",      "uri-reference", "uri",      "uuid"};
  return names;
}

std::string TypeOf(const Json& value) {
  if (value.is_string()) return "string";
  if (value.is_boolean()) return "boolean";
  if (value.is_null()) return "null";
  if (value.is_array()) return "array";
  if (value.is_object()) return "object";
  return value.is_number_integer() ? "integer" : "number";
}

// What makes a schema of others; null: nothing.
const char* CombinerOf(const Json& schema) {
  for (const char* keyword : {"$ref", "anyOf", "oneOf", "allOf"}) {
    if (schema.contains(keyword)) return keyword;
  }
  return nullptr;
}

// Says that anything may be in a list or an object of which nothing is said: xgrammar takes it for
// granted only where the schema has no keyword but its type.
void SayWhatIsOpen(Json& schema) {
  const auto is = [&schema](const char* name) {
    const auto type = schema.find("type");
    return type != schema.end() &&
           (*type == name ||
            (type->is_array() && std::find(type->begin(), type->end(), name) != type->end()));
  };
  const auto says = [&schema](std::initializer_list<const char*> keywords) {
    return std::any_of(keywords.begin(), keywords.end(),
                       [&](const char* keyword) { return schema.contains(keyword); });
  };
  if (says({"const", "enum"})) return;
  if (is("array") && !says({"items", "prefixItems", "unevaluatedItems"})) {
    schema["items"] = Json::object();
  }
  if (is("object") && !says({"properties", "additionalProperties", "unevaluatedProperties"})) {
    schema["additionalProperties"] = Json::object();
  }
}

// A count is an integer, also one that is written 2.0.
std::optional<int64_t> CountOf(const Json& value) {
  if (!value.is_number()) return std::nullopt;
  const auto number = value.get<double>();
  if (number != std::floor(number) || number < 0 || number > 1e15) return std::nullopt;
  return static_cast<int64_t>(number);
}

// Beyond them a number is another one once it has been read.
bool Has64Bits(const Json& value) {
  if (value.is_structured()) return std::all_of(value.begin(), value.end(), Has64Bits);
  return !value.is_number() || std::abs(value.get<double>()) < 9.2e18;
}

// As JSON Pointers have it.
std::string PartOf(absl::string_view name) {
  return absl::StrReplaceAll(name, {{"~", "~0"}, {"/", "~1"}});
}

class Reader {
 public:
  // The schema as it is kept; see JsonSchema.
  absl::StatusOr<Json> Read(const Json& schema, const std::string& path);
  // After all has been read.
  absl::Status CheckReferences() const;
  std::vector<std::string>& patterns() { return patterns_; }

 private:
  static absl::Status Wrong(const std::string& path, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path.empty() ? "the schema" : path, ": ", what));
  }
  // Nothing but these, descriptions, and `also`.
  static absl::Status CheckKeywords(const Json& schema, const std::string& path,
                                    const Names& keywords, absl::string_view also = "");
  static absl::Status CheckLiterals(const Json& schema, const std::string& path);
  static absl::Status CheckTyped(const Json& schema, const std::string& path);
  static absl::Status CheckString(const Json& schema, const std::string& path);
  static absl::Status CheckRequired(const Json& schema, const std::string& path);
  absl::StatusOr<Json> ReadValue(const std::string& keyword, const Json& value,
                                 const std::string& path);
  absl::StatusOr<Json> ReadEach(const Json& schemas, const std::string& path);

  std::vector<std::string> patterns_;
  std::set<std::string> places_;                                 // of schemas, as JSON Pointers
  std::vector<std::pair<std::string, std::string>> references_;  // where, and to what
};

absl::Status Reader::CheckKeywords(const Json& schema, const std::string& path,
                                   const Names& keywords, absl::string_view also) {
  for (const auto& [keyword, value] : schema.items()) {
    if (keywords.contains(keyword) || Descriptions().contains(keyword) || keyword == also) continue;
    if (keyword == "$defs" || keyword == "definitions") continue;
    if (keyword == "$id" && path.empty()) continue;
    return Wrong(path, absl::StrCat("the keyword '", keyword, "' is not supported",
                                    also.empty() ? "" : absl::StrCat(" beside '", also, "'")));
  }
  return absl::OkStatus();
}

// enum and const, whose values have to be of the type if one is given beside them.
absl::Status Reader::CheckLiterals(const Json& schema, const std::string& path) {
  const bool is_const = schema.contains("const");
  absl::Status status = CheckKeywords(schema, path, {"type"}, is_const ? "const" : "enum");
  if (!status.ok()) return status;
  const Json values = is_const ? Json::array({schema["const"]}) : schema["enum"];
  if (!values.is_array() || values.empty()) return Wrong(path, "'enum' must be a list, not empty");
  if (!Has64Bits(values)) return Wrong(path, "numbers of more than 64 bits are not supported");
  const auto type = schema.find("type");
  if (type == schema.end()) return absl::OkStatus();
  for (const Json& value : values) {
    const std::string is = TypeOf(value);
    const auto fits = [&is](const Json& wanted) {
      return wanted == is || (wanted == "number" && is == "integer");
    };
    if (type->is_array() ? std::any_of(type->begin(), type->end(), fits) : fits(*type)) continue;
    return Wrong(path, absl::StrCat("a value of '", is_const ? "const" : "enum", "' is a ", is,
                                    ", which 'type' excludes"));
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckTyped(const Json& schema, const std::string& path) {
  Names keywords = {"type"};
  std::vector<std::string> types;
  const auto type = schema.find("type");
  if (type == schema.end()) {
    // What xgrammar takes for an object, or for an array.
    for (const absl::string_view guess : {"object", "array"}) {
      const Names& of = KeywordsOf(guess);
      if (std::any_of(of.begin(), of.end(), [&](const auto& k) { return schema.contains(k); })) {
        return Wrong(path, absl::StrCat("'type' is missing: \"", guess, "\"?"));
      }
    }
  } else if (type->is_string()) {
    types = {type->get<std::string>()};
  } else if (type->is_array() && !type->empty() &&
             std::all_of(type->begin(), type->end(), [](auto& t) { return t.is_string(); })) {
    types = type->get<std::vector<std::string>>();
  } else {
    return Wrong(path, "'type' must be a string, or a list of them");
  }
  for (const std::string& name : types) {
    keywords.insert(KeywordsOf(name).begin(), KeywordsOf(name).end());
    if (name == "integer") keywords.insert("multipleOf");
  }
  if (absl::Status status = CheckKeywords(schema, path, keywords); !status.ok()) return status;
  if (absl::Status status = CheckString(schema, path); !status.ok()) return status;
  return CheckRequired(schema, path);
}

absl::Status Reader::CheckString(const Json& schema, const std::string& path) {
  const auto format = schema.find("format");
  if (format != schema.end() &&
      !(format->is_string() && Formats().contains(format->get<std::string>()))) {
    return Wrong(path, absl::StrCat("'format' must be one of: ", absl::StrJoin(Formats(), ", ")));
  }
  const auto pattern = schema.find("pattern");
  if (pattern == schema.end()) return absl::OkStatus();
  if (!pattern->is_string()) return Wrong(path, "'pattern' must be a string");
  if (format == schema.end()) return absl::OkStatus();
  return Wrong(path, "the keyword 'pattern' is not supported beside 'format'");
}

absl::Status Reader::CheckRequired(const Json& schema, const std::string& path) {
  const auto required = schema.find("required");
  if (required == schema.end()) return absl::OkStatus();
  if (!required->is_array()) return Wrong(path, "'required' must be a list");
  const auto properties = schema.find("properties");
  for (const Json& name : *required) {
    if (!name.is_string()) return Wrong(path, "'required' must hold strings");
    if (properties != schema.end() && properties->is_object() &&
        properties->contains(name.get<std::string>())) {
      continue;
    }
    return Wrong(path, absl::StrCat("'required' names '", name.get<std::string>(),
                                    "', which 'properties' lacks"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> Reader::ReadEach(const Json& schemas, const std::string& path) {
  Json kept = schemas.is_array() ? Json::array() : Json::object();
  for (const auto& [name, child] : schemas.items()) {
    if (name.size() > kMostNameBytes) {
      return Wrong(path,
                   absl::StrCat("a name has ", name.size(), " bytes, at most ", kMostNameBytes));
    }
    auto read = Read(child, absl::StrCat(path, "/", PartOf(name)));
    if (!read.ok()) return read.status();
    if (schemas.is_array()) {
      kept.push_back(*std::move(read));
    } else {
      kept[name] = *std::move(read);
    }
  }
  return kept;
}

// What is kept of a keyword that may stand where it does.
absl::StatusOr<Json> Reader::ReadValue(const std::string& keyword, const Json& value,
                                       const std::string& path) {
  static const auto& schemas =
      *new Names{"items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"};
  static const auto& counts = *new Names{"minLength", "maxLength", "minItems", "maxItems"};
  static const auto& numbers =
      *new Names{"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"};
  if (schemas.contains(keyword)) return Read(value, absl::StrCat(path, "/", keyword));
  if (NamesSchemas().contains(keyword)) {
    if (value.is_object()) return ReadEach(value, absl::StrCat(path, "/", keyword));
    return Wrong(path, absl::StrCat("'", keyword, "' must be an object"));
  }
  if (ListsSchemas().contains(keyword)) {
    if (value.is_array() && !value.empty())
      return ReadEach(value, absl::StrCat(path, "/", keyword));
    return Wrong(path, absl::StrCat("'", keyword, "' must be a list, not empty"));
  }
  if (counts.contains(keyword)) {
    const std::optional<int64_t> count = CountOf(value);
    if (count.has_value()) return Json(*count);
    return Wrong(path, absl::StrCat("'", keyword, "' must be an integer, at least 0"));
  }
  if (numbers.contains(keyword) && !value.is_number()) {
    return Wrong(path, absl::StrCat("'", keyword, "' must be a number"));
  }
  if (keyword == "$ref") {
    if (!value.is_string()) return Wrong(path, "'$ref' must be a string");
    references_.emplace_back(path, value);
  }
  if (keyword == "pattern") patterns_.push_back(value);
  return value;
}

absl::StatusOr<Json> Reader::Read(const Json& schema, const std::string& path) {
  places_.insert("#" + path);
  if (schema.is_boolean()) return schema.get<bool>() ? Json::object() : schema;
  if (!schema.is_object()) return Wrong(path, "must be an object or a boolean");
  absl::Status status;
  if (schema.contains("const") || schema.contains("enum")) {
    status = CheckLiterals(schema, path);
  } else if (const char* combines = CombinerOf(schema)) {
    status = CheckKeywords(schema, path, {}, combines);
  } else {
    status = CheckTyped(schema, path);
  }
  if (!status.ok()) return status;
  Json kept = Json::object();
  for (const auto& [keyword, value] : schema.items()) {
    if (Descriptions().contains(keyword) || keyword == "$id") continue;
    auto read = ReadValue(keyword, value, path);
    if (!read.ok()) return read.status();
    kept[keyword] = *std::move(read);
  }
  SayWhatIsOpen(kept);
  return kept;
}

absl::Status Reader::CheckReferences() const {
  for (const auto& [path, target] : references_) {
    // xgrammar reads no escapes, and leaves empty parts out.
    const bool plain = target.find_first_of("~%") == target.npos &&
                       !absl::StrContains(target, "//") && !absl::EndsWith(target, "/");
    if (!plain || !absl::StartsWith(target, "#")) {
      return Wrong(path, absl::StrCat("'$ref' is '", target,
                                      "': only '#' and '#/...' without '~', '%' and empty parts "
                                      "are supported"));
    }
    if (!places_.contains(target)) {
      return Wrong(path, absl::StrCat("there is no schema at '", target, "'"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<JsonSchema> ReadJsonSchema(absl::string_view schema) {
  bool deep = false;
  const Json json = Json::parse(
      schema.begin(), schema.end(),
      [&deep](int depth, Json::parse_event_t, Json&) {
        deep |= depth > kMostDepth;
        return !deep;
      },
      /*allow_exceptions=*/false);
  if (deep) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schema is nested more than ", kMostDepth, " deep"));
  }
  if (json.is_discarded()) return absl::InvalidArgumentError("the schema is not JSON");
  Reader reader;
  const auto kept = reader.Read(json, "");
  if (!kept.ok()) return kept.status();
  if (absl::Status status = reader.CheckReferences(); !status.ok()) return status;
  return JsonSchema{.text = kept->dump(), .patterns = std::move(reader.patterns())};
}

}  // namespace epikv
