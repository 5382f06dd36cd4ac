// Constraints over a byte-level vocabulary of the test's own: what may come next is held against
// PCRE2's partial matching, which shares nothing with them.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "runtime/constraints/constraint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <pcre2.h>

#include <algorithm>
#include <list>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/base/reason.h"
#include "runtime/constraints/constraint_text.h"
#include "runtime/text/tokenizer.h"
#include "runtime/text/utf8.h"
#include "tests/fixtures/byte_level.h"

namespace epikv {
namespace constraint_test {

using Kind = ConstraintText::Kind;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

// One of tokens that stand in a row, and none of them for a byte.
std::unique_ptr<Tokenizer> OfTokens(const std::vector<std::string>& words) {
  nlohmann::json vocab = nlohmann::json::object();
  for (size_t id = 0; id < words.size(); ++id) vocab[words[id]] = id;
  const nlohmann::json json = {{"version", "1.0"},
                               {"added_tokens", nlohmann::json::array()},
                               {"normalizer", nullptr},
                               {"pre_tokenizer", nullptr},
                               {"post_processor", nullptr},
                               {"decoder", {{"type", "Fuse"}}},
                               {"model",
                                {{"type", "BPE"},
                                 {"vocab", vocab},
                                 {"merges", nlohmann::json::array()},
                                 {"unk_token", nullptr}}}};
  auto tokenizer = Tokenizer::FromJson(json.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

// All bytes, and words of several: characters cut in two, and some whose beginnings are no tokens.
std::vector<std::string> Words() {
  std::vector<std::string> words = ByteWords();
  for (const char* word : {"ab",  "ba",  "aab", "abba", "ca",  "cbca",      "cbcab",    "12",
                           "123", "1a",  "é",   "日本", "本a", "\xC3\xA9z", "\x97\xA5", "a b",
                           "  ",  " \n", "\"a", "\":",  "{\"", "},",        "bcabc",    "acbac"}) {
    words.push_back(word);
  }
  return words;
}

struct World {
  explicit World(std::vector<std::string> some)
      : words(std::move(some)),
        tokenizer(words.size() < 256 ? OfTokens(words) : ByteLevel(words)) {}
  int32_t end() const { return static_cast<int32_t>(words.size()); }

  absl::StatusOr<std::shared_ptr<const Constraint>> Compile(Kind kind, const std::string& text) {
    return compiler.Compile({kind, {text}});
  }
  ConstraintState Start(Kind kind, const std::string& text) {
    auto constraint = Compile(kind, text);
    EXPECT_TRUE(constraint.ok()) << text << ": " << constraint.status();
    return ConstraintState(*constraint, {end()}, "");
  }

  const std::vector<std::string> words;
  const std::unique_ptr<Tokenizer> tokenizer;
  ConstraintCompiler compiler{*tokenizer, static_cast<int64_t>(words.size()) + 40};
};

std::vector<int32_t> TokensOf(absl::Span<const uint32_t> bits) {
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < 32 * bits.size(); ++i) {
    if (bits[i / 32] >> (i % 32) & 1) tokens.push_back(static_cast<int32_t>(i));
  }
  return tokens;
}

std::vector<std::string> AllowedWords(const World& world, const ConstraintState& state) {
  std::vector<std::string> words;
  for (const int32_t token : TokensOf(state.allowed())) {
    words.push_back(token == world.end() ? "<end>" : world.words.at(token));
  }
  return words;
}

int32_t IdOf(const World& world, const std::string& word) {
  return static_cast<int32_t>(std::find(world.words.begin(), world.words.end(), word) -
                              world.words.begin());
}

// Whether bytes are the whole of a match, or the beginning of one.
class Oracle {
 public:
  explicit Oracle(const std::string& regex) {
    int error;
    PCRE2_SIZE offset;
    const std::string whole = absl::StrCat("(?s)^(?:", regex, ")\\z");
    code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(whole.data()), whole.size(), 0, &error,
                          &offset, nullptr);
    EXPECT_NE(code_, nullptr) << regex;
    match_ = pcre2_match_data_create(1, nullptr);
  }
  ~Oracle() {
    pcre2_match_data_free(match_);
    pcre2_code_free(code_);
  }
  bool Matches(absl::string_view text) const { return Run(text, 0) >= 0; }
  bool Begins(absl::string_view text) const {
    return Matches(text) || Run(text, PCRE2_PARTIAL_HARD) == PCRE2_ERROR_PARTIAL;
  }

 private:
  // By an automaton: backtracking would take forever on some.
  int Run(absl::string_view text, uint32_t options) const {
    std::vector<int> workspace(4096);
    const int result =
        pcre2_dfa_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0, options,
                        match_, nullptr, workspace.data(), workspace.size());
    EXPECT_TRUE(result >= 0 || result == PCRE2_ERROR_NOMATCH || result == PCRE2_ERROR_PARTIAL)
        << result;
    return result;
  }
  pcre2_code* code_;
  pcre2_match_data* match_;
};

class RandomRegex {
 public:
  explicit RandomRegex(uint32_t seed) : random_(seed) {}
  std::string Next() { return Alternatives(3); }

