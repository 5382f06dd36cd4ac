#include "runtime/text/chat/chat_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/civil_time.h"

namespace epikv {
namespace chat_format_test {

using ::testing::HasSubstr;
using Json = nlohmann::json;
using Role = ChatRole;

const absl::Time kNow = absl::FromCivil(absl::CivilDay(2026, 3, 9), absl::LocalTimeZone());

// "[S system][U user][A assistant]...[A", nothing stripped.
Json Brackets() {
  return Json::parse(R"({
    "begin": {"system": ["[S "], "user": ["[U "]},
    "between": {"system user": ["][U "], "user assistant": ["][A "], "assistant user": ["][U "]},
    "generation": ["][A "],
    "end": ["]"],
    "system": "first",
    "strip": {"system": "none", "user": "none", "assistant": "none"},
    "history": {"after": null, "strip": "none"}
  })");
}

ChatFormats Made(const Json& format) {
  return *ChatFormats::FromJson(Json{{"default", format}}.dump());
}

std::string Text(const ChatFormats& formats, const std::vector<ChatMessage>& messages,
                 std::optional<bool> thinking = std::nullopt) {
  const absl::StatusOr<ChatText> text =
      formats.Render(messages, {.thinking = thinking, .now = kNow});
  return text.ok() ? text->text : text.status().ToString();
}

TEST(ChatFormatTest, WritesWhatStandsAroundContents) {
  const ChatFormats formats = Made(Brackets());
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}}), "[U a][A ");
  EXPECT_EQ(Text(formats, {{Role::kSystem, "s"}, {Role::kUser, "a"}}), "[S s][U a][A ");
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}, {Role::kAssistant, "b"}, {Role::kUser, "c"}}),
            "[U a][A b][U c][A ");
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}, {Role::kAssistant, "b"}}), "[U a][A b]");
  EXPECT_EQ(Text(formats, {{Role::kUser, ""}}), "[U ][A ");
}

TEST(ChatFormatTest, TellsWhereContentsStand) {
  const ChatText text =
      *Made(Brackets())
           .Render({{Role::kSystem, "sys"}, {Role::kUser, ""}, {Role::kAssistant, "b"}},
                   {.now = kNow});
  std::vector<std::string> contents;
  for (const TextRange& range : text.contents) {
    contents.push_back(text.text.substr(range.begin, range.end - range.begin));
  }
  EXPECT_EQ(text.text, "[S sys][U ][A b]");
  EXPECT_EQ(contents, (std::vector<std::string>{"sys", "", "b"}));
}

TEST(ChatFormatTest, StripsAsPythonDoes) {
  struct Case {
    const char *strip, *content, *stripped;
  };
  const Case cases[] = {
      {"none", " \n a ", " \n a "},
      {"both",
       " \t\n\v\f\r\x1c\x1d\x1e\x1f"
       "a b \n",
       "a b"},
      {"both", "\xc2\xa0\xe3\x80\x80 a\xe2\x80\xa9", "a"},
      {"both",
       "\xe2\x80\x8b"
       "a\xc2\xad",
       "\xe2\x80\x8b"
       "a\xc2\xad"},  // no white space to Python
      {"both", " \n", ""},
      {"left", " \na \n", "a \n"},
      {"right", " \na \n", " \na"},
      {"left_newlines", "\n\n \na\n", " \na\n"},
      {"newlines", "\n a \n\n", " a "},
  };
  for (const Case& c : cases) {
    Json format = Brackets();
    format["strip"]["user"] = c.strip;
    EXPECT_EQ(Text(Made(format), {{Role::kUser, c.content}}),
              absl::StrCat("[U ", c.stripped, "][A "))
        << c.strip << " of '" << c.content << "'";
  }
}

