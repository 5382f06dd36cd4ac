// A tokenizer file, which a model file brings along: it is refused by name of a field, or serves.
// And text, under files that are well: byte-level tokens spell it exactly.

#include <fstream>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

const Tokenizer& Golden(const char* name) {
  std::ifstream file(
      absl::StrCat(EPIKV_SOURCE_DIR "/tests/golden/tokenizers/", name, ".tokenizer.json"));
  const std::string json{std::istreambuf_iterator<char>(file), {}};
  return *Tokenizer::FromJson(json).value().release();
}

// Token by token nothing broken is told and nothing that is not in all the text.
void CheckStream(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                 absl::string_view decoded) {
  Detokenizer stream(tokenizer, {.skip_special = false});
  std::string told;
  for (int32_t id : ids) {
    const std::string piece = stream.Append(id);
    Require(!FirstInvalidUtf8(piece).has_value(), "pieces are whole code points", piece);
    told += piece;
    Require(absl::StartsWith(decoded, told), "nothing is told too soon", told);
  }
}

void CheckText(const Tokenizer& tokenizer, absl::string_view text, bool exact) {
  const absl::StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, {.add_special = false});
  if (!ids.ok()) {
    Require(!ids.status().message().empty(), "an error has a text");
    Require(!FirstInvalidUtf8(ids.status().message()).has_value(), "that clients can read");
    Require(!exact || FirstInvalidUtf8(text).has_value(), "text can be encoded", text);
    return;
  }
  for (int32_t id : *ids) {
    Require(tokenizer.TokenBytes(id).has_value(), "ids are tokens", absl::StrCat(id));
  }
  const std::string decoded = tokenizer.Decode(*ids, {.skip_special = false});
  CheckStream(tokenizer, *ids, decoded);
  Require(!FirstInvalidUtf8(decoded).has_value(), "decoded text is UTF-8", decoded);
  Require(!exact || decoded == text, "tokens spell the text", decoded);
}

void CheckFile(absl::string_view json) {
  const auto tokenizer = Tokenizer::FromJson(json);
  if (!tokenizer.ok()) {
    Require(absl::StartsWith(tokenizer.status().message(), "tokenizer.json: "),
            "an error names the file", tokenizer.status().message());
    return;
  }
  Require((*tokenizer)->vocab_size() >= 0, "it has a size");
  for (const char* text : {"", " ", "w1 w2  \n\t'll 12345 \xc3\xa9\xe2\x82\xac", "e\xcc\x81<s>"}) {
    CheckText(**tokenizer, text, /*exact=*/false);
  }
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace epikv;  // NOLINT: the entry of this file
  static const Tokenizer &gpt2 = Golden("gpt2"), &llama = Golden("llama3"), &qwen = Golden("qwen"),
                         &llama2 = Golden("llama2_legacy"), &gemma = Golden("gemma"),
                         &unigram = Golden("unigram_fallback");
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  if (absl::StartsWith(input, "{")) CheckFile(input);
  CheckText(gpt2, input, /*exact=*/true);
  CheckText(llama, input, /*exact=*/true);
  // They compose characters, or write spaces as another character.
  for (const Tokenizer* tokenizer : {&qwen, &llama2, &gemma, &unigram}) {
    CheckText(*tokenizer, input, /*exact=*/false);
  }
  return 0;
}
