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
#include "runtime/text/chat/chat_message.h"
#include "runtime/text/tokenizer.h"

namespace epikv {

// A prompt, and where in it texts of people and programs stand, in order: contents of messages,
// tools, arguments of calls.
struct ChatText {
  std::string text;
  std::vector<TextRange> contents;
  bool thinks = false;  // it ends within thinking, which the answer goes on with
};

// How a family of models writes calls.
enum class CallSyntax {
  kHermes,  // <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>, one behind the other
  kLlama3,  // {"name": "f", "parameters": {...}}, the whole answer
  kMistral  // [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]
};

// What stands around the thinking in an answer.
struct ThinkingTags {
  std::string begin, end;
};

// One way in which a template writes conversations: a row of parts, what stands before, between and
// after them, and what is taken off their contents.
struct ChatFormat {
  // A message is one part; one of the assistant's that calls is its content, if there is any, and a
  // part for each call.
  enum class Part { kSystem, kTools, kUser, kReasoning, kAssistant, kCall, kResult };
  // What is taken off a content; kJson: nothing, it is written as a JSON string.
  enum class Strip { kNone, kBoth, kLeft, kRight, kLeftNewlines, kNewlines, kJson };
  enum class Field { kName, kArguments, kId, kContent };
  struct Date {
    std::string format;  // as of strftime
  };
  using Text = std::vector<std::variant<std::string, Date>>;
  // What is written of a call or a result, from its first field to its last.
  using Pattern = std::vector<std::variant<std::string, Field>>;

  // Whether a message that calls has what it says beside: where it is not blank, with
  // kKeptUnlessEmpty not where nothing is left of it.
  enum class Beside { kKept, kKeptUnlessEmpty, kDropped };
  struct Calls {
    CallSyntax syntax = CallSyntax::kHermes;
    Pattern call, result;
    Strip result_strip = Strip::kNone;
    Text result_generation;  // after a last result: where the answer begins
    Beside content = Beside::kKept;
    bool several = true;           // one may call more than once
    bool system_dropped = false;   // of conversations that end with a result
    std::optional<int> id_length;  // ids are so many letters and digits
  };
  struct Tools {
    bool last_user = false;    // they stand before the last user's message, not behind the system's
    bool equal_users = false;  // and before those that say the same
    std::string between;       // two of them
    std::optional<int> indent;
    bool raw_descriptions = false;  // they are not escaped
  };

  std::map<Part, Text> begin;  // before the first part
  std::map<std::pair<Part, Part>, Text> between;
  Text generation;          // after a last part of the user's: where the answer begins
  std::optional<Text> end;  // after a last part of the assistant's
  std::string system_refusal;
  bool system_last = false;  // its content stands before the last user's, not first
  std::map<Part, Strip> strip;
  // Of the assistant's contents that a user's follows: of one with this tag only what is behind the
  // last of it, stripped. Those beside calls behind the last user's may not hold it.
  std::string history_after;  // empty: none
  Strip history_strip = Strip::kNone;
  // Contents that the template treats in a way of its own: those that hold all of these texts one
  // behind the other; of no texts, those of which nothing is left.
  std::map<Part, std::vector<std::vector<std::string>>> refuse;
  std::string calls_refusal;   // why there are no calls, nor results
  std::optional<Calls> calls;  // there are
  std::optional<Tools> tools;  // of formats with tools
  // Written of messages behind the last user's.
  struct Reasoning {
    Strip strip = Strip::kNone;
    Strip content_strip = Strip::kNone;  // of the content that it stands before
  };
  std::optional<Reasoning> reasoning;  // absent: none is
};

// What of a conversation is not its messages.
struct ChatOptions {
  std::vector<ChatTool> tools;
  std::optional<bool> thinking;  // chooses among the template's ways, where it has several
  absl::Time now;                // what a template dates conversations by
};

// How a model writes conversations as prompts. The exporter derives it from the checkpoint's Jinja
// template and keeps it only where it gives what the template gives (tools/epikv/export/chat; extra
// file `chat.json`). Immutable.
class ChatFormats {
 public:
  // None, for a reason that clients are told.
  explicit ChatFormats(std::string refusal) : refusal_(std::move(refusal)) {}
  // INVALID_ARGUMENT names the field that is wrong.
  static absl::StatusOr<ChatFormats> FromJson(absl::string_view json);

  // Of a prompt. What a request says is shorter, but a template may say it again, or spread it out.
  static constexpr size_t kMostBytes = 16 << 20;

  // The prompt that asks for the next answer; after a last message of the assistant's, the
  // conversation as it stands. FAILED_PRECONDITION for what the template cannot do, or its format;
  // INVALID_ARGUMENT for what is no JSON, or a prompt that is too long. Precondition: no message is
  // out of turn.
  absl::StatusOr<ChatText> Render(absl::Span<const ChatMessage> messages,
                                  const ChatOptions& options) const;

  // Why there are none; empty: there are.
  const std::string& refusal() const { return refusal_; }
  // Why there can be no system message; empty: there can.
  const std::string& system_refusal() const { return plain_.none.system_refusal; }
  // Why no tools can be offered; empty: they can.
  const std::string& tools_refusal() const { return tools_refusal_; }
  // How calls are written, if tools can be offered.
  const ChatFormat::Calls& calls() const { return *with_tools_.none.calls; }
  // Whether thinking can be chosen.
  bool has_thinking() const { return plain_.on.has_value() && plain_.off.has_value(); }
  // Absent: the template knows none.
  const std::optional<ThinkingTags>& thinking_tags() const { return thinking_tags_; }

 private:
  class Reader;
  // As the template does of itself, and with thinking asked for, or asked not to.
  struct Ways {
    ChatFormat none;
    std::optional<ChatFormat> on, off;
  };

  std::string refusal_;
  Ways plain_;
  std::string tools_refusal_;
  Ways with_tools_;  // if not refused
  std::optional<ThinkingTags> thinking_tags_;
};

// What is wrong with the order of messages.
struct OutOfTurn {
  size_t message;  // that is; the number of messages: one more is needed
  std::string rule;
};
// A conversation is a system message or none, then user and assistant in turns, the user first. A
// message of the assistant's that calls tools is followed by a result of each call; or by none, and
// the user.
std::optional<OutOfTurn> FirstOutOfTurn(absl::Span<const ChatMessage> messages);

}  // namespace epikv
