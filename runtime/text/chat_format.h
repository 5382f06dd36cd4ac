#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "runtime/text/tokenizer.h"

namespace epikv {

enum class ChatRole { kSystem, kUser, kAssistant };

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string content;
};

// A prompt, and where in it contents of messages stand, in order.
struct ChatText {
  std::string text;
  std::vector<TextRange> contents;
};

// How a model writes conversations as prompts: what stands before, between and after their
// messages. The exporter derives it from the checkpoint's Jinja template and keeps it only where it
// gives what the template gives (tools/epikv/export/chat.py; extra file `chat.json`). Immutable.
class ChatFormats {
 public:
  // None, for a reason that clients are told.
  explicit ChatFormats(std::string refusal) : refusal_(std::move(refusal)) {}
  // INVALID_ARGUMENT names the field that is wrong.
  static absl::StatusOr<ChatFormats> FromJson(absl::string_view json);

  // The prompt that asks for the next answer; after a last message of the assistant's, the
  // conversation as it stands. `thinking` chooses among the template's ways, where it has several;
  // `now` is what a template dates conversations by. FAILED_PRECONDITION for what the template
  // cannot do, or its format. Precondition: no message is out of turn.
  absl::StatusOr<ChatText> Render(absl::Span<const ChatMessage> messages,
                                  std::optional<bool> thinking, absl::Time now) const;

  // Why there are none; empty: there are.
  const std::string& refusal() const { return refusal_; }
  // Why there can be no system message; empty: there can.
  const std::string& system_refusal() const { return default_.system_refusal; }
  // Whether thinking can be chosen.
  bool has_thinking() const { return thinking_.has_value() && no_thinking_.has_value(); }

 private:
  // What is taken off a content.
  enum class Strip { kNone, kBoth, kLeft, kRight, kLeftNewlines, kNewlines };
  struct Date {
    std::string format;  // as of strftime
  };
  using Text = std::vector<std::variant<std::string, Date>>;

  struct Format {
    std::map<ChatRole, Text> begin;  // before the first content, by its role
    std::map<std::pair<ChatRole, ChatRole>, Text> between;
    Text generation;          // after the last content, a user's: where the answer begins
    std::optional<Text> end;  // after the last content, an assistant's
    std::string system_refusal;
    bool system_last = false;  // its content stands before the last user's, not first
    std::map<ChatRole, Strip> strip;
    // Of the assistant's contents that a user's follows: of one with this tag only what is behind
    // the last of it, stripped.
    std::string history_after;  // empty: none
    Strip history_strip = Strip::kNone;
    // Contents that the template treats in a way of its own: those that hold all of these texts one
    // behind the other; of no texts, those of which nothing is left.
    std::map<ChatRole, std::vector<std::vector<std::string>>> refuse;
  };
  class Reader;

  static std::string Stripped(absl::string_view content, Strip strip);
  static absl::StatusOr<std::string> Content(const Format& format, const ChatMessage& message,
                                             bool history);

  std::string refusal_;
  Format default_;
  std::optional<Format> thinking_, no_thinking_;
};

// A conversation is a system message or none, then user and assistant in turns, the user first: the
// index of the first message that is not (the number of messages: one more is needed).
std::optional<size_t> FirstOutOfTurn(absl::Span<const ChatMessage> messages);

}  // namespace epikv
