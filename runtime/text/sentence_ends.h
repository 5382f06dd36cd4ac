#pragma once

#include <cstdint>
#include <vector>

#include "runtime/text/tokenizer.h"

namespace epikv {

// Tokens with which sentences end, ascending: the last token of each of "\n", ".\n", ")\n",
// "\n\n", ".\n\n", ")\n\n" and "?\n\n" (SkipKV's, arXiv 2512.07993 and its code) that has a new
// line in it; of a tokenizer without any, that of "."; empty: it has neither.
std::vector<int32_t> SentenceEnds(const Tokenizer& tokenizer);

}  // namespace epikv
