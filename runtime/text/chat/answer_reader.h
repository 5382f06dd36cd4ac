#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "runtime/text/chat/chat_format.h"

namespace epikv {

// What a call, or a list of calls, begins with.
absl::string_view CallMark(CallSyntax syntax);

// How a model's answers are written.
struct AnswerFormat {
  std::optional<ThinkingTags> thinking;  // absent: it does not think
  bool thinks = false;                   // the answer begins within thinking
  std::optional<CallSyntax> calls;       // absent: it calls nothing
  std::optional<int> id_length;          // of calls; absent: any
  // Special tokens that are a part of this, as text.
  std::vector<int32_t> markup;
};

// What has come of a call.
struct CallDelta {
  int64_t index = 0;      // among the answer's calls
  std::string id, name;   // with its first part; then empty
  std::string arguments;  // a piece of a JSON object
};

// What has come of an answer.
struct AnswerDelta {
  std::string reasoning, content;
  std::vector<CallDelta> calls;  // by index

  bool empty() const { return reasoning.empty() && content.empty() && calls.empty(); }
  void Append(AnswerDelta next);
};

// Takes an answer apart as it comes: thinking, what is said, calls of functions. White space at the
// edges of thinking, and between what is said and a call, belongs to neither. Markup that does not
// go on as its family writes it is content: nothing is lost. Not thread-safe: owned by the
// request's sequence.
class AnswerReader {
 public:
  explicit AnswerReader(AnswerFormat format);

  // text: whole code points.
  AnswerDelta Append(absl::string_view text);
  // What was held back, when the answer ends.
  AnswerDelta Flush();

  // It may yet think, or does.
  bool may_think() const { return state_ == State::kStart || thinks(); }
  // The answer so far ends within thinking.
  bool thinks() const { return state_ == State::kThinking; }

 private:
  enum class State {
    kStart,  // nothing yet but white space
    kThinking,
    kContent,
    kHead,  // of a call, to its arguments
    kArguments,
    kTail,  // behind them
  };

  // Goes on with what is held; false: more has to come first.
  bool Step(AnswerDelta& delta);
  bool Start();
  bool Think(AnswerDelta& delta);
  bool Say(AnswerDelta& delta);
  bool ReadHead(AnswerDelta& delta);
  bool ReadArguments(AnswerDelta& delta);
  bool ReadTail();
  // The call is none.
  void GiveUp(AnswerDelta& delta);
  void Take(size_t count) { held_.erase(0, count); }
  // How much of the held text up to here is told: less the white space that it ends with, unless
  // that is long.
  size_t Told(absl::string_view text);
  std::string NewId() const;
  absl::string_view mark() const;  // of calls that stand behind what is said; empty: there are none

  const AnswerFormat format_;
  State state_ = State::kStart;
  std::string held_;         // text that is not told yet
  std::string markup_;       // what was taken as a call's, until its arguments begin
  bool space_told_ = false;  // of the white space that the text ends with, some was told
  bool trims_ = true;        // white space that comes next belongs to nothing
  int64_t num_calls_ = 0;
  int64_t depth_ = 0;  // of the arguments' brackets
  bool in_string_ = false, escaped_ = false;
};

}  // namespace epikv
