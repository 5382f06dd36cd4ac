// Answers taken apart: however one is cut, its parts are the same, and they hold no more than it
// has. Input: a byte that chooses the format, and text.

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "runtime/text/chat/answer_reader.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

AnswerFormat FormatOf(uint8_t choice) {
  AnswerFormat format;
  if (choice & 1) format.thinking = ThinkingTags{"<think>", "</think>"};
  format.thinks = (choice & 3) == 3;
  if (choice & 4) format.calls = static_cast<CallSyntax>((choice >> 3) % 3);
  return format;
}

std::string ToldOf(const AnswerDelta& delta) {
  std::string told = absl::StrCat(delta.reasoning, "\x1f", delta.content);
  for (const CallDelta& call : delta.calls)
    absl::StrAppend(&told, "\x1f", call.name, "\x1f", call.arguments);
  return told;
}

AnswerDelta Read(const AnswerFormat& format, absl::string_view text, size_t piece) {
  AnswerReader reader(format);
  AnswerDelta all;
  for (size_t at = 0; at < text.size(); at += piece)
    all.Append(reader.Append(text.substr(at, piece)));
  all.Append(reader.Flush());
  return all;
}

void CheckAnswer(const AnswerFormat& format, absl::string_view text) {
  const AnswerDelta whole = Read(format, text, std::max<size_t>(1, text.size()));
  for (const size_t piece : {1, 2, 7}) {
    Require(ToldOf(Read(format, text, piece)) == ToldOf(whole), "how it is cut says nothing");
  }
  size_t bytes = whole.reasoning.size() + whole.content.size();
  for (size_t i = 0; i < whole.calls.size(); ++i) {
    const CallDelta& call = whole.calls[i];
    bytes += call.name.size() + call.arguments.size();
    Require(call.index == static_cast<int64_t>(i), "calls are counted");
    Require(!call.id.empty(), "a call has an id");
    Require(call.arguments.substr(0, 1) == "{", "arguments are an object", call.arguments);
  }
  Require(bytes <= text.size(), "nothing is made up");
  if (!format.thinking.has_value() && !format.calls.has_value()) {
    Require(whole.content == text, "what has no parts is content");
  }
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  epikv::CheckAnswer(epikv::FormatOf(data[0]), {reinterpret_cast<const char*>(data) + 1, size - 1});
  return 0;
}
