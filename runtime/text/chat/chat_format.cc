#include "runtime/text/chat/chat_format.h"

#include <algorithm>
#include <array>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/text/chat/python_json.h"

namespace epikv {
namespace {

using Part = ChatFormat::Part;
using Field = ChatFormat::Field;
using Strip = ChatFormat::Strip;

// Every character that Python's str.strip() takes off, in UTF-8.
constexpr std::array<absl::string_view, 29> kSpaces = {
    "\t",           "\n",           "\v",           "\f",           "\r",
    "\x1c",         "\x1d",         "\x1e",         "\x1f",         " ",
    "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81",
    "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
    "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
    "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};
constexpr std::array<absl::string_view, 1> kNewlines = {"\n"};

absl::string_view StripLeft(absl::string_view text, absl::Span<const absl::string_view> what) {
  auto begins = [&](absl::string_view one) { return absl::StartsWith(text, one); };
  for (const absl::string_view* one;
       (one = std::find_if(what.begin(), what.end(), begins)) != what.end();) {
    text.remove_prefix(one->size());
  }
  return text;
}

absl::string_view StripRight(absl::string_view text, absl::Span<const absl::string_view> what) {
  auto ends = [&](absl::string_view one) { return absl::EndsWith(text, one); };
  for (const absl::string_view* one;
       (one = std::find_if(what.begin(), what.end(), ends)) != what.end();) {
    text.remove_suffix(one->size());
  }
  return text;
}

// One behind the other.
bool HoldsAll(absl::string_view content, const std::vector<std::string>& texts) {
  size_t begin = 0;
  for (const std::string& text : texts) {
    const size_t found = content.find(text, begin);
    if (found == absl::string_view::npos) return false;
    begin = found + text.size();
  }
  return true;
}

std::string Stripped(absl::string_view content, Strip strip) {
  switch (strip) {
    case Strip::kNone:
      break;
    case Strip::kBoth:
      content = StripRight(StripLeft(content, kSpaces), kSpaces);
      break;
    case Strip::kLeft:
      content = StripLeft(content, kSpaces);
      break;
    case Strip::kRight:
      content = StripRight(content, kSpaces);
      break;
    case Strip::kLeftNewlines:
      content = StripLeft(content, kNewlines);
      break;
    case Strip::kNewlines:
      content = StripRight(StripLeft(content, kNewlines), kNewlines);
      break;
    case Strip::kJson:
      return PythonJsonString(content);
  }
  return std::string(content);
}

absl::string_view NameOf(Part part) {
  switch (part) {
    case Part::kSystem:
      return "system";
    case Part::kTools:
      return "tools";
    case Part::kUser:
      return "user";
    case Part::kReasoning:
      return "reasoning";
    case Part::kAssistant:
      return "assistant";
    case Part::kCall:
      return "call";
    case Part::kResult:
      return "tool";
  }
  return "";
}

absl::Status Refused(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("this model's chat template ", what));
}

// One conversation on its way into a prompt.
class PromptWriter {
 public:
  PromptWriter(const ChatFormat& format, const ChatOptions& options)
      : format_(format), options_(options) {}

  absl::Status Write(absl::Span<const ChatMessage> messages);
  ChatText Take() { return std::move(prompt_); }
  // Where in its text stands what the answer goes on from: a last answer, and what is behind it; of
  // others' last words only what is behind them.
  size_t tail() const { return tail_; }

 private:
  absl::Status Order(absl::Span<const ChatMessage> messages);
  absl::Status WriteMessage(const ChatMessage& message, bool history, bool last);
  absl::Status WriteAnswer(const ChatMessage& message, bool history, bool last);
  absl::Status WriteCall(const ToolCall& call);
  absl::Status WriteResult(const ChatMessage& message);
  absl::Status WriteTools();
  absl::Status WriteContent(Part part, const std::string& given, bool history);
  // What stands before a part.
  absl::Status Begin(Part part);
  void Append(const ChatFormat::Text& text);
  // Somebody's text.
  void Put(absl::string_view text);
  absl::Status CheckId(const std::string& id) const;

