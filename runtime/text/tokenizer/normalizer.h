#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/split_regex.h"
#include "runtime/text/tokenizer/unicode_form.h"

namespace epikv {

// The part `normalizer` of a tokenizer: rewrites text before it is cut. Immutable, any thread.
class Normalizer {
 public:
  // `json`: null, NFC, NFD, NFKC, NFKD, Lowercase, Strip, Replace, Prepend, or a Sequence of
  // these.
  static absl::StatusOr<Normalizer> FromJson(const Json& json);

  // Precondition: `text` is UTF-8. RESOURCE_EXHAUSTED if a pattern takes too many steps.
  absl::StatusOr<std::string> Normalize(absl::string_view text) const;

  // Whether characters at the beginning of the text may go without a replacement.
  bool may_cut_beginning() const;

 private:
  enum class Kind { kForm, kLowerCase, kStrip, kReplace, kPrepend };

  struct Step {
    Kind kind;
    UnicodeForm form = UnicodeForm::kNfc;  // kForm
    bool left = false, right = false;      // kStrip: the sides that lose white space
    std::optional<SplitRegex> pattern;     // kReplace: each match becomes `content`
    std::string content;                   // kReplace; kPrepend: put before text that is not empty
  };

  absl::Status Add(const Json& json, const std::string& path);
  absl::Status AddStep(const Json& json, const std::string& type, const std::string& path);

  std::vector<Step> steps_;
};

}  // namespace epikv