TEST(ChatFormatTest, AnswersThatUsersHaveReadLoseTheirThoughts) {
  Json format = Brackets();
  format["history"] = {{"after", "</think>"}, {"strip", "left_newlines"}};
  const std::string thought = "<think>\nhm </think>hm</think>\n\nyes ";
  const std::vector<ChatMessage> asked = {
      {Role::kUser, "a</think>b"}, {Role::kAssistant, thought}, {Role::kUser, "c"}};
  EXPECT_EQ(Text(Made(format), asked), "[U a</think>b][A yes ][U c][A ");
  const std::vector<ChatMessage> plain = {
      {Role::kUser, "a"}, {Role::kAssistant, "\n\nyes"}, {Role::kUser, "c"}};
  EXPECT_EQ(Text(Made(format), plain), "[U a][A \n\nyes][U c][A ");
  const std::vector<ChatMessage> answered(asked.begin(), asked.begin() + 2);
  EXPECT_EQ(Text(Made(format), answered), absl::StrCat("[U a</think>b][A ", thought, "]"));
}

TEST(ChatFormatTest, ASystemMessageMayStandBeforeTheLastUsers) {
  Json format = Brackets();
  format["system"] = "last_user";
  format["between"]["assistant system"] = {"][U+S "};
  format["between"]["system user"] = {"; "};
  format["begin"]["system"] = {"[U+S "};
  const std::vector<ChatMessage> messages = {
      {Role::kSystem, "s"}, {Role::kUser, "a"}, {Role::kAssistant, "b"}, {Role::kUser, "c"}};
  EXPECT_EQ(Text(Made(format), messages), "[U a][A b][U+S s; c][A ");
  const std::vector<ChatMessage> first(messages.begin(), messages.begin() + 2);
  EXPECT_EQ(Text(Made(format), first), "[U+S s; a][A ");
  const std::vector<ChatMessage> answered(messages.begin(), messages.begin() + 3);
  EXPECT_EQ(Text(Made(format), answered), "[U+S s; a][A b]");
}

TEST(ChatFormatTest, DatesAreTodays) {
  Json format = Brackets();
  format["begin"]["user"] = Json::array({"Today: ", {{"date", "%d %B %Y"}}, " [U "});
  EXPECT_EQ(Text(Made(format), {{Role::kUser, "a %d"}}), "Today: 09 March 2026 [U a %d][A ");
}

TEST(ChatFormatTest, ThinkingChoosesTheFormat) {
  Json on = Brackets(), off = Brackets();
  on["generation"] = {"][A <think>"};
  off["generation"] = {"][A <think></think>"};
  const ChatFormats formats = *ChatFormats::FromJson(
      Json{{"default", Brackets()}, {"thinking", on}, {"no_thinking", off}}.dump());
  EXPECT_TRUE(formats.has_thinking());
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}}), "[U a][A ");
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}}, true), "[U a][A <think>");
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}}, false), "[U a][A <think></think>");
}

