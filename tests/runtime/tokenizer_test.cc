#include "runtime/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/text/utf8.h"

namespace epikv {
namespace tokenizer_test {

using Json = nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

using Ids = std::vector<int32_t>;

std::string ReadGolden(const std::string& file) {
  const std::string path = absl::StrCat(EPIKV_SOURCE_DIR, "/tests/golden/tokenizers/", file);
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::unique_ptr<Tokenizer> Golden(const std::string& name) {
  auto tokenizer = Tokenizer::FromJson(ReadGolden(name + ".tokenizer.json"));
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

absl::Status Load(const Json& json) { return Tokenizer::FromJson(json.dump()).status(); }

// A small valid file, to be spoilt.
Json Words() {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
          {"post_processor", nullptr},
          {"decoder", nullptr},
          {"model", {{"type", "WordLevel"}, {"vocab", {{"a", 0}, {"b", 1}}}, {"unk_token", "a"}}}};
}

// Files and goldens: golden/make_tokenizers.py.
class TokenizerGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  const std::unique_ptr<Tokenizer> tokenizer_ = Golden(GetParam());
  const Json golden_ = Json::parse(ReadGolden(GetParam() + ".golden.json"));
  const Json texts_ = Json::parse(ReadGolden("texts.json"));
};

TEST_P(TokenizerGoldenTest, EncodesAsTheReference) {
  for (const bool add_special : {true, false}) {
    const Json& expected = golden_[add_special ? "with_special" : "without_special"];
    ASSERT_EQ(expected.size(), texts_.size());
    for (size_t i = 0; i < texts_.size(); ++i) {
      const auto ids =
          tokenizer_->Encode(texts_[i].get<std::string>(), {.add_special = add_special});
      if (expected[i].is_null()) {
        EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument) << texts_[i];
      } else {
        ASSERT_TRUE(ids.ok()) << ids.status();
        EXPECT_EQ(*ids, expected[i].get<Ids>()) << texts_[i];
      }
    }
  }
}

TEST_P(TokenizerGoldenTest, DecodesAsTheReference) {
  for (const Json& decoding : golden_["decodings"]) {
    const Ids ids = decoding[0].get<Ids>();
    EXPECT_EQ(tokenizer_->Decode(ids, {.skip_special = false}), decoding[1].get<std::string>());
    EXPECT_EQ(tokenizer_->Decode(ids, {.skip_special = true}), decoding[2].get<std::string>());
  }
}

TEST_P(TokenizerGoldenTest, TokenBytesMakeUpTheDecodedText) {
  const int32_t first = tokenizer_->TokenToId("a").value();  // another treatment is the first's
  for (const Json& decoding : golden_["decodings"]) {
    Ids ids = decoding[0].get<Ids>();
    std::string bytes = tokenizer_->Decode({first});
    for (int32_t id : ids) {
      const auto token = tokenizer_->TokenBytes(id);
      if (token.has_value()) absl::StrAppend(&bytes, tokenizer_->separator(), *token);
    }
    Utf8Repair repair;
    const std::string text = repair.Append(bytes);
    ids.insert(ids.begin(), first);
    EXPECT_EQ(text + repair.Flush(), tokenizer_->Decode(ids, {.skip_special = false}));
  }
}

// Random text of code points that tokenizers treat differently, some of it no UTF-8.
std::string RandomText(std::mt19937& random, bool valid) {
  static const std::vector<std::string> kParts = {" ",
                                                  "  ",
                                                  "\n",
                                                  "\r\n",
                                                  "\t",
                                                  "a",
                                                  "the",
                                                  "'s",
                                                  "7",
                                                  "é",
                                                  "e\xCC\x81",
                                                  "日",
                                                  "\xF0\x9F\x98\x80",
                                                  "\xE2\x80\x8D",
                                                  "<|eot|>",
                                                  "<tool>",
                                                  "<left>",
                                                  "mask",
                                                  ".",
                                                  "\xC2\xA0",
                                                  std::string(1, '\0')};
  std::string text;
  for (int i = random() % 40; i > 0; --i) {
    if (valid || random() % 2 == 0) {
      text += kParts[random() % kParts.size()];
    } else {
      text += static_cast<char>(random());
    }
  }
  return text;
}

// With ranges of the whole text: no special token, whatever it spells; or an error that names it.
TEST_P(TokenizerGoldenTest, PlainTextHasNoSpecialTokens) {
  int told = 0, plain = 0;
  for (const Json& text : texts_) {
    const std::string spelled = text.get<std::string>();
    const auto ids =
        tokenizer_->Encode(spelled, {.add_special = false, .plain = {{0, spelled.size()}}});
    if (!ids.ok()) {
      ++told;
      continue;
    }
    ++plain;
    for (const int32_t id : *ids) EXPECT_FALSE(tokenizer_->IsSpecial(id)) << spelled;
  }
  EXPECT_GT(plain, 0) << told << " were refused";
}

TEST_P(TokenizerGoldenTest, RandomBytesGiveValidIdsOrAnError) {
  std::mt19937 random(1);
  for (int round = 0; round < 3000; ++round) {
    const std::string text = RandomText(random, round % 2 == 0);
    const auto ids = tokenizer_->Encode(text);
    if (!ids.ok()) {
      EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
      continue;
    }
    EXPECT_FALSE(FirstInvalidUtf8(text).has_value());
    for (int32_t id : *ids) EXPECT_TRUE(tokenizer_->TokenBytes(id).has_value());
    EXPECT_FALSE(FirstInvalidUtf8(tokenizer_->Decode(*ids)).has_value());
  }
}

TEST_P(TokenizerGoldenTest, LongRunsAreEncoded) {
  for (const char* unit : {" ", "a", "1", "\n", "\xCC\x81", "\xCC\xA7\xCC\x81", "<", "'", "the "}) {
    std::string text = "e";
    while (text.size() < 50000) text += unit;
    const auto ids = tokenizer_->Encode(text);
    EXPECT_EQ(ids.ok(), GetParam() != "words_without_unknown") << ids.status();
  }
}

TEST_P(TokenizerGoldenTest, DamagedFileIsRefusedOrUsable) {
  const std::string file = ReadGolden(GetParam() + ".tokenizer.json");
  std::mt19937 random(2);
  for (int round = 0; round < 100; ++round) {
    std::string damaged = file;
    const size_t at = random() % std::min<size_t>(damaged.size(), 2000);
    if (round % 2 == 0) {
      damaged[at] = static_cast<char>(random() % 128);
    } else {
      damaged.erase(at, random() % 20);
    }
    const auto tokenizer = Tokenizer::FromJson(damaged);
    if (!tokenizer.ok()) continue;
    const auto ids = (*tokenizer)->Encode("Hello <|eot|>\n");
    if (ids.ok()) (*tokenizer)->Decode(*ids);
  }
}

INSTANTIATE_TEST_SUITE_P(Files, TokenizerGoldenTest,
                         testing::Values("gpt2", "gpt2_prefix_space", "llama3", "qwen", "deepseek",
                                         "o200k", "digits", "odd_patterns", "words",
                                         "words_and_punctuation", "words_without_unknown",
                                         "llama2_legacy", "mistral", "gemma", "t5",
                                         "unigram_fallback"),
                         [](const auto& info) { return info.param; });

TEST(TokenizerTest, ByteLevelDecodesToWhatItEncoded) {
  std::mt19937 random(3);
  for (const char* name : {"gpt2", "llama3", "o200k", "digits"}) {
    const std::unique_ptr<Tokenizer> tokenizer = Golden(name);
    for (int round = 0; round < 500; ++round) {
      const std::string text = RandomText(random, /*valid=*/true);
      const auto ids = tokenizer->Encode(text, {.add_special = false});
      ASSERT_TRUE(ids.ok()) << ids.status();
      EXPECT_EQ(tokenizer->Decode(*ids, {.skip_special = false}), text) << name;
    }
  }
}

// A run of byte tokens is no UTF-8: what of it is stays text, whatever stands beside it.
TEST(TokenizerTest, BrokenByteTokensLeaveTheOthers) {
  const auto tokenizer = Golden("llama2_legacy");
  const auto id = [&](const char* token) { return tokenizer->TokenToId(token).value(); };
  EXPECT_EQ(tokenizer->Decode({id("<0x0A>"), id("<0xE2>"), id("<0x82>")}), "\n\uFFFD");
  EXPECT_EQ(tokenizer->Decode({id("<0xE2>"), id("a"), id("<0x82>"), id("<0xAC>")}),
            "\uFFFDa\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer->Decode({id("<0xE2>"), id("<0x82>"), id("<0xAC>")}), "€");
}

// "\u2581" stands for a space that only the first word does not have in text.
TEST(TokenizerTest, TheFirstSpaceIsTakenOff) {
  for (const char* name : {"llama2_legacy", "mistral", "t5"}) {
    const auto tokenizer = Golden(name);
    const auto ids = tokenizer->Encode("the key the", {.add_special = false});
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(tokenizer->Decode(*ids), "the key the") << name;
    Ids behind_special = {tokenizer->TokenToId("<s>").value()};
    behind_special.insert(behind_special.end(), ids->begin(), ids->end());
    EXPECT_EQ(tokenizer->Decode(behind_special), "the key the") << name;
  }
  const auto gemma = Golden("gemma");
  EXPECT_EQ(gemma->Decode(*gemma->Encode(" the", {.add_special = false})), " the");
}

// b-- and b- have sums whose last bit is another where scores are the doubles nearest to what is
// written. Ids are those of `tokenizers` 0.23.3.
TEST(TokenizerTest, ScoresAreReadAsTheReferenceReadsThem) {
  Json json = Words();
  json["pre_tokenizer"] = nullptr;
  json["model"] = Json::parse(R"({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0],
      ["b", -10.482186376919065], ["-", -6.321961284657728], ["--", -9.25300036792717]]})");
  const auto tokenizer = Tokenizer::FromJson(json.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_THAT(*(*tokenizer)->Encode("b---"), ElementsAre(1, 3, 2));
}

// A megabyte in one piece: a quadratic way would not end.
// Of a token that has a byte in a plain range nothing is found.
TEST(TokenizerTest, PlainRangesHoldNoByteOfASpecialToken) {
  const auto tokenizer = Golden("llama3");
  const int32_t end = tokenizer->TokenToId("<|eot|>").value();
  auto count = [&](std::vector<TextRange> plain) {
    const auto ids = *tokenizer->Encode("<|eot|>a<|eot|>b<|eot|>", {.plain = std::move(plain)});
    return std::count(ids.begin(), ids.end(), end);
  };
  EXPECT_EQ(count({}), 3);
  EXPECT_EQ(count({{7, 16}}), 2);
  EXPECT_EQ(count({{0, 7}, {16, 23}}), 1);
  EXPECT_EQ(count({{6, 7}}), 2) << "its last byte";
  EXPECT_EQ(count({{7, 8}, {8, 8}, {15, 16}}), 3) << "none of them has one";
}

TEST(TokenizerTest, LongPiecesAreMerged) {
  const auto tokenizer = Golden("llama2_legacy");  // does not cut text
  std::string text;
  while (text.size() < 1000000) text += "the key of the cache ";
  const auto ids = tokenizer->Encode(text, {.add_special = false});
  ASSERT_TRUE(ids.ok()) << ids.status();
  EXPECT_EQ(tokenizer->Decode(*ids), text);
}

TEST(TokenizerTest, InvalidUtf8NamesTheByte) {
  const auto tokenizer = Golden("gpt2");
  for (const char* text : {"abc\xFF", "abc\xC0\x80", "abc\xE2\x82", "abc\xED\xA0\x80"}) {
    const absl::Status status = tokenizer->Encode(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("byte 3"));
  }
}

TEST(TokenizerTest, UnknownWordIsNamed) {
  const absl::Status status = Golden("words_without_unknown")->Encode("$a = frog").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("'frog'"));
}

