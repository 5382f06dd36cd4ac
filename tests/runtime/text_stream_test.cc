#include "runtime/text/text_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace text_stream_test {

using Ids = std::vector<int32_t>;

// "llama3": byte-level, <|bos|> 0, <|eot|> 1. "words": words joined by spaces, <s> and </s>
// special.
const Tokenizer& Golden(const std::string& name) {
  static auto& loaded = *new std::map<std::string, std::unique_ptr<Tokenizer>>();
  std::unique_ptr<Tokenizer>& tokenizer = loaded[name];
  if (tokenizer == nullptr) {
    std::ifstream in(
        absl::StrCat(EPIKV_SOURCE_DIR, "/tests/golden/tokenizers/", name, ".tokenizer.json"));
    tokenizer = *Tokenizer::FromJson(std::string(std::istreambuf_iterator<char>(in), {}));
  }
  return *tokenizer;
}

const Tokenizer& Bytes() { return Golden("llama3"); }
const Tokenizer& Words() { return Golden("words"); }

int32_t Id(const Tokenizer& tokenizer, const std::string& token) {
  return tokenizer.TokenToId(token).value();
}

// One token a byte, so that a text comes in known pieces.
Ids ByteTokens(const std::string& bytes) {
  Ids ids;
  for (char byte : bytes) {
    for (int32_t id = 0; id < Bytes().vocab_size(); ++id) {
      if (!Bytes().IsSpecial(id) && Bytes().TokenBytes(id) == std::string(1, byte)) {
        ids.push_back(id);
        break;
      }
    }
  }
  EXPECT_EQ(ids.size(), bytes.size());
  return ids;
}

Ids Encoded(const Tokenizer& tokenizer, const std::string& text) {
  return *tokenizer.Encode(text, {.add_special = false});
}

struct Output {
  std::vector<std::string> pieces;  // one a token, and one for the flush
  std::string text;                 // all of them
  std::optional<StopMatch> stop;
  size_t tokens = 0;  // taken before the stream ended
};

Output Streamed(const Tokenizer& tokenizer, const Ids& ids, TextStreamOptions options) {
  TextStream stream(tokenizer, std::move(options));
  Output output;
  const auto take = [&output](TextStream::Piece piece) {
    EXPECT_FALSE(FirstInvalidUtf8(piece.text).has_value());
    output.pieces.push_back(piece.text);
    output.text += piece.text;
    output.stop = piece.stop;
  };
  for (int32_t id : ids) {
    take(stream.Append(id));
    ++output.tokens;
    if (output.stop.has_value()) return output;
  }
  take(stream.Flush());
  return output;
}

TEST(TextStreamTest, CodePointsAreEmittedWhole) {
  const Output output = Streamed(Bytes(), ByteTokens("aé😀!"), {});
  EXPECT_EQ(output.pieces, std::vector<std::string>({"a", "", "é", "", "", "", "😀", "!", ""}));
}

TEST(TextStreamTest, BrokenBytesAreReplacedOnceKnown) {
  // 0xE2 0x82 could go on; 'a' shows that it does not.
  const Output output = Streamed(Bytes(),
                                 ByteTokens("\xE2\x82"
                                            "a\xFF\xE2"),
                                 {});
  EXPECT_EQ(output.pieces, std::vector<std::string>({"", "", "\uFFFDa", "\uFFFD", "", "\uFFFD"}));
}

TEST(TextStreamTest, WordsAreJoinedBySpaces) {
  const Ids ids = Encoded(Words(), "<s> $a = 3 </s> ;");
  EXPECT_EQ(Streamed(Words(), ids, {}).text, "$a = 3 ;");
  EXPECT_EQ(Streamed(Words(), ids, {.skip_special = false}).text, "<s> $a = 3 </s> ;");
}

// Bytes that are a whole character are text at once: a newline, which such models spell so, stops.
TEST(TextStreamTest, ByteTokensAreToldAtOnce) {
  const Tokenizer& tokenizer = Golden("llama2_legacy");
  const Ids ids = {Id(tokenizer, "▁the"),   Id(tokenizer, "<0xE2>"), Id(tokenizer, "<0x82>"),
                   Id(tokenizer, "<0xAC>"), Id(tokenizer, "<0x0A>"), Id(tokenizer, "a")};
  EXPECT_EQ(Streamed(tokenizer, ids, {}).pieces,
            std::vector<std::string>({"the", "", "", "€", "\n", "a", ""}));
  const Output stopped = Streamed(tokenizer, ids, {.stop_strings = {"\n"}});
  EXPECT_EQ(stopped.text, "the€");
  EXPECT_EQ(stopped.tokens, 5u);
}

