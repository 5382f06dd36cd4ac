#include "server/messages/chat_prompt.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/errors.h"

namespace epikv {
namespace {

constexpr int kMostTools = 128;
constexpr size_t kMostNameBytes = 64;
constexpr absl::string_view kNoArguments =
    R"({"type": "object", "properties": {}, "additionalProperties": false})";

std::optional<ChatRole> RoleOf(v1::ChatRole role) {
  switch (role) {
    case v1::CHAT_ROLE_SYSTEM:
      return ChatRole::kSystem;
    case v1::CHAT_ROLE_USER:
      return ChatRole::kUser;
    case v1::CHAT_ROLE_ASSISTANT:
      return ChatRole::kAssistant;
    case v1::CHAT_ROLE_TOOL:
      return ChatRole::kTool;
    default:
      return std::nullopt;
  }
}

Rejection Bad(std::string field, std::string description) {
  return {.reason = "INVALID_REQUEST",
          .message = absl::StrCat(field, ": ", description),
          .violations = {{std::move(field), std::move(description)}}};
}

bool IsToolName(absl::string_view name) {
  return !name.empty() && name.size() <= kMostNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' ||
                  c == '.';
         });
}
constexpr absl::string_view kNameRule =
    "must have 1 to 64 letters, digits, underscores, hyphens and dots";

// Reads messages and tools, up to the first thing that is wrong.
class ConversationReader {
 public:
  explicit ConversationReader(const v1::ChatPrompt& chat) : chat_(chat) {}

  std::optional<Rejection> Read() {
    for (const v1::ChatMessage& message : chat_.messages()) {
      const std::string field = absl::StrCat("chat.messages[", messages_.size(), "]");
      if (std::optional<Rejection> wrong = ReadMessage(message, field)) return wrong;
    }
    if (const std::optional<OutOfTurn> wrong = FirstOutOfTurn(messages_)) {
      const bool missing = wrong->message == messages_.size();
      return Bad(
          missing ? "chat.messages" : absl::StrCat("chat.messages[", wrong->message, "].role"),
          wrong->rule);
    }
    return ReadTools();
  }
  const std::vector<ChatMessage>& messages() const { return messages_; }
  std::vector<ChatTool> TakeTools() { return std::move(tools_); }

 private:
  std::optional<Rejection> ReadMessage(const v1::ChatMessage& message, const std::string& field) {
    const std::optional<ChatRole> role = RoleOf(message.role());
    if (!role.has_value()) {
      return Bad(absl::StrCat(field, ".role"),
                 "must be CHAT_ROLE_SYSTEM, CHAT_ROLE_USER, CHAT_ROLE_ASSISTANT or CHAT_ROLE_TOOL");
    }
    ChatMessage read{.role = *role, .content = message.content(), .reasoning = message.reasoning()};
    const bool answer = role == ChatRole::kAssistant;
    if (!answer && !message.tool_calls().empty()) {
      return Bad(absl::StrCat(field, ".tool_calls"), "only the assistant's messages have them");
    }
    if (!answer && !message.reasoning().empty()) {
      return Bad(absl::StrCat(field, ".reasoning"), "only the assistant's messages have it");
    }
    if (role != ChatRole::kTool && !message.tool_call_id().empty()) {
      return Bad(absl::StrCat(field, ".tool_call_id"), "only a tool's messages have it");
    }
    if (answer) called_.clear();
    for (const v1::ToolCall& call : message.tool_calls()) {
      const std::string at = absl::StrCat(field, ".tool_calls[", read.calls.size(), "]");
      if (!IsToolName(call.name())) {
        return Bad(absl::StrCat(at, ".name"), std::string(kNameRule));
      }
      if (!called_.emplace(call.id(), call.name()).second) {
        return Bad(absl::StrCat(at, ".id"), "is another call's, too");
      }
      read.calls.push_back({.id = call.id(), .name = call.name(), .arguments = call.arguments()});
    }
    if (role == ChatRole::kTool) {
      const auto call = called_.find(message.tool_call_id());
      if (call == called_.end()) {
        return Bad(absl::StrCat(field, ".tool_call_id"),
                   absl::StrCat("'", message.tool_call_id(),
                                "' is the id of no call that waits for its result"));
      }
      read.call_id = call->first;
      read.name = call->second;
      called_.erase(call);
    }
    messages_.push_back(std::move(read));
    return std::nullopt;
  }

  std::optional<Rejection> ReadTools() {
    if (chat_.tools_size() > kMostTools) {
      return Bad("chat.tools",
                 absl::StrCat("has ", chat_.tools_size(), " items, at most ", kMostTools));
    }
    std::set<std::string> names;
    for (const v1::Tool& tool : chat_.tools()) {
      const std::string field = absl::StrCat("chat.tools[", tools_.size(), "].name");
      if (!IsToolName(tool.name())) return Bad(field, std::string(kNameRule));
      if (!names.insert(tool.name()).second) return Bad(field, "is another tool's, too");
      tools_.push_back({.name = tool.name(),
                        .description = tool.description(),
                        .parameters = tool.parameters()});
    }
    if (!tools_.empty() && messages_.back().role == ChatRole::kAssistant) {
      return Bad("chat.tools", "cannot be set where the last message is the assistant's");
    }
    return ReadChoice(names);
  }

