#include "runtime/text/chat/thinking_finder.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/fixtures/byte_level.h"

namespace epikv {
namespace thinking_finder_test {

const ThinkingTags kTags = {"<think>", "</think>"};
constexpr int32_t kBegin = 256, kEnd = 257, kOther = 258;  // special tokens

using Found = std::optional<ThinkingFinder::Found>;

// Of an answer whose first token is token 10: special tokens are "{", "}" and, no markup, "^".
Found FindIn(const std::string& answer, bool begun = false) {
  const auto tokenizer = ByteLevel(ByteWords(), {"<think>", "</think>", "<other>"});
  ThinkingFinder finder(*tokenizer, kTags, {kBegin, kEnd}, begun, 10);
  for (const char c : answer) {
    finder.Append(c == '{'   ? kBegin
                  : c == '}' ? kEnd
                  : c == '^' ? kOther
                             : static_cast<unsigned char>(c));
  }
  return finder.found();
}

void ExpectFound(const Found& found, int64_t begin, int64_t end, bool ended) {
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->span, (TokenSpan{begin, end}));
  EXPECT_EQ(found->ended, ended);
}

TEST(ThinkingFinderTest, FindsWhatStandsBetweenTheTags) {
  ExpectFound(FindIn("{abc}de"), 11, 14, true);
  ExpectFound(FindIn("{abc"), 11, 14, false);
  ExpectFound(FindIn("\n{abc}{d}"), 12, 15, true);
  ExpectFound(FindIn("{}d"), 11, 11, true);
  // A tag of several tokens: those that begin it are thought to be thinking.
  ExpectFound(FindIn("<think>abc</think>d"), 17, 27, true);
  EXPECT_FALSE(FindIn("abc{d}").has_value());
  EXPECT_FALSE(FindIn("").has_value());
}

// As the reader of the answer's parts, which is not told of them.
TEST(ThinkingFinderTest, OtherSpecialTokensAreNoText) {
  ExpectFound(FindIn("^{abc}de"), 12, 15, true);
  ExpectFound(FindIn("{a^bc^}de"), 11, 16, true);
}

TEST(ThinkingFinderTest, ThinkingMayHaveBegunInThePrompt) {
  ExpectFound(FindIn("abc}d", true), 10, 13, true);
  ExpectFound(FindIn("abc", true), 10, 13, false);
  ExpectFound(FindIn("", true), 10, 10, false);
  ExpectFound(FindIn("}abc", true), 10, 10, true);
}

}  // namespace thinking_finder_test
}  // namespace epikv
