#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "epikv/v1/generation.pb.h"
#include "runtime/admission/admission.h"
#include "runtime/constraints/call_grammar.h"
#include "runtime/text/chat/answer_reader.h"
#include "runtime/text/chat/chat_format.h"

namespace epikv {

// The prompt's text. A message out of turn is named, as is what is wrong with a tool; what the
// model has no format for is FAILED_PRECONDITION (CHAT_FORMAT).
std::variant<ChatText, Rejection> ChatTextOf(const v1::ChatPrompt& chat,
                                             const ChatFormats& formats);

// How it becomes tokens: special tokens are the format's, but where the request wants them in
// contents, too.
EncodeOptions ChatEncoding(const v1::ChatPrompt& chat, const ChatText& text);

// How its answers are written, if the request asks for their parts.
AnswerFormat AnswerFormatOf(const v1::ChatPrompt& chat, const ChatText& text,
                            const ChatFormats& formats, const Tokenizer& tokenizer);

// The special tokens of a model that are a part of its answers.
std::vector<int32_t> AnswerMarkup(const ChatFormats& formats, const Tokenizer& tokenizer);

// What the answer may call; absent: the prompt offers no tools.
std::optional<CallRule> CallRuleOf(const v1::ChatPrompt& chat, const ChatFormats& formats);

}  // namespace epikv
