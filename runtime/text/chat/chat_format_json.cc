#include <array>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "runtime/text/chat/chat_format.h"

// chat.json.

namespace epikv {
namespace {

using Json = nlohmann::json;
using Part = ChatFormat::Part;
using Strip = ChatFormat::Strip;

constexpr std::array<std::pair<Part, absl::string_view>, 7> kParts = {
    {{Part::kSystem, "system"},
     {Part::kTools, "tools"},
     {Part::kUser, "user"},
     {Part::kReasoning, "reasoning"},
     {Part::kAssistant, "assistant"},
     {Part::kCall, "call"},
     {Part::kResult, "result"}}};
constexpr std::array<std::pair<Part, absl::string_view>, 3> kRoles = {
    {{Part::kSystem, "system"}, {Part::kUser, "user"}, {Part::kAssistant, "assistant"}}};

}  // namespace

// Keeps the first thing that is wrong.
class ChatFormats::Reader {
 public:
  absl::Status status() const { return status_; }

  Ways ReadWays(const Json& json, const std::string& path, bool tools) {
    Ways ways;
    auto read = [&](const char* name) {
      const Json& format = json.contains(name) ? json[name] : Json();
      const std::string field = absl::StrCat(path, name);
      if (!format.is_object()) Refuse(field, "must be an object");
      return format.is_object() ? ReadFormat(format, absl::StrCat(field, "."), tools)
                                : ChatFormat();
    };
    ways.none = read("default");
    if (json.contains("thinking")) ways.on = read("thinking");
    if (json.contains("no_thinking")) ways.off = read("no_thinking");
    return ways;
  }

  std::string String(const Json& json, const std::string& path, const std::string& name) {
    if (json.contains(name) && json[name].is_string() && !json[name].get<std::string>().empty()) {
      return json[name].get<std::string>();
    }
    return Refuse(absl::StrCat(path, name), "must be a string, not empty"), "";
  }

  ThinkingTags ReadTags(const Json& json) {
    const bool two = json.is_array() && json.size() == 2 && json[0].is_string() &&
                     json[1].is_string() && !json[0].get<std::string>().empty() &&
                     !json[1].get<std::string>().empty();
    if (!two) return Refuse("thinking_tags", "must be two strings, none empty"), ThinkingTags();
    return {.begin = json[0].get<std::string>(), .end = json[1].get<std::string>()};
  }

