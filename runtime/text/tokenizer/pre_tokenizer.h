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

// Text in pieces, each of which the model encodes by itself.
class Pieces {
 public:
  // One piece, or none if `text` is empty.
  explicit Pieces(absl::string_view text);

  size_t size() const { return spans_.size(); }
  absl::string_view operator[](size_t i) const {
    return absl::string_view(text_).substr(spans_[i].begin, spans_[i].end - spans_[i].begin);
  }

 private:
  friend class PreTokenizer;
  struct Span {
    size_t begin, end;  // bytes of text_, not empty
  };

  std::string text_;
  std::vector<Span> spans_;  // in order
};

// The part `pre_tokenizer` of a tokenizer: cuts text into pieces. Immutable, any thread.
class PreTokenizer {
 public:
  // `json`: null, Whitespace, WhitespaceSplit, Digits, Punctuation, Split, Metaspace, ByteLevel,
  // or a Sequence of these with ByteLevel nowhere but last.
  static absl::StatusOr<PreTokenizer> FromJson(const Json& json);

  // `at_start`: no text stands before this one. Precondition: `text` is UTF-8. RESOURCE_EXHAUSTED
  // if a pattern takes too many steps.
  absl::StatusOr<Pieces> Split(absl::string_view text, bool at_start) const;

  // Whether the model is to see each piece's bytes in the byte alphabet.
  bool byte_level() const { return byte_level_; }
  // Whether pieces at the beginning of the text are treated in a way of their own.
  bool minds_beginning() const;

 private:
  // What becomes of a match of a cut's pattern (`invert`: of what lies between two matches). The
  // rest stays.
  enum class Behavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Cut {
    SplitRegex regex;
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
  };

  struct Mark {
    MetaspaceScheme scheme;
    bool replaces_spaces = false;  // by the scheme's character; else it only puts one before pieces
  };

  struct Step {
    std::optional<Mark> mark;  // done first
    std::optional<Cut> cut;
  };

  struct Segment {
    size_t begin, end;  // bytes of a piece
    bool match;
  };

  static absl::StatusOr<Behavior> BehaviorFromJson(const Json& json, const std::string& path);
  // The pieces that a piece is cut into.
  static absl::StatusOr<std::vector<Segment>> Segments(absl::string_view piece, const Cut& cut);
  static std::vector<Segment> Arranged(std::vector<Segment> segments, Behavior behavior);

  absl::Status Add(const Json& json, const std::string& path);
  absl::Status AddSplit(const Json& json, const std::string& path);
  absl::Status AddMetaspace(const Json& json, const std::string& path);
  absl::Status AddByteLevel(const Json& json, const std::string& path);
  absl::Status AddFixed(absl::string_view pattern, Behavior behavior, bool invert,
                        const std::string& path);

  static Pieces Marked(const Pieces& pieces, const Mark& mark, bool at_start);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace epikv
