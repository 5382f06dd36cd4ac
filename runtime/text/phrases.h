#pragma once

#include <cstdint>
#include <vector>

#include "policies/spec.h"
#include "runtime/text/tokenizer.h"

// What policies know of a model's words.

namespace epikv {

// Tokens with which sentences end, ascending: the last token of each of "\n", ".\n", ")\n",
// "\n\n", ".\n\n", ")\n\n" and "?\n\n" (SkipKV's, arXiv 2512.07993 and its code) that has a new
// line in it; of a tokenizer without any, that of "."; empty: it has neither.
std::vector<int32_t> SentenceEnds(const Tokenizer& tokenizer);

// Fills ModelShape's sentence_ends and repeat, whose phrases are KVzip's (arXiv 2505.23416,
// kvpress). Empty: of a phrase that has words that the tokenizer lacks.
void AddPhrases(const Tokenizer& tokenizer, ModelShape& shape);

}  // namespace epikv