  void Refuse(const std::string& field, absl::string_view what) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat("chat.json: ", field, " ", what));
    }
  }

 private:
  ChatFormat ReadFormat(const Json& json, const std::string& path, bool tools) {
    ChatFormat format;
    ReadTexts(json, path, format);
    const Json& strip = Object(json, path, "strip");
    for (const auto& [part, name] : kRoles) {
      format.strip[part] = ReadStrip(strip, absl::StrCat(path, "strip."), std::string(name));
    }
    format.generation = ReadText(json, path, "generation");
    if (json.contains("end") && !json["end"].is_null()) {
      format.end = ReadText(json, path, "end");
    }
    ReadSystem(json, path, format);
    const Json& history = Object(json, path, "history");
    if (history.contains("after") && !history["after"].is_null()) {
      format.history_after = String(history, absl::StrCat(path, "history."), "after");
    }
    format.history_strip = ReadStrip(history, absl::StrCat(path, "history."), "strip");
    ReadRefuse(json, path, format);
    ReadCalls(json, path, format);
    if (tools) format.tools = ReadTools(json, path);
    if (json.contains("reasoning") && !json["reasoning"].is_null()) {
      const Json& reasoning = Object(json, path, "reasoning");
      const std::string in = absl::StrCat(path, "reasoning.");
      format.reasoning = {.strip = ReadStrip(reasoning, in, "strip"),
                          .content_strip = ReadStrip(reasoning, in, "content_strip")};
    }
    CheckComplete(format, path);
    return format;
  }

  void ReadTexts(const Json& json, const std::string& path, ChatFormat& format) {
    const Json& begin = Object(json, path, "begin");
    const Json& between = Object(json, path, "between");
    for (const auto& [part, name] : kParts) {
      if (begin.contains(name)) {
        format.begin[part] = ReadText(begin, absl::StrCat(path, "begin."), std::string(name));
      }
      for (const auto& [next, next_name] : kParts) {
        const std::string names = absl::StrCat(name, " ", next_name);
        if (!between.contains(names)) continue;
        format.between[{part, next}] = ReadText(between, absl::StrCat(path, "between."), names);
      }
    }
  }

  const Json& Object(const Json& json, const std::string& path, const char* name) {
    static const Json& empty = *new Json(Json::object());
    if (json.contains(name) && json[name].is_object()) return json[name];
    Refuse(absl::StrCat(path, name), "must be an object");
    return empty;
  }

  ChatFormat::Text ReadText(const Json& json, const std::string& path, const std::string& name) {
    ChatFormat::Text text;
    const std::string field = absl::StrCat(path, name);
    if (!json.contains(name) || !json[name].is_array()) return Refuse(field, kTextRule), text;
    for (const Json& piece : json[name]) {
      if (piece.is_string()) {
        text.emplace_back(piece.get<std::string>());
      } else if (piece.is_object() && piece.size() == 1 && piece.contains("date") &&
                 piece["date"].is_string()) {
        text.emplace_back(ChatFormat::Date{piece["date"].get<std::string>()});
      } else {
        Refuse(field, kTextRule);
      }
    }
    return text;
  }

  // `fields`: those that it may and must name, each once.
  ChatFormat::Pattern ReadPattern(const Json& json, const std::string& path, const char* name,
                                  const std::map<std::string, ChatFormat::Field>& fields,
                                  ChatFormat::Field needed) {
    ChatFormat::Pattern pattern;
    const std::string field = absl::StrCat(path, name);
    if (!json.contains(name) || !json[name].is_array()) return Refuse(field, kPatternRule), pattern;
    bool there = false;
    for (const Json& piece : json[name]) {
      if (piece.is_string()) {
        pattern.emplace_back(piece.get<std::string>());
        continue;
      }
      const bool names = piece.is_object() && piece.size() == 1 && piece.contains("field") &&
                         piece["field"].is_string();
      const auto known = fields.find(names ? piece["field"].get<std::string>() : "");
      if (known == fields.end()) return Refuse(field, kPatternRule), pattern;
      pattern.emplace_back(known->second);
      there |= known->second == needed;
    }
    if (!there) Refuse(field, "lacks the arguments, or the content");
    return pattern;
  }

  Strip ReadStrip(const Json& json, const std::string& path, const std::string& name) {
    static const auto& known = *new std::map<std::string, Strip>{
        {"none", Strip::kNone},         {"both", Strip::kBoth},
        {"left", Strip::kLeft},         {"right", Strip::kRight},
        {"newlines", Strip::kNewlines}, {"left_newlines", Strip::kLeftNewlines},
        {"json", Strip::kJson}};
    if (json.contains(name) && json[name].is_string()) {
      const auto found = known.find(json[name].get<std::string>());
      if (found != known.end()) return found->second;
    }
    Refuse(absl::StrCat(path, name),
           "must be none, both, left, right, newlines, left_newlines or json");
    return Strip::kNone;
  }

  void ReadSystem(const Json& json, const std::string& path, ChatFormat& format) {
    const Json& system = json.contains("system") ? json["system"] : Json();
    if (system == "last_user") {
      format.system_last = true;
    } else if (system.is_object()) {
      format.system_refusal = String(system, absl::StrCat(path, "system."), "refusal");
    } else if (system != "first") {
      Refuse(absl::StrCat(path, "system"), "must be first, last_user or a refusal");
    }
  }

  void ReadRefuse(const Json& json, const std::string& path, ChatFormat& format) {
    if (!json.contains("refuse")) return;
    const Json& refuse = Object(json, path, "refuse");
    for (const auto& [part, name] : kParts) {
      if (!refuse.contains(name)) continue;
      const std::string field = absl::StrCat(path, "refuse.", name);
      if (!refuse[name].is_array()) return Refuse(field, kRefuseRule);
      for (const Json& texts : refuse[name]) {
        const bool strings =
            texts.is_array() && std::all_of(texts.begin(), texts.end(), [](const Json& text) {
              return text.is_string() && !text.get<std::string>().empty();
            });
        if (!strings) return Refuse(field, kRefuseRule);
        format.refuse[part].push_back(texts.get<std::vector<std::string>>());
      }
    }
  }

  void ReadCalls(const Json& json, const std::string& path, ChatFormat& format) {
    using Field = ChatFormat::Field;
    format.calls_refusal = "it knows no calls of tools";
    if (!json.contains("calls") || json["calls"].is_null()) return;
    const Json& calls = Object(json, path, "calls");
    const std::string in = absl::StrCat(path, "calls.");
    if (calls.contains("refusal")) {
      format.calls_refusal = String(calls, in, "refusal");
      return;
    }
    ChatFormat::Calls read;
    const std::string syntax = String(calls, in, "syntax");
    if (syntax == "llama3") {
      read.syntax = CallSyntax::kLlama3;
    } else if (syntax == "mistral") {
      read.syntax = CallSyntax::kMistral;
    } else if (syntax != "hermes") {
      Refuse(absl::StrCat(in, "syntax"), "must be hermes, llama3 or mistral");
    }
    read.call =
        ReadPattern(calls, in, "call",
                    {{"name", Field::kName}, {"arguments", Field::kArguments}, {"id", Field::kId}},
                    Field::kArguments);
    read.result =
        ReadPattern(calls, in, "result",
                    {{"name", Field::kName}, {"content", Field::kContent}, {"id", Field::kId}},
                    Field::kContent);
    read.result_strip = ReadStrip(calls, in, "result_strip");
    read.result_generation = ReadText(calls, in, "result_generation");
    read.content = ReadBeside(calls, in);
    read.system_dropped = calls.contains("system") && OneOf(calls, in, "system", "dropped", "kept");
    read.several = Bool(calls, in, "several");
    read.id_length = Number(calls, in, "id_length");
    format.calls = std::move(read);
    format.calls_refusal.clear();
  }

  ChatFormat::Tools ReadTools(const Json& json, const std::string& path) {
    const Json& tools = Object(json, path, "tools");
    const std::string in = absl::StrCat(path, "tools.");
    ChatFormat::Tools read;
    read.last_user = OneOf(tools, in, "place", "last_user", "first");
    read.indent = Number(tools, in, "indent");
    if (tools.contains("between") && tools["between"].is_string()) {
      read.between = tools["between"].get<std::string>();
    } else {
      Refuse(absl::StrCat(in, "between"), "must be a string");
    }
    read.raw_descriptions =
        tools.contains("raw_descriptions") && Bool(tools, in, "raw_descriptions");
    read.equal_users = tools.contains("equal_users") && !tools["equal_users"].is_null();
    return read;
  }

  ChatFormat::Beside ReadBeside(const Json& calls, const std::string& path) {
    const Json& content = calls.contains("content") ? calls["content"] : Json();
    if (content == "kept_unless_empty") return ChatFormat::Beside::kKeptUnlessEmpty;
    if (content == "dropped") return ChatFormat::Beside::kDropped;
    if (content != "kept") {
      Refuse(absl::StrCat(path, "content"), "must be kept, kept_unless_empty or dropped");
    }
    return ChatFormat::Beside::kKept;
  }

  // Whether it is the one, not the other.
  bool OneOf(const Json& json, const std::string& path, const char* name, const char* one,
             const char* other) {
    const Json& value = json.contains(name) ? json[name] : Json();
    if (value != one && value != other) {
      Refuse(absl::StrCat(path, name), absl::StrCat("must be ", one, " or ", other));
    }
    return value == one;
  }

  bool Bool(const Json& json, const std::string& path, const char* name) {
    if (json.contains(name) && json[name].is_boolean()) return json[name].get<bool>();
    return Refuse(absl::StrCat(path, name), "must be true or false"), false;
  }

  std::optional<int> Number(const Json& json, const std::string& path, const char* name) {
    if (!json.contains(name) || json[name].is_null()) return std::nullopt;
    if (json[name].is_number_integer() && json[name] >= 0 && json[name] <= 64) {
      return json[name].get<int>();
    }
    return Refuse(absl::StrCat(path, name), "must be a number from 0 to 64, or null"), std::nullopt;
  }

  // That every conversation of system, user and assistant finds the texts it needs. Those with
  // calls are told what there is not.
  void CheckComplete(const ChatFormat& format, const std::string& path) {
    auto need = [&](bool there, absl::string_view what) {
      if (!there) Refuse(absl::StrCat(path, what), "is missing");
    };
    auto need_between = [&](Part before, Part after, absl::string_view what) {
      need(format.between.contains({before, after}), what);
    };
    const bool system = format.system_refusal.empty();
    const bool tools_first = format.tools.has_value() && !format.tools->last_user;
    const bool tools_last = format.tools.has_value() && format.tools->last_user;
    need_between(Part::kUser, Part::kAssistant, "between.user assistant");
    need_between(Part::kAssistant, Part::kUser, "between.assistant user");
    if (!tools_first) need(format.begin.contains(Part::kUser), "begin.user");
    if (format.tools.has_value()) {
      const bool behind_system = tools_first && system && !format.system_last;
      need(format.begin.contains(Part::kTools), "begin.tools");
      need_between(Part::kTools, Part::kUser, "between.tools user");
      if (behind_system) need_between(Part::kSystem, Part::kTools, "between.system tools");
      if (tools_last) need_between(Part::kAssistant, Part::kTools, "between.assistant tools");
    }
    if (!system) return;
    if (!tools_first || format.system_last) {
      need_between(Part::kSystem, Part::kUser, "between.system user");
    }
    if (!format.system_last) {
      need(format.begin.contains(Part::kSystem), "begin.system");
    } else if (tools_last) {
      need_between(Part::kTools, Part::kSystem, "between.tools system");
    } else {
      need(tools_first || format.begin.contains(Part::kSystem), "begin.system");
      need_between(Part::kAssistant, Part::kSystem, "between.assistant system");
    }
  }

  static constexpr absl::string_view kRefuseRule = "must be a list of lists of strings, none empty";
  static constexpr absl::string_view kTextRule =
      "must be a list of strings and of {\"date\": strftime's format}";
  static constexpr absl::string_view kPatternRule =
      "must be a list of strings and of {\"field\": a field's name}";
  absl::Status status_;
};

