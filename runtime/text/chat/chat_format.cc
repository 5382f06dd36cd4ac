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
using Strip = ChatFormat::Strip;
using Beside = ChatFormat::Beside;

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

bool IsBlank(absl::string_view text) { return StripLeft(text, kSpaces).empty(); }

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
  absl::Status WriteMessage(const ChatMessage& message, bool history);
  absl::Status WriteAnswer(const ChatMessage& message, bool history);
  absl::Status WriteCall(const ToolCall& call);
  absl::Status WriteResult(const ChatMessage& message);
  absl::Status WriteTools();
  absl::Status MakeTools();
  absl::Status WriteContent(Part part, const std::string& given);
  // What of a content is written.
  absl::StatusOr<std::string> ContentOf(Part part, const std::string& given, bool history,
                                        Strip strip = Strip::kNone) const;
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
  std::string tools_;  // as they are written, once they are needed
  size_t tail_ = 0;
  std::vector<const ChatMessage*> order_;  // as they are written; null: the tools
  size_t last_user_ = 0;                   // its place in `order_`
  bool calls_now_ = false;                 // behind it
};

// Brings system message and tools to their places.
absl::Status PromptWriter::Order(absl::Span<const ChatMessage> messages) {
  const bool system = messages.front().role == ChatRole::kSystem;
  if (system && !format_.system_refusal.empty()) {
    return absl::FailedPreconditionError(format_.system_refusal);
  }
  size_t last = messages.size();
  while (last > 0 && messages[last - 1].role != ChatRole::kUser) --last;
  const ChatMessage& last_user = messages[last - 1];
  const bool system_first = system && !format_.system_last;
  const bool system_last = system && format_.system_last &&
                           !(messages.back().role == ChatRole::kTool && format_.calls.has_value() &&
                             format_.calls->system_dropped);
  if (system_first) order_.push_back(&messages.front());
  if (format_.tools.has_value() && !format_.tools->last_user) order_.push_back(nullptr);
  for (const ChatMessage& message : messages.subspan(system ? 1 : 0)) {
    const bool is_last = &message == &last_user;
    const bool alike = message.role == ChatRole::kUser && format_.tools.has_value() &&
                       format_.tools->equal_users && message.content == last_user.content;
    const bool tools_here = format_.tools.has_value() && format_.tools->last_user;
    if (tools_here && (is_last || alike)) order_.push_back(nullptr);
    if (is_last && system_last) order_.push_back(&messages.front());
    if (is_last) last_user_ = order_.size();
    order_.push_back(&message);
    calls_now_ |= &message > &last_user && !message.calls.empty();
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::Write(absl::Span<const ChatMessage> messages) {
  if (absl::Status status = Order(messages); !status.ok()) return status;
  for (size_t i = 0; i < order_.size(); ++i) {
    absl::Status status =
        order_[i] == nullptr ? WriteTools() : WriteMessage(*order_[i], i < last_user_);
    if (!status.ok()) return status;
    if (prompt_.text.size() > ChatFormats::kMostBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("the conversation is longer than ", ChatFormats::kMostBytes >> 20,
                       " MiB as this model's chat template writes it"));
    }
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

absl::Status PromptWriter::WriteMessage(const ChatMessage& message, bool history) {
  switch (message.role) {
    case ChatRole::kSystem:
      return WriteContent(Part::kSystem, message.content);
    case ChatRole::kUser:
      return WriteContent(Part::kUser, message.content);
    case ChatRole::kAssistant:
      return WriteAnswer(message, history);
    case ChatRole::kTool:
      return WriteResult(message);
  }
  return absl::OkStatus();
}

absl::Status PromptWriter::WriteAnswer(const ChatMessage& message, bool history) {
  if (!history && calls_now_ && !format_.history_after.empty() &&
      absl::StrContains(message.content, format_.history_after)) {
    return Refused(absl::StrCat("takes thinking out of contents that hold '", format_.history_after,
                                "': give it as the message's reasoning"));
  }
  Strip strip = Strip::kNone;
  if (!history && format_.reasoning.has_value() && !IsBlank(message.reasoning)) {
    if (absl::Status status = Begin(Part::kReasoning); !status.ok()) return status;
    Put(Stripped(message.reasoning, format_.reasoning->strip));
    strip = format_.reasoning->content_strip;
  }
  const Beside beside = message.calls.empty()       ? Beside::kKept
                        : IsBlank(message.content)  ? Beside::kDropped
                        : format_.calls.has_value() ? format_.calls->content
                                                    : Beside::kDropped;
  if (beside != Beside::kDropped) {
    const absl::StatusOr<std::string> content =
        ContentOf(Part::kAssistant, message.content, history, strip);
    if (!content.ok()) return content.status();
    if (beside == Beside::kKept || !content->empty()) {
      if (absl::Status status = Begin(Part::kAssistant); !status.ok()) return status;
      Put(*content);
    }
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
  // Models that have none to give may give nothing.
  const absl::StatusOr<std::string> arguments =
      PythonJson(call.arguments.empty() ? "{}" : call.arguments);
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
    const ChatFormat::Field field = std::get<ChatFormat::Field>(piece);
    Put(field == ChatFormat::Field::kName ? call.name
        : field == ChatFormat::Field::kId ? call.id
                                          : *arguments);
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
    switch (std::get<ChatFormat::Field>(piece)) {
      case ChatFormat::Field::kName:
        Put(message.name);
        break;
      case ChatFormat::Field::kId:
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
  if (tools_.empty()) {
    if (absl::Status status = MakeTools(); !status.ok()) return status;
  }
  if (absl::Status status = Begin(Part::kTools); !status.ok()) return status;
  Put(tools_);
  return absl::OkStatus();
}

absl::Status PromptWriter::MakeTools() {
  for (const ChatTool& tool : options_.tools) {
    std::string json = absl::StrCat("{\"type\": \"function\", \"function\": {\"name\": ",
                                    PythonJsonString(tool.name));
    const std::string description = PythonJsonString(tool.description);
    if (!tool.description.empty()) absl::StrAppend(&json, ", \"description\": ", description);
    if (!tool.parameters.empty()) {
      const absl::StatusOr<std::string> parameters = PythonJson(tool.parameters);
      if (!parameters.ok()) {
        return absl::InvalidArgumentError(absl::StrCat("the parameters of the tool '", tool.name,
                                                       "': the text ",
                                                       parameters.status().message()));
      }
      absl::StrAppend(&json, ", \"parameters\": ", *parameters);
    }
    json += "}}";
    absl::StatusOr<std::string> written = PythonJson(json, format_.tools->indent);
    if (!written.ok()) {  // nested too deeply, with what stands around them
      return absl::InvalidArgumentError(
          absl::StrCat("the tool '", tool.name, "' ", written.status().message()));
    }
    if (format_.tools->raw_descriptions && !tool.description.empty()) {
      written->replace(written->find(description), description.size(),
                       absl::StrCat("\"", tool.description, "\""));
    }
    absl::StrAppend(&tools_, tools_.empty() ? "" : format_.tools->between, *written);
    if (tools_.size() > ChatFormats::kMostBytes) break;  // it will be told
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> PromptWriter::ContentOf(Part part, const std::string& given,
                                                    bool history, Strip strip) const {
  std::string content = Stripped(Stripped(given, format_.strip.at(part)), strip);
  if (part == Part::kAssistant && history && !format_.history_after.empty()) {
    const size_t tag = content.rfind(format_.history_after);
    if (tag != std::string::npos) {
      content = Stripped(content.substr(tag + format_.history_after.size()), format_.history_strip);
    }
  }
  const auto refused = format_.refuse.find(part);
  if (refused == format_.refuse.end()) return content;
  for (const std::vector<std::string>& texts : refused->second) {
    if (texts.empty() ? !content.empty() : !HoldsAll(given, texts)) continue;
    return Refused(absl::StrCat(
        "treats ", NameOf(part), " messages that ",
        texts.empty() ? "are empty"
                      : absl::StrCat("hold '", absl::StrJoin(texts, "' and then '"), "'"),
        " in a special way, which is not supported here"));
  }
  return content;
}

absl::Status PromptWriter::WriteContent(Part part, const std::string& given) {
  const absl::StatusOr<std::string> content = ContentOf(part, given, /*history=*/false);
  if (!content.ok()) return content.status();
  if (absl::Status status = Begin(part); !status.ok()) return status;
  Put(*content);
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
      "each call of an assistant message is followed by its result, or all of them by a user "
      "message";
  const size_t first = !messages.empty() && messages[0].role == ChatRole::kSystem ? 1 : 0;
  ChatRole before = ChatRole::kSystem;
  size_t calls = 0, due = 0;  // of the last answer; of them, those without a result
  for (size_t i = first; i < messages.size(); ++i) {
    const ChatRole role = messages[i].role;
    const bool answered = due == 0 || due == calls;
    const bool user = role == ChatRole::kUser && before != ChatRole::kUser && answered;
    const bool answer = role == ChatRole::kAssistant && due == 0 &&
                        (before == ChatRole::kUser || before == ChatRole::kTool);
    const bool result = role == ChatRole::kTool && due > 0;
    if (!user && !answer && !result) {
      const bool of_results = due > 0 || role == ChatRole::kTool;
      return OutOfTurn{i, std::string(of_results ? kResults : kTurns)};
    }
    if (result) --due;
    if (!result) calls = due = messages[i].calls.size();
    before = role;
  }
  if (before == ChatRole::kSystem) return OutOfTurn{messages.size(), std::string(kTurns)};
  if (due > 0) return OutOfTurn{messages.size(), std::string(kResults)};
  return std::nullopt;
}

}  // namespace epikv
