#include "runtime/constraints/call_grammar.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/constraints/json_schema.h"
#include "runtime/text/chat/answer_reader.h"

namespace epikv {
namespace {

// xgrammar's structural tags, which keep the order of a schema's properties.
using Json = nlohmann::ordered_json;

constexpr absl::string_view kAnyObject = R"({"type": "object"})";
constexpr size_t kMostSchemaBytes = 49152;  // of all functions together, and their names
constexpr int kMostWhiteSpace = 16;  // in a row; a model that writes nothing else has to go on

Json TagOf(const std::string& begin, Json content, const std::string& end) {
  return {{"type", "tag"}, {"begin", begin}, {"content", std::move(content)}, {"end", end}};
}

Json AnyTextWithout(const std::string& text) {
  return {{"type", "any_text"}, {"excludes", {text}}};
}

// Every text that does not begin with `prefix`, whose characters are no ^, ] nor \.
Json TextNotBeginningWith(const std::string& prefix) {
  std::string regex;
  for (size_t n = prefix.size(); n-- > 0;) {
    // Nothing; another character, and anything; or this one, and what may follow it.
    const std::string next = prefix.substr(n, 1);
    const std::string rest = regex.empty() ? "" : absl::StrCat("|[", next, "]", regex);
    regex = absl::StrCat("([^", next, "][\\s\\S]*", rest, ")?");
  }
  return {{"type", "regex"}, {"pattern", regex}};
}

struct Spelling {
  std::vector<std::string> begins;  // of the calls, one of them; none: nothing stands before them
  std::string call;                 // of one, to its name
  std::string arguments;            // between name and arguments
  std::string call_end;
  std::string between;
  std::string end;
};

Spelling SpellingOf(CallSyntax syntax) {
  switch (syntax) {
    case CallSyntax::kHermes:
      return {.begins = {},
              .call = "<tool_call>\n{\"name\": \"",
              .arguments = "\", \"arguments\": ",
              .call_end = "}\n</tool_call>",
              .between = "\n",
              .end = ""};
    case CallSyntax::kLlama3:
      return {.begins = {},
              .call = "{\"name\": \"",
              .arguments = "\", \"parameters\": ",
              .call_end = "}",
              .between = "",
              .end = ""};
    case CallSyntax::kMistral:
      return {.begins = {"[TOOL_CALLS] [", "[TOOL_CALLS]["},
              .call = "{\"name\": \"",
              .arguments = "\", \"arguments\": ",
              .call_end = "}",
              .between = ", ",
              .end = "]"};
  }
  return {};
}

// Calls one behind the other, and nothing else; where they are listed, one list for each way to
// begin.
std::vector<Json> CallsOf(const Spelling& spelling, const Json& tags, bool several) {
  Json calls = {{"type", "tags_with_separator"},
                {"tags", tags},
                {"separator", spelling.between},
                {"at_least_one", true},
                {"stop_after_first", !several}};
  if (spelling.begins.empty()) return {calls};
  std::vector<Json> lists;
  for (const std::string& begin : spelling.begins)
    lists.push_back(TagOf(begin, calls, spelling.end));
  return lists;
}

Json AnswerOf(const CallRule& rule, const Json& tags) {
  const Spelling spelling = SpellingOf(rule.syntax);
  const std::string mark(CallMark(rule.syntax));
  const bool first = rule.syntax == CallSyntax::kLlama3;  // a call is the whole answer
  if (rule.functions.empty()) {
    return first ? TextNotBeginningWith(mark) : AnyTextWithout(mark);
  }
  std::vector<Json> calls = CallsOf(spelling, tags, rule.several && !first);
  if (first && !rule.required) calls.push_back(TextNotBeginningWith(mark));
  if (first || rule.required) {
    if (calls.size() == 1) return calls.front();
    return {{"type", "or"}, {"elements", calls}};
  }
  const bool listed = !spelling.begins.empty();  // all calls are in one list
  return {{"type", "triggered_tags"},
          {"triggers", {mark}},
          {"tags", listed ? Json(calls) : tags},
          {"at_least_one", false},
          {"stop_after_first", listed || !rule.several}};
}

// Of an object.
absl::StatusOr<JsonSchema> SchemaOf(absl::string_view text) {
  absl::StatusOr<JsonSchema> schema = ReadJsonSchema(text);
  if (!schema.ok()) return schema;
  const Json json = Json::parse(schema->text);
  if (json.is_object() && json.contains("type") && json["type"] == "object") return schema;
  return absl::InvalidArgumentError("must have the type 'object'");
}

}  // namespace

absl::StatusOr<ConstraintText> ConstraintOfCalls(const CallRule& rule) {
  const Spelling spelling = SpellingOf(rule.syntax);
  ConstraintText text{.kind = ConstraintText::Kind::kStructuralTag};
  Json tags = Json::array();
  std::vector<std::string> patterns;
  size_t bytes = 0;
  for (const CalledFunction& function : rule.functions) {
    bytes += function.name.size();
    const bool fits = bytes + function.schema.size() <= kMostSchemaBytes;
    absl::StatusOr<JsonSchema> schema =
        fits ? SchemaOf(function.schema.empty() ? kAnyObject : function.schema)
             : absl::InvalidArgumentError(absl::StrCat("is too large: schemas of all tools have ",
                                                       kMostSchemaBytes, " bytes at most"));
    if (schema.ok()) bytes += function.schema.size();
    if (!schema.ok() && function.lenient) schema = SchemaOf(kAnyObject);
    if (!schema.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("of '", function.name, "': ", schema.status().message()));
    }
    tags.push_back(TagOf(absl::StrCat(spelling.call, function.name, spelling.arguments),
                         {{"type", "json_schema"},
                          {"json_schema", Json::parse(schema->text)},
                          {"max_whitespace_cnt", kMostWhiteSpace}},
                         spelling.call_end));
    for (std::string& pattern : schema->patterns) patterns.push_back(std::move(pattern));
  }
  const Json tag = {{"type", "structural_tag"}, {"format", AnswerOf(rule, tags)}};
  text.texts.push_back(tag.dump());
  text.texts.insert(text.texts.end(), patterns.begin(), patterns.end());
  return text;
}

}  // namespace epikv
