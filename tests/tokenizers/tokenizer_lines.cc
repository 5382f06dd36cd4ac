// The tokenizer as a filter, for comparing it with the `tokenizers` library: tokenizer_lines FILE,
// a tokenizer.json. Each line of input is answered by a line of JSON.
//
//   text HEX    bytes of text       {"with_special": ids, "without_special": ids} or {"error":
//   text} ids N N...  tokens, streamed    {"keep": streamed, "skip": streamed}: special tokens
//   kept, skipped
//
// where streamed is {"pieces": [one a token], "flushes": [what ending there would add; one a token
// and one before them], "decoded": all at once}.

#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "runtime/text/tokenizer.h"

namespace epikv {
namespace {

using Json = nlohmann::json;

Json Encoded(const Tokenizer& tokenizer, const std::string& text) {
  Json answer;
  for (const bool special : {true, false}) {
    const auto ids = tokenizer.Encode(text, {.add_special = special});
    if (!ids.ok()) return {{"error", ids.status().message()}};
    answer[special ? "with_special" : "without_special"] = *ids;
  }
  return answer;
}

Json Streamed(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip) {
  Detokenizer stream(tokenizer, {.skip_special = skip});
  const auto flush = [](Detokenizer ending) { return ending.Flush(); };
  Json pieces = Json::array(), flushes = {flush(stream)};
  for (int32_t id : ids) {
    pieces.push_back(stream.Append(id));
    flushes.push_back(flush(stream));
  }
  return {{"pieces", pieces},
          {"flushes", flushes},
          {"decoded", tokenizer.Decode(ids, {.skip_special = skip})}};
}

Json Answer(const Tokenizer& tokenizer, absl::string_view line) {
  if (absl::ConsumePrefix(&line, "text ")) return Encoded(tokenizer, absl::HexStringToBytes(line));
  if (!absl::ConsumePrefix(&line, "ids ")) return {{"error", "neither text nor ids"}};
  std::vector<int32_t> ids;
  for (absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(word, &id)) return {{"error", absl::StrCat(word, " is no number")}};
    ids.push_back(id);
  }
  return {{"keep", Streamed(tokenizer, ids, false)}, {"skip", Streamed(tokenizer, ids, true)}};
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  std::ifstream file(argc == 2 ? argv[1] : "", std::ios::binary);
  const std::string json{std::istreambuf_iterator<char>(file), {}};
  const auto tokenizer = epikv::Tokenizer::FromJson(json);
  if (!tokenizer.ok()) {
    std::cerr << tokenizer.status() << "\n";
    return 1;
  }
  std::ios::sync_with_stdio(false);
  // Strict: text that is not UTF-8 ends the process.
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << epikv::Answer(**tokenizer, line).dump() << "\n";
  }
  return 0;
}
