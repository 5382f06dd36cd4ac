#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "runtime/model/model.h"

namespace epikv {

// What a text is about, without a second model: the mean of its tokens' input embeddings, of length
// 1. [hidden_size] (EpiCache, arXiv 2509.17396, `embedding_type = llm`). Requires: some tokens, of
// the vocabulary. Any thread. Throws what the model throws.
std::vector<float> EmbeddingOf(const Model& model, absl::Span<const int32_t> tokens);

}  // namespace epikv
