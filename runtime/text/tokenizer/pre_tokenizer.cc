#include "runtime/text/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

using Dialect = SplitRegex::Dialect;

// How GPT-2 cuts text; what ByteLevel does unless told otherwise.
constexpr absl::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// ASCII's symbols count as punctuation, others do not.
constexpr absl::string_view kPunctuation = R"([\p{P}$+<=>\^`|~])";

}  // namespace

Pieces::Pieces(absl::string_view text) : text_(text) {
  if (!text.empty()) spans_.push_back({0, text.size()});
}

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const Json& json) {
  PreTokenizer result;
  const absl::Status status = result.Add(json, "pre_tokenizer");
  if (!status.ok()) return status;
  return result;
}

absl::Status PreTokenizer::Add(const Json& json, const std::string& path) {
  const absl::StatusOr<std::string> type = TypeOf(json, path);
  if (!type.ok()) return type.status();
  if (type->empty()) return absl::OkStatus();
  if (byte_level_) return Unsupported(path, "follows ByteLevel, which must be last");
  if (*type == "Sequence") {
    return ForEachOfSequence(
        json, path, "pretokenizers",
        [this](const Json& part, const std::string& part_path) { return Add(part, part_path); });
  }
  if (*type == "Split") return AddSplit(json, path);
  if (*type == "Metaspace") return AddMetaspace(json, path);
  if (*type == "ByteLevel") return AddByteLevel(json, path);
  if (*type == "Whitespace" || *type == "WhitespaceSplit") {
    const absl::Status status = CheckFields(json, path, {"type"});
    if (!status.ok()) return status;
    return *type == "Whitespace"
               ? AddFixed(R"(\w+|[^\w\s]+)", Behavior::kRemoved, /*invert=*/true, path)
               : AddFixed(R"(\s+)", Behavior::kRemoved, /*invert=*/false, path);
  }
  if (*type == "Digits") {
    const absl::Status status = CheckFields(json, path, {"type", "individual_digits"});
    if (!status.ok()) return status;
    const absl::StatusOr<bool> individual = BoolField(json, path, "individual_digits", false);
    if (!individual.ok()) return individual.status();
    return AddFixed(*individual ? R"(\p{N})" : R"(\p{N}+)", Behavior::kIsolated, /*invert=*/false,
                    path);
  }
  if (*type == "Punctuation") {
    const absl::Status status = CheckFields(json, path, {"type", "behavior"});
    if (!status.ok()) return status;
    const absl::StatusOr<Behavior> behavior =
        json.contains("behavior") ? BehaviorFromJson(json, path) : Behavior::kIsolated;
    if (!behavior.ok()) return behavior.status();
    return AddFixed(kPunctuation, *behavior, /*invert=*/false, path);
  }
  return Unsupported(absl::StrCat(path, ".type"),
                     absl::StrCat("is '", *type,
                                  "'; supported: ByteLevel, Digits, Metaspace, Punctuation, "
                                  "Sequence, Split, Whitespace, WhitespaceSplit"));
}

absl::StatusOr<PreTokenizer::Behavior> PreTokenizer::BehaviorFromJson(const Json& json,
                                                                      const std::string& path) {
  const absl::StatusOr<std::string> name = StringField(json, path, "behavior");
  if (!name.ok()) return name.status();
  if (*name == "Isolated") return Behavior::kIsolated;
  if (*name == "Removed") return Behavior::kRemoved;
  if (*name == "MergedWithPrevious") return Behavior::kMergedWithPrevious;
  if (*name == "MergedWithNext") return Behavior::kMergedWithNext;
  if (*name == "Contiguous") return Behavior::kContiguous;
  return Unsupported(absl::StrCat(path, ".behavior"),
                     absl::StrCat("is '", *name,
                                  "'; supported: Contiguous, Isolated, MergedWithNext, "
                                  "MergedWithPrevious, Removed"));
}

