#include "runtime/text/chat/answer_reader.h"

#include <algorithm>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

constexpr size_t kMostNameBytes = 64;
// That is held back: more of it in a row is content, or thinking.
constexpr size_t kMostSpaceBytes = 256;

// How much of the text's end begins `mark`, less than all of it.
size_t Begun(absl::string_view text, absl::string_view mark) {
  for (size_t n = std::min(text.size(), mark.size() - 1); n > 0; --n) {
    if (absl::StartsWith(mark, text.substr(text.size() - n))) return n;
  }
  return 0;
}

bool IsSpace(char c) { return absl::ascii_isspace(static_cast<unsigned char>(c)); }

size_t SpaceAtEnd(absl::string_view text) {
  const auto last = std::find_if_not(text.rbegin(), text.rend(), IsSpace);
  return static_cast<size_t>(last - text.rbegin());
}

size_t SpaceAtBegin(absl::string_view text) {
  return static_cast<size_t>(std::find_if_not(text.begin(), text.end(), IsSpace) - text.begin());
}

// Reads the literals and names of a call from left to right.
class Scanner {
 public:
  explicit Scanner(absl::string_view text) : text_(text) {}

  // The text so far is right; at its end, it is not known yet.
  bool ok() const { return ok_; }
  bool at_end() const { return at_ == text_.size(); }
  size_t at() const { return at_; }

  void Space() { at_ += SpaceAtBegin(text_.substr(at_)); }
  void Literal(absl::string_view literal) {
    const absl::string_view rest = text_.substr(at_);
    const size_t n = std::min(rest.size(), literal.size());
    ok_ = ok_ && rest.substr(0, n) == literal.substr(0, n);
    if (ok_) at_ += n;
    whole_ = whole_ && n == literal.size();
  }
  std::string Name() {
    std::string name;
    while (!at_end() && text_[at_] != '"' && name.size() <= kMostNameBytes) {
      name.push_back(text_[at_++]);
    }
    ok_ = ok_ && name.size() <= kMostNameBytes;
    return name;
  }
  // All literals were there to their ends.
  bool whole() const { return ok_ && whole_; }

 private:
  const absl::string_view text_;
  size_t at_ = 0;
  bool ok_ = true, whole_ = true;
};

}  // namespace

void AnswerDelta::Append(AnswerDelta next) {
  reasoning += next.reasoning;
  content += next.content;
  for (CallDelta& call : next.calls) {
    if (calls.empty() || calls.back().index != call.index) {
      calls.push_back(std::move(call));
    } else {
      calls.back().arguments += call.arguments;
    }
  }
}

AnswerReader::AnswerReader(AnswerFormat format) : format_(std::move(format)) {
  if (format_.thinks) state_ = State::kThinking;
}

absl::string_view CallMark(CallSyntax syntax) {
  switch (syntax) {
    case CallSyntax::kHermes:
      return "<tool_call>";
    case CallSyntax::kLlama3:
      return "{\"name\": \"";
    case CallSyntax::kMistral:
      break;
  }
  return "[TOOL_CALLS]";
}

absl::string_view AnswerReader::mark() const {
  const bool behind = format_.calls.has_value() && format_.calls != CallSyntax::kLlama3;
  return behind ? CallMark(*format_.calls) : "";
}

size_t AnswerReader::Told(absl::string_view text) {
  const size_t space = SpaceAtEnd(text);
  if (space < text.size()) space_told_ = false;  // it begins here
  space_told_ |= space > kMostSpaceBytes;
  return space_told_ ? text.size() : text.size() - space;
}

AnswerDelta AnswerReader::Append(absl::string_view text) {
  absl::StrAppend(&held_, text);
  AnswerDelta delta;
  while (Step(delta)) {
  }
  return delta;
}

AnswerDelta AnswerReader::Flush() {
  AnswerDelta delta;
  switch (state_) {
    case State::kThinking:
      delta.reasoning += held_.substr(0, held_.size() - SpaceAtEnd(held_));
      break;
    case State::kStart:
      delta.content += held_;
      break;
    case State::kHead:
      GiveUp(delta);
      [[fallthrough]];
    case State::kContent:
      if (num_calls_ > 0) held_.resize(held_.size() - SpaceAtEnd(held_));
      delta.content += held_.substr(trims_ ? SpaceAtBegin(held_) : 0);
      break;
    case State::kArguments:
    case State::kTail:
      break;
  }
  held_.clear();
  return delta;
}

bool AnswerReader::Step(AnswerDelta& delta) {
  if (held_.empty()) return false;
  switch (state_) {
    case State::kStart:
      return Start();
    case State::kThinking:
      return Think(delta);
    case State::kContent:
      return Say(delta);
    case State::kHead:
      return ReadHead(delta);
    case State::kArguments:
      return ReadArguments(delta);
    case State::kTail:
      return ReadTail();
  }
  return false;
}

// Thinking, a call that is the whole answer, or content.
bool AnswerReader::Start() {
  const size_t space = SpaceAtBegin(held_);
  const absl::string_view said = absl::string_view(held_).substr(space);
  if (said.empty() && space <= kMostSpaceBytes) return false;
  if (format_.thinking.has_value() && space <= kMostSpaceBytes) {
    const std::string& begin = format_.thinking->begin;
    if (absl::StartsWith(said, begin)) {
      Take(held_.size() - said.size() + begin.size());
      state_ = State::kThinking;
      return true;
    }
    if (absl::StartsWith(begin, said)) return false;
  }
  trims_ = false;  // what is before it is content
  state_ = State::kContent;
  if (format_.calls == CallSyntax::kLlama3 && said.size() == held_.size()) state_ = State::kHead;
  return true;
}