TEST(TextStreamTest, IdsThatAreNoTokensAreSkipped) {
  EXPECT_EQ(Streamed(Words(), {100000, Id(Words(), "a"), -1, Id(Words(), "b")}, {}).text, "a b");
}

TEST(TextStreamTest, StopStringIsCutOff) {
  const Output output =
      Streamed(Bytes(), ByteTokens("one END two"), {.stop_strings = {"x", "END"}});
  EXPECT_EQ(output.text, "one ");
  EXPECT_EQ(output.stop, StopMatch(StopString{1}));
  EXPECT_EQ(output.tokens, 7);
}

TEST(TextStreamTest, StopStringIsLeftInOnRequest) {
  const Output output =
      Streamed(Bytes(), ByteTokens("one END two"), {.stop_strings = {"END"}, .include_stop = true});
  EXPECT_EQ(output.text, "one END");
  EXPECT_EQ(output.pieces.back(), "D");  // nothing needs to be held back
}

TEST(TextStreamTest, TextBehindTheStopInTheSameTokenIsDropped) {
  const int32_t tokens = Id(Bytes(), "Ġtokens");
  EXPECT_EQ(Streamed(Bytes(), {tokens}, {.stop_strings = {"ok"}}).text, " t");
  EXPECT_EQ(Streamed(Bytes(), {tokens}, {.stop_strings = {"ok"}, .include_stop = true}).text,
            " tok");
}

TEST(TextStreamTest, WhatMayBeginAStopIsHeldBack) {
  const Output output = Streamed(Bytes(), ByteTokens("aaab"), {.stop_strings = {"aaac"}});
  EXPECT_EQ(output.pieces, std::vector<std::string>({"", "", "", "aaab", ""}));
}

TEST(TextStreamTest, HeldTextShrinksAsSoonAsItCan) {
  const Output output = Streamed(Bytes(), ByteTokens("xabab"), {.stop_strings = {"ababc"}});
  EXPECT_EQ(output.pieces, std::vector<std::string>({"x", "", "", "", "", "abab"}));
  const Output shrinks = Streamed(Bytes(), ByteTokens("ababab"), {.stop_strings = {"ababc"}});
  EXPECT_EQ(shrinks.pieces, std::vector<std::string>({"", "", "", "", "ab", "", "abab"}));
}

TEST(TextStreamTest, AStopThatBeginsInsideAFailedOneIsFound) {
  const Output output = Streamed(Bytes(), ByteTokens("abaabaac"), {.stop_strings = {"abaac"}});
  EXPECT_EQ(output.text, "aba");
}

TEST(TextStreamTest, TheStopThatEndsFirstWins) {
  const Output output = Streamed(Bytes(), ByteTokens("abcd"), {.stop_strings = {"abcd", "bc"}});
  EXPECT_EQ(output.text, "a");
  EXPECT_EQ(output.stop, StopMatch(StopString{1}));
}

TEST(TextStreamTest, OfStopsThatEndTogetherTheLongestWins) {
  const Output output =
      Streamed(Bytes(), ByteTokens("xabcy"), {.stop_strings = {"c", "abc", "bc", "abc"}});
  EXPECT_EQ(output.text, "x");
  EXPECT_EQ(output.stop, StopMatch(StopString{1}));
}

TEST(TextStreamTest, StopTokenEndsTheTextBeforeItself) {
  Ids ids = ByteTokens("ab");
  ids.push_back(1);
  const Output output = Streamed(Bytes(), ids, {.stop_strings = {"bc"}, .stop_token_ids = {9, 1}});
  EXPECT_EQ(output.pieces, std::vector<std::string>({"a", "", "b"}));
  EXPECT_EQ(output.stop, StopMatch(StopToken{1}));
}

TEST(TextStreamTest, StopTokenIsLeftInOnRequest) {
  Ids ids = ByteTokens("a\xE2");
  ids.push_back(1);
  TextStreamOptions options = {.stop_token_ids = {1}, .include_stop = true, .skip_special = false};
  EXPECT_EQ(Streamed(Bytes(), ids, options).text, "a\uFFFD<|eot|>");
  options.skip_special = true;
  EXPECT_EQ(Streamed(Bytes(), ids, options).text, "a\uFFFD");
}

TEST(TextStreamTest, StopTokenGoesBeforeAStopStringItCompletes) {
  const Ids ids = Encoded(Words(), "a = b");
  const Output output =
      Streamed(Words(), ids, {.stop_strings = {"= b"}, .stop_token_ids = {ids[2]}});
  EXPECT_EQ(output.stop, StopMatch(StopToken{ids[2]}));
  EXPECT_EQ(output.text, "a =");
}

