#include "runtime/json_schema.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace epikv {
namespace {

using Json = nlohmann::ordered_json;
using Names = std::set<std::string, std::less<>>;

constexpr int kMostDepth = 64;

const Names& Descriptions() {
  static const auto& names =
      *new Names{"$comment",   "$defs",       "$id",      "$schema",  "default", "definitions",
                 "deprecated", "description", "examples", "readOnly", "title",   "writeOnly"};
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

class Checker {
 public:
  absl::Status Check(const Json& schema, const std::string& path);

 private:
  static absl::Status Wrong(const std::string& path, absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat(path.empty() ? "the schema" : path, ": ", what));
  }
  // Nothing but these, descriptions, and `also`.
  static absl::Status CheckKeywords(const Json& schema, const std::string& path,
                                    const Names& keywords, absl::string_view also = "");
  absl::Status CheckLiterals(const Json& schema, const std::string& path);
  absl::Status CheckTyped(const Json& schema, const std::string& path);
  absl::Status CheckChildren(const Json& schema, const std::string& path);
  absl::Status CheckEach(const Json& schema, absl::string_view keyword, const std::string& path);
};

absl::Status Checker::CheckKeywords(const Json& schema, const std::string& path,
                                    const Names& keywords, absl::string_view also) {
  for (const auto& [keyword, value] : schema.items()) {
    if (keywords.contains(keyword) || Descriptions().contains(keyword) || keyword == also) continue;
    return Wrong(path, absl::StrCat("the keyword '", keyword, "' is not supported",
                                    also.empty() ? "" : absl::StrCat(" beside '", also, "'")));
  }
  return absl::OkStatus();
}

// enum and const, whose values have to be of the type if one is given beside them.
absl::Status Checker::CheckLiterals(const Json& schema, const std::string& path) {
  const bool is_const = schema.contains("const");
  absl::Status status = CheckKeywords(schema, path, {"type"}, is_const ? "const" : "enum");
  if (!status.ok()) return status;
  const Json values = is_const ? Json::array({schema["const"]}) : schema["enum"];
  if (!values.is_array() || values.empty()) return Wrong(path, "'enum' must be a list, not empty");
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

absl::Status Checker::CheckTyped(const Json& schema, const std::string& path) {
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
  const auto format = schema.find("format");
  if (format != schema.end() &&
      !(format->is_string() && Formats().contains(format->get<std::string>()))) {
    return Wrong(path, absl::StrCat("'format' must be one of: ", absl::StrJoin(Formats(), ", ")));
  }
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

absl::Status Checker::CheckEach(const Json& schema, absl::string_view keyword,
                                const std::string& path) {
  const auto children = schema.find(keyword);
  if (children == schema.end()) return absl::OkStatus();
  if (!children->is_structured())
    return Wrong(path, absl::StrCat("'", keyword, "' holds no schemas"));
  for (const auto& [name, child] : children->items()) {
    absl::Status status = Check(child, absl::StrCat(path, "/", keyword, "/", name));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Checker::CheckChildren(const Json& schema, const std::string& path) {
  for (const char* keyword :
       {"$defs", "definitions", "properties", "prefixItems", "anyOf", "oneOf", "allOf"}) {
    if (absl::Status status = CheckEach(schema, keyword, path); !status.ok()) return status;
  }
  for (const char* keyword :
       {"items", "unevaluatedItems", "additionalProperties", "unevaluatedProperties"}) {
    const auto child = schema.find(keyword);
    if (child == schema.end()) continue;
    absl::Status status = Check(*child, absl::StrCat(path, "/", keyword));
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Checker::Check(const Json& schema, const std::string& path) {
  if (schema.is_boolean()) return absl::OkStatus();
  if (!schema.is_object()) return Wrong(path, "must be an object or a boolean");
  absl::Status status;
  if (schema.contains("const") || schema.contains("enum")) {
    status = CheckLiterals(schema, path);
  } else if (const char* combines = CombinerOf(schema)) {
    status = CheckKeywords(schema, path, {}, combines);
  } else {
    status = CheckTyped(schema, path);
  }
  return status.ok() ? CheckChildren(schema, path) : status;
}

void AddPatterns(const Json& json, std::vector<std::string>& patterns) {
  for (const auto& [key, value] : json.items()) {
    if (json.is_object() && key == "pattern" && value.is_string()) patterns.push_back(value);
    if (value.is_structured()) AddPatterns(value, patterns);
  }
}

}  // namespace

std::vector<std::string> PatternsOf(absl::string_view schema) {
  std::vector<std::string> patterns;
  const Json json = Json::parse(schema.begin(), schema.end(), nullptr, /*allow_exceptions=*/false);
  if (json.is_structured()) AddPatterns(json, patterns);
  return patterns;
}

absl::Status CheckJsonSchema(absl::string_view schema) {
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
  return Checker().Check(json, "");
}

}  // namespace epikv
