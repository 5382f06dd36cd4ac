#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "policies/spec.h"

// Artefacts: what a tool (`epikv calibrate`) measured on one model for one policy, in a file that a
// daemon loads at start. Nothing of the kind is ever computed while serving. Without torch.

namespace epikv {

// Adds an artefact to what policies may know of a model. text: JSON,
//   {"format": "epikv.artefact/1", "policy": NAME,
//    "model": {"name": ..., "weights": the digest in the model's manifest},
//    "params": the defaults on this model of all parameters that have no other, may be absent,
//    "data": what the policy's spec reads, may be absent,
//    "arrays": the name of a safetensors file beside it that `data` needs, whose metadata say the
//      same policy and weights; may be absent,
//    ...}  and whatever else its tool notes
// weights: of the model that is served. read: the bytes of a file beside this one. An error names
// what is wrong: the policy is unknown, takes no such thing or has one already, a parameter is out
// of range, the model is another one. NAME may also be "steering" (steering.h) or "packet"
// (soft_tokens.h), which are no policies and have data alone.
using ReadBeside = std::function<absl::StatusOr<std::string>(const std::string& name)>;
absl::Status AddArtefact(absl::string_view text, PolicyCatalog catalog, absl::string_view weights,
                         const ReadBeside& read, ModelShape& shape);

}  // namespace epikv