TEST(TokenizerTest, LongUnknownWordIsCutInTheMessage) {
  std::string word = "x";
  while (word.size() < 10000) word += "\u00e9";
  const std::string message(Golden("words_without_unknown")->Encode(word).status().message());
  EXPECT_LT(message.size(), 200);
  EXPECT_FALSE(FirstInvalidUtf8(message).has_value());
}

TEST(TokenizerTest, WordsAreJoinedBySingleSpaces) {
  const auto tokenizer = Golden("words");
  const auto ids = tokenizer->Encode("<s>$a  =\n3");
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(tokenizer->Decode(*ids), "$a = 3");
  EXPECT_EQ(tokenizer->separator(), " ");
}

TEST(TokenizerTest, TokensAreFoundByTheirSpelling) {
  const auto tokenizer = Golden("llama3");
  EXPECT_EQ(tokenizer->TokenToId("<|bos|>"), 0);
  EXPECT_TRUE(tokenizer->IsSpecial(0));
  EXPECT_EQ(tokenizer->TokenToId("no such token"), std::nullopt);
  const auto space = tokenizer->TokenToId("Ġ");
  ASSERT_TRUE(space.has_value());
  EXPECT_EQ(tokenizer->TokenBytes(*space), " ");
  EXPECT_FALSE(tokenizer->IsSpecial(*space));
}