TEST(TextStreamTest, NothingFollowsTheEnd) {
  TextStream stream(Bytes(), {.stop_token_ids = {1}});
  stream.Append(1);
  const TextStream::Piece more = stream.Append(ByteTokens("a")[0]);
  EXPECT_EQ(more.text, "");
  EXPECT_FALSE(more.stop.has_value());
  EXPECT_EQ(stream.Flush().text, "");
}

// Where the first stop ends in `text`, and where it begins: by looking at every prefix.
std::optional<std::pair<size_t, size_t>> FirstStop(const std::string& text,
                                                   const std::vector<std::string>& stops) {
  for (size_t end = 1; end <= text.size(); ++end) {
    size_t longest = 0;
    for (const std::string& stop : stops) {
      if (stop.size() <= end && text.compare(end - stop.size(), stop.size(), stop) == 0) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return std::pair(end - longest, end);
  }
  return std::nullopt;
}

std::string RandomStop(std::mt19937& random) {
  static const std::vector<std::string> kFixed = {"the",    " the",         "\n\n", "é",  "😀",
                                                  "\uFFFD", "\uFFFD\uFFFD", "= ",   "b ;"};
  if (random() % 2 == 0) return kFixed[random() % kFixed.size()];
  std::string stop;
  for (int i = random() % 6; i >= 0; --i) stop += "ab"[random() % 2];
  return stop;
}

TEST(TextStreamTest, EmittedTextIsDecodeCutAtTheStop) {
  std::mt19937 random(1);
  for (const Tokenizer* tokenizer :
       {&Bytes(), &Words(), &Golden("llama2_legacy"), &Golden("mistral"), &Golden("gemma")}) {
    // Tokens of few different bytes, so that stops are met.
    Ids choice;
    for (const char* token :
         {"a", "b", "a", "b", "a", "b", "Ġ",    "=",      ";",      "Ċ",      "Ġthe",   "Ã",
          "©", "ð", "Ł", "ĺ", "Ģ", "▁", "▁the", "<0x0A>", "<0xE2>", "<0x96>", "<0x81>", "<0xFF>"}) {
      const auto id = tokenizer->TokenToId(token);
      if (id.has_value()) choice.push_back(*id);
    }
    for (int round = 0; round < 5000; ++round) {
      TextStreamOptions options{.include_stop = random() % 2 == 0,
                                .skip_special = random() % 2 == 0};
      for (int i = random() % 4; i > 0; --i) options.stop_strings.push_back(RandomStop(random));
      Ids ids;
      for (int i = random() % 20; i > 0; --i) {
        ids.push_back(random() % 8 == 0 ? static_cast<int32_t>(random() % tokenizer->vocab_size())
                                        : choice[random() % choice.size()]);
      }
      std::string expected = tokenizer->Decode(ids, {.skip_special = options.skip_special});
      const auto stop = FirstStop(expected, options.stop_strings);
      if (stop.has_value()) expected.resize(options.include_stop ? stop->second : stop->first);
      const Output output = Streamed(*tokenizer, ids, options);
      ASSERT_EQ(output.text, expected);
      ASSERT_EQ(output.stop.has_value(), stop.has_value());
    }
  }
}

// Stop strings that end too early do not count, whole or in pieces; what begins early and ends in
// time does.
TEST(TextStreamTest, StopStringsCountAfterTheLeastTokens) {
  const auto run = [](const std::string& text, const std::string& stop, int64_t min_tokens) {
    TextStream stream(Bytes(), {.stop_strings = {stop}, .min_tokens = min_tokens});
    std::string out;
    for (int32_t token : ByteTokens(text)) {
      const TextStream::Piece piece = stream.Append(token);
      out += piece.text;
      if (piece.stop.has_value()) return out + "|";
    }
    return out + stream.Flush().text;
  };
  EXPECT_EQ(run("abcabc", "abc", 2), "|");
  EXPECT_EQ(run("abcabc", "abc", 3), "abc|");
  EXPECT_EQ(run("abcabc", "abc", 5), "abc|");
  EXPECT_EQ(run("abcabc", "abc", 6), "abcabc");
  EXPECT_EQ(run("aaaa", "aaa", 3), "a|");  // the second match begins inside the first
  EXPECT_EQ(run("xabc", "abc", 3), "x|");
}

}  // namespace text_stream_test
}  // namespace epikv
