#pragma once

#include <string>
#include <variant>

#include "epikv/v1/generation.pb.h"
#include "runtime/admission/admission.h"
#include "runtime/text/chat_format.h"

namespace epikv {

// The prompt's text, special tokens included. A message out of turn is named; what the model has no
// format for is FAILED_PRECONDITION (CHAT_FORMAT).
std::variant<std::string, Rejection> ChatText(const v1::ChatPrompt& chat,
                                              const ChatFormats& formats);

}  // namespace epikv
