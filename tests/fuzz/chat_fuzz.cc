// A chat format, which a model file brings along: it is refused by name of a field, or writes every
// conversation, none of whose contents it loses but for white space.

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "runtime/text/chat/chat_format.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

// From a system message or none to nine others.
std::vector<std::vector<ChatMessage>> Conversations() {
  std::vector<std::vector<ChatMessage>> all;
  for (const bool system : {false, true}) {
    std::vector<ChatMessage> messages;
    if (system)
      messages.push_back({ChatRole::kSystem,
                          " be\xc2\xa0"
                          "brief\n"});
    for (int i = 0; i < 9; ++i) {
      const bool user = i % 2 == 0;
      messages.push_back({user ? ChatRole::kUser : ChatRole::kAssistant,
                          absl::StrCat(i % 3 == 0 ? "\n " : "", user ? "" : "<think>x</think>",
                                       "word", i, i % 4 == 0 ? " \xe3\x80\x80" : "")});
      all.push_back(messages);
    }
  }
  return all;
}

void CheckFile(absl::string_view json) {
  const absl::StatusOr<ChatFormats> formats = ChatFormats::FromJson(json);
  if (!formats.ok()) {
    Require(absl::StartsWith(formats.status().message(), "chat.json: "), "an error names the file",
            formats.status().message());
    Require(!FirstInvalidUtf8(formats.status().message()).has_value(), "and can be told");
    return;
  }
  static const auto& conversations = *new auto(Conversations());
  for (const std::optional<bool> thinking : {std::optional<bool>(), std::optional(true)}) {
    for (const std::vector<ChatMessage>& messages : conversations) {
      const absl::StatusOr<ChatText> text = formats->Render(
          messages, {.thinking = thinking, .now = absl::FromUnixSeconds(1'700'000'000)});
      if (!text.ok()) {
        Require(text.status().code() == absl::StatusCode::kFailedPrecondition &&
                    !text.status().message().empty(),
                "it says what it cannot do", text.status().ToString());
        continue;
      }
      Require(!FirstInvalidUtf8(text->text).has_value(), "prompts are UTF-8", text->text);
      Require(text->contents.size() == messages.size(), "each content has its place");
      for (const ChatMessage& message : messages) {
        if (message.role != ChatRole::kUser) continue;
        const std::string word = message.content.substr(message.content.find("word"), 5);
        Require(absl::StrContains(text->text, word), "what users say is there", word);
      }
    }
  }
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckFile({reinterpret_cast<const char*>(data), size});
  return 0;
}