  std::optional<Rejection> ReadChoice(const std::set<std::string>& names) {
    const v1::ToolChoice& choice = chat_.tool_choice();
    if (!v1::ToolChoiceMode_IsValid(choice.mode())) {
      return Bad("chat.tool_choice.mode", absl::StrCat("unknown value ", choice.mode()));
    }
    if (names.empty() && choice.ByteSizeLong() > 0) {
      return Bad("chat.tool_choice", "there are no tools to choose from");
    }
    if (!choice.name().empty() && !names.contains(choice.name())) {
      return Bad("chat.tool_choice.name", absl::StrCat("'", choice.name(), "' is no tool's"));
    }
    return std::nullopt;
  }

  const v1::ChatPrompt& chat_;
  std::vector<ChatMessage> messages_;
  std::vector<ChatTool> tools_;
  std::map<std::string, std::string> called_;  // names of the last calls without results, by id
};

}  // namespace

std::variant<ChatText, Rejection> ChatTextOf(const v1::ChatPrompt& chat,
                                             const ChatFormats& formats) {
  ConversationReader reader(chat);
  if (std::optional<Rejection> wrong = reader.Read()) return *std::move(wrong);
  absl::StatusOr<ChatText> text = formats.Render(
      reader.messages(),
      {.tools = reader.TakeTools(),
       .thinking = chat.has_thinking() ? std::optional(chat.thinking()) : std::nullopt,
       .now = absl::Now()});
  if (text.ok()) return *std::move(text);
  const std::string why(text.status().message());
  if (absl::IsInvalidArgument(text.status())) return Bad("chat", why);
  return Rejection{.code = text.status().code(),
                   .reason = std::string(kChatFormat),
                   .message = absl::StrCat("chat: ", why),
                   .violations = {{"chat", why}}};
}

EncodeOptions ChatEncoding(const v1::ChatPrompt& chat, const ChatText& text) {
  EncodeOptions options{.add_special = false};
  if (!chat.special_tokens_in_contents()) options.plain = text.contents;
  return options;
}

std::vector<int32_t> AnswerMarkup(const ChatFormats& formats, const Tokenizer& tokenizer) {
  std::vector<std::string> marks;
  if (const std::optional<ThinkingTags>& tags = formats.thinking_tags(); tags.has_value()) {
    marks = {tags->begin, tags->end};
  }
  if (formats.tools_refusal().empty()) {
    marks.insert(marks.end(), {"<tool_call>", "</tool_call>", "[TOOL_CALLS]"});
  }
  std::vector<int32_t> markup;
  for (const std::string& mark : marks) {
    const std::optional<int32_t> id = tokenizer.TokenToId(mark);
    if (id.has_value() && tokenizer.IsSpecial(*id)) markup.push_back(*id);
  }
  return markup;
}

AnswerFormat AnswerFormatOf(const v1::ChatPrompt& chat, const ChatText& text,
                            const ChatFormats& formats, const Tokenizer& tokenizer) {
  AnswerFormat format{.thinking = formats.thinking_tags(),
                      .thinks = text.thinks,
                      .markup = AnswerMarkup(formats, tokenizer)};
  if (chat.tools().empty() || !formats.tools_refusal().empty()) return format;
  format.id_length = formats.calls().id_length;
  if (chat.tool_choice().mode() != v1::TOOL_CHOICE_MODE_NONE) {
    format.calls = formats.calls().syntax;
  }
  return format;
}

std::optional<CallRule> CallRuleOf(const v1::ChatPrompt& chat, const ChatFormats& formats) {
  if (chat.tools().empty() || !formats.tools_refusal().empty()) return std::nullopt;
  const v1::ToolChoice& choice = chat.tool_choice();
  CallRule rule{.syntax = formats.calls().syntax,
                .required = choice.mode() == v1::TOOL_CHOICE_MODE_REQUIRED,
                .several = formats.calls().several && !choice.single()};
  if (choice.mode() == v1::TOOL_CHOICE_MODE_NONE) return rule;
  for (const v1::Tool& tool : chat.tools()) {
    if (!choice.name().empty() && choice.name() != tool.name()) continue;
    const bool strict = !tool.has_strict() || tool.strict();
    rule.functions.push_back({.name = tool.name(),
                              .schema = !strict                     ? ""
                                        : tool.parameters().empty() ? std::string(kNoArguments)
                                                                    : tool.parameters(),
                              .lenient = !tool.has_strict()});
  }
  return rule;
}

}  // namespace epikv
