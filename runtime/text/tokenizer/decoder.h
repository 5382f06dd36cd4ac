#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "runtime/text/tokenizer/json_fields.h"
#include "runtime/text/tokenizer/metaspace.h"
#include "runtime/text/tokenizer/split_regex.h"

namespace epikv {

// The part `decoder` of a tokenizer: what tokens are in text. Immutable, any thread.
class Decoder {
 public:
  // What is taken off the text's beginning: `content` as often as it stands there, at most `count`
  // times.
  struct Strip {
    std::string content;
    size_t count = 0;
  };

  // `json`: null, ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip, or a Sequence of these.
  // Refused are those that act on text at its end or on more of it than a token at a time, but for
  // Strip behind Fuse: text could not be told token by token.
  static absl::StatusOr<Decoder> FromJson(const Json& json);

  // The bytes of a token, not always whole UTF-8. `first`: no token stands before it.
  // RESOURCE_EXHAUSTED if a pattern takes too many steps.
  absl::StatusOr<std::string> BytesOf(absl::string_view token, bool first) const;
  // Whether it matters that a token is the first.
  bool minds_first() const;

  // What stands between the bytes of two tokens.
  absl::string_view separator() const { return separator_; }
  const Strip& strip() const { return strip_; }

 private:
  enum class Kind { kByteLevel, kByteFallback, kMetaspace, kReplace, kStrip };

  struct Step {
    Kind kind;
    MetaspaceScheme metaspace;          // kMetaspace
    std::optional<SplitRegex> pattern;  // kReplace: each match becomes `content`
    std::string content;                // kReplace; kStrip: taken off each token's beginning
    size_t count = 0;                   // kStrip: at most so often
  };

  absl::Status Add(const Json& json, const std::string& path);
  absl::Status AddStep(const Json& json, const std::string& type, const std::string& path);
  absl::Status AddStrip(const Json& json, const std::string& path);

  std::vector<Step> steps_;  // of each token
  std::string separator_;
  Strip strip_;
  bool bytes_made_ = false;  // tokens are no longer text: nothing more can be done with each
  bool fused_ = false;       // what follows is for the whole text
};

}  // namespace epikv