  const ChatFormat& format_;
  const ChatOptions& options_;
  ChatText prompt_;
  std::optional<Part> before_;
  size_t tail_ = 0;
  std::vector<const ChatMessage*> order_;  // as they are written; null: the tools
  size_t last_user_ = 0;                   // its place in `order_`
};

// Brings system message and tools to their places.
absl::Status PromptWriter::Order(absl::Span<const ChatMessage> messages) {
  for (const ChatMessage& message : messages) order_.push_back(&message);
  const bool system = order_.front()->role == ChatRole::kSystem;
  if (system && !format_.system_refusal.empty()) {
    return absl::FailedPreconditionError(format_.system_refusal);
  }
  const auto is_user = [](const ChatMessage* message) {
    return message != nullptr && message->role == ChatRole::kUser;
  };
  const auto last_user = [&] {
    return order_.rend() - std::find_if(order_.rbegin(), order_.rend(), is_user) - 1;
  };
  if (system && format_.system_last) {
    std::rotate(order_.begin(), order_.begin() + 1, order_.begin() + last_user());
  }
  if (format_.tools.has_value()) {
    ptrdiff_t place = system && !format_.system_last ? 1 : 0;
    if (format_.tools->last_user) {
      place = last_user();
      if (place > 0 && order_[place - 1]->role == ChatRole::kSystem && format_.system_last) --place;
    }
    order_.insert(order_.begin() + place, nullptr);
  }
  last_user_ = last_user();
  if (format_.tools.has_value() && !format_.tools->equal_users) {
    for (size_t i = 0; i < last_user_; ++i) {
      if (is_user(order_[i]) && order_[i]->content == order_[last_user_]->content) {
        return Refused(
            "writes the tools before each message of the user's that says the same as the last, "
            "which is not supported here");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::Write(absl::Span<const ChatMessage> messages) {
  if (absl::Status status = Order(messages); !status.ok()) return status;
  for (size_t i = 0; i < order_.size(); ++i) {
    absl::Status status = order_[i] == nullptr
                              ? WriteTools()
                              : WriteMessage(*order_[i], i < last_user_, i + 1 == order_.size());
    if (!status.ok()) return status;
  }
  const std::vector<TextRange>& contents = prompt_.contents;
  tail_ = *before_ == Part::kAssistant ? contents.back().begin : contents.back().end;
  switch (*before_) {
    case Part::kUser:
      Append(format_.generation);
      return absl::OkStatus();
    case Part::kResult:
      Append(format_.calls->result_generation);
      return absl::OkStatus();
    case Part::kAssistant:
      if (!format_.end.has_value()) break;
      Append(*format_.end);
      return absl::OkStatus();
    default:
      break;
  }
  return Refused(
      "treats a conversation that ends with an assistant message in a special way, which is not "
      "supported here: end with a user message");
}

absl::Status PromptWriter::WriteMessage(const ChatMessage& message, bool history, bool last) {
  switch (message.role) {
    case ChatRole::kSystem:
      return WriteContent(Part::kSystem, message.content, history);
    case ChatRole::kUser:
      return WriteContent(Part::kUser, message.content, history);
    case ChatRole::kAssistant:
      return WriteAnswer(message, history, last);
    case ChatRole::kTool:
      return WriteResult(message);
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::WriteAnswer(const ChatMessage& message, bool history, bool last) {
  if (!history && !last && !format_.history_after.empty() &&
      absl::StrContains(message.content, format_.history_after)) {
    return Refused(absl::StrCat("takes thinking out of contents that hold '", format_.history_after,
                                "': give it as the message's reasoning"));
  }
  if (!history && format_.reasoning.has_value() && !message.reasoning.empty()) {
    if (absl::Status status = Begin(Part::kReasoning); !status.ok()) return status;
    Put(Stripped(message.reasoning, *format_.reasoning));
  }
  const bool blank = StripLeft(message.content, kSpaces).empty();
  if (message.calls.empty() || (format_.calls.has_value() && format_.calls->content && !blank)) {
    absl::Status status = WriteContent(Part::kAssistant, message.content, history);
    if (!status.ok()) return status;
  }
  if (message.calls.empty()) return absl::OkStatus();
  if (!format_.calls.has_value()) {
    return Refused(
        absl::StrCat("has no calls of tools that are supported here: ", format_.calls_refusal));
  }
  if (message.calls.size() > 1 && !format_.calls->several) {
    return Refused("takes one call in a message, not several");
  }
  for (const ToolCall& call : message.calls) {
    if (absl::Status status = WriteCall(call); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::WriteCall(const ToolCall& call) {
  const absl::StatusOr<std::string> arguments = PythonJson(call.arguments);
  if (!arguments.ok() || !absl::StartsWith(*arguments, "{")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the arguments of a call of '", call.name, "' must be a JSON object",
        arguments.ok() ? "" : absl::StrCat("; the text ", arguments.status().message())));
  }
  if (absl::Status status = CheckId(call.id); !status.ok()) return status;
  if (absl::Status status = Begin(Part::kCall); !status.ok()) return status;
  for (const auto& piece : format_.calls->call) {
    if (const auto* text = std::get_if<std::string>(&piece)) {
      prompt_.text += *text;
      continue;
    }
    const Field field = std::get<Field>(piece);
    Put(field == Field::kName ? call.name : field == Field::kId ? call.id : *arguments);
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::WriteResult(const ChatMessage& message) {
  if (!format_.calls.has_value()) {
    return Refused(
        absl::StrCat("has no results of tools that are supported here: ", format_.calls_refusal));
  }
  if (absl::Status status = CheckId(message.call_id); !status.ok()) return status;
  if (absl::Status status = Begin(Part::kResult); !status.ok()) return status;
  for (const auto& piece : format_.calls->result) {
    if (const auto* text = std::get_if<std::string>(&piece)) {
      prompt_.text += *text;
      continue;
    }
    switch (std::get<Field>(piece)) {
      case Field::kName:
        Put(message.name);
        break;
      case Field::kId:
        Put(message.call_id);
        break;
      default:
        Put(Stripped(message.content, format_.calls->result_strip));
    }
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::CheckId(const std::string& id) const {
  const std::optional<int> length = format_.calls->id_length;
  if (!length.has_value() ||
      (std::ssize(id) == *length && std::all_of(id.begin(), id.end(), [](char c) {
         return absl::ascii_isalnum(static_cast<unsigned char>(c));
       }))) {
    return absl::OkStatus();
  }
  return Refused(
      absl::StrCat("takes ids of calls that are ", *length, " letters and digits, not '", id, "'"));
}

absl::Status PromptWriter::WriteTools() {
  if (absl::Status status = Begin(Part::kTools); !status.ok()) return status;
  std::string all;
  for (const ChatTool& tool : options_.tools) {
    const std::string description = PythonJsonString(tool.description);
    if (format_.tools->plain_descriptions && description.size() != tool.description.size() + 2) {
      return Refused(absl::StrCat("does not escape descriptions of tools; that of '", tool.name,
                                  "' has quotes, backslashes or control characters"));
    }
    std::string json = absl::StrCat("{\"type\": \"function\", \"function\": {\"name\": ",
                                    PythonJsonString(tool.name));
    if (!tool.description.empty()) absl::StrAppend(&json, ", \"description\": ", description);
    if (!tool.parameters.empty()) absl::StrAppend(&json, ", \"parameters\": ", tool.parameters);
    json += "}}";
    absl::StatusOr<std::string> written = PythonJson(json, format_.tools->indent);
    if (!written.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("the parameters of the tool '", tool.name,
                                                     "': the text ", written.status().message()));
    }
    absl::StrAppend(&all, all.empty() ? "" : format_.tools->between, *written);
  }
  Put(all);
  return absl::OkStatus();
}

absl::Status PromptWriter::WriteContent(Part part, const std::string& given, bool history) {
  std::string content = Stripped(given, format_.strip.at(part));
  if (part == Part::kAssistant && history && !format_.history_after.empty()) {
    const size_t tag = content.rfind(format_.history_after);
    if (tag != std::string::npos) {
      content = Stripped(content.substr(tag + format_.history_after.size()), format_.history_strip);
    }
  }
  if (const auto refused = format_.refuse.find(part); refused != format_.refuse.end()) {
    for (const std::vector<std::string>& texts : refused->second) {
      if (texts.empty() ? !content.empty() : !HoldsAll(given, texts)) continue;
      return Refused(absl::StrCat(
          "treats ", NameOf(part), " messages that ",
          texts.empty() ? "are empty"
                        : absl::StrCat("hold '", absl::StrJoin(texts, "' and then '"), "'"),
          " in a special way, which is not supported here"));
    }
  }
  if (absl::Status status = Begin(part); !status.ok()) return status;
  Put(content);
  return absl::OkStatus();
}

absl::Status PromptWriter::Begin(Part part) {
  const ChatFormat::Text* text = nullptr;
  if (before_.has_value()) {
    const auto found = format_.between.find({*before_, part});
    if (found != format_.between.end()) text = &found->second;
  } else if (const auto found = format_.begin.find(part); found != format_.begin.end()) {
    text = &found->second;
  }
  if (text == nullptr) {
    return Refused(
        absl::StrCat("is not known for conversations in which a ", NameOf(part), " message ",
                     before_.has_value() ? absl::StrCat("follows a ", NameOf(*before_), " message")
                                         : "is the first"));
  }
  before_ = part;
  Append(*text);
  return absl::OkStatus();
}

void PromptWriter::Append(const ChatFormat::Text& text) {
  for (const auto& piece : text) {
    const auto* date = std::get_if<ChatFormat::Date>(&piece);
    absl::StrAppend(&prompt_.text, date == nullptr ? std::get<std::string>(piece)
                                                   : absl::FormatTime(date->format, options_.now,
                                                                      absl::LocalTimeZone()));
  }
}

void PromptWriter::Put(absl::string_view text) {
  const size_t begin = prompt_.text.size();
  absl::StrAppend(&prompt_.text, text);
  prompt_.contents.push_back({.begin = begin, .end = prompt_.text.size()});
}

}  // namespace

absl::StatusOr<ChatText> ChatFormats::Render(absl::Span<const ChatMessage> messages,
                                             const ChatOptions& options) const {
  if (!refusal_.empty()) return absl::FailedPreconditionError(refusal_);
  if (options.thinking.has_value() && !has_thinking()) {
    return Refused("does not let thinking be switched on or off");
  }
  if (!options.tools.empty() && !tools_refusal_.empty()) {
    return Refused(absl::StrCat("takes no tools: ", tools_refusal_));
  }
  const Ways& ways = options.tools.empty() ? plain_ : with_tools_;
  const ChatFormat& format = !options.thinking.has_value() ? ways.none
                             : *options.thinking           ? *ways.on
                                                           : *ways.off;
  PromptWriter writer(format, options);
  if (absl::Status status = writer.Write(messages); !status.ok()) return status;
  const size_t tail = writer.tail();
  ChatText prompt = writer.Take();
  if (thinking_tags_.has_value()) {
    const absl::string_view end = absl::string_view(prompt.text).substr(tail);
    const size_t opened = end.rfind(thinking_tags_->begin);
    prompt.thinks = opened != absl::string_view::npos &&
                    end.find(thinking_tags_->end, opened) == absl::string_view::npos;
  }
  return prompt;
}

std::optional<OutOfTurn> FirstOutOfTurn(absl::Span<const ChatMessage> messages) {
  constexpr absl::string_view kTurns =
      "a conversation is a system message or none, then user and assistant in turns";
  constexpr absl::string_view kResults =
      "results of tools follow an assistant message that calls them";
  bool calls = false;   // results may follow
  bool user = true;     // the user's turn
  bool answer = false;  // the assistant's
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    switch (message.role) {
      case ChatRole::kSystem:
        if (i > 0) return OutOfTurn{i, std::string(kTurns)};
        continue;
      case ChatRole::kUser:
        if (!user) return OutOfTurn{i, std::string(kTurns)};
        user = calls = false;
        answer = true;
        continue;
      case ChatRole::kAssistant:
        if (!answer) return OutOfTurn{i, std::string(kTurns)};
        calls = !message.calls.empty();
        answer = false;
        user = true;
        continue;
      case ChatRole::kTool:
        if (!calls) return OutOfTurn{i, std::string(kResults)};
        answer = true;
        continue;
    }
  }
  const bool speaks = !messages.empty() && messages.back().role != ChatRole::kSystem;
  const bool awaits = speaks && messages.back().role == ChatRole::kAssistant && calls;
  if (!speaks) return OutOfTurn{messages.size(), std::string(kTurns)};
  if (awaits) return OutOfTurn{messages.size(), std::string(kResults)};
  return std::nullopt;
}

}  // namespace epikv