absl::Status PreTokenizer::AddSplit(const Json& json, const std::string& path) {
  const absl::Status status = CheckFields(json, path, {"type", "pattern", "behavior", "invert"});
  if (!status.ok()) return status;
  const absl::StatusOr<Behavior> behavior = BehaviorFromJson(json, path);
  if (!behavior.ok()) return behavior.status();
  const absl::StatusOr<bool> invert = BoolField(json, path, "invert", false);
  if (!invert.ok()) return invert.status();
  absl::StatusOr<SplitRegex> regex = SplitRegex::FromJson(json, path);
  if (!regex.ok()) return regex.status();
  steps_.push_back({.cut = Cut{*std::move(regex), *behavior, *invert}});
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddMetaspace(const Json& json, const std::string& path) {
  const absl::StatusOr<MetaspaceScheme> scheme = MetaspaceScheme::FromJson(json, path);
  if (!scheme.ok()) return scheme.status();
  const absl::StatusOr<bool> split = BoolField(json, path, "split", true);
  if (!split.ok()) return split.status();
  Step step{.mark = Mark{*scheme, /*replaces_spaces=*/true}};
  if (*split) {
    absl::StatusOr<SplitRegex> regex = SplitRegex::Literal(scheme->replacement);
    if (!regex.ok()) return regex.status();
    step.cut = Cut{*std::move(regex), Behavior::kMergedWithNext};
  }
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddByteLevel(const Json& json, const std::string& path) {
  const absl::Status status =
      CheckFields(json, path, {"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (!status.ok()) return status;
  const absl::StatusOr<bool> prefix_space = BoolField(json, path, "add_prefix_space", true);
  if (!prefix_space.ok()) return prefix_space.status();
  const absl::StatusOr<bool> use_regex = BoolField(json, path, "use_regex", true);
  if (!use_regex.ok()) return use_regex.status();
  byte_level_ = true;
  if (*prefix_space) {
    steps_.push_back({.mark = Mark{{.replacement = " ", .prepend = MetaspacePrepend::kAlways}}});
  }
  if (!*use_regex) return absl::OkStatus();
  absl::StatusOr<SplitRegex> regex = SplitRegex::Compile(kGpt2Pattern, Dialect::kOniguruma);
  if (!regex.ok()) return regex.status();
  steps_.push_back({.cut = Cut{*std::move(regex)}});
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddFixed(absl::string_view pattern, Behavior behavior, bool invert,
                                    const std::string& path) {
  absl::StatusOr<SplitRegex> regex = SplitRegex::Compile(pattern, Dialect::kRustRegex);
  if (!regex.ok()) return Unsupported(path, regex.status().message());
  steps_.push_back({.cut = Cut{*std::move(regex), behavior, invert}});
  return absl::OkStatus();
}

absl::StatusOr<Pieces> PreTokenizer::Split(absl::string_view text, bool at_start) const {
  Pieces pieces(text);
  for (const Step& step : steps_) {
    if (step.mark.has_value()) pieces = Marked(pieces, *step.mark, at_start);
    if (!step.cut.has_value()) continue;
    std::vector<Pieces::Span> finer;
    for (size_t i = 0; i < pieces.size(); ++i) {
      const auto segments = Segments(pieces[i], *step.cut);
      if (!segments.ok()) return segments.status();
      const size_t begin = pieces.spans_[i].begin;
      for (const Segment& segment : *segments) {
        finer.push_back({begin + segment.begin, begin + segment.end});
      }
    }
    pieces.spans_ = std::move(finer);
  }
  return pieces;
}

Pieces PreTokenizer::Marked(const Pieces& pieces, const Mark& mark, bool at_start) {
  const std::string& character = mark.scheme.replacement;
  Pieces result("");
  std::string& text = result.text_;
  text.reserve(pieces.text_.size() + pieces.text_.size() / 2);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const absl::string_view piece = pieces[i];
    const size_t begin = text.size();
    const bool asked = mark.scheme.prepend == MetaspacePrepend::kAlways ||
                       (mark.scheme.prepend == MetaspacePrepend::kFirst && at_start &&
                        pieces.spans_[i].begin == 0);
    const bool has = absl::StartsWith(piece, character) ||
                     (mark.replaces_spaces && absl::StartsWith(piece, " "));
    if (asked && !has) text += character;
    if (mark.replaces_spaces) {
      for (char c : piece) c == ' ' ? text += character : text += c;
    } else {
      text.append(piece.data(), piece.size());
    }
    result.spans_.push_back({begin, text.size()});
  }
  return result;
}

absl::StatusOr<std::vector<PreTokenizer::Segment>> PreTokenizer::Segments(absl::string_view piece,
                                                                          const Cut& cut) {
  const absl::StatusOr<std::vector<SplitRegex::Match>> matches = cut.regex.FindAll(piece);
  if (!matches.ok()) return matches.status();
  std::vector<Segment> segments;
  segments.reserve(matches->size() + 1);
  size_t end = 0;
  for (const SplitRegex::Match& match : *matches) {
    if (match.begin > end) segments.push_back({end, match.begin, cut.invert});
    segments.push_back({match.begin, match.end, !cut.invert});
    end = match.end;
  }
  if (end < piece.size()) segments.push_back({end, piece.size(), cut.invert});
  return Arranged(std::move(segments), cut.behavior);
}

std::vector<PreTokenizer::Segment> PreTokenizer::Arranged(std::vector<Segment> segments,
                                                          Behavior behavior) {
  if (behavior == Behavior::kIsolated) return segments;
  if (behavior == Behavior::kRemoved) {
    segments.erase(std::remove_if(segments.begin(), segments.end(),
                                  [](const Segment& segment) { return segment.match; }),
                   segments.end());
    return segments;
  }
  const bool backwards = behavior == Behavior::kMergedWithNext;
  if (backwards) std::reverse(segments.begin(), segments.end());
  std::vector<Segment> result;
  bool previous = false;
  for (const Segment& segment : segments) {
    const bool joins =
        behavior == Behavior::kContiguous ? segment.match == previous : segment.match && !previous;
    previous = segment.match;
    if (!joins || result.empty()) {
      result.push_back(segment);
    } else if (backwards) {
      result.back().begin = segment.begin;
    } else {
      result.back().end = segment.end;
    }
  }
  if (backwards) std::reverse(result.begin(), result.end());
  return result;
}

bool PreTokenizer::minds_beginning() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const Step& step) {
    return step.mark.has_value() && step.mark->scheme.prepend == MetaspacePrepend::kFirst;
  });
}

}  // namespace epikv
