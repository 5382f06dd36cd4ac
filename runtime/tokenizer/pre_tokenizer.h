#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/tokenizer/json_fields.h"
#include "runtime/tokenizer/split_regex.h"

namespace epikv {

// The part `pre_tokenizer` of a tokenizer: cuts text into pieces, each of which the model encodes
// by itself. Immutable, any thread.
class PreTokenizer {
 public:
  // `json`: null, Whitespace, WhitespaceSplit, Digits, Split, ByteLevel, or a Sequence of these
  // with ByteLevel nowhere but last.
  static absl::StatusOr<PreTokenizer> FromJson(const Json& json);

  // Pieces, none empty, in order. Precondition: `text` is UTF-8.
  absl::StatusOr<std::vector<std::string>> Split(absl::string_view text) const;

  // Whether the model is to see each piece's bytes in the byte alphabet.
  bool byte_level() const { return byte_level_; }

 private:
  enum class Keep { kAll, kMatches, kGaps };

  struct Step {
    bool prefix_space = false;        // before the cut, each piece gets a leading space it lacks
    std::optional<SplitRegex> regex;  // absent: no cut
    Keep keep = Keep::kAll;
  };

  absl::Status Add(const Json& json, const std::string& path);
  absl::Status AddSequence(const Json& json, const std::string& path);
  absl::Status AddSplit(const Json& json, const std::string& path);
  absl::Status AddByteLevel(const Json& json, const std::string& path);
  absl::Status AddCut(absl::StatusOr<SplitRegex> regex, Keep keep, const std::string& path);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace epikv
