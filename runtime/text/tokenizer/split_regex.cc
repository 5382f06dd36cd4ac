#include "runtime/text/tokenizer/split_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

using Dialect = SplitRegex::Dialect;

absl::Status Refused(absl::string_view what) {
  return absl::UnimplementedError(absl::StrCat("has ", what, ", which is not supported"));
}

// Rewrites a pattern for PCRE2. It knows the constructs that all engines agree on and those whose
// difference it can spell out; everything else is refused.
class Translator {
 public:
  Translator(absl::string_view pattern, Dialect dialect) : rest_(pattern), dialect_(dialect) {}

  absl::StatusOr<std::string> Translate() {
    while (!rest_.empty()) {
      const absl::Status status = Next();
      if (!status.ok()) return status;
    }
    return std::move(out_);
  }

 private:
  absl::Status Next() {
    switch (rest_[0]) {
      case '\\':
        return Escape(Place::kOutside);
      case '[':
        return Class();
      case '(':
        return Group();
      case '{':
        return Repeat();
      case '^':
        return Refused("the anchor ^");
      case '$':  // the end of any line, as in Ruby
        out_ += "(?=\\n|\\z)";
        rest_.remove_prefix(1);
        return absl::OkStatus();
      default:
        Copy(1);
        return absl::OkStatus();
    }
  }

  enum class Place { kOutside, kInClass };

  absl::Status Escape(Place place) {
    if (rest_.size() < 2) return Refused("a lone backslash at the end");
    const char kind = rest_[1];
    if (kind == 'p' || kind == 'P') return Property();
    if (kind == 'u' || kind == 'x') return CodePoint();
    if (absl::StrContains("sSdDwW", kind)) return Shorthand(place);
    if (!absl::StrContains("rntf", kind) && !absl::ascii_ispunct(kind)) {
      return Refused(absl::StrCat("the escape ", rest_.substr(0, 2)));
    }
    Copy(2);
    return absl::OkStatus();
  }

  // \p{Lu}, \p{L}: general categories, the same everywhere. Other names are taken as scripts:
  // a bare script name means more in PCRE2 (the script extensions).
  absl::Status Property() {
    const size_t close = rest_.find('}');
    if (rest_.substr(2, 1) != "{" || close == absl::string_view::npos) {
      return Refused("a \\p without braces");
    }
    const absl::string_view name = rest_.substr(3, close - 3);
    for (char c : name) {
      if (!absl::ascii_isalpha(c)) return Refused(absl::StrCat("the property ", name));
    }
    absl::StrAppend(&out_, rest_.substr(0, 3), name.size() > 2 ? "sc:" : "", name, "}");
    rest_.remove_prefix(close + 1);
    return absl::OkStatus();
  }

  // \uHHHH and \x{H...}.
  absl::Status CodePoint() {
    const bool braces = rest_[1] == 'x';
    const size_t first = braces ? 3 : 2;
    const size_t last = braces ? rest_.find('}') : 6;
    if (last == absl::string_view::npos || last > rest_.size() ||
        (braces && rest_.substr(2, 1) != "{")) {
      return Refused("a \\x without braces or an incomplete \\u");
    }
    const absl::string_view digits = rest_.substr(first, last - first);
    for (char c : digits) {
      if (!absl::ascii_isxdigit(c)) return Refused(absl::StrCat("the code point ", digits));
    }
    absl::StrAppend(&out_, "\\x{", digits, "}");
    rest_.remove_prefix(last + (braces ? 1 : 0));
    return absl::OkStatus();
  }

  // \s, \d, \w and their complements, by property: engines differ in what they count.
  absl::Status Shorthand(Place place) {
    const char kind = rest_[1];
    const bool complement = absl::ascii_isupper(kind);
    std::string members;
    switch (absl::ascii_tolower(kind)) {
      case 's':
        members = complement ? "\\P{White_Space}" : "\\p{White_Space}";
        break;
      case 'd':
        members = complement ? "\\P{Nd}" : "\\p{Nd}";
        break;
      case 'w':
        if (complement && place == Place::kInClass) return Refused("a \\W inside [...]");
        members = dialect_ == Dialect::kRustRegex
                      ? "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}"
                      : "\\p{Alphabetic}\\p{M}\\p{N}\\p{Pc}";
        if (place == Place::kOutside) members = absl::StrCat(complement ? "[^" : "[", members, "]");
        break;
    }
    absl::StrAppend(&out_, members);
    rest_.remove_prefix(2);
    return absl::OkStatus();
  }

  absl::Status Class() {
    Copy(absl::StartsWith(rest_, "[^") ? 2 : 1);
    if (absl::StartsWith(rest_, "]")) return Refused("a ] first in [...]");
    while (!rest_.empty() && rest_[0] != ']') {
      if (rest_[0] == '[') return Refused("a [ inside [...]");
      if (absl::StartsWith(rest_, "&&")) return Refused("&& inside [...]");
      if (rest_[0] == '\\') {
        const absl::Status status = Escape(Place::kInClass);
        if (!status.ok()) return status;
      } else {
        Copy(1);
      }
    }
    if (rest_.empty()) return Refused("a [ without ]");
    Copy(1);
    return absl::OkStatus();
  }

