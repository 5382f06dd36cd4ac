#include "runtime/text/chat_format.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace epikv {
namespace {

using Json = nlohmann::json;

constexpr std::array<std::pair<ChatRole, absl::string_view>, 3> kRoles = {
    {{ChatRole::kSystem, "system"},
     {ChatRole::kUser, "user"},
     {ChatRole::kAssistant, "assistant"}}};

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

}  // namespace

// Reads chat.json and keeps the first thing that is wrong with it.
class ChatFormats::Reader {
 public:
  absl::Status status() const { return status_; }

  Format ReadFormat(const Json& json, const std::string& path) {
    Format format;
    const Json& begin = Object(json, path, "begin");
    const Json& between = Object(json, path, "between");
    const Json& strip = Object(json, path, "strip");
    const Json& history = Object(json, path, "history");
    for (const auto& [role, name] : kRoles) {
      if (begin.contains(name)) {
        format.begin[role] = ReadText(begin, absl::StrCat(path, "begin."), std::string(name));
      }
      format.strip[role] = ReadStrip(strip, absl::StrCat(path, "strip."), std::string(name));
      for (const auto& [next, next_name] : kRoles) {
        const std::string names = absl::StrCat(name, " ", next_name);
        if (!between.contains(names)) continue;
        format.between[{role, next}] = ReadText(between, absl::StrCat(path, "between."), names);
      }
    }
    format.generation = ReadText(json, path, "generation");
    if (json.contains("end") && !json["end"].is_null()) {
      format.end = ReadText(json, path, "end");
    }
    ReadSystem(json, path, format);
    if (history.contains("after") && !history["after"].is_null()) {
      format.history_after = String(history, absl::StrCat(path, "history."), "after");
    }
    format.history_strip = ReadStrip(history, absl::StrCat(path, "history."), "strip");
    ReadRefuse(json, path, format);
    CheckComplete(format, path);
    return format;
  }

  std::string String(const Json& json, const std::string& path, const std::string& name) {
    if (json.contains(name) && json[name].is_string() && !json[name].get<std::string>().empty()) {
      return json[name].get<std::string>();
    }
    return Refuse(absl::StrCat(path, name), "must be a string, not empty"), "";
  }

  void Refuse(const std::string& field, absl::string_view what) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat("chat.json: ", field, " ", what));
    }
  }

 private:
  const Json& Object(const Json& json, const std::string& path, const char* name) {
    static const Json& empty = *new Json(Json::object());
    if (json.contains(name) && json[name].is_object()) return json[name];
    Refuse(absl::StrCat(path, name), "must be an object");
    return empty;
  }

  Text ReadText(const Json& json, const std::string& path, const std::string& name) {
    Text text;
    const std::string field = absl::StrCat(path, name);
    if (!json.contains(name) || !json[name].is_array()) return Refuse(field, kTextRule), text;
    for (const Json& piece : json[name]) {
      if (piece.is_string()) {
        text.emplace_back(piece.get<std::string>());
      } else if (piece.is_object() && piece.size() == 1 && piece.contains("date") &&
                 piece["date"].is_string()) {
        text.emplace_back(Date{piece["date"].get<std::string>()});
      } else {
        Refuse(field, kTextRule);
      }
    }
    return text;
  }

  Strip ReadStrip(const Json& json, const std::string& path, const std::string& name) {
    static const auto& known = *new std::map<std::string, Strip>{
        {"none", Strip::kNone},         {"both", Strip::kBoth},
        {"left", Strip::kLeft},         {"right", Strip::kRight},
        {"newlines", Strip::kNewlines}, {"left_newlines", Strip::kLeftNewlines}};
    if (json.contains(name) && json[name].is_string()) {
      const auto found = known.find(json[name].get<std::string>());
      if (found != known.end()) return found->second;
    }
    Refuse(absl::StrCat(path, name), "must be none, both, left, right, newlines or left_newlines");
    return Strip::kNone;
  }

  void ReadSystem(const Json& json, const std::string& path, Format& format) {
    const Json& system = json.contains("system") ? json["system"] : Json();
    if (system == "last_user") {
      format.system_last = true;
    } else if (system.is_object()) {
      format.system_refusal = String(system, absl::StrCat(path, "system."), "refusal");
    } else if (system != "first") {
      Refuse(absl::StrCat(path, "system"), "must be first, last_user or a refusal");
    }
  }

  void ReadRefuse(const Json& json, const std::string& path, Format& format) {
    if (!json.contains("refuse")) return;
    const Json& refuse = Object(json, path, "refuse");
    for (const auto& [role, name] : kRoles) {
      if (!refuse.contains(name)) continue;
      const std::string field = absl::StrCat(path, "refuse.", name);
      if (!refuse[name].is_array()) return Refuse(field, kRefuseRule);
      for (const Json& texts : refuse[name]) {
        const bool strings =
            texts.is_array() && std::all_of(texts.begin(), texts.end(), [](const Json& text) {
              return text.is_string() && !text.get<std::string>().empty();
            });
        if (!strings) return Refuse(field, kRefuseRule);
        format.refuse[role].push_back(texts.get<std::vector<std::string>>());
      }
    }
  }

  // That every conversation finds the texts it needs.
  void CheckComplete(const Format& format, const std::string& path) {
    auto need = [&](bool there, absl::string_view what) {
      if (!there) Refuse(absl::StrCat(path, what), "is missing");
    };
    using Role = ChatRole;
    need(format.begin.contains(Role::kUser), "begin.user");
    need(format.between.contains({Role::kUser, Role::kAssistant}), "between.user assistant");
    need(format.between.contains({Role::kAssistant, Role::kUser}), "between.assistant user");
    if (!format.system_refusal.empty()) return;
    need(format.begin.contains(Role::kSystem), "begin.system");
    need(format.between.contains({Role::kSystem, Role::kUser}), "between.system user");
    if (!format.system_last) return;
    need(format.between.contains({Role::kAssistant, Role::kSystem}), "between.assistant system");
  }

  static constexpr absl::string_view kRefuseRule = "must be a list of lists of strings, none empty";
  static constexpr absl::string_view kTextRule =
      "must be a list of strings and of {\"date\": strftime's format}";
  absl::Status status_;
};

