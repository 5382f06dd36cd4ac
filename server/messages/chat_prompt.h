#pragma once

#include <string>
#include <variant>

#include "epikv/v1/generation.pb.h"
#include "runtime/admission/admission.h"
#include "runtime/text/chat_format.h"

namespace epikv {

// The prompt's text. A message out of turn is named; what the model has no format for is
// FAILED_PRECONDITION (CHAT_FORMAT).
std::variant<ChatText, Rejection> ChatTextOf(const v1::ChatPrompt& chat,
                                             const ChatFormats& formats);

// How it becomes tokens: special tokens are the format's, but where the request wants them in
// contents, too.
EncodeOptions ChatEncoding(const v1::ChatPrompt& chat, const ChatText& text);

}  // namespace epikv