  absl::Status Group() {
    if (absl::StartsWith(rest_, "(*")) return Refused("(*");
    if (!absl::StartsWith(rest_, "(?")) {
      Copy(1);
      return absl::OkStatus();
    }
    for (absl::string_view opening : {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (!absl::StartsWith(rest_, opening)) continue;
      Copy(opening.size());
      return absl::OkStatus();
    }
    return Refused(absl::StrCat("the group ", rest_.substr(0, 3)));
  }

  // {n}, {n,} and {n,m}. What may follow a brace means different things to different engines.
  absl::Status Repeat() {
    const size_t close = rest_.find('}');
    if (close == absl::string_view::npos || close < 2 || !absl::ascii_isdigit(rest_[1])) {
      return Refused("a { that is no {n}, {n,} or {n,m}");
    }
    for (char c : rest_.substr(1, close - 1)) {
      if (!absl::ascii_isdigit(c) && c != ',') return Refused("a { that is no {n}, {n,} or {n,m}");
    }
    const absl::string_view after = rest_.substr(close + 1, 1);
    if (after == "+" || after == "?" || after == "*") return Refused(absl::StrCat("a }", after));
    Copy(close + 1);
    return absl::OkStatus();
  }

  void Copy(size_t length) {
    absl::StrAppend(&out_, rest_.substr(0, length));
    rest_.remove_prefix(length);
  }

  absl::string_view rest_;
  const Dialect dialect_;
  std::string out_;
};

std::string PcreMessage(int error) {
  PCRE2_UCHAR message[256];
  pcre2_get_error_message(error, message, sizeof(message));
  return reinterpret_cast<const char*>(message);
}

PCRE2_SPTR Units(absl::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

}  // namespace

void SplitRegex::Free::operator()(pcre2_real_code_8* code) const { pcre2_code_free(code); }

absl::StatusOr<SplitRegex> SplitRegex::FromJson(const Json& json, const std::string& path) {
  const std::string pattern_path = absl::StrCat(path, ".pattern");
  const Json& pattern = Field(json, "pattern");
  const absl::Status status = CheckFields(pattern, pattern_path, {"Regex", "String"});
  if (!status.ok()) return status;
  if (pattern.size() != 1) return Malformed(pattern_path, "must have one of Regex and String");
  const bool literal = pattern.contains("String");
  const absl::StatusOr<std::string> text =
      StringField(pattern, pattern_path, literal ? "String" : "Regex");
  if (!text.ok()) return text.status();
  absl::StatusOr<SplitRegex> regex = literal ? Literal(*text) : Compile(*text, Dialect::kOniguruma);
  if (!regex.ok()) return Unsupported(pattern_path, regex.status().message());
  return regex;
}

absl::StatusOr<SplitRegex> SplitRegex::Compile(absl::string_view pattern, Dialect dialect) {
  const absl::StatusOr<std::string> translated = Translator(pattern, dialect).Translate();
  if (!translated.ok()) return translated.status();
  return CompilePcre(*translated);
}

absl::StatusOr<SplitRegex> SplitRegex::Literal(absl::string_view text) {
  if (text.empty()) return Refused("a pattern that matches the empty string");
  return SplitRegex(std::string(text));
}

absl::StatusOr<SplitRegex> SplitRegex::CompilePcre(const std::string& pattern) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  Code code(pcre2_compile(Units(pattern), pattern.size(), PCRE2_UTF | PCRE2_UCP, &error, &offset,
                          nullptr));
  if (code == nullptr) {
    return absl::UnimplementedError(
        absl::StrCat("has a pattern that PCRE2 refuses: ", PcreMessage(error)));
  }
  uint32_t matches_empty = 0;
  pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &matches_empty);
  if (matches_empty != 0) return Refused("a pattern that matches the empty string");
  // Where the kernel forbids executable memory this fails and matching is interpreted.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return SplitRegex(std::move(code));
}

absl::StatusOr<std::vector<SplitRegex::Match>> SplitRegex::FindAll(absl::string_view text) const {
  std::vector<Match> matches;
  if (code_ == nullptr) {
    for (size_t at = text.find(literal_); at != text.npos;) {
      matches.push_back({at, at + literal_.size()});
      at = text.find(literal_, at + literal_.size());
    }
    return matches;
  }
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create_from_pattern(code_.get(), nullptr), &pcre2_match_data_free);
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(data.get());
  size_t start = 0;
  while (start < text.size()) {
    const auto match = [&](uint32_t options) {
      return pcre2_match(code_.get(), Units(text), text.size(), start, PCRE2_NO_UTF_CHECK | options,
                         data.get(), nullptr);
    };
    int found = match(0);
    // Compiled code has a small stack; the interpreter has the heap.
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(PCRE2_NO_JIT);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return absl::ResourceExhaustedError(
          absl::StrCat("splitting the text at byte ", start, " failed: ", PcreMessage(found)));
    }
    matches.push_back({bounds[0], bounds[1]});
    start = bounds[1];
  }
  return matches;
}

absl::StatusOr<std::string> SplitRegex::Replace(absl::string_view text,
                                                absl::string_view content) const {
  const absl::StatusOr<std::vector<Match>> matches = FindAll(text);
  if (!matches.ok()) return matches.status();
  std::string result;
  result.reserve(text.size() + matches->size() * content.size());
  size_t end = 0;
  for (const Match& match : *matches) {
    absl::StrAppend(&result, text.substr(end, match.begin - end), content);
    end = match.end;
  }
  absl::StrAppend(&result, text.substr(end));
  return result;
}

}  // namespace epikv