absl::StatusOr<ChatFormats> ChatFormats::FromJson(absl::string_view text) {
  const Json json = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InvalidArgumentError("chat.json: must be an object");
  Reader reader;
  ChatFormats formats("");
  if (json.contains("refusal")) {
    formats.refusal_ = reader.String(json, "", "refusal");
    formats.tools_refusal_ = formats.refusal_;
    if (!reader.status().ok()) return reader.status();
    return formats;
  }
  formats.plain_ = reader.ReadWays(json, "", /*tools=*/false);
  const Json& tools = json.contains("tools") ? json["tools"] : Json();
  if (!tools.is_object()) {
    formats.tools_refusal_ = "its model file was exported by a version that knew no tools";
  } else if (tools.contains("refusal")) {
    formats.tools_refusal_ = reader.String(tools, "tools.", "refusal");
  } else {
    formats.with_tools_ = reader.ReadWays(tools, "tools.", /*tools=*/true);
    formats.tools_refusal_ = formats.with_tools_.none.calls_refusal;
    const auto chosen = [](const Ways& ways) {
      return ways.on.has_value() && ways.off.has_value();
    };
    if (chosen(formats.plain_) && !chosen(formats.with_tools_)) {
      reader.Refuse("tools", "must have the same ways of thinking as what stands beside it");
    }
  }
  if (json.contains("thinking_tags"))
    formats.thinking_tags_ = reader.ReadTags(json["thinking_tags"]);
  if (!reader.status().ok()) return reader.status();
  return formats;
}

}  // namespace epikv
