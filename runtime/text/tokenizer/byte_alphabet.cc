#include "runtime/text/tokenizer/byte_alphabet.h"

#include <array>

namespace epikv {
namespace {

// Every character lies in U+0021..U+0143: one or two bytes of UTF-8.
constexpr uint32_t kCodePoints = 0x144;

struct Alphabet {
  std::array<std::string, 256> characters;                // by byte
  std::array<std::optional<uint8_t>, kCodePoints> bytes;  // by code point
};

Alphabet MakeAlphabet() {
  Alphabet alphabet;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
    const uint32_t code_point = printable ? byte : next++;
    std::string& character = alphabet.characters[byte];
    if (code_point < 0x80) {
      character = {static_cast<char>(code_point)};
    } else {
      character = {static_cast<char>(0xC0 | code_point >> 6),
                   static_cast<char>(0x80 | (code_point & 0x3F))};
    }
    alphabet.bytes[code_point] = static_cast<uint8_t>(byte);
  }
  return alphabet;
}

const Alphabet& TheAlphabet() {
  static const Alphabet& alphabet = *new Alphabet(MakeAlphabet());
  return alphabet;
}

}  // namespace

absl::string_view ByteCharacter(uint8_t byte) { return TheAlphabet().characters[byte]; }

std::optional<std::string> BytesOfToken(absl::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    uint32_t code_point = static_cast<uint8_t>(token[0]);
    size_t length = 1;
    if (code_point >= 0x80) {  // two bytes, or outside the alphabet
      if (code_point >= 0xE0 || token.size() < 2) return std::nullopt;
      code_point = (code_point & 0x1F) << 6 | (static_cast<uint8_t>(token[1]) & 0x3F);
      length = 2;
    }
    if (code_point >= kCodePoints || !TheAlphabet().bytes[code_point]) return std::nullopt;
    bytes.push_back(static_cast<char>(*TheAlphabet().bytes[code_point]));
    token.remove_prefix(length);
  }
  return bytes;
}

}  // namespace epikv