bool AnswerReader::Think(AnswerDelta& delta) {
  if (trims_) {
    Take(SpaceAtBegin(held_));
    trims_ = held_.empty();
    if (trims_) return false;
  }
  const std::string& end = format_.thinking->end;
  const size_t found = held_.find(end);
  if (found == std::string::npos) {
    const size_t begun = Begun(held_, end);
    const absl::string_view thought(held_.data(), held_.size() - begun);
    const size_t told = Told(thought);
    delta.reasoning += held_.substr(0, told);
    Take(told);
    return false;
  }
  const absl::string_view thought(held_.data(), found);
  absl::StrAppend(&delta.reasoning, thought.substr(0, Told(thought)));
  Take(found + end.size());
  trims_ = true;
  space_told_ = false;
  state_ = format_.calls == CallSyntax::kLlama3 ? State::kHead : State::kContent;
  return true;
}

bool AnswerReader::Say(AnswerDelta& delta) {
  if (trims_) {
    Take(SpaceAtBegin(held_));
    trims_ = held_.empty();
    if (trims_) return false;
  }
  const absl::string_view mark = this->mark();
  if (mark.empty()) {
    delta.content += std::exchange(held_, "");
    return false;
  }
  const size_t found = held_.find(std::string(mark));
  const size_t begun = found == std::string::npos ? Begun(held_, mark) : held_.size() - found;
  const absl::string_view said(held_.data(), held_.size() - begun);
  const size_t told = Told(said);
  delta.content += held_.substr(0, told);
  if (found == std::string::npos) {
    Take(told);
    return false;
  }
  markup_ = held_.substr(told, found - told + mark.size());
  Take(found + mark.size());
  space_told_ = false;
  state_ = State::kHead;
  return true;
}

bool AnswerReader::ReadHead(AnswerDelta& delta) {
  if (markup_.empty() && trims_) Take(SpaceAtBegin(held_));  // behind thinking
  Scanner head(held_);
  std::string name;
  if (format_.calls == CallSyntax::kLlama3) {  // as it is told from what is said (call_grammar.h)
    head.Literal(CallMark(CallSyntax::kLlama3));
    name = head.Name();
    head.Literal("\", \"parameters\": ");
  } else {
    head.Space();
    if (format_.calls == CallSyntax::kMistral && num_calls_ == 0) {
      head.Literal("[");
      head.Space();
    }
    head.Literal("{");
    head.Space();
    head.Literal("\"name\"");
    head.Space();
    head.Literal(":");
    head.Space();
    head.Literal("\"");
    name = head.Name();
    head.Literal("\"");
    head.Space();
    head.Literal(",");
    head.Space();
    head.Literal("\"arguments\"");
    head.Space();
    head.Literal(":");
    head.Space();
  }
  const bool begins = head.whole() && !head.at_end();
  if (!head.ok() || (begins && held_[head.at()] != '{')) {
    GiveUp(delta);
    return true;
  }
  if (!begins) return false;
  Take(head.at());
  markup_.clear();
  delta.Append({.calls = {{.index = num_calls_, .id = NewId(), .name = std::move(name)}}});
  ++num_calls_;
  state_ = State::kArguments;
  return true;
}

bool AnswerReader::ReadArguments(AnswerDelta& delta) {
  size_t at = 0;
  bool whole = false;
  for (; at < held_.size() && !whole; ++at) {
    const char c = held_[at];
    if (in_string_) {
      in_string_ = escaped_ || c != '"';
      escaped_ = !escaped_ && c == '\\';
    } else if (c == '"') {
      in_string_ = true;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if (c == '}' || c == ']') {
      whole = --depth_ == 0;
    }
  }
  delta.Append({.calls = {{.index = num_calls_ - 1, .arguments = held_.substr(0, at)}}});
  Take(at);
  if (whole) state_ = State::kTail;
  return whole;
}

// To the end of the call, or to the next one.
bool AnswerReader::ReadTail() {
  Scanner tail(held_);
  tail.Space();
  tail.Literal("}");
  tail.Space();
  bool next = false;
  if (format_.calls == CallSyntax::kHermes) {
    tail.Literal("</tool_call>");
  } else if (format_.calls == CallSyntax::kMistral) {
    if (tail.ok() && (!tail.whole() || tail.at_end())) return false;
    next = tail.ok() && held_[tail.at()] == ',';
    tail.Literal(next ? "," : "]");
  }
  if (tail.ok() && !tail.whole()) return false;
  // What is not as it should be behind a whole call is content.
  if (tail.ok()) Take(tail.at());
  trims_ = true;
  state_ = next ? State::kHead : State::kContent;
  return true;
}

// What is held is told at once, so that it is not tried again.
void AnswerReader::GiveUp(AnswerDelta& delta) {
  // What is held goes on as content: another call may be in it.
  if (!markup_.empty()) trims_ = false;
  delta.content += std::exchange(markup_, "");
  state_ = State::kContent;
}

std::string AnswerReader::NewId() const {
  constexpr absl::string_view kLetters =
      "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  absl::BitGen random;
  std::string id = format_.id_length.has_value() ? "" : "call_";
  for (int i = 0; i < format_.id_length.value_or(24); ++i) {
    id.push_back(kLetters[absl::Uniform<size_t>(random, 0, kLetters.size())]);
  }
  return id;
}

}  // namespace epikv
