#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "runtime/text/utf8.h"

namespace epikv {

// Bytes of a text.
struct TextRange {
  size_t begin = 0, end = 0;
};

struct EncodeOptions {
  bool add_special = true;  // what the post-processor adds: a beginning-of-sequence token, say
  // Where what looks like a special token is text, in order: what people wrote, in a prompt whose
  // structure is ours.
  std::vector<TextRange> plain = {};
};

struct DecodeOptions {
  bool skip_special = true;         // leave special tokens out of the text
  std::vector<int32_t> shown = {};  // but for these
};

// Text to token ids and back, exactly as the `tokenizers` library does it from the same file: BPE
// (byte-level, or of characters with byte fallback), Unigram and WordLevel. Two things differ:
// characters newer than this machine's or that library's Unicode tables may be cut or normalized
// otherwise; and where a run of byte fallback tokens is no UTF-8, what of it is stays text, while
// that library gives U+FFFD for each of its bytes (text could not be told before the run's end).
// Immutable: one object serves all threads.
class Tokenizer {
 public:
  // From the text of a tokenizer.json. INVALID_ARGUMENT for a malformed file; UNIMPLEMENTED, with
  // the field's name, for one that asks for anything this class cannot do.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(absl::string_view tokenizer_json);
  ~Tokenizer();

  // INVALID_ARGUMENT for text that is not UTF-8 (names the byte) or holds a word that a
  // word-level vocabulary without an unknown token lacks (names the word); and where a special
  // token in a plain range cannot be text, since the vocabulary has the same as a word (names it).
  absl::StatusOr<std::vector<int32_t>> Encode(absl::string_view text,
                                              const EncodeOptions& options = {}) const;

  // UTF-8 whatever the ids are; bytes that are not become U+FFFD. Ids that name no token
  // contribute nothing (a model's vocabulary may be padded beyond the tokenizer's).
  std::string Decode(absl::Span<const int32_t> ids, const DecodeOptions& options = {}) const;

  // The bytes that a token contributes to decoded text where it is not the first, not always whole
  // UTF-8; absent if the id names no token. Valid while the tokenizer is.
  std::optional<absl::string_view> TokenBytes(int32_t id) const;
  // The same of a first token. Absent also where the text of those after it depends on it.
  std::optional<std::string> FirstTokenBytes(int32_t id) const;
  // What stands between the bytes of two contributing tokens: nothing, or a space.
  absl::string_view separator() const;

  // Special tokens mark structure and are no text.
  bool IsSpecial(int32_t id) const;

  // The id of a token as the file spells it: byte-level files spell " the" as "Ġthe".
  std::optional<int32_t> TokenToId(absl::string_view token) const;

  // One past the largest id.
  int64_t vocab_size() const;

  // The text it was made from.
  const std::string& json() const;

 private:
  friend class Detokenizer;
  struct Parts;
  explicit Tokenizer(std::unique_ptr<const Parts> parts);

  const std::unique_ptr<const Parts> parts_;
};

// Text of tokens that come one by one: what it gives, concatenated, is what Decode gives for them
// all. Each piece is whole code points. Not thread-safe.
class Detokenizer {
 public:
  // `tokenizer` outlives it.
  explicit Detokenizer(const Tokenizer& tokenizer, const DecodeOptions& options = {});

  std::string Append(int32_t id);

  // What the end of the tokens settles.
  std::string Flush();

 private:
  bool Shown(int32_t special) const;
  // The text without what is taken off the beginning of all text.
  std::string WithoutStrip(std::string text);

  const Tokenizer& tokenizer_;
  const DecodeOptions options_;
  Utf8Repair repair_;
  bool contributed_ = false;  // some token has added to the text
  size_t strip_left_;         // times that something may yet be taken off the beginning
};

}  // namespace epikv
