#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer/json_fields.h"

struct pcre2_real_code_8;

namespace epikv {

// A pattern by which text is cut or rewritten. Matching is PCRE2's; the patterns in tokenizer files
// are written for other engines, and what those engines read differently is rewritten or refused.
// Character properties are those of PCRE2's Unicode version. Immutable, any thread.
class SplitRegex {
 public:
  enum class Dialect {
    kOniguruma,  // patterns from files
    kRustRegex,  // patterns fixed in the `tokenizers` library
  };

  struct Match {
    size_t begin, end;  // bytes, half open, not empty
  };

  // The field `pattern` of the object at `path`: {"String": ...} or {"Regex": ...}.
  static absl::StatusOr<SplitRegex> FromJson(const Json& json, const std::string& path);
  // UNIMPLEMENTED if the pattern uses what cannot be carried over; the message begins with "has".
  static absl::StatusOr<SplitRegex> Compile(absl::string_view pattern, Dialect dialect);
  // Matches `text` itself.
  static absl::StatusOr<SplitRegex> Literal(absl::string_view text);

  // All matches, from left to right. Precondition: `text` is UTF-8. RESOURCE_EXHAUSTED if a match
  // takes too many steps.
  absl::StatusOr<std::vector<Match>> FindAll(absl::string_view text) const;

  // The text with `content` for every match. Precondition and errors as above.
  absl::StatusOr<std::string> Replace(absl::string_view text, absl::string_view content) const;

 private:
  struct Free {
    void operator()(pcre2_real_code_8* code) const;
  };
  using Code = std::unique_ptr<pcre2_real_code_8, Free>;

  explicit SplitRegex(std::string literal) : literal_(std::move(literal)) {}
  explicit SplitRegex(Code code) : code_(std::move(code)) {}
  static absl::StatusOr<SplitRegex> CompilePcre(const std::string& pattern);

  std::string literal_;  // what is matched, where there is no code
  Code code_;
};

}  // namespace epikv