absl::StatusOr<ChatFormats> ChatFormats::FromJson(absl::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("chat.json: must be an object");
  Reader reader;
  ChatFormats formats("");
  if (json.contains("refusal")) {
    formats.refusal_ = reader.String(json, "", "refusal");
  } else {
    auto read = [&](const char* name) {
      const Json& format = json.contains(name) ? json[name] : Json();
      if (!format.is_object()) reader.Refuse(name, "must be an object");
      return format.is_object() ? reader.ReadFormat(format, absl::StrCat(name, ".")) : Format();
    };
    formats.default_ = read("default");
    if (json.contains("thinking")) formats.thinking_ = read("thinking");
    if (json.contains("no_thinking")) formats.no_thinking_ = read("no_thinking");
  }
  if (!reader.status().ok()) return reader.status();
  return formats;
}

std::string ChatFormats::Stripped(absl::string_view content, Strip strip) {
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
  }
  return std::string(content);
}

absl::StatusOr<std::string> ChatFormats::Content(const Format& format, const ChatMessage& message,
                                                 bool history) {
  std::string content = Stripped(message.content, format.strip.at(message.role));
  if (history && !format.history_after.empty()) {
    const size_t tag = content.rfind(format.history_after);
    if (tag != std::string::npos) {
      content = Stripped(content.substr(tag + format.history_after.size()), format.history_strip);
    }
  }
  const auto refused = format.refuse.find(message.role);
  if (refused == format.refuse.end()) return content;
  for (const std::vector<std::string>& texts : refused->second) {
    if (texts.empty() ? !content.empty() : !HoldsAll(message.content, texts)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "this model's chat template treats ", kRoles[static_cast<size_t>(message.role)].second,
        " messages that ",
        texts.empty() ? "are empty"
                      : absl::StrCat("hold '", absl::StrJoin(texts, "' and then '"), "'"),
        " in a special way, which is not supported here"));
  }
  return content;
}

absl::StatusOr<ChatText> ChatFormats::Render(absl::Span<const ChatMessage> messages,
                                             std::optional<bool> thinking, absl::Time now) const {
  if (!refusal_.empty()) return absl::FailedPreconditionError(refusal_);
  if (thinking.has_value() && !has_thinking()) {
    return absl::FailedPreconditionError(
        "this model's chat template does not let thinking be switched on or off");
  }
  const Format& format = !thinking.has_value() ? default_ : *thinking ? *thinking_ : *no_thinking_;
  std::vector<const ChatMessage*> order;
  for (const ChatMessage& message : messages) order.push_back(&message);
  const auto last_user = std::find_if(order.rbegin(), order.rend(), [](const ChatMessage* m) {
    return m->role == ChatRole::kUser;
  });
  const ptrdiff_t last = order.rend() - last_user - 1;  // its index
  if (order.front()->role == ChatRole::kSystem) {
    if (!format.system_refusal.empty()) {
      return absl::FailedPreconditionError(format.system_refusal);
    }
    if (format.system_last) std::rotate(order.begin(), order.begin() + 1, order.begin() + last);
  }
  if (order.back()->role == ChatRole::kAssistant && !format.end.has_value()) {
    return absl::FailedPreconditionError(
        "this model's chat template treats a conversation that ends with an assistant message in a "
        "special way, which is not supported here: end with a user message");
  }

  ChatText prompt;
  auto append = [&](const Text& text) {
    for (const auto& piece : text) {
      const auto* date = std::get_if<Date>(&piece);
      absl::StrAppend(&prompt.text,
                      date == nullptr ? std::get<std::string>(piece)
                                      : absl::FormatTime(date->format, now, absl::LocalTimeZone()));
    }
  };
  append(format.begin.at(order.front()->role));
  for (ptrdiff_t i = 0; i < static_cast<ptrdiff_t>(order.size()); ++i) {
    if (i > 0) append(format.between.at({order[i - 1]->role, order[i]->role}));
    const bool history = order[i]->role == ChatRole::kAssistant && i < last;
    absl::StatusOr<std::string> content = Content(format, *order[i], history);
    if (!content.ok()) return content.status();
    const size_t begin = prompt.text.size();
    prompt.text += *content;
    prompt.contents.push_back({.begin = begin, .end = prompt.text.size()});
  }
  append(order.back()->role == ChatRole::kUser ? format.generation : *format.end);
  return prompt;
}

std::optional<size_t> FirstOutOfTurn(absl::Span<const ChatMessage> messages) {
  ChatRole expected = ChatRole::kUser;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatRole role = messages[i].role;
    if (i == 0 && role == ChatRole::kSystem) continue;
    if (role != expected) return i;
    expected = role == ChatRole::kUser ? ChatRole::kAssistant : ChatRole::kUser;
  }
  const bool speaks = !messages.empty() && messages.back().role != ChatRole::kSystem;
  return speaks ? std::nullopt : std::optional<size_t>(messages.size());
}

}  // namespace epikv