TEST(TokenizerTest, IdsOutsideTheVocabularyAreNoTokens) {
  const auto tokenizer = Golden("gpt2");
  const int32_t past = static_cast<int32_t>(tokenizer->vocab_size());
  for (int32_t id : {-1, past, past + 1000}) {
    EXPECT_EQ(tokenizer->TokenBytes(id), std::nullopt);
    EXPECT_FALSE(tokenizer->IsSpecial(id));
    EXPECT_EQ(tokenizer->Decode({id}), "");
  }
}

TEST(TokenizerTest, KeepsTheTextItWasMadeFrom) {
  const std::string json = ReadGolden("gpt2.tokenizer.json");
  EXPECT_EQ((*Tokenizer::FromJson(json))->json(), json);
}

Json Added(int32_t id, const std::string& content) {
  return {{"id", id},        {"content", content}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", true}, {"special", false}};
}

struct Refusal {
  const char* pointer;  // into the file
  Json value;           // put there
  absl::StatusCode code;
  const char* message;  // part of it
};

TEST(TokenizerTest, WhatCannotBeDoneIsRefusedByName) {
  constexpr auto kUnimplemented = absl::StatusCode::kUnimplemented;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  const Json split = {{"type", "Split"}, {"invert", false}, {"behavior", "Isolated"}};
  const auto regex = [&split](const char* pattern) {
    Json result = split;
    result["pattern"] = {{"Regex", pattern}};
    return result;
  };
  const auto strip = [](int start, int stop) {
    return Json{{"type", "Strip"}, {"content", " "}, {"start", start}, {"stop", stop}};
  };
  const auto decoders = [](std::vector<Json> parts) {
    return Json{{"type", "Sequence"}, {"decoders", parts}};
  };
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", "_"}}}, {"content", " "}};
  const std::vector<Refusal> refusals = {
      {"/version", "2.0", kUnimplemented, "version"},
      {"/surprise", 1, kUnimplemented, "surprise"},
      {"/truncation", {{"max_length", 5}}, kUnimplemented, "truncation"},
      {"/padding", {{"strategy", "x"}}, kUnimplemented, "padding"},
      {"/normalizer",
       {{"type", "Precompiled"}},
       kUnimplemented,
       "normalizer.type is 'Precompiled'"},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}, {{"type", "Nmt"}}}}},
       kUnimplemented,
       "normalizer.normalizers[1].type is 'Nmt'"},
      {"/normalizer", {{"type", "Strip"}}, kInvalid, "normalizer.strip_left"},
      {"/normalizer", {{"type", "Prepend"}}, kInvalid, "normalizer.prepend"},
      {"/normalizer", {{"type", "Replace"}, {"content", ""}}, kInvalid, "normalizer.pattern"},
      {"/normalizer", {{"type", "NFC"}, {"x", 1}}, kUnimplemented, "normalizer.x"},
      {"/normalizer", 3, kInvalid, "normalizer"},
      {"/pre_tokenizer", {{"type", "BertPreTokenizer"}}, kUnimplemented, "'BertPreTokenizer'"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, kInvalid, "pre_tokenizer.replacement"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "__"}},
       kInvalid,
       "must be one character"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "_"}, {"prepend_scheme", "last"}},
       kUnimplemented,
       "pre_tokenizer.prepend_scheme is 'last'"},
      {"/pre_tokenizer",
       {{"type", "Metaspace"}, {"replacement", "_"}, {"add_prefix_space", false}},
       kInvalid,
       "contradicts add_prefix_space"},
      {"/pre_tokenizer", {{"type", "Whitespace"}, {"x", 1}}, kUnimplemented, "pre_tokenizer.x"},
      {"/pre_tokenizer", {{"type", "ByteLevel"}}, kUnimplemented, "WordLevel"},
      {"/pre_tokenizer",
       {{"type", "Sequence"}, {"pretokenizers", {{{"type", "ByteLevel"}}, {{"type", "Digits"}}}}},
       kUnimplemented,
       "pretokenizers[1] follows ByteLevel"},
      {"/pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers", {{{"type", "Sequence"}, {"pretokenizers", Json::array()}}}}},
       kUnimplemented,
       "pretokenizers[0] is a Sequence inside"},
      {"/post_processor",
       {{"type", "Sequence"}, {"processors", {{{"type", "Sequence"}}}}},
       kUnimplemented,
       "processors[0] is a Sequence inside"},
      {"/pre_tokenizer", regex("a*"), kUnimplemented, "empty string"},
      {"/pre_tokenizer", regex("^a"), kUnimplemented, "the anchor ^"},
      {"/pre_tokenizer", regex("[a&&b]"), kUnimplemented, "&&"},
      {"/pre_tokenizer", regex("[a[b]]"), kUnimplemented, "a [ inside"},
      {"/pre_tokenizer", regex("\\h+"), kUnimplemented, "\\h"},
      {"/pre_tokenizer", regex("(?i)a"), kUnimplemented, "the group (?i"},
      {"/pre_tokenizer", regex("a{2}+"), kUnimplemented, "}+"},
      {"/pre_tokenizer", regex("(?<n>a)"), kUnimplemented, "the group (?<"},
      {"/pre_tokenizer", regex("a("), kUnimplemented, "PCRE2"},
      {"/pre_tokenizer", split, kInvalid, "pre_tokenizer.pattern"},
      {"/pre_tokenizer/pattern", {{"String", "x"}}, kUnimplemented, "pre_tokenizer.pattern"},
      {"/post_processor", {{"type", "BertProcessing"}}, kUnimplemented, "'BertProcessing'"},
      {"/post_processor",
       {{"type", "TemplateProcessing"}, {"single", {{{"Sequence", {{"id", "B"}}}}}}},
       kUnimplemented,
       "single[0]"},
      {"/decoder", {{"type", "WordPiece"}}, kUnimplemented, "decoder.type is 'WordPiece'"},
      {"/decoder", strip(1, 1), kUnimplemented, "decoder.stop must be 0"},
      {"/decoder", decoders({{{"type", "Fuse"}}, replace}), kUnimplemented, "decoders[1]"},
      {"/decoder", decoders({{{"type", "ByteFallback"}}, replace}), kUnimplemented, "decoders[1]"},
      {"/decoder", decoders({{{"type", "ByteFallback"}}, strip(1, 0)}), kUnimplemented,
       "decoders[1]"},
      {"/decoder", decoders({{{"type", "Fuse"}}, strip(1, 0), strip(1, 0)}), kUnimplemented,
       "decoders[2]"},
      {"/model/type", "WordPiece", kUnimplemented, "model.type is 'WordPiece'"},
      {"/model", Json::parse(R"({"type": "Unigram", "vocab": ["a"]})"), kInvalid, "model.vocab[0]"},
      {"/model", Json::parse(R"({"type": "Unigram", "vocab": [["a", 0], ["a", 1]]})"), kInvalid,
       "model.vocab[1] repeats"},
      {"/model", Json::parse(R"({"type": "Unigram", "vocab": [["a", 0]], "unk_id": 1})"), kInvalid,
       "model.unk_id"},
      {"/model/surprise", 1, kUnimplemented, "model.surprise"},
      {"/model/unk_token", nullptr, kInvalid, "model.unk_token"},
      {"/model/vocab/b", 0, kInvalid, "repeats the id"},
      {"/model/vocab/b", -1, kInvalid, "model.vocab['b']"},
      {"/model/vocab/b", 1 << 30, kInvalid, "model.vocab['b']"},
      {"/model/vocab/b", 1.5, kInvalid, "model.vocab['b']"},
      {"/added_tokens", {Added(0, "x")}, kInvalid, "added_tokens[0] contradicts"},
      {"/added_tokens", {Added(7, "a")}, kInvalid, "added_tokens[0] contradicts"},
      {"/added_tokens", {Added(7, "")}, kInvalid, "must not be empty"},
      {"/added_tokens", {Added(7, "x"), Added(8, "x")}, kInvalid, "added_tokens[1] repeats"},
      {"/added_tokens", {{{"id", 7}, {"content", "x"}}}, kInvalid, "single_word"},
  };
  ASSERT_TRUE(Load(Words()).ok()) << Load(Words());
  for (const Refusal& refusal : refusals) {
    Json json = Words();
    json[Json::json_pointer(refusal.pointer)] = refusal.value;
    const absl::Status status = Load(json);
    EXPECT_EQ(status.code(), refusal.code) << json << status;
    EXPECT_THAT(status.message(), HasSubstr(refusal.message)) << json;
  }
}

