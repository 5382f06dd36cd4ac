#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

// The alphabet of byte-level tokenizers (GPT-2): every byte is written as one printable character,
// so that a token of any bytes is a string. Printable bytes stand for themselves as Latin-1, the
// others are U+0100 onwards in ascending order: a space is "Ġ", a newline "Ċ".

namespace epikv {

// The character that stands for a byte, in UTF-8.
absl::string_view ByteCharacter(uint8_t byte);

// The bytes a token of the alphabet stands for; absent if it has a character from outside.
std::optional<std::string> BytesOfToken(absl::string_view token);

}  // namespace epikv