TEST(ChatFormatTest, WhatATemplateCannotDoIsSaid) {
  const auto refusal = [](const ChatFormats& formats, std::vector<ChatMessage> messages,
                          std::optional<bool> thinking = std::nullopt) {
    const absl::Status status =
        formats.Render(messages, {.thinking = thinking, .now = kNow}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    return std::string(status.message());
  };
  const std::vector<ChatMessage> user = {{Role::kUser, "a"}};
  EXPECT_EQ(refusal(*ChatFormats::FromJson(R"({"refusal": "no template"})"), user), "no template");
  EXPECT_EQ(refusal(ChatFormats("none"), user), "none");
  EXPECT_THAT(refusal(Made(Brackets()), user, true),
              HasSubstr("does not let thinking be switched"));
  Json format = Brackets();
  format["system"] = {{"refusal", "System role not supported"}};
  format["begin"].erase("system");
  format["between"].erase("system user");
  format["end"] = nullptr;
  const ChatFormats formats = Made(format);
  EXPECT_EQ(formats.system_refusal(), "System role not supported");
  EXPECT_EQ(refusal(formats, {{Role::kSystem, "s"}, {Role::kUser, "a"}}),
            "System role not supported");
  EXPECT_THAT(refusal(formats, {{Role::kUser, "a"}, {Role::kAssistant, "b"}}),
              HasSubstr("end with a user message"));
  EXPECT_EQ(Text(formats, user), "[U a][A ");
}

TEST(ChatFormatTest, ContentsThatTheTemplateTreatsInAWayOfItsOwnAreRefused) {
  Json format = Brackets();
  format["strip"]["user"] = "both";
  format["refuse"] = {{"system", Json::array()},
                      {"user", {Json::array(), {"<a>", "</a>"}}},
                      {"assistant", {{"/think"}}}};
  const ChatFormats formats = Made(format);
  EXPECT_THAT(Text(formats, {{Role::kUser, " \n"}}), HasSubstr("user messages that are empty"));
  EXPECT_THAT(Text(formats, {{Role::kUser, "x<a>y</a>"}}),
              HasSubstr("user messages that hold '<a>' and then '</a>'"));
  EXPECT_EQ(Text(formats, {{Role::kUser, "</a><a>"}}), "[U </a><a>][A ");
  EXPECT_THAT(Text(formats, {{Role::kUser, "/think"}, {Role::kAssistant, "so /think"}}),
              HasSubstr("assistant messages that hold '/think'"));
  EXPECT_EQ(Text(formats, {{Role::kSystem, ""}, {Role::kUser, "/think"}}), "[S ][U /think][A ");
}

TEST(ChatFormatTest, AWrongFileIsNamed) {
  const auto error = [](const Json& json) {
    const absl::Status status = ChatFormats::FromJson(json.dump()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    return std::string(status.message());
  };
  const auto broken = [&](const std::string& pointer, const Json& value) {
    Json format = Brackets();
    format[Json::json_pointer(pointer)] = value;
    return error({{"default", format}});
  };
  const auto lacking = [&](const std::string& field, const char* name) {
    Json format = Brackets();
    (field.empty() ? format : format[field]).erase(name);
    return error({{"default", format}});
  };
  EXPECT_THAT(error(Json::array()), HasSubstr("must be an object"));
  EXPECT_THAT(error(Json::object()), HasSubstr("default must be an object"));
  EXPECT_THAT(error({{"refusal", ""}}), HasSubstr("refusal must be a string, not empty"));
  EXPECT_THAT(error({{"default", Brackets()}, {"thinking", 3}}), HasSubstr("thinking must be"));
  EXPECT_THAT(broken("/begin", 1), HasSubstr("default.begin must be an object"));
  EXPECT_THAT(broken("/generation", "x"), HasSubstr("default.generation must be a list"));
  EXPECT_THAT(broken("/begin/user/0", 1), HasSubstr("default.begin.user must be a list"));
  EXPECT_THAT(broken("/end", {{"date", "%d"}}), HasSubstr("default.end must be a list"));
  EXPECT_THAT(broken("/strip/user", "middle"), HasSubstr("default.strip.user must be none"));
  EXPECT_THAT(broken("/system", "second"), HasSubstr("default.system must be first"));
  EXPECT_THAT(broken("/system", "last_user"),
              HasSubstr("default.between.assistant system is missing"));
  EXPECT_THAT(broken("/history/after", 7), HasSubstr("default.history.after must be a string"));
  EXPECT_THAT(broken("/refuse", {{"user", "x"}}), HasSubstr("default.refuse.user must be a list"));
  EXPECT_THAT(broken("/refuse", {{"user", {"x"}}}),
              HasSubstr("default.refuse.user must be a list"));
  EXPECT_THAT(broken("/refuse", {{"user", Json::array({Json::array({""})})}}),
              HasSubstr("default.refuse.user must be a list"));
  EXPECT_THAT(lacking("begin", "user"), HasSubstr("default.begin.user is missing"));
  EXPECT_THAT(lacking("begin", "system"), HasSubstr("default.begin.system is missing"));
  EXPECT_THAT(lacking("between", "user assistant"), HasSubstr("between.user assistant is missing"));
  EXPECT_THAT(lacking("", "history"), HasSubstr("default.history must be an object"));
  EXPECT_FALSE(ChatFormats::FromJson("{").ok());
}

TEST(ChatFormatTest, MessagesTakeTurns) {
  const auto first = [](const std::vector<Role>& roles) {
    std::vector<ChatMessage> messages;
    for (Role role : roles) messages.push_back({role, "x"});
    const std::optional<OutOfTurn> wrong = FirstOutOfTurn(messages);
    return wrong.has_value() ? std::optional(wrong->message) : std::nullopt;
  };
  constexpr Role S = Role::kSystem, U = Role::kUser, A = Role::kAssistant;
  for (const auto& roles :
       std::vector<std::vector<Role>>{{U}, {S, U}, {U, A}, {S, U, A}, {U, A, U}, {S, U, A, U, A}}) {
    EXPECT_EQ(first(roles), std::nullopt) << roles.size();
  }
  EXPECT_EQ(first({}), 0u);
  EXPECT_EQ(first({S}), 1u);
  EXPECT_EQ(first({A}), 0u);
  EXPECT_EQ(first({S, S, U}), 1u);
  EXPECT_EQ(first({S, A}), 1u);
  EXPECT_EQ(first({U, U}), 1u);
  EXPECT_EQ(first({U, S}), 1u);
  EXPECT_EQ(first({U, A, A}), 2u);
  EXPECT_EQ(first({U, Role::kTool}), 1u);
  EXPECT_EQ(first({U, A, Role::kTool}), 2u);
}

TEST(ChatFormatTest, ResultsFollowCalls) {
  const ChatMessage user{Role::kUser, "x"}, said{Role::kAssistant, "x"}, result{Role::kTool, "x"},
      called{.role = Role::kAssistant, .calls = {{"1", "f", "{}"}}},
      twice{.role = Role::kAssistant, .calls = {{"1", "f", "{}"}, {"2", "f", "{}"}}};
  const auto first = [](const std::vector<ChatMessage>& messages) {
    const std::optional<OutOfTurn> wrong = FirstOutOfTurn(messages);
    return wrong.has_value() ? std::optional(wrong->message) : std::nullopt;
  };
  for (const auto& messages :
       std::vector<std::vector<ChatMessage>>{{user, called, result},
                                             {user, twice, result, result, said},
                                             {user, called, result, called, result, said, user},
                                             {user, called, result, user},
                                             {user, called, user},
                                             {user, twice, user}}) {
    EXPECT_EQ(first(messages), std::nullopt) << messages.size();
  }
  EXPECT_EQ(first({user, called}), 2u);
  EXPECT_EQ(first({user, called, said}), 2u);
  EXPECT_EQ(first({user, called, result, said, result}), 4u);
  EXPECT_EQ(first({user, called, result, result}), 3u);
  EXPECT_EQ(first({user, twice, result}), 3u);
  EXPECT_EQ(first({user, twice, result, said}), 3u);
  EXPECT_EQ(first({user, twice, result, user}), 3u);
  EXPECT_EQ(first({user, called, user, result}), 3u);
}

// As Brackets, with tools behind the system message: "[T f; g]", calls "{f=args#id}", results
// "<id:content>".
Json Calling() {
  Json format = Brackets();
  format["begin"]["tools"] = {"[T "};
  for (const auto& [names, text] : std::map<std::string, std::string>{{"system tools", "][T "},
                                                                      {"tools user", "][U "},
                                                                      {"user call", "][A {"},
                                                                      {"assistant call", "{"},
                                                                      {"call call", "}{"},
                                                                      {"call result", "}<"},
                                                                      {"result result", "><"},
                                                                      {"result assistant", ">[A "},
                                                                      {"result call", ">[A {"}}) {
    format["between"][names] = {text};
  }
  format["calls"] = {
      {"syntax", "hermes"},
      {"call", {{{"field", "name"}}, "=", {{"field", "arguments"}}, "#", {{"field", "id"}}}},
      {"result", {{{"field", "id"}}, ":", {{"field", "content"}}}},
      {"result_strip", "both"},
      {"result_generation", {">[A "}},
      {"content", "kept"},
      {"several", true},
      {"id_length", nullptr}};
  return format;
}

Json WithTools(Json format) {
  format["tools"] = {{"place", "first"}, {"between", "; "}, {"indent", nullptr}};
  return format;
}

ChatFormats MadeWithTools(const Json& format) {
  const absl::StatusOr<ChatFormats> formats = ChatFormats::FromJson(
      Json{{"default", Calling()}, {"tools", {{"default", WithTools(format)}}}}.dump());
  EXPECT_TRUE(formats.ok()) << formats.status();
  return *formats;
}

std::string Offering(const ChatFormats& formats, const std::vector<ChatMessage>& messages,
                     std::vector<ChatTool> tools = {{"f", "", ""}}) {
  const absl::StatusOr<ChatText> text =
      formats.Render(messages, {.tools = std::move(tools), .now = kNow});
  return text.ok() ? text->text : text.status().ToString();
}

const ChatMessage kCalled{.role = Role::kAssistant,
                          .content = "Look.",
                          .calls = {{"1", "f", "{\"a\":[1,2]}"}, {"2", "g", "{}"}}};
const ChatMessage kFirstResult{
    .role = Role::kTool, .content = " one ", .call_id = "1", .name = "f"};
const ChatMessage kSecondResult{.role = Role::kTool, .content = "two", .call_id = "2", .name = "g"};

TEST(ChatFormatTest, CallsAndResultsAreParts) {
  const ChatFormats formats = MadeWithTools(Calling());
  const std::vector<ChatMessage> messages = {
      {Role::kUser, "a"}, kCalled, kFirstResult, kSecondResult};
  const char* text = "[U a][A Look.{f={\"a\": [1, 2]}#1}{g={}#2}<1:one><2:two>[A ";
  EXPECT_EQ(Text(formats, messages), text);
  std::vector<ChatMessage> answered = messages;
  answered.push_back({Role::kAssistant, "b"});
  EXPECT_EQ(Text(formats, answered), absl::StrCat(text, "b]"));
  ChatMessage silent = kCalled;
  silent.content = " \n";
  EXPECT_EQ(Text(formats, {{Role::kUser, "a"}, silent, kFirstResult}),
            "[U a][A {f={\"a\": [1, 2]}#1}{g={}#2}<1:one>[A ");
}

TEST(ChatFormatTest, ToolsStandWhereTheTemplatePutsThem) {
  const std::vector<ChatTool> tools = {{"f", "It \"f\"s.", "{\"type\":\"object\"}"}, {"g", "", ""}};
  const char* written =
      "[T {\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"It "
      "\\\"f\\\"s.\", \"parameters\": {\"type\": \"object\"}}}; {\"type\": \"function\", "
      "\"function\": {\"name\": \"g\"}}]";
  const ChatFormats first = MadeWithTools(Calling());
  EXPECT_EQ(Offering(first, {{Role::kUser, "a"}}, tools), absl::StrCat(written, "[U a][A "));
  EXPECT_EQ(Offering(first, {{Role::kSystem, "s"}, {Role::kUser, "a"}}, tools),
            absl::StrCat("[S s]", written, "[U a][A "));
  Json format = Calling();
  format["between"]["assistant tools"] = {"][T "};
  format["between"]["result tools"] = {">[T "};
  format["tools"] = {{"place", "last_user"}, {"between", ", "}, {"indent", nullptr}};
  const ChatFormats last =
      *ChatFormats::FromJson(Json{{"default", Calling()}, {"tools", {{"default", format}}}}.dump());
  const char* f = "[T {\"type\": \"function\", \"function\": {\"name\": \"f\"}}]";
  EXPECT_EQ(Offering(last, {{Role::kUser, "a"}, {Role::kAssistant, "b"}, {Role::kUser, "c"}}),
            absl::StrCat("[U a][A b]", f, "[U c][A "));
  EXPECT_EQ(
      Offering(last,
               {{Role::kUser, "a"}, kCalled, kFirstResult, kSecondResult, {Role::kUser, "c"}}),
      absl::StrCat("[U a][A Look.{f={\"a\": [1, 2]}#1}{g={}#2}<1:one><2:two>", f, "[U c][A "));
}

TEST(ChatFormatTest, FormatsSayWhatElseBecomesOfToolsAndContents) {
  const auto offering = [](const std::vector<std::pair<std::string, Json>>& changes,
                           const std::vector<ChatMessage>& messages,
                           std::vector<ChatTool> tools = {{"f", "", ""}}) {
    Json format = WithTools(Calling());
    for (const auto& [pointer, value] : changes) format[Json::json_pointer(pointer)] = value;
    const absl::StatusOr<ChatFormats> formats = ChatFormats::FromJson(
        Json{{"default", Calling()}, {"tools", {{"default", format}}}}.dump());
    EXPECT_TRUE(formats.ok()) << formats.status();
    return Offering(*formats, messages, std::move(tools));
  };
  const std::string f = "[T {\"type\": \"function\", \"function\": {\"name\": \"f\"}}]";
  const std::vector<ChatMessage> called = {
      {Role::kUser, "a"}, kCalled, kFirstResult, kSecondResult};
  const std::string calls = "{f={\"a\": [1, 2]}#1}{g={}#2}<1:one><2:two>[A ";
  EXPECT_EQ(offering({{"/calls/content", "dropped"}}, called), f + "[U a][A " + calls);
  EXPECT_EQ(offering({{"/calls/content", "kept_unless_empty"}}, called),
            f + "[U a][A Look." + calls);
  EXPECT_THAT(
      offering({{"/tools/raw_descriptions", true}}, {{Role::kUser, "a"}}, {{"f", "\"x\"", ""}}),
      HasSubstr("\"description\": \"\"x\"\"}"));
  const std::vector<std::pair<std::string, Json>> last = {
      {"/tools/place", "last_user"},          {"/system", "last_user"},
      {"/between/assistant tools", {"][T "}}, {"/between/result tools", {">[T "}},
      {"/between/tools system", {"][S "}},    {"/between/system user", {"; "}}};
  const std::vector<ChatMessage> twice = {
      {Role::kSystem, "s"}, {Role::kUser, "a"}, {Role::kAssistant, "b"}, {Role::kUser, "a"}};
  EXPECT_EQ(offering(last, twice), "[U a][A b]" + f + "[S s; a][A ");
  auto alike = last;
  alike.emplace_back("/tools/equal_users", "repeated");
  EXPECT_EQ(offering(alike, twice), f + "[U a][A b]" + f + "[S s; a][A ");
  auto dropped = last;
  dropped.emplace_back("/calls/system", "dropped");
  std::vector<ChatMessage> told = called;
  told.insert(told.begin(), {Role::kSystem, "s"});
  EXPECT_EQ(offering(last, told), f + "[S s; a][A Look." + calls);
  EXPECT_EQ(offering(dropped, told), f + "[U a][A Look." + calls);
  told.push_back({Role::kAssistant, "b"});
  EXPECT_THAT(offering(dropped, told), HasSubstr("[S s; a]"));
}

TEST(ChatFormatTest, APromptThatATemplateMakesTooLongIsRefused) {
  Json format = Calling();
  format["between"]["assistant tools"] = {"][T "};
  format["tools"] = {
      {"place", "last_user"}, {"between", ", "}, {"indent", 64}, {"equal_users", "repeated"}};
  const ChatFormats formats =
      *ChatFormats::FromJson(Json{{"default", Calling()}, {"tools", {{"default", format}}}}.dump());
  std::vector<ChatMessage> messages = {{Role::kUser, "a"}};
  for (int i = 0; i < 500; ++i) {
    messages.push_back({Role::kAssistant, "b"});
    messages.push_back({Role::kUser, "a"});
  }
  const std::string description(100'000, 'x');
  EXPECT_THAT(Offering(formats, messages, {{"f", description, ""}}),
              HasSubstr("the conversation is longer than 16 MiB as this model's"));
  std::string wide(60, '[');
  for (int i = 0; i < 50'000; ++i) wide += i > 0 ? ",1" : "1";
  wide += std::string(60, ']');
  EXPECT_THAT(Offering(formats, {{Role::kUser, "a"}}, {{"f", "", wide}}),
              HasSubstr("is longer than 16 MiB as it is written"));
}

TEST(ChatFormatTest, ReasoningIsWrittenBehindTheLastUsersMessage) {
  Json format = Calling();
  format["between"]["user reasoning"] = {"][A <think>"};
  format["between"]["reasoning call"] = {"</think>{"};
  format["between"]["reasoning assistant"] = {"</think>"};
  format["reasoning"] = {{"strip", "newlines"}, {"content_strip", "left"}};
  ChatMessage called = kCalled;
  called.reasoning = "\nhm\n";
  const ChatFormats formats = MadeWithTools(format);
  EXPECT_EQ(Offering(formats, {{Role::kSystem, "s"}, {Role::kUser, "a"}, called, kFirstResult}),
            "[S s][T {\"type\": \"function\", \"function\": {\"name\": \"f\"}}][U a][A "
            "<think>hm</think>Look.{f={\"a\": [1, 2]}#1}{g={}#2}<1:one>[A ");
  EXPECT_THAT(
      Offering(
          formats,
          {{Role::kUser, "a"}, called, kFirstResult, {Role::kAssistant, "b"}, {Role::kUser, "c"}}),
      HasSubstr("[A Look.{"));
}

TEST(ChatFormatTest, WhatATemplateCannotDoWithToolsIsSaid) {
  const auto offering = [](const std::string& pointer, const Json& value,
                           const std::vector<ChatMessage>& messages,
                           std::vector<ChatTool> tools = {{"f", "", ""}}) {
    Json format = WithTools(Calling());
    format[Json::json_pointer(pointer)] = value;
    const ChatFormats formats = *ChatFormats::FromJson(
        Json{{"default", Calling()}, {"tools", {{"default", format}}}}.dump());
    return Offering(formats, messages, std::move(tools));
  };
  const std::vector<ChatMessage> called = {{Role::kUser, "a"}, kCalled, kFirstResult};
  EXPECT_THAT(offering("/calls/several", false, called), HasSubstr("one call in a message"));
  EXPECT_THAT(offering("/calls/id_length", 9, called), HasSubstr("9 letters and digits, not '1'"));
  EXPECT_THAT(offering("/calls", {{"refusal", "its own way"}}, {{Role::kUser, "a"}}),
              HasSubstr("takes no tools: its own way"));
  EXPECT_THAT(offering("/tools/indent", nullptr, {{Role::kUser, "a"}}, {{"f", "", "{"}}),
              HasSubstr("the parameters of the tool 'f': the text is no JSON"));
  EXPECT_THAT(
      offering("/history/after", "</think>",
               {{Role::kUser, "a"},
                {.role = Role::kAssistant, .content = "</think>", .calls = {{"1", "f", "{}"}}},
                kFirstResult}),
      HasSubstr("give it as the message's reasoning"));
  ChatMessage wrong = kCalled;
  wrong.calls[0].arguments = "[1]";
  EXPECT_THAT(offering("/tools/indent", nullptr, {{Role::kUser, "a"}, wrong, kFirstResult}),
              HasSubstr("INVALID_ARGUMENT: the arguments of a call of 'f' must be a JSON object"));
  EXPECT_THAT(offering("/tools/indent", nullptr, {{Role::kUser, "a"}, kCalled, {Role::kUser, "b"}}),
              HasSubstr("a user message follows a call message"));
  EXPECT_THAT(Offering(Made(Brackets()), {{Role::kUser, "a"}}), HasSubstr("knew no tools"));
  EXPECT_THAT(Text(Made(Brackets()), called), HasSubstr("no calls of tools"));
}

TEST(ChatFormatTest, TellsWhetherAPromptEndsWithinThinking) {
  Json format = Brackets();
  format["generation"] = {"][A <think>\n"};
  const auto thinks = [](const Json& format, const std::vector<ChatMessage>& messages) {
    const ChatFormats formats = *ChatFormats::FromJson(
        Json{{"default", format}, {"thinking_tags", {"<think>", "</think>"}}}.dump());
    return formats.Render(messages, {.now = kNow})->thinks;
  };
  EXPECT_TRUE(thinks(format, {{Role::kUser, "a"}}));
  EXPECT_FALSE(thinks(format, {{Role::kUser, "a"}, {Role::kAssistant, "<think>b</think>c"}}));
  EXPECT_TRUE(thinks(format, {{Role::kUser, "a"}, {Role::kAssistant, "<think>b"}}));
  EXPECT_FALSE(thinks(Brackets(), {{Role::kUser, "<think>"}}));
}

}  // namespace chat_format_test
}  // namespace epikv