TEST(TokenizerTest, BpeOptionsThatChangeTokensAreRefused) {
  const Json good = Json::parse(ReadGolden("gpt2.tokenizer.json"));
  const std::vector<std::pair<const char*, Json>> changes = {{"dropout", 0.1},
                                                             {"continuing_subword_prefix", "##"},
                                                             {"end_of_word_suffix", "</w>"},
                                                             {"byte_fallback", true},
                                                             {"surprise", 1},
                                                             {"ignore_merges", "yes"},
                                                             {"merges", {{"a", "zzz"}}},
                                                             {"merges", {{"a"}}},
                                                             {"merges", 3}};
  for (const auto& [name, value] : changes) {
    Json json = good;
    json["model"][name] = value;
    EXPECT_THAT(Load(json).message(), HasSubstr(absl::StrCat("model.", name)));
  }
  Json json = good;
  json["model"]["vocab"].erase("Ġ");
  EXPECT_THAT(Load(json).message(), HasSubstr("byte 0x20"));
}

TEST(TokenizerTest, OldFilesAreRead) {
  Json json = Json::parse(ReadGolden("gpt2.tokenizer.json"));
  const auto expected = Golden("gpt2")->Encode("The tokens that matter.");
  json["model"].erase("type");
  Json lines = {"#version: 0.2"};
  for (const Json& merge : json["model"]["merges"]) {
    lines.push_back(merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  json["model"]["merges"] = lines;
  const auto tokenizer = Tokenizer::FromJson(json.dump());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ(*(*tokenizer)->Encode("The tokens that matter."), *expected);
}

TEST(TokenizerTest, NoJsonIsMalformed) {
  for (const char* text : {"", "{", "[]", "null", "{\"version\":\"1.0\"}", "\xFF"}) {
    EXPECT_EQ(Tokenizer::FromJson(text).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST(Utf8Test, RepairDoesNotDependOnTheCuts) {
  std::mt19937 random(4);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    static const std::string kBytes =
        "a\x80\xBF\xC2\xE0\xA0\xED\x9F\xEF\xF0\x90\xF4\x8F\xFF\xC3\xA9";
    for (int i = random() % 12; i > 0; --i) bytes += kBytes[random() % kBytes.size()];
    Utf8Repair whole, cut;
    std::string expected = whole.Append(bytes);
    expected += whole.Flush();
    std::string text;
    for (char byte : bytes) text += cut.Append({&byte, 1});
    text += cut.Flush();
    EXPECT_EQ(text, expected);
    EXPECT_FALSE(FirstInvalidUtf8(expected).has_value());
    EXPECT_EQ(expected == bytes, !FirstInvalidUtf8(bytes).has_value());
  }
}

TEST(Utf8Test, TheLongestBrokenRunIsOneReplacement) {
  const std::string r = "\xEF\xBF\xBD";
  const std::vector<std::pair<std::string, std::string>> cases = {{"\xF0\x9F\x98", r},
                                                                  {"\xF0\x9F\x98"
                                                                   "a",
                                                                   r + "a"},
                                                                  {"\xE0\x80", r + r},
                                                                  {"\xED\xA0\x80", r + r + r},
                                                                  {"\xC3\xC3\xA9", r + "\xC3\xA9"},
                                                                  {"\xFF\xFE", r + r}};
  for (const auto& [bytes, expected] : cases) {
    Utf8Repair repair;
    const std::string text = repair.Append(bytes);
    EXPECT_EQ(text + repair.Flush(), expected);
  }
}

}  // namespace tokenizer_test
}  // namespace epikv