 private:
  int Below(int n) { return static_cast<int>(random_() % n); }
  std::string Atom(int depth) {
    static const std::vector<std::string> kAtoms = {
        "a", "b", "c", "ab", "1", "[ab]", "[a-c]", "[0-9]", "\\d", "\\.", " ", "é", "日", "z"};
    if (depth == 0 || Below(3) > 0) return kAtoms[Below(static_cast<int>(kAtoms.size()))];
    return absl::StrCat("(", Below(2) ? "?:" : "", Alternatives(depth - 1), ")");
  }
  std::string Alternatives(int depth) {
    std::vector<std::string> all;
    for (int i = 1 + (Below(3) == 0) + (Below(4) == 0); i > 0; --i) {
      std::string sequence;
      for (int j = 1 + Below(3); j > 0; --j) {
        static const std::vector<std::string> kTimes = {"",  "",    "",      "*",     "+",
                                                        "?", "{2}", "{0,2}", "{1,3}", "{2,}"};
        std::string atom = Atom(depth);
        const std::string& times = kTimes[Below(10)];
        if (!times.empty() && atom.size() > 1 && atom[0] != '(' && atom[0] != '[' &&
            atom[0] != '\\') {
          atom = absl::StrCat("(?:", atom, ")");
        }
        absl::StrAppend(&sequence, atom, times);
      }
      all.push_back(std::move(sequence));
    }
    return absl::StrJoin(all, "|");
  }
  std::mt19937 random_;
};

// Walks at random through one constraint; after each token what may come next is exactly what a
// match can go on with.
void WalkAgainstOracle(World& world, const std::string& regex, uint32_t seed) {
  const Oracle oracle(regex);
  const auto constraint = world.Compile(Kind::kRegex, regex);
  if (!constraint.ok()) {  // an empty text, and nothing else
    EXPECT_THAT(constraint.status().message(), HasSubstr("empty text")) << regex;
    return;
  }
  ConstraintState state(*constraint, {world.end()});
  std::mt19937 random(seed);
  std::string text;
  for (int step = 0; step < 12; ++step) {
    SCOPED_TRACE(absl::StrCat(regex, " after '", text, "'"));
    std::vector<int32_t> expected;
    for (int32_t token = 0; token < world.end(); ++token) {
      if (oracle.Begins(text + world.words[token])) expected.push_back(token);
    }
    EXPECT_EQ(state.may_end(), oracle.Matches(text));
    EXPECT_EQ(state.must_end(), oracle.Matches(text) && expected.empty());
    std::vector<int32_t> with_end = expected;
    if (state.may_end()) with_end.push_back(world.end());
    ASSERT_EQ(TokensOf(state.allowed()), with_end);
    if (expected.empty()) return;
    const int32_t token = expected[random() % expected.size()];
    const absl::Status accepted = state.Accept(token);
    ASSERT_TRUE(accepted.ok()) << accepted;
    text += world.words[token];
  }
}

TEST(ConstraintTest, AllowsWhatARegexCanGoOnWith) {
  World world(Words());
  RandomRegex random(7);
  for (uint32_t i = 0; i < 400 && !testing::Test::HasFailure(); ++i) {
    WalkAgainstOracle(world, random.Next(), i);
  }
}

// Tokens whose beginnings are no tokens: what they inherit from others that they contain.
TEST(ConstraintTest, AllowsWhatARegexCanGoOnWithWithoutSingleBytes) {
  World world(
      {"a", "b", "ca", "cbca", "cbcab", "bcab", "acba", "12", "é", "日", "1", "z", ".", " "});
  RandomRegex random(8);
  for (uint32_t i = 0; i < 400 && !testing::Test::HasFailure(); ++i) {
    const std::string regex = random.Next();
    if (world.Compile(Kind::kRegex, regex).ok() && regex.find_first_of("023456789") == regex.npos) {
      const Oracle oracle(regex);
      ConstraintState state(*world.Compile(Kind::kRegex, regex), {world.end()});
      std::vector<int32_t> expected;
      for (int32_t token = 0; token < world.end(); ++token) {
        if (oracle.Begins(world.words[token])) expected.push_back(token);
      }
      if (state.may_end()) expected.push_back(world.end());
      EXPECT_EQ(TokensOf(state.allowed()), expected) << regex;
    }
  }
}

TEST(ConstraintTest, CharactersMayBeCutAnywhere) {
  World world(Words());
  ConstraintState state = world.Start(Kind::kRegex, "日本.");
  EXPECT_THAT(AllowedWords(world, state), UnorderedElementsAre("\xE6", "日本"));
  ASSERT_TRUE(state.Accept(0xE6).ok());
  EXPECT_THAT(AllowedWords(world, state), UnorderedElementsAre("\x97", "\x97\xA5"));
  ASSERT_TRUE(state.Accept(IdOf(world, "\x97\xA5")).ok());
  EXPECT_THAT(AllowedWords(world, state), UnorderedElementsAre("\xE6", "本a"));
  ASSERT_TRUE(state.Accept(IdOf(world, "本a")).ok());
  EXPECT_TRUE(state.must_end());
}

// Of the bytes that may follow a first one.
std::vector<int32_t> BytesAfter(World& world, Kind kind, const std::string& text, uint8_t first) {
  ConstraintState state = world.Start(kind, text);
  if (kind == Kind::kJsonSchema) {
    EXPECT_TRUE(state.Accept('"').ok());
  }
  EXPECT_TRUE(state.Accept(first).ok());
  std::vector<int32_t> bytes = TokensOf(state.allowed());
  std::erase_if(bytes, [](int32_t token) { return token > 255; });
  return bytes;
}

std::vector<int32_t> From(int32_t least, int32_t most) {
  std::vector<int32_t> all(most - least + 1);
  std::iota(all.begin(), all.end(), least);
  return all;
}

TEST(ConstraintTest, AllowsNothingThatIsNoUtf8) {
  World world(Words());
  for (const auto& [kind, text] :
       std::vector<std::pair<Kind, std::string>>{{Kind::kRegex, "."},
                                                 {Kind::kRegex, "[^a]"},
                                                 {Kind::kRegex, "\\S"},
                                                 {Kind::kGrammar, "root ::= [^a]"},
                                                 {Kind::kGrammar, "root ::= [\\x00-\\U0010FFFF]"},
                                                 {Kind::kJsonSchema, R"({"type": "string"})"}}) {
    SCOPED_TRACE(text);
    ConstraintState start = world.Start(kind, text);
    if (kind == Kind::kJsonSchema) {
      ASSERT_TRUE(start.Accept('"').ok());
    }
    const std::vector<int32_t> first = TokensOf(start.allowed());
    for (int32_t byte = 0x80; byte < 256; ++byte) {
      const bool leads = (0xC2 <= byte && byte <= 0xF4);
      EXPECT_EQ(std::find(first.begin(), first.end(), byte) != first.end(), leads) << byte;
    }
    EXPECT_EQ(BytesAfter(world, kind, text, 0xC2).back(), 0xBF);
    EXPECT_EQ(BytesAfter(world, kind, text, 0xE0), From(0xA0, 0xBF));
    EXPECT_EQ(BytesAfter(world, kind, text, 0xE1), From(0x80, 0xBF));
    EXPECT_EQ(BytesAfter(world, kind, text, 0xED), From(0x80, 0x9F));
    EXPECT_EQ(BytesAfter(world, kind, text, 0xEE), From(0x80, 0xBF));
    EXPECT_EQ(BytesAfter(world, kind, text, 0xF0), From(0x90, 0xBF));
    EXPECT_EQ(BytesAfter(world, kind, text, 0xF4), From(0x80, 0x8F));
  }
}

TEST(ConstraintTest, ChoicesAreWhatTheyAreByteForByte) {
  World world(Words());
  const std::vector<std::string> choices = {"a\"b\\n", "a\n\t\x01\x7f", "\tb1", "日本",
                                            "[x](y)*", "::=",           ""};
  const auto constraint = world.compiler.Compile({Kind::kChoice, choices});
  ASSERT_TRUE(constraint.ok()) << constraint.status();
  for (const std::string& choice : choices) {
    ConstraintState state(*constraint, {world.end()});
    for (const char c : choice) {
      ASSERT_TRUE(state.Accept(static_cast<unsigned char>(c)).ok()) << choice;
    }
    EXPECT_TRUE(state.may_end()) << choice;
  }
  ConstraintState state(*constraint, {world.end()});
  EXPECT_THAT(AllowedWords(world, state),
              UnorderedElementsAre("a", "\xE6", "日本", "[", ":", "\t", "<end>"));
}

TEST(ConstraintTest, AnEndIsAllowedWhereTheTextIsWholeAndNeverAsText) {
  World world(Words());
  const auto constraint = *world.Compile(Kind::kRegex, "ab*");
  // A token of text that ends the completion is no text any more.
  ConstraintState state(constraint, {world.end(), IdOf(world, "ab")});
  EXPECT_THAT(AllowedWords(world, state), ElementsAre("a"));
  ASSERT_TRUE(state.Accept('a').ok());
  EXPECT_THAT(AllowedWords(world, state), ElementsAre("b", "ab", "<end>"));
  EXPECT_FALSE(state.must_end());
  // Without ends it goes on.
  ConstraintState endless(constraint, {});
  ASSERT_TRUE(endless.Accept('a').ok());
  EXPECT_THAT(AllowedWords(world, endless), ElementsAre("b"));
  EXPECT_TRUE(endless.may_end());
}

TEST(ConstraintTest, OneThatIsTooLargeToBeRememberedPushesOutNoOther) {
  const std::unique_ptr<Tokenizer> tokenizer = ByteLevel(ByteWords());
  ConstraintCompiler compiler(*tokenizer, 257, {.remembered = 1 << 16});
  const ConstraintText small{Kind::kRegex, {"ab"}}, large{Kind::kRegex, {"(ab|cd){0,100}x{0,99}"}};
  ASSERT_TRUE(compiler.Compile(small).ok());
  ASSERT_TRUE(compiler.Remembered(small).has_value());
  const auto made = compiler.Compile(large);
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_GT((*made)->bytes(), 1 << 16);
  EXPECT_FALSE(compiler.Remembered(large).has_value());
  EXPECT_TRUE(compiler.Remembered(small).has_value());
}

TEST(ConstraintTest, AVocabularyThatCannotGoOnSaysSo) {
  World world({"a", "b"});
  EXPECT_THAT(world.Compile(Kind::kRegex, "c").status().message(),
              HasSubstr("this model's tokens"));
  ConstraintState state = world.Start(Kind::kRegex, "a(c|bd)");
  ASSERT_TRUE(state.Accept(0).ok());
  const absl::Status status = state.Accept(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), kConstraintFailed);
}

