#include "runtime/constraint_text.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/json_schema.h"
#include "runtime/utf8.h"

namespace epikv {
namespace {

constexpr size_t kMostTextBytes = 65536, kMostChoices = 1024;
constexpr int kMostNesting = 64;

// Of brackets in a regex or a grammar. Those in strings and classes count, too; escaped ones do
// not.
int Nesting(absl::string_view text) {
  int open = 0, deepest = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '(') {
      deepest = std::max(deepest, ++open);
    } else if (text[i] == ')') {
      --open;
    }
  }
  return deepest;
}

// What an EBNF of xgrammar's can have beside rules: tokens by id, which are no text, and attributes
// that make a rule more than its text.
absl::Status CheckGrammar(absl::string_view grammar) {
  for (const char* macro : {"TagDispatch(", "Token(", "Regex(", "Substring("}) {
    if (absl::StrContains(grammar, macro)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rules, strings and character classes are supported, not '", macro, "...)'"));
    }
  }
  for (size_t at = grammar.find("::="); at != grammar.npos; at = grammar.find("::=", at + 1)) {
    const size_t before = grammar.find_last_not_of(" \t\r\n", at == 0 ? grammar.npos : at - 1);
    if (at > 0 && before != grammar.npos && grammar[before] == ']') {
      return absl::InvalidArgumentError("rules with attributes, name[...], are not supported");
    }
  }
  return absl::OkStatus();
}

// A string as an EBNF of xgrammar's spells it.
std::string Literal(absl::string_view text) {
  std::string literal = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      absl::StrAppend(&literal, "\\", absl::string_view(&c, 1));
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppend(&literal, "\\u", absl::Hex(byte, absl::kZeroPad4));
    } else {
      literal.push_back(c);
    }
  }
  return literal + "\"";
}

}  // namespace

absl::Status CheckConstraintText(const ConstraintText& text) {
  size_t bytes = 0;
  for (const std::string& part : text.texts) {
    bytes += part.size();
    if (FirstInvalidUtf8(part).has_value()) return absl::InvalidArgumentError("is not UTF-8");
    if (absl::StrContains(part, '\0')) {
      return absl::InvalidArgumentError("holds a NUL character, which is not supported");
    }
  }
  if (text.texts.size() > kMostChoices) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", text.texts.size(), " items, at most ", kMostChoices));
  }
  if (bytes > kMostTextBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", bytes, " bytes, at most ", kMostTextBytes));
  }
  if (text.texts.empty())
    return absl::InvalidArgumentError("is empty; one item is needed at least");
  if (text.kind == ConstraintText::Kind::kChoice) return absl::OkStatus();
  const std::string& only = text.texts.front();
  if (text.kind == ConstraintText::Kind::kJsonSchema) return CheckJsonSchema(only);
  if (const int nesting = Nesting(only); nesting > kMostNesting) {
    return absl::InvalidArgumentError(
        absl::StrCat("is nested ", nesting, " deep, at most ", kMostNesting));
  }
  return text.kind == ConstraintText::Kind::kGrammar ? CheckGrammar(only) : absl::OkStatus();
}

std::string GrammarOfRegex(const std::string& regex) {
  if (regex.empty()) return "root ::= \"\"";
  return absl::StrCat("root ::= Regex(", Literal(regex), ")");
}

std::string GrammarOfChoices(const std::vector<std::string>& choices) {
  return absl::StrCat("root ::= ",
                      absl::StrJoin(choices, " | ", [](std::string* out, const auto& c) {
                        absl::StrAppend(out, Literal(c));
                      }));
}

}  // namespace epikv
