#include "server/messages/chat_prompt.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/errors.h"

namespace epikv {
namespace {

std::optional<ChatRole> RoleOf(v1::ChatRole role) {
  switch (role) {
    case v1::CHAT_ROLE_SYSTEM:
      return ChatRole::kSystem;
    case v1::CHAT_ROLE_USER:
      return ChatRole::kUser;
    case v1::CHAT_ROLE_ASSISTANT:
      return ChatRole::kAssistant;
    default:
      return std::nullopt;
  }
}

Rejection Bad(std::string field, std::string description) {
  return {.reason = "INVALID_REQUEST",
          .message = absl::StrCat(field, ": ", description),
          .violations = {{std::move(field), std::move(description)}}};
}

}  // namespace

std::variant<ChatText, Rejection> ChatTextOf(const v1::ChatPrompt& chat,
                                             const ChatFormats& formats) {
  std::vector<ChatMessage> messages;
  auto field = [&](size_t message) { return absl::StrCat("chat.messages[", message, "]"); };
  for (const v1::ChatMessage& message : chat.messages()) {
    const std::optional<ChatRole> role = RoleOf(message.role());
    if (!role.has_value()) {
      return Bad(absl::StrCat(field(messages.size()), ".role"),
                 "must be CHAT_ROLE_SYSTEM, CHAT_ROLE_USER or CHAT_ROLE_ASSISTANT");
    }
    messages.push_back({.role = *role, .content = message.content()});
  }
  if (const std::optional<size_t> wrong = FirstOutOfTurn(messages)) {
    const bool missing = *wrong == messages.size();
    return Bad(missing ? "chat.messages" : absl::StrCat(field(*wrong), ".role"),
               "a conversation is a system message or none, then user and assistant in turns");
  }
  absl::StatusOr<ChatText> text = formats.Render(
      messages, chat.has_thinking() ? std::optional(chat.thinking()) : std::nullopt, absl::Now());
  if (text.ok()) return *std::move(text);
  return Rejection{.code = text.status().code(),
                   .reason = std::string(kChatFormat),
                   .message = absl::StrCat("chat: ", text.status().message()),
                   .violations = {{"chat", std::string(text.status().message())}}};
}

EncodeOptions ChatEncoding(const v1::ChatPrompt& chat, const ChatText& text) {
  EncodeOptions options{.add_special = false};
  if (!chat.special_tokens_in_contents()) options.plain = text.contents;
  return options;
}

}  // namespace epikv