// How much of a text a constraint takes, byte for byte; and whether it may end there.
std::pair<std::string, bool> Taken(World& world, Kind kind, const std::string& constraint,
                                   const std::string& text) {
  ConstraintState state = world.Start(kind, constraint);
  std::string taken;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (!(state.allowed()[byte / 32] >> (byte % 32) & 1)) return {taken, false};
    taken.push_back(c);
    if (!state.Accept(byte).ok()) return {taken, false};
  }
  return {taken, state.may_end()};
}

struct Instance {
  const char *schema, *json;
  bool fits;
};

TEST(ConstraintTest, TakesJsonThatItsSchemaAllowsAndNoOther) {
  World world(Words());
  const std::string two =
      R"({"type": "object", "properties": {"a": {"type": "object", "properties": )"
      R"({"title": {"type": "string"}}}, "b": {"type": "object", "properties": )"
      R"({"title": {"type": "integer"}}}}})";
  const std::vector<Instance> cases = {
      // Properties may be named as keywords that describe.
      {two.c_str(), R"({"a":{"title":"x"},"b":{"title":5}})", true},
      {two.c_str(), R"({"a":{"title":"x"},"b":{"title":"y"}})", false},
      {R"({"type": "array", "prefixItems": [{"const": {"default": 1}}, {"const": {"default": 2}}]})",
       R"([{"default":1},{"default":2}])", true},
      // Keys beside the properties are none of theirs, however they are spelled, and strings.
      {R"({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}})",
       R"({"b":null,"ab":null,"A":null})", true},
      {R"({"type": "object", "properties": {"é": {}}, "additionalProperties": {"type": "null"}})",
       R"({"è":null,"ée":null})", true},
      {R"({"type": "object", "properties": {"é": {}}, "additionalProperties": {"type": "null"}})",
       R"({"é":null})", true},
      {R"({"type": "object", "properties": {"é": {"type": "integer"}}, "additionalProperties": {"type": "null"}})",
       R"({"é":null})", false},
      {R"({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}})",
       R"({"\u0061":null})", false},
      {R"({"type": "object", "properties": {"q\"": {}}, "additionalProperties": {"type": "null"}})",
       R"({"q"a":null})", false},
      {R"({"type": "object", "properties": {"q\"": {}}, "additionalProperties": {"type": "null"}})",
       R"({"q\"":1,"q":null,"qq":null})", true},
      {R"({"type": "object", "properties": {"q\\": {}}, "additionalProperties": {"type": "null"}})",
       R"({"q\a":null})", false},
      // What a schema says nothing of.
      {R"({"type": "array", "maxItems": 2})", R"([1,"a"])", true},
      {R"({"type": "array", "maxItems": 2})", R"([1,1,1])", false},
      {R"({"type": ["array", "null"], "minItems": 2, "title": "x"})", R"([1,"a"])", true},
      {R"({"type": "array", "prefixItems": [true, {"type": "null"}]})", R"([1,null])", true},
      {R"({"type": "object", "required": []})", R"({"a":1})", true},
      {R"({"type": "object", "properties": {}})", R"({"a":1})", false},
      {R"({"type": "object", "description": "x"})", R"({"a":1})", true},
      {R"({"type": "object", "properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}})",
       R"({"b":null})", true},
      {R"({"type": "string", "format": "date"})", R"("2023-02-28")", true},
      {R"({"type": "string", "format": "date"})", R"("2023-02-30")", false},
      {R"({"type": "string", "format": "date"})", R"("2023-11-31")", false},
      {R"({"type": "string", "format": "date-time"})", R"("1999-12-31T23:59:59Z")", true},
      {R"({"type": "string", "format": "date-time"})", R"("1999-12-31T12:00:60Z")", false},
      {R"({"type": "string", "format": "ipv4"})", R"("10.0.255.199")", true},
      {R"({"type": "string", "format": "ipv4"})", R"("10.01.2.3")", false},
      // Numbers as they are written.
      {R"({"const": 0.1})", "0.1", true},
      {R"({"const": 0.30000000000000004})", "0.30000000000000004", true},
      {R"({"const": 1e2})", "100", true},
      {R"({"type": "string", "minLength": 2.0})", R"("ab")", true},
      {R"({"enum": [{"pattern": "("}]})", R"({"pattern":"("})", true},
  };
  for (const Instance& instance : cases) {
    const auto [taken, may_end] = Taken(world, Kind::kJsonSchema, instance.schema, instance.json);
    EXPECT_EQ(taken == instance.json && may_end, instance.fits)
        << instance.schema << " took " << taken << " of " << instance.json;
  }
}

