#pragma once

#include <fstream>
#include <iterator>
#include <string>

#include "runtime/text/tokenizer.h"

namespace epikv {

// Byte-level: a token may be a part of a code point.
inline const Tokenizer& Bytes() {
  static const Tokenizer& tokenizer = *[] {
    std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/tokenizers/gpt2.tokenizer.json");
    const std::string json{std::istreambuf_iterator<char>(file), {}};
    return Tokenizer::FromJson(json).value().release();
  }();
  return tokenizer;
}

}  // namespace epikv
