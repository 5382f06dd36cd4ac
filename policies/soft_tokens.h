#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "policies/spec.h"

// Soft tokens (KV Packet, arXiv 2604.13226): rows that a model reads in place of its tokens'
// embeddings, before and behind a document that is cached alone. They were trained so that the
// model reads documents that lie side by side as if it had read them one after another. Without
// torch.

namespace epikv {

constexpr absl::string_view kPacketArtefact = "packet";  // its artefact's `policy`

// Of one model: what `epikv calibrate packet` trained.
struct SoftTokens final : public PolicyData {
  int64_t header = 0, trailer = 0;               // how many
  std::vector<float> header_rows, trailer_rows;  // [header, hidden_size], [trailer, hidden_size]
};

// Of the artefact's data, an object, and its arrays "header" and "trailer" [1 to 64, hidden_size].
// INVALID_ARGUMENT: it is not that, or not of this shape.
absl::StatusOr<std::shared_ptr<const PolicyData>> ReadSoftTokens(const ArtefactData& artefact,
                                                                 const ModelShape& shape);

// Null: the model has none.
std::shared_ptr<const SoftTokens> SoftTokensOf(const ModelShape& shape);

}  // namespace epikv
