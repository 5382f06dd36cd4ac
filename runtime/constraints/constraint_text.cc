#include "runtime/constraints/constraint_text.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/constraints/json_schema.h"
#include "runtime/text/utf8.h"

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
      open = std::max(0, open - 1);
    }
  }
  return deepest;
}

// A grammar without its strings, classes and comments, each of them a space.
std::string BareRules(absl::string_view grammar) {
  std::string bare;
  for (size_t i = 0; i < grammar.size(); ++i) {
    const char opens = grammar[i];
    if (opens != '"' && opens != '[' && opens != '#') {
      bare.push_back(opens);
      continue;
    }
    bare.push_back(' ');
    const absl::string_view closes = opens == '"' ? "\"\r\n" : opens == '[' ? "]" : "\r\n";
    for (++i; i < grammar.size() && !absl::StrContains(closes, grammar[i]); ++i) {
      if (grammar[i] == '\\' && opens != '#') ++i;
    }
  }
  return bare;
}

bool IsOfName(char c) { return absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '.'; }

bool HasName(absl::string_view bare, absl::string_view name) {
  for (size_t at = bare.find(name); at != bare.npos; at = bare.find(name, at + 1)) {
    const size_t end = at + name.size();
    if ((at == 0 || !IsOfName(bare[at - 1])) && (end == bare.size() || !IsOfName(bare[end]))) {
      return true;
    }
  }
  return false;
}

// What an EBNF of xgrammar's can have beside rules: tokens by id, which are no text, other ways to
// say what a text is, attributes that make a rule more than its text, and look-ahead that is taken
// for granted.
absl::Status CheckGrammar(absl::string_view grammar) {
  const std::string bare = BareRules(grammar);
  for (const char* macro :
       {"TagDispatch", "Token", "ExcludeToken", "TokenTagDispatch", "Regex", "Substring"}) {
    if (HasName(bare, macro)) {
      return absl::InvalidArgumentError(
          absl::StrCat("rules, strings and character classes are supported, not '", macro, "'"));
    }
  }
  if (absl::StrContains(bare, "(=")) {
    return absl::InvalidArgumentError("look-ahead, (= ...), is not supported");
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
  if (text.texts.empty()) {
    return absl::InvalidArgumentError("is empty; at least one item is needed");
  }
  if (text.kind == ConstraintText::Kind::kChoice ||
      text.kind == ConstraintText::Kind::kStructuralTag) {
    return absl::OkStatus();
  }
  const std::string& only = text.texts.front();
  if (text.kind == ConstraintText::Kind::kJsonSchema) return ReadJsonSchema(only).status();
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
