// Constraints on answers that may call functions: what they let through is read by AnswerReader,
// and what models write without them is held against them.
#include "runtime/constraints/call_grammar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/text/chat/answer_reader.h"
#include "tests/fixtures/byte_level.h"

namespace epikv {
namespace call_grammar_test {

using testing::HasSubstr;

const CalledFunction kFind = {
    "find",
    R"({"type": "object", "properties": {"id": {"type": "integer"}, "in": {"enum": ["a", "b"]}},
               "required": ["id"], "additionalProperties": false})"};
const CalledFunction kStop = {
    "stop", R"({"type": "object", "properties": {}, "additionalProperties": false})"};

// Bytes, and special tokens that are markup but for the last, which ends the answer.
struct World {
  std::unique_ptr<Tokenizer> tokenizer =
      ByteLevel(ByteWords(), {"[TOOL_CALLS]", "<tool_call>", "<think>", "</think>", "<end>"});
  static constexpr int32_t kMarkup = 256, kEnd = 260;
  ConstraintCompiler compiler{*tokenizer, 261, ConstraintLimits(), {256, 257, 258, 259}};

  std::shared_ptr<const Constraint> Compile(const CallRule& rule,
                                            std::optional<ThinkingBefore> thinking = {}) {
    absl::StatusOr<ConstraintText> text = ConstraintOfCalls(rule);
    EXPECT_TRUE(text.ok()) << text.status();
    text->thinking = std::move(thinking);
    auto constraint = compiler.Compile(*text);
    EXPECT_TRUE(constraint.ok()) << constraint.status();
    return *constraint;
  }
};

bool Allows(const ConstraintState& state, int32_t token) {
  return state.allowed()[token / 32] >> (token % 32) & 1;
}

// How a constraint takes a text: up to its first byte that may not be there ("<...>!"), as one that
// has to go on ("..."), or whole.
std::string Taken(const std::shared_ptr<const Constraint>& constraint, const std::string& text) {
  ConstraintState state(constraint, {World::kEnd});
  for (size_t i = 0; i < text.size(); ++i) {
    const int32_t token = static_cast<unsigned char>(text[i]);
    if (!Allows(state, token)) return absl::StrCat(text.substr(0, i), "!");
    EXPECT_TRUE(state.Accept(token).ok());
  }
  return state.may_end() ? "whole" : "...";
}

// An answer of tokens that are drawn from those allowed, up to `most`.
std::string Drawn(const World& world, const std::shared_ptr<const Constraint>& constraint,
                  std::mt19937& random, int most) {
  ConstraintState state(constraint, {World::kEnd});
  std::vector<int32_t> tokens;
  while (static_cast<int>(tokens.size()) < most) {
    std::vector<int32_t> allowed;
    for (int32_t token = 0; token <= World::kEnd; ++token) {
      const bool text = token == '\n' || (token >= 0x20 && token < 0x7f);
      if (Allows(state, token) && (text || token >= World::kMarkup)) allowed.push_back(token);
    }
    if (allowed.empty()) break;
    const int32_t token = allowed[random() % allowed.size()];
    if (token == World::kEnd) break;
    tokens.push_back(token);
    EXPECT_TRUE(state.Accept(token).ok());
    if (state.must_end()) break;
  }
  return world.tokenizer->Decode(tokens, {.skip_special = false});
}

TEST(CallGrammarTest, CallsOfEachFamilyAreHeldToTheirSchemas) {
  struct Case {
    CallSyntax syntax;
    const char *before, *between, *after;
  };
  const Case cases[] = {
      {CallSyntax::kHermes, "<tool_call>\n{\"name\": \"find\", \"arguments\": ", "",
       "}\n</tool_call>"},
      {CallSyntax::kLlama3, "{\"name\": \"find\", \"parameters\": ", "", "}"},
      {CallSyntax::kMistral, "[TOOL_CALLS] [{\"name\": \"find\", \"arguments\": ", "", "}]"},
  };
  World world;
  for (const Case& c : cases) {
    for (const bool required : {false, true}) {
      const auto rule =
          world.Compile({.syntax = c.syntax, .functions = {kFind, kStop}, .required = required});
      auto taken = [&](const std::string& arguments) {
        return Taken(rule, absl::StrCat(c.before, arguments));
      };
      const std::string good = absl::StrCat("{\"id\": 12, \"in\": \"a\"}", c.after);
      EXPECT_EQ(taken(good), "whole") << c.before;
      EXPECT_EQ(taken("{\"id\": \"x\"}"), absl::StrCat(c.before, "{\"id\": !"));
      EXPECT_EQ(taken("{\"id\": 1, \"in\": \"c"),
                absl::StrCat(c.before, "{\"id\": 1, \"in\": \"!"));
      EXPECT_EQ(taken("{}"), absl::StrCat(c.before, "{!"));
      EXPECT_EQ(taken("{\"id\": 1"), "...");
      std::string other = c.before;
      other.replace(other.find("find"), 4, "fond");
      EXPECT_EQ(Taken(rule, other), absl::StrCat(other.substr(0, other.find("ond")), "!"));
      EXPECT_EQ(Taken(rule, "No, none."), required ? "!" : "whole");
      EXPECT_EQ(Taken(rule, ""), required ? "..." : "whole");
    }
  }
}

TEST(CallGrammarTest, WhatIsSaidBesideIsFree) {
  World world;
  const auto hermes = world.Compile({.syntax = CallSyntax::kHermes, .functions = {kStop}});
  const std::string call = "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";
  EXPECT_EQ(Taken(hermes, absl::StrCat("I stop.\n", call, "\n", call, " There.")), "whole");
  EXPECT_EQ(Taken(hermes, "<tool_cal {\"name\": \"x\"}"), "whole");
  const auto llama = world.Compile({.syntax = CallSyntax::kLlama3, .functions = {kStop}});
  for (const char* text : {"{\"answer\": 1}", "{", "{\"name\"", "{}", "\n{\"name\": \"x\"}",
                           "So: {\"name\": \"x\"}"}) {
    EXPECT_EQ(Taken(llama, text), "whole") << text;
  }
  EXPECT_EQ(Taken(llama, "{\"name\": \"x"), "{\"name\": \"!");
  const auto mistral = world.Compile({.syntax = CallSyntax::kMistral, .functions = {kStop}});
  for (const char* begin : {"[TOOL_CALLS] [", "[TOOL_CALLS]["}) {
    EXPECT_EQ(Taken(mistral, absl::StrCat(begin, "{\"name\": \"stop\", \"arguments\": {}}]")),
              "whole");
    EXPECT_EQ(Taken(mistral, absl::StrCat("So: ", begin, "{\"name\": \"x")),
              absl::StrCat("So: ", begin, "{\"name\": \"!"));
  }
  const auto single = world.Compile(
      {.syntax = CallSyntax::kHermes, .functions = {kStop}, .required = true, .several = false});
  EXPECT_EQ(Taken(single, absl::StrCat(call, "\n")), absl::StrCat(call, "!"));
}

TEST(CallGrammarTest, WhereNothingMayBeCalledNothingIs) {
  World world;
  const auto hermes = world.Compile({.syntax = CallSyntax::kHermes});
  EXPECT_EQ(Taken(hermes, "a <tool_call>"), "a <tool_call!");
  EXPECT_EQ(Taken(hermes, "a tool_call>"), "whole");
  EXPECT_EQ(Taken(world.Compile({.syntax = CallSyntax::kMistral}), "[TOOL_CALLS]"), "[TOOL_CALLS!");
  const auto llama = world.Compile({.syntax = CallSyntax::kLlama3});
  EXPECT_EQ(Taken(llama, "{\"name\": \""), "{\"name\": !");
  EXPECT_EQ(Taken(llama, "{\"name\": 3}"), "whole");
}

TEST(CallGrammarTest, ThinkingBeforeIsFree) {
  World world;
  const CallRule rule{.syntax = CallSyntax::kHermes, .functions = {kStop}, .required = true};
  const std::string call = "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";
  const auto may = world.Compile(rule, ThinkingBefore{"<think>", "</think>"});
  EXPECT_EQ(Taken(may, call), "whole");
  EXPECT_EQ(Taken(may, absl::StrCat("<think>a <tool_call>b</think>", call)), "whole");
  EXPECT_EQ(Taken(may, "<think>a"), "...");
  EXPECT_EQ(Taken(may, "a"), "!");
  const auto begun = world.Compile(rule, ThinkingBefore{"<think>", "</think>", true});
  EXPECT_EQ(Taken(begun, absl::StrCat("so\n</think>", call)), "whole");
  EXPECT_EQ(Taken(begun, call), "...");
  EXPECT_EQ(Taken(begun, absl::StrCat("so\n</think>\n\n", call)), "whole");
  EXPECT_EQ(Taken(may, absl::StrCat("\n<think>a <tool_call>b</think>\n\n", call)), "whole");
  const auto schema =
      world.compiler.Compile({.kind = ConstraintText::Kind::kJsonSchema,
                              .texts = {R"({"type": "boolean"})"},
                              .thinking = ThinkingBefore{"<think>", "</think>", true}});
  ASSERT_TRUE(schema.ok()) << schema.status();
  EXPECT_EQ(Taken(*schema, "hm</think>true"), "whole");
  EXPECT_EQ(Taken(*schema, "hm</think>yes"), "hm</think>!");
}

TEST(CallGrammarTest, ReadersUnderstandWhatTheyLetThrough) {
  World world;
  std::mt19937 random(3);
  for (const CallSyntax syntax : {CallSyntax::kHermes, CallSyntax::kLlama3, CallSyntax::kMistral}) {
    const auto rule =
        world.Compile({.syntax = syntax, .functions = {kFind, kStop}, .required = true});
    int whole = 0;
    for (int i = 0; i < 60; ++i) {
      AnswerReader reader({.calls = syntax});
      AnswerDelta all = reader.Append(Drawn(world, rule, random, 4000));
      all.Append(reader.Flush());
      EXPECT_EQ(all.content, "");
      for (const CallDelta& call : all.calls) {
        const auto arguments = nlohmann::json::parse(call.arguments, nullptr, false);
        whole += arguments.is_object();
        if (call.name == "find" && arguments.is_object()) {
          EXPECT_TRUE(arguments["id"].is_number()) << call.arguments;
        }
      }
    }
    EXPECT_GT(whole, 30);
  }
}

TEST(CallGrammarTest, SchemasThatCannotBeHeldAreNamed) {
  auto error = [](const char* schema) {
    const auto text = ConstraintOfCalls({.functions = {kStop, {"find", schema}}});
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(text.status().message());
  };
  EXPECT_THAT(error("{"), HasSubstr("of 'find': "));
  EXPECT_THAT(error(R"({"type": "string"})"), HasSubstr("of 'find': must have the type 'object'"));
  EXPECT_THAT(error("true"), HasSubstr("of 'find': must have the type 'object'"));
  EXPECT_THAT(
      error(R"({"type": "object", "properties": {"a": {"type": "array", "contains": {}}}})"),
      HasSubstr("contains"));
}

TEST(CallGrammarTest, ArgumentsAreAnyObjectWhereTheSchemaNeedNotBeHeld) {
  World world;
  const auto rule = world.Compile(
      {.functions = {{"find", R"({"type": "object", "minProperties": 1})", /*lenient=*/true}},
       .required = true});
  const std::string begin = "<tool_call>\n{\"name\": \"find\", \"arguments\": ";
  EXPECT_EQ(Taken(rule, absl::StrCat(begin, "{\"a\": [1, null]}}\n</tool_call>")), "whole");
  EXPECT_EQ(Taken(rule, absl::StrCat(begin, "[")), absl::StrCat(begin, "!"));
}

TEST(CallGrammarTest, SchemasThatAreTooLargeAreNotRead) {
  std::string schema = R"({"type": "object", "properties": {)";
  for (int i = 0; schema.size() < 60000; ++i) {
    absl::StrAppend(&schema, i > 0 ? ", " : "", "\"property", i, "\": {\"type\": \"integer\"}");
  }
  schema += "}}";
  EXPECT_THAT(ConstraintOfCalls({.functions = {kStop, {"find", schema}}}).status().message(),
              HasSubstr("of 'find': is too large"));
  World world;
  const auto rule = world.Compile({.functions = {kStop, {"find", schema, /*lenient=*/true}}});
  EXPECT_EQ(
      Taken(rule, "<tool_call>\n{\"name\": \"find\", \"arguments\": {\"x\": 1}}\n</tool_call>"),
      "whole");
}

TEST(CallGrammarTest, WhatCostsTooMuchIsRefused) {
  World world;
  std::vector<CalledFunction> functions;
  for (int i = 0; i < 64; ++i) {
    functions.push_back(
        {absl::StrCat("f", i),
         R"({"type": "object", "properties": {"a": {"type": "string", "pattern": "((a{1,200}){1,200}){1,200}"}}})"});
  }
  const absl::StatusOr<ConstraintText> text = ConstraintOfCalls({.functions = functions});
  ASSERT_TRUE(text.ok());
  EXPECT_THAT(world.compiler.Compile(*text).status().message(), HasSubstr("too complex"));
}

}  // namespace call_grammar_test
}  // namespace epikv
