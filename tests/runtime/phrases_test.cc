#include "runtime/text/phrases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace phrases_test {

// Words between spaces, ids as they are listed.
std::unique_ptr<Tokenizer> OfWords(const std::vector<std::string>& words) {
  nlohmann::json vocab;
  for (size_t id = 0; id < words.size(); ++id) vocab[words[id]] = id;
  const nlohmann::json json = {
      {"version", "1.0"},
      {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
      {"model", {{"type", "WordLevel"}, {"vocab", vocab}, {"unk_token", words[0]}}}};
  auto tokenizer = Tokenizer::FromJson(json.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(SentenceEnds, OfWordsWithoutNewLinesAreFullStops) {
  EXPECT_THAT(SentenceEnds(*OfWords({"<unk>", "so", ".", "it"})), testing::ElementsAre(2));
}

TEST(SentenceEnds, TheUnknownTokenIsNone) {
  EXPECT_THAT(SentenceEnds(*OfWords({"<unk>", "so", "it"})), testing::IsEmpty());
}

// Of real tokenizers' files: each of these tokens has a new line in it, and they are ascending.
TEST(SentenceEnds, HaveNewLines) {
  for (const char* name : {"llama3", "qwen", "gpt2", "deepseek", "o200k"}) {
    std::ifstream in(
        absl::StrCat(EPIKV_SOURCE_DIR, "/tests/golden/tokenizers/", name, ".tokenizer.json"));
    ASSERT_TRUE(in.good()) << name;
    const std::string json{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    const auto tokenizer = Tokenizer::FromJson(json);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const std::vector<int32_t> ends = SentenceEnds(**tokenizer);
    EXPECT_FALSE(ends.empty());
    EXPECT_TRUE(std::is_sorted(ends.begin(), ends.end()));
    for (const int32_t id : ends) {
      EXPECT_THAT(std::string(*(*tokenizer)->TokenBytes(id)), testing::HasSubstr("\n"));
    }
  }
}

}  // namespace phrases_test
}  // namespace epikv