TEST(ConstraintTest, RulesMayBeNamedLikeWhatIsNotSupported) {
  World world(Words());
  const std::string grammar =
      "root ::= MyToken(\"Regex(\") [(=]  # Token(5)\nMyToken ::= \"Token (\" | \"]\"";
  EXPECT_EQ(Taken(world, Kind::kGrammar, grammar, "Token (Regex(=").second, true);
}

// Metaspace: the first token loses the space that stands for its beginning.
TEST(ConstraintTest, TheFirstTokenIsTheTextThatItBegins) {
  std::vector<std::string> tokens = {"<unk>", "▁", "▁a", "a", "b", "▁b", "▁▁a"};
  nlohmann::json vocab;
  for (size_t id = 0; id < tokens.size(); ++id) vocab[tokens[id]] = id;
  const nlohmann::json json = {{"version", "1.0"},
                               {"added_tokens", nlohmann::json::array()},
                               {"normalizer", nullptr},
                               {"pre_tokenizer",
                                {{"type", "Metaspace"},
                                 {"replacement", "▁"},
                                 {"prepend_scheme", "always"},
                                 {"split", false}}},
                               {"post_processor", nullptr},
                               {"decoder",
                                {{"type", "Metaspace"},
                                 {"replacement", "▁"},
                                 {"prepend_scheme", "always"},
                                 {"split", false}}},
                               {"model",
                                {{"type", "BPE"},
                                 {"vocab", vocab},
                                 {"merges", nlohmann::json::array()},
                                 {"unk_token", "<unk>"}}}};
  const auto tokenizer = Tokenizer::FromJson(json.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ConstraintCompiler compiler(**tokenizer, 7);
  const auto constraint = compiler.Compile({Kind::kRegex, {"a( b)*"}});
  ASSERT_TRUE(constraint.ok()) << constraint.status();
  ConstraintState state(*constraint, {});
  for (const int32_t token : TokensOf(state.allowed())) {
    EXPECT_EQ((*tokenizer)->Decode({token}).find_first_not_of("a"), std::string::npos) << token;
  }
  EXPECT_THAT(TokensOf(state.allowed()), ElementsAre(1, 2, 3, 6));
  ASSERT_TRUE(state.Accept(2).ok());
  EXPECT_TRUE(state.may_end());
  EXPECT_THAT(TokensOf(state.allowed()), ElementsAre(1, 5));
  ConstraintState other(*constraint, {});
  ASSERT_TRUE(other.Accept(1).ok());
  EXPECT_THAT(TokensOf(other.allowed()), ElementsAre(3));
}

// Word-level: a space stands before each token but the first.
TEST(ConstraintTest, WordsStandApart) {
  const nlohmann::json json = {
      {"version", "1.0"},
      {"added_tokens", nlohmann::json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
      {"post_processor", nullptr},
      {"decoder", nullptr},
      {"model",
       {{"type", "WordLevel"}, {"vocab", {{"x", 0}, {"y", 1}, {"xy", 2}}}, {"unk_token", "x"}}}};
  const auto tokenizer = Tokenizer::FromJson(json.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ConstraintCompiler compiler(**tokenizer, 3);
  ConstraintState state(*compiler.Compile({Kind::kChoice, {"xy y", "x"}}), {});
  EXPECT_THAT(TokensOf(state.allowed()), ElementsAre(0, 2));
  ASSERT_TRUE(state.Accept(2).ok());
  EXPECT_THAT(TokensOf(state.allowed()), ElementsAre(1));
  ASSERT_TRUE(state.Accept(1).ok());
  EXPECT_TRUE(state.must_end());
}

struct Refused {
  Kind kind;
  std::string text, why;
};

TEST(ConstraintTest, WhatCannotBeKeptToIsRefusedWithTheReason) {
  World world(Words());
  const std::vector<Refused> cases = {
      {Kind::kRegex, "(", "parenthesis"},
      {Kind::kRegex, "a{2", "epetition"},
      // The first of these crashed what makes automata.
      {Kind::kRegex, "[a-z]+(\\.[0-9]{1,3}{0,999}*", ""},
      {Kind::kRegex, "(a{0,999}", "parenthesis"},
      // Only what makes automata knows what is wrong with these; it crashed where it said so.
      {Kind::kRegex, "a{0,999}]", "Unmatched ']'"},
      {Kind::kRegex, "a{0,999}[^\\B]", "\\B"},
      {Kind::kRegex, "a{0,3}{0,999}", ""},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": "(a[0-9]{1,3}{0,999}*"})", ""},
      {Kind::kRegex, "(?=a)b", "Lookahead"},
      {Kind::kRegex, "(a)\\1", "Backreference"},
      {Kind::kRegex, "a^b", "'^'"},
      {Kind::kRegex, "^a$|^b$", "'$'"},
      {Kind::kRegex, "\\q", "not recognized"},
      {Kind::kRegex, "", "empty text"},
      {Kind::kRegex, "\xFF", "UTF-8"},
      {Kind::kRegex, std::string("a\0b", 3), "NUL"},
      {Kind::kRegex, std::string(70000, 'a'), "at most 65536"},
      {Kind::kRegex, absl::StrCat(std::string(65, '('), "a", std::string(65, ')')), "nested 65"},
      {Kind::kGrammar, "root := a", ""},
      {Kind::kGrammar, "a ::= \"b\"", "root"},
      {Kind::kGrammar, "root ::= b", "b"},
      {Kind::kRegex, "\\uD800", ""},
      {Kind::kRegex, "\\uD83D\\uDE00", ""},
      {Kind::kRegex, "\\u{DFFF}", "escape"},
      {Kind::kGrammar, "root ::= \"\\uD800\"", "escape"},
      {Kind::kGrammar, "root ::= [\\uD800-\\uDFFF]", "escape"},
      {Kind::kGrammar, "root ::= \"\\U00110000\"", "escape"},
      {Kind::kGrammar, "root ::= \"\\x100000041\"", "escape"},
      {Kind::kGrammar, "root ::= Token(5)", "'Token'"},
      {Kind::kGrammar, "root ::= Token (5)", "'Token'"},
      {Kind::kGrammar, "root ::= Token # tokens\n(5)", "'Token'"},
      {Kind::kGrammar, "root ::= ExcludeToken\t(5)", "'ExcludeToken'"},
      {Kind::kGrammar, "root ::= [\"] Substring (\"abc\")", "'Substring'"},
      {Kind::kGrammar, "root ::= \"\\\"\" TagDispatch ((\"a\", b))\nb ::= \"c\"", "'TagDispatch'"},
      // This one crashed what makes automata.
      {Kind::kGrammar, "root ::= Regex (\"(a[0-9]{1,3}{0,999}*\")", "'Regex'"},
      {Kind::kGrammar, "root[capture=\"]\"] ::= Regex (\"a\")", ""},
      {Kind::kGrammar, "root ::= a \"c\"\na ::= \"b\" (= \"d\")", "look-ahead"},
      {Kind::kGrammar, "root[temperature=2] ::= \"a\"", "attributes"},
      {Kind::kGrammar, "root ::= root", "no text"},
      {Kind::kJsonSchema, "{", "not JSON"},
      {Kind::kJsonSchema, "[]", "an object or a boolean"},
      {Kind::kJsonSchema, "false", ""},
      {Kind::kJsonSchema, R"({"type": "strin"})", "strin"},
      {Kind::kJsonSchema, R"({"type": "array", "uniqueItems": true})", "'uniqueItems'"},
      {Kind::kJsonSchema, R"({"type": "object", "properties": {"a": {"not": {}}}})",
       "/properties/a: the keyword 'not'"},
      {Kind::kJsonSchema, R"({"anyOf": [{"type": "null"}], "type": "null"})",
       "'type' is not supported beside 'anyOf'"},
      {Kind::kJsonSchema, R"({"allOf": [{"type": "null"}, {"type": "null"}]})", "allOf"},
      {Kind::kJsonSchema, R"({"type": "string", "format": "colour"})", "'format'"},
      {Kind::kJsonSchema, R"({"type": "string", "format": "email"})", "'format'"},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": "a\"b"})", "pattern"},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": "é."})", "pattern"},
      {Kind::kJsonSchema, R"({"type": "number", "multipleOf": 2})", "'multipleOf'"},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": "a+", "format": "date"})",
       "'pattern' is not supported beside 'format'"},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": 5})", "'pattern' must be a string"},
      {Kind::kJsonSchema, R"({"type": "string", "maxLength": -1})", "'maxLength'"},
      {Kind::kJsonSchema, R"({"type": "string", "minLength": 1.5})", "'minLength'"},
      {Kind::kJsonSchema, R"({"type": "array", "maxItems": "2"})", "'maxItems'"},
      {Kind::kJsonSchema, R"({"type": "integer", "minimum": "2"})", "'minimum' must be a number"},
      {Kind::kJsonSchema, R"({"type": "integer", "exclusiveMinimum": true})", "'exclusiveMinimum'"},
      {Kind::kJsonSchema, R"({"type": "object", "properties": []})",
       "'properties' must be an object"},
      {Kind::kJsonSchema, R"({"anyOf": {}})", "'anyOf' must be a list"},
      {Kind::kJsonSchema, R"({"anyOf": []})", "'anyOf' must be a list"},
      {Kind::kJsonSchema, R"({"const": 12345678901234567890})", "64 bits"},
      {Kind::kJsonSchema, R"({"enum": [{"a": [1, -1e300]}]})", "64 bits"},
      {Kind::kJsonSchema, R"({"$ref": 5})", "'$ref' must be a string"},
      {Kind::kJsonSchema, R"({"type": "number", "minimum": 1e-7, "maximum": 2e-7})", "decimals"},
      {Kind::kJsonSchema, R"({"oneOf": [{"type": "integer"}, {"type": "number"}]})",
       "is not supported: oneOf"},
      // What is there is no schema that was looked at.
      {Kind::kJsonSchema, R"({"$ref": "#/default", "default": {"type": "array", "contains": {}}})",
       "no schema at '#/default'"},
      {Kind::kJsonSchema, R"({"$defs": {"a": {"const": {"not": {}}}}, "$ref": "#/$defs/a/const"})",
       "no schema at"},
      {Kind::kJsonSchema, R"({"type": "object", "properties": {"": {"$ref": "#/properties/"}}})",
       "'$ref' is '#/properties/'"},
      {Kind::kJsonSchema, R"({"$defs": {"a/b": {}}, "$ref": "#/$defs/a~1b"})", "'~'"},
      {Kind::kJsonSchema, R"({"anyOf": [{}, {"$ref": "#/anyOf/0"}]})", "#/anyOf/0"},
      {Kind::kJsonSchema, R"({"$defs": {"a": {"$id": "http://b/"}}, "$ref": "#/$defs/a"})",
       "/$defs/a: the keyword '$id'"},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": "a+", "minLength": 3})", "minLength"},
      {Kind::kJsonSchema, R"({"type": "object", "required": ["b"], "properties": {}})", "'b'"},
      {Kind::kJsonSchema, R"({"enum": [1], "type": "string"})", "'type' excludes"},
      {Kind::kJsonSchema, R"({"properties": {}})", "'type' is missing"},
      {Kind::kJsonSchema, R"({"$ref": "#/$defs/none"})", ""},
      {Kind::kJsonSchema, R"({"$ref": "http://elsewhere/"})", "'$ref' is 'http://elsewhere/'"},
      {Kind::kJsonSchema, R"({"type": "string", "pattern": "("})", ""},
  };
  for (const Refused& refused : cases) {
    const auto constraint = world.Compile(refused.kind, refused.text);
    EXPECT_EQ(constraint.status().code(), absl::StatusCode::kInvalidArgument)
        << refused.text << constraint.status();
    EXPECT_THAT(constraint.status().message(), HasSubstr(refused.why)) << refused.text;
  }
  EXPECT_THAT(world.compiler.Compile({Kind::kChoice, {}}).status().message(),
              HasSubstr("is empty"));
  EXPECT_THAT(world.compiler.Compile({Kind::kChoice, std::vector<std::string>(1025, "a")})
                  .status()
                  .message(),
              HasSubstr("at most 1024"));
}

// Of draft 2020-12 and before it, and what is no keyword.
TEST(ConstraintTest, KeywordsThatCouldNotBeKeptToAreNamedWhereverTheyStand) {
  World world(Words());
  for (const char* keyword : {"$anchor",
                              "$dynamicAnchor",
                              "$dynamicRef",
                              "$recursiveAnchor",
                              "$recursiveRef",
                              "$vocabulary",
                              "additionalItems",
                              "contains",
                              "contentEncoding",
                              "contentMediaType",
                              "contentSchema",
                              "dependencies",
                              "dependentRequired",
                              "dependentSchemas",
                              "else",
                              "extends",
                              "id",
                              "if",
                              "maxContains",
                              "maxProperties",
                              "minContains",
                              "minProperties",
                              "not",
                              "nullable",
                              "patternProperties",
                              "propertyNames",
                              "then",
                              "uniqueItems",
                              "x-any"}) {
    for (const char* beside : {R"("type": "object")", R"("type": "array")", R"("type": "string")",
                               R"("type": ["number", "array"])", R"("$ref": "#")", R"("const": 1)",
                               R"("anyOf": [true])", R"("title": "x")"}) {
      const std::string inner = absl::StrCat("{", beside, ", \"", keyword, "\": {}}");
      for (const std::string& schema :
           {inner, absl::StrCat(R"({"type": "array", "items": )", inner, "}"),
            absl::StrCat(R"({"$defs": {"unused": )", inner, R"(}, "type": "null"})")}) {
        const absl::Status status = world.Compile(Kind::kJsonSchema, schema).status();
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << schema;
        EXPECT_THAT(status.message(), HasSubstr(absl::StrCat("the keyword '", keyword, "'")));
      }
    }
  }
}

// Each of them is refused, or can be walked: nothing hangs, and nothing grows without bound.
// The library quotes bytes, not characters.
TEST(ConstraintTest, ReasonsCanBeToldToClients) {
  const auto tokenizer = ByteLevel(ByteWords());
  ConstraintCompiler compiler(*tokenizer, 257);
  const std::string parts[] = {"root ::= ", "\"a\"", "\xc3\xa9", "\xe6\x97\xa5",     "[\xc3\xa9-",
                               "(",         "\\",    "{2",       "\xf0\x9f\x91\x8b", " | "};
  std::mt19937 random(5);
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    ConstraintText text{static_cast<Kind>(random() % 4), {""}};
    for (size_t i = 0; i < 1 + random() % 6; ++i) text.texts[0] += parts[random() % 10];
    const absl::Status status = compiler.Compile(text).status();
    if (status.ok()) continue;
    ++refused;
    EXPECT_FALSE(status.message().empty()) << text.texts[0];
    EXPECT_FALSE(FirstInvalidUtf8(status.message()).has_value()) << text.texts[0];
  }
  EXPECT_GT(refused, 500);
}

TEST(ConstraintTest, HostileTextsAreRefusedOrHarmless) {
  World world(Words());
  auto repeat = [](const std::string& text, int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += text;
    return all;
  };
  std::string chain = "root ::= r0\n", wide = "root ::= ";
  for (int i = 0; i < 2500; ++i)
    absl::StrAppend(&chain, "r", i, " ::= r", i + 1, " | \"a\" r", i + 1, "\n");
  absl::StrAppend(&chain, "r2500 ::= \"b\"\n");
  for (int i = 0; i < 5000; ++i) absl::StrAppend(&wide, i > 0 ? " | " : "", "[a-c]* \"", i, "\"");
  nlohmann::json deep = {{"type", "null"}},
                 broad = {{"type", "object"}, {"properties", nlohmann::json::object()}};
  for (int i = 0; i < 60; ++i) {
    deep = {{"type", "array"}, {"items", {{"anyOf", {deep, {{"type", "string"}}}}}}};
  }
  for (int i = 0; i < 700; ++i) {
    broad["properties"][absl::StrCat("property", i)] = {{"type", {"string", "integer", "null"}}};
  }
  const nlohmann::json recursive = {
      {"$defs",
       {{"a", {{"anyOf", {{{"$ref", "#/$defs/b"}}, {{"$ref", "#/$defs/a"}}, {{"type", "null"}}}}}},
        {"b", {{"type", "array"}, {"items", {{"$ref", "#/$defs/a"}}}}}}},
      {"$ref", "#/$defs/a"}};
  const std::vector<ConstraintText> texts = {
      {Kind::kRegex, {"(a{1000}){1000}"}},
      {Kind::kRegex, {"(a{0,1000}){0,1000}"}},
      {Kind::kRegex, {"((a{1,100}){1,100}){1,100}"}},
      {Kind::kRegex, {"((((((((a?){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}"}},
      {Kind::kRegex, {"a{1000000000000}"}},
      {Kind::kRegex, {"a{99999999999999999999}"}},
      {Kind::kRegex, {"((a*)*)*b"}},
      {Kind::kRegex, {"(a|a|a|aa|aaa)*b"}},
      {Kind::kRegex, {"(.*a){60}"}},
      {Kind::kRegex, {"(a|b)*a(a|b){100}"}},
      {Kind::kRegex, {repeat(".*", 2000)}},
      {Kind::kRegex, {repeat("a{128}", 8000)}},
      {Kind::kRegex, {repeat("[a-z]{0,128}", 5000)}},
      {Kind::kRegex, {repeat("(a|b)*|", 8000) + "c"}},
      {Kind::kRegex, {repeat("(((a{128}){128}){128}){128}", 2000)}},
      {Kind::kGrammar, {"root ::= root root | \"a\""}},
      {Kind::kGrammar, {"root ::= root root root | \"a\" | \"\""}},
      {Kind::kGrammar,
       {"root ::= a a a a a a a a\na ::= b b b b b b b b\nb ::= c c c c c c c c\nc ::= \"x\" | "
        "\"\""}},
      {Kind::kGrammar, {"root ::= \"a\" root | root \"a\" | \"a\""}},
      {Kind::kGrammar, {chain}},
      {Kind::kGrammar, {wide}},
      {Kind::kJsonSchema, {deep.dump()}},
      {Kind::kJsonSchema, {broad.dump()}},
      {Kind::kJsonSchema, {recursive.dump()}},
      {Kind::kJsonSchema, {R"({"$ref": "#"})"}},
      {Kind::kJsonSchema,
       {R"({"type": "string", "minLength": 100000000, "maxLength": 2000000000})"}},
      {Kind::kJsonSchema, {R"({"type": "string", "pattern": "((a{0,999}){0,999}){0,999}"})"}},
      {Kind::kJsonSchema,
       {R"({"type": "array", "items": {"type": "array", "minItems": 1000000}, "minItems": 1000000})"}},
      {Kind::kJsonSchema,
       {R"({"type": "integer", "minimum": -9000000000000000000, "maximum": 9000000000000000000})"}},
      {Kind::kJsonSchema, {repeat("[", 60000)}},
      {Kind::kJsonSchema,
       {absl::StrCat(R"({"type": "object", "properties": {")", repeat("a", 60000),
                     R"(": {}}, "additionalProperties": true})")}},
      {Kind::kRegex,
       {absl::StrCat("[", repeat(")", 9000), "]", repeat("(", 9000), "a", repeat(")", 9000))}},
  };
  for (const ConstraintText& text : texts) {
    SCOPED_TRACE(text.texts.front().substr(0, 80));
    const auto constraint = world.compiler.Compile(text);
    if (!constraint.ok()) {
      EXPECT_EQ(constraint.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_FALSE(constraint.status().message().empty());
      continue;
    }
    ConstraintState state(*constraint, {world.end()});
    std::mt19937 random(3);
    for (int step = 0; step < 200 && !state.must_end(); ++step) {
      std::vector<int32_t> allowed = TokensOf(state.allowed());
      std::erase(allowed, world.end());
      const absl::Status status = state.Accept(allowed[random() % allowed.size()]);
      if (status.ok()) continue;
      EXPECT_EQ(ReasonOf(status), kConstraintFailed) << status;
      break;
    }
  }
}

TEST(ConstraintTest, WhatWasCompiledIsRememberedAlsoWhereItWasRefused) {
  World world(Words());
  const auto one = world.Compile(Kind::kRegex, "a+");
  EXPECT_EQ(*one, *world.Compile(Kind::kRegex, "a+"));
  EXPECT_NE(*one, *world.Compile(Kind::kChoice, "a+"));
  EXPECT_EQ(world.Compile(Kind::kRegex, "(").status(), world.Compile(Kind::kRegex, "(").status());
}

// As glibc counts what is allocated; a sanitizer's malloc is another.
#ifndef EPIKV_SANITIZED
TEST(ConstraintTest, BytesAreThoseThatAreAllocated) {
  std::string chain = "root ::= r0\n";
  nlohmann::json broad = {{"type", "object"}};
  for (int i = 0; i < 1500; ++i) {
    absl::StrAppend(&chain, "r", i, "::=([a-z]*\"x\")? r", i + 1, "\n");
  }
  absl::StrAppend(&chain, "r1500::=\"a\"\n");
  for (int i = 0; i < 500; ++i) {
    broad["properties"][absl::StrCat("property", i)] = {{"type", {"string", "integer", "null"}}};
  }
  World world(Words());
  ASSERT_TRUE(world.Compile(Kind::kRegex, "a").ok());  // the vocabulary is made once
  for (const ConstraintText& text : std::vector<ConstraintText>{
           {Kind::kRegex, {"((a{1,100}){1,20})b[^c]{0,500}"}},
           {Kind::kGrammar, {chain}},
           {Kind::kJsonSchema, {broad.dump()}},
           {Kind::kJsonSchema, {R"({"type": "string", "minLength": 2000, "maxLength": 5000})"}},
       }) {
    SCOPED_TRACE(text.texts.front().substr(0, 80));
    const size_t before = mallinfo2().uordblks + mallinfo2().hblkhd;
    const auto constraint = world.compiler.Compile(text);
    ASSERT_TRUE(constraint.ok()) << constraint.status();
    const auto allocated = static_cast<double>(mallinfo2().uordblks + mallinfo2().hblkhd - before);
    EXPECT_GT(allocated, 100'000);  // the rest of the process is small beside
    EXPECT_GT(static_cast<double>((*constraint)->bytes()), 0.8 * allocated);
    EXPECT_LT(static_cast<double>((*constraint)->bytes()), 1.2 * allocated);
    EXPECT_LT(allocated, 16e6);  // a matcher of the chain had 68 MiB once
  }
}
#endif

TEST(ConstraintTest, NoMoreAreCompiledWhileThoseInUseHoldTooMuch) {
  const auto tokenizer = ByteLevel(ByteWords());
  ConstraintCompiler compiler(*tokenizer, 257, {.remembered = 0, .live = 1});
  auto one = compiler.Compile({Kind::kRegex, {"a+"}});
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_GT((*one)->bytes(), 1);
  EXPECT_TRUE(absl::IsResourceExhausted(compiler.Compile({Kind::kRegex, {"b+"}}).status()));
  one = absl::UnknownError("gone");
  EXPECT_TRUE(compiler.Compile({Kind::kRegex, {"b+"}}).ok());
}

TEST(ConstraintTest, CompletionsKeepNoMoreThanTheirTextAllowsWhereMemoryIsScarce) {
  std::string wide = "root ::= \"!\"";
  for (int i = 0; i < 500; ++i) absl::StrAppend(&wide, " | [a-z]* \"", i, "\"");
  const auto tokenizer = ByteLevel(ByteWords());
  for (const bool scarce : {false, true}) {
    ConstraintCompiler compiler(*tokenizer, 257,
                                {.remembered = 0, .live = scarce ? 2 << 20 : 1 << 30});
    const auto costly = compiler.Compile({Kind::kGrammar, {wide}});
    ASSERT_TRUE(costly.ok()) << costly.status();
    const auto cheap = compiler.Compile({Kind::kRegex, {"[a-z]*"}});
    ASSERT_TRUE(cheap.ok()) << cheap.status();
    const int64_t before = *compiler.live_bytes();
    {
      ConstraintState first(*costly, {256}, ""), second(*costly, {256}, "");
      ConstraintState modest(*cheap, {256}, "");
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(modest.Accept('a').ok());
      const auto steps = [&](ConstraintState& state) {
        int taken = 0;
        while (taken < 100 && state.Accept('a').ok()) ++taken;
        return taken;
      };
      const int alone = steps(first), beside = steps(second);
      EXPECT_EQ(scarce, alone < 100) << alone;
      EXPECT_GE(beside, alone);  // what one that ends has kept is there for others
      EXPECT_EQ(scarce, *compiler.live_bytes() < 1 << 20);
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(modest.Accept('a').ok());
    }
    EXPECT_EQ(*compiler.live_bytes(), before);
  }
}

TEST(ConstraintTest, WhatOneTenantHoldsKeepsNobodyElseOut) {
  const auto tokenizer = ByteLevel(ByteWords());
  const ConstraintText text{Kind::kRegex, {"[a-z]{100}"}};
  const int64_t bytes = (*ConstraintCompiler(*tokenizer, 257).Compile(text))->bytes();
  ConstraintCompiler compiler(*tokenizer, 257, {.remembered = 0, .live = 3 * bytes});
  const auto first = compiler.Compile(text, "greedy"), second = compiler.Compile(text, "greedy");
  EXPECT_TRUE(absl::IsResourceExhausted(compiler.Compile(text, "greedy").status()));
  const auto other = compiler.Compile(text, "modest");
  EXPECT_TRUE(other.ok()) << other.status();
}

// Whoever had its constraint compiled.
TEST(ConstraintTest, ACompletionsMemoryIsItsTenants) {
  const auto tokenizer = ByteLevel(ByteWords());
  const ConstraintText text{Kind::kRegex, {"[a-z]{100}"}}, more{Kind::kRegex, {"[0-9]{100}"}};
  const int64_t bytes = (*ConstraintCompiler(*tokenizer, 257).Compile(text))->bytes();
  ConstraintCompiler compiler(*tokenizer, 257, {.remembered = 0, .live = 10 * bytes});
  const auto constraint = *compiler.Compile(text, "first");
  std::list<ConstraintState> states;
  while (*compiler.live_bytes() <= 5 * bytes + bytes / 2) {
    states.emplace_back(constraint, std::vector<int32_t>{256}, "second");
  }
  EXPECT_TRUE(absl::IsResourceExhausted(compiler.Compile(more, "second").status()));
  EXPECT_TRUE(compiler.Compile(more, "first").ok());
}

// Each of these keeps less than its text allows, and all together more than there is.
TEST(ConstraintTest, BeyondTheLimitOneCompletionEndsForTheOthers) {
  std::string wide = "root ::= \"!\"";
  for (int i = 0; i < 20; ++i) absl::StrAppend(&wide, " | [a-z]* \"", i, "\"");
  const auto tokenizer = ByteLevel(ByteWords());
  ConstraintCompiler compiler(*tokenizer, 257, {.remembered = 0, .live = 1 << 20});
  const auto constraint = *compiler.Compile({Kind::kGrammar, {wide}});
  std::list<ConstraintState> states;
  for (int i = 0; i < 8; ++i) states.emplace_back(constraint, std::vector<int32_t>{256}, "");
  ConstraintState modest(constraint, {256}, "modest");
  ASSERT_LT(*compiler.live_bytes(), 1 << 20);
  size_t ended = 0;
  for (int token = 0; token < 400; ++token) {
    EXPECT_TRUE(modest.Accept('a').ok()) << token;
    for (auto state = states.begin(); state != states.end();) {
      const absl::Status read = state->Accept('a');
      if (read.ok()) {
        ++state;
        continue;
      }
      EXPECT_THAT(read.message(), HasSubstr("those of yours the most"));
      ++ended;
      state = states.erase(state);
    }
    EXPECT_LT(*compiler.live_bytes(), (1 << 20) + (1 << 16));
  }
  EXPECT_GT(ended, 0u);
  EXPECT_GT(states.size(), 0u);
}

// Looking ahead changes nothing. Of two states that read the same, one looks at what may come now
// and then, and is right or wrong about it.
TEST(ConstraintLookAheadTest, HasNoEffectOnWhatIsRead) {
  constexpr int64_t kPlenty = 1'000'000;
  World world(Words());
  std::mt19937 random(3);
  int64_t right = 0, wrong = 0;
  for (const char* regex : {"(ab|ba|c)*", "(a|b){3,7}c", "[a-c]*(12|3)+", "abbacbcab"}) {
    SCOPED_TRACE(regex);
    for (int run = 0; run < 20; ++run) {
      std::vector<int32_t> text;
      ConstraintState first = world.Start(Kind::kRegex, regex);
      while (!first.must_end() && text.size() < 15) {
        std::vector<int32_t> next = TokensOf(first.allowed());
        std::erase(next, world.end());
        text.push_back(next[random() % next.size()]);
        ASSERT_TRUE(first.Accept(text.back()).ok());
      }
      ConstraintState plain = world.Start(Kind::kRegex, regex);
      ConstraintState looks = world.Start(Kind::kRegex, regex);
      for (size_t at = 0; at < text.size(); ++at) {
        if (random() % 3 == 0) {
          std::vector<int32_t> guesses(text.begin() + at,
                                       text.begin() + std::min(text.size(), at + 4));
          if (random() % 2 == 0) guesses[random() % guesses.size()] = 0;  // a byte that is no text
          int64_t work = kPlenty;
          const int64_t known = looks.LookAhead(guesses, work);
          EXPECT_EQ(work < kPlenty, guesses[0] == text[at]) << "what cannot come costs nothing";
          (known == std::ssize(guesses) ? right : wrong) += 1;
          ConstraintState walks = world.Start(Kind::kRegex, regex);
          for (size_t i = 0; i < at + known; ++i) ASSERT_TRUE(walks.Accept(text[i]).ok());
          if (known > 0) {
            EXPECT_EQ(looks.allowed_behind(known), walks.allowed());
          }
        }
        ASSERT_TRUE(plain.Accept(text[at]).ok());
        ASSERT_TRUE(looks.Accept(text[at]).ok());
        ASSERT_EQ(looks.allowed(), plain.allowed());
        ASSERT_EQ(looks.may_end(), plain.may_end());
        ASSERT_EQ(looks.must_end(), plain.must_end());
      }
    }
  }
  EXPECT_GT(right, 50);
  EXPECT_GT(wrong, 50);
}

TEST(ConstraintLookAheadTest, EndsWhereNothingFollowsAndWhereItsWorkDoes) {
  World world(Words());
  const auto id = [&](absl::string_view word) {
    return static_cast<int32_t>(std::find(world.words.begin(), world.words.end(), word) -
                                world.words.begin());
  };
  const std::vector<int32_t> guesses = {id("ab"), id("ba"), id("1")};
  ConstraintState state = world.Start(Kind::kRegex, "abba1");
  int64_t work = 1'000'000;
  EXPECT_EQ(state.LookAhead(guesses, work), 2) << "behind the third nothing may follow";
  work = 1;
  EXPECT_EQ(state.LookAhead(guesses, work), 0);
  EXPECT_LE(work, 0);
  EXPECT_EQ(state.LookAhead({}, work), 0);
  for (const int32_t token : guesses) ASSERT_TRUE(state.Accept(token).ok());
  EXPECT_TRUE(state.must_end());
}

}  // namespace constraint_test
}  // namespace epikv
