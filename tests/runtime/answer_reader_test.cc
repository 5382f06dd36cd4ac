#include "runtime/text/chat/answer_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/text/utf8.h"

namespace epikv {
namespace answer_reader_test {

using testing::IsEmpty;
using testing::MatchesRegex;
using testing::SizeIs;

const ThinkingTags kThink = {"<think>", "</think>"};

// An answer's parts, joined: "reasoning|content|name(arguments)...".
struct Parts {
  std::string text;
  std::vector<std::string> ids;
};

Parts PartsOf(const AnswerDelta& all) {
  Parts parts{.text = absl::StrCat(all.reasoning, "|", all.content)};
  for (const CallDelta& call : all.calls) {
    absl::StrAppend(&parts.text, "|", call.name, "(", call.arguments, ")");
    parts.ids.push_back(call.id);
  }
  return parts;
}

// Of texts that come one by one.
AnswerDelta Read(const AnswerFormat& format, const std::vector<std::string>& texts) {
  AnswerReader reader(format);
  AnswerDelta all;
  for (const std::string& text : texts) all.Append(reader.Append(text));
  all.Append(reader.Flush());
  return all;
}

// However it is cut, an answer has the same parts.
std::string Read(const AnswerFormat& format, const std::string& text) {
  const std::string whole = PartsOf(Read(format, std::vector<std::string>{text})).text;
  std::vector<std::string> bytes;
  for (const char c : text) bytes.emplace_back(1, c);
  EXPECT_EQ(PartsOf(Read(format, bytes)).text, whole);
  std::mt19937 random(7);
  for (int i = 0; i < 20; ++i) {
    std::vector<std::string> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t size = 1 + random() % 9;
      pieces.push_back(text.substr(at, size));
      at += size;
    }
    EXPECT_EQ(PartsOf(Read(format, pieces)).text, whole);
  }
  return whole;
}

TEST(AnswerReaderTest, AnAnswerWithoutPartsIsContent) {
  EXPECT_EQ(Read({}, ""), "|");
  EXPECT_EQ(Read({}, " <think>a</think> <tool_call>\n"), "| <think>a</think> <tool_call>\n");
  EXPECT_EQ(Read({.thinking = kThink}, " an answer </think>\n"), "| an answer </think>\n");
}

TEST(AnswerReaderTest, ThinkingStandsBetweenItsTags) {
  const AnswerFormat format{.thinking = kThink};
  EXPECT_EQ(Read(format, "<think>\nhm, \n so\n</think>\n\nYes. <think>"), "hm, \n so|Yes. <think>");
  EXPECT_EQ(Read(format, "\n<think>a</think>b</think>"), "a|b</think>");
  EXPECT_EQ(Read(format, "<think>\n\n</think>\n\nNo"), "|No");
  EXPECT_EQ(Read(format, "<think>cut off</thi"), "cut off</thi|");
  EXPECT_EQ(Read(format, "<thi"), "|<thi");
}

TEST(AnswerReaderTest, AnAnswerMayBeginWithinThinking) {
  const AnswerFormat format{.thinking = kThink, .thinks = true};
  EXPECT_EQ(Read(format, "\nhm\n</think>\n\nYes"), "hm|Yes");
  EXPECT_EQ(Read(format, "hm "), "hm|");
  AnswerReader reader(format);
  EXPECT_TRUE(reader.thinks());
  reader.Append("hm</think>");
  EXPECT_FALSE(reader.thinks());
}

TEST(AnswerReaderTest, ReadsHermesCalls) {
  const AnswerFormat format{.thinking = kThink, .calls = CallSyntax::kHermes};
  EXPECT_EQ(Read(format,
                 "<think>Which?</think>\n\nI look.\n<tool_call>\n{\"name\": \"find\", "
                 "\"arguments\": {\"a\": \"}\\\"]\", \"b\": [{}, 1]}}\n</tool_call>\n<tool_call>\n"
                 "{\"name\": \"f.g-2\", \"arguments\": {}}\n</tool_call>\n"),
            "Which?|I look.|find({\"a\": \"}\\\"]\", \"b\": [{}, 1]})|f.g-2({})");
  EXPECT_EQ(Read(format, "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call> Done."),
            "|Done.|f({})");
  // Behind one that breaks off another may come, however the answer is cut.
  EXPECT_EQ(Read(format,
                 "<tool_call>{\"name\":<f</tool_call><tool_call>{\"name\":\"g\",\"arguments\":{}}"
                 "</tool_call>"),
            "|<tool_call>{\"name\":<f</tool_call>|g({})");
}

TEST(AnswerReaderTest, ReadsLlamasCall) {
  const AnswerFormat format{.calls = CallSyntax::kLlama3};
  EXPECT_EQ(Read(format, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}"), "||f({\"a\": 1})");
  EXPECT_EQ(Read(format, "Say {\"name\": \"f\", \"parameters\": {}}"),
            "|Say {\"name\": \"f\", \"parameters\": {}}");
  EXPECT_EQ(Read(format, " {\"answer\": 3}"), "| {\"answer\": 3}");
  // What the constraint takes for words is no call.
  for (const char* text :
       {"{\"name\":\"f\",\"parameters\":{}}", "\n{\"name\": \"f\", \"parameters\": {}}",
        "{ \"name\": \"f\", \"parameters\": {}}"}) {
    EXPECT_EQ(Read(format, text), absl::StrCat("|", text));
  }
  EXPECT_EQ(Read({.thinking = kThink, .calls = CallSyntax::kLlama3},
                 "<think>a</think>\n\n{\"name\": \"f\", \"parameters\": {}}"),
            "a||f({})");
  EXPECT_EQ(Read({.thinking = kThink, .calls = CallSyntax::kLlama3}, "<think>a</think>\n\nNo."),
            "a|No.");
}

TEST(AnswerReaderTest, ReadsMistralsCalls) {
  const AnswerFormat format{.calls = CallSyntax::kMistral, .id_length = 9};
  const std::string text =
      "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", "
      "\"arguments\": {}}]";
  EXPECT_EQ(Read(format, text), "||f({\"a\": 1})|g({})");
  const Parts parts = PartsOf(Read(format, std::vector<std::string>{text}));
  ASSERT_THAT(parts.ids, SizeIs(2));
  EXPECT_THAT(parts.ids[0], MatchesRegex("[0-9A-Za-z]{9}"));
  EXPECT_NE(parts.ids[0], parts.ids[1]);
}

TEST(AnswerReaderTest, WhatIsNoCallIsContent) {
  const AnswerFormat format{.calls = CallSyntax::kHermes};
  for (const char* text : {"a <tool_call> is what one writes", "<tool_call>\n{\"nam\": 1}",
                           "<tool_call>\n{\"name\": \"",
                           "<tool_call>\n{\"name\": \"f\", \"arguments\": [1]}\n</tool_call>",
                           "a <tool_cal", "b \n "}) {
    EXPECT_EQ(Read(format, text), absl::StrCat("|", text));
  }
  const std::string name(65, 'n');
  const std::string long_name = absl::StrCat("<tool_call>\n{\"name\": \"", name);
  EXPECT_EQ(Read(format, long_name), absl::StrCat("|", long_name));
}

TEST(AnswerReaderTest, ACallThatIsCutShortIsToldAsFarAsItCame) {
  const AnswerFormat format{.calls = CallSyntax::kHermes};
  EXPECT_EQ(Read(format, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b"),
            "||f({\"a\": \"b)");
  EXPECT_EQ(Read(format, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool"), "||f({})");
  EXPECT_EQ(Read(format, "<tool_call>\n{\"name\": \"f\", \"arguments\": {}} and so on"),
            "|} and so on|f({})");
}

TEST(AnswerReaderTest, HoldsNoMoreThanALittleWhiteSpace) {
  for (const AnswerFormat& format :
       {AnswerFormat{.calls = CallSyntax::kHermes},
        AnswerFormat{.thinking = kThink, .thinks = true}, AnswerFormat{.thinking = kThink}}) {
    AnswerReader reader(format);
    AnswerDelta all = reader.Append("a");
    for (int i = 0; i < 1000; ++i) all.Append(reader.Append("  \n"));
    EXPECT_GT(all.content.size() + all.reasoning.size(), 2500u);
    all.Append(reader.Flush());
  }
  // It goes nowhere, or it is told, however the answer is cut.
  for (const size_t n : {250, 256, 257, 1000}) {
    const std::string space(n, ' ');
    const std::string told = n > 256 ? space : "";
    EXPECT_EQ(Read({.thinking = kThink}, absl::StrCat("<think>a", space, "</think>b")),
              absl::StrCat("a", told, "|b"));
    EXPECT_EQ(Read({.calls = CallSyntax::kHermes},
                   absl::StrCat("a", space, "<tool_call>{\"name\": \"f\", \"arguments\": {}}")),
              absl::StrCat("|a", told, "|f({})"));
    EXPECT_EQ(Read({.thinking = kThink}, absl::StrCat(space, "<think>a</think>b")),
              n > 256 ? absl::StrCat("|", space, "<think>a</think>b") : "a|b");
  }
  AnswerReader blank({.thinking = kThink});
  AnswerDelta all = blank.Append(std::string(1000, ' '));
  all.Append(blank.Flush());
  EXPECT_EQ(all.content, std::string(1000, ' '));
}

TEST(AnswerReaderTest, WhatIsWrongBehindACallIsContent) {
  const std::string call = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}";
  EXPECT_EQ(Read({.calls = CallSyntax::kMistral}, call + " so"), "|so|f({})");
  EXPECT_EQ(Read({.calls = CallSyntax::kMistral}, call + "} so"), "|} so|f({})");
}

TEST(AnswerReaderTest, TellsACallOnce) {
  AnswerReader reader({.calls = CallSyntax::kHermes});
  EXPECT_TRUE(reader.Append("<tool_call>\n{\"name\": \"f\", \"arguments\": ").empty());
  const AnswerDelta first = reader.Append("{\"a\"");
  ASSERT_THAT(first.calls, SizeIs(1));
  EXPECT_EQ(first.calls[0].name, "f");
  EXPECT_THAT(first.calls[0].id, MatchesRegex("call_[0-9A-Za-z]{24}"));
  EXPECT_EQ(first.calls[0].arguments, "{\"a\"");
  const AnswerDelta next = reader.Append(": 1");
  ASSERT_THAT(next.calls, SizeIs(1));
  EXPECT_THAT(next.calls[0].id, IsEmpty());
  EXPECT_THAT(next.calls[0].name, IsEmpty());
  EXPECT_EQ(next.calls[0].arguments, ": 1");
}

}  // namespace answer_reader_test
}  // namespace epikv
