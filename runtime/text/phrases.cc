#include "runtime/text/phrases.h"

#include <optional>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace epikv {
namespace {

// The last token of `text`, if `part` is in it.
std::optional<int32_t> LastToken(const Tokenizer& tokenizer, absl::string_view text,
                                 absl::string_view part) {
  const absl::StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, {.add_special = false});
  if (!ids.ok() || ids->empty()) return std::nullopt;
  const std::optional<absl::string_view> bytes = tokenizer.TokenBytes(ids->back());
  if (!bytes.has_value() || bytes->find(part) == bytes->npos) return std::nullopt;
  return ids->back();
}

std::vector<int32_t> Phrase(const Tokenizer& tokenizer, absl::string_view text) {
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, {.add_special = false});
  return ids.ok() ? *std::move(ids) : std::vector<int32_t>();
}

}  // namespace

std::vector<int32_t> SentenceEnds(const Tokenizer& tokenizer) {
  std::set<int32_t> ends;
  for (const char* text : {"\n", ".\n", ")\n", "\n\n", ".\n\n", ")\n\n", "?\n\n"}) {
    if (const auto id = LastToken(tokenizer, text, "\n"); id.has_value()) ends.insert(*id);
  }
  if (ends.empty()) {
    if (const auto id = LastToken(tokenizer, ".", "."); id.has_value()) ends.insert(*id);
  }
  return {ends.begin(), ends.end()};
}

void AddPhrases(const Tokenizer& tokenizer, ModelShape& shape) {
  shape.sentence_ends = SentenceEnds(tokenizer);
  shape.repeat = {
      .whole = Phrase(tokenizer, "\n\nRepeat the previous context exactly."),
      .part =
          Phrase(tokenizer, "\n\nRepeat the part of the previous context exactly, starting with"),
      .suffix = Phrase(tokenizer, "\n")};
}

}  // namespace epikv
