#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "policies/spec.h"

// Steering (SkipKV, arXiv 2512.07993; SEAL): a vector is added to the residual stream at some
// tokens, so that a model goes on with its work instead of starting over. It changes what the model
// says, whatever is cached. Without torch.

namespace epikv {

constexpr absl::string_view kSteering = "steering";  // its artefact's `policy`

// Of one model: what `epikv calibrate steering` measured.
struct SteeringVector final : public PolicyData {
  int64_t layer = 0;           // at whose input it is added
  std::vector<float> values;   // [hidden_size]
  std::vector<int32_t> at;     // tokens at which it is added, ascending
  std::vector<int32_t> ends;   // tokens that end sentences, ascending
  std::vector<int32_t> marks;  // a sentence with one of these is marked, ascending
  // It is added behind the one and before the other; absent: from the first token on, to the last.
  std::optional<int32_t> begin, end;
};

// Of the artefact's data: {"layer": L, "at": [IDS], "ends": [IDS], "marks": [IDS], "begin": ID,
// "end": ID}, of which the last two may be absent; and its array "vector" [hidden_size].
// INVALID_ARGUMENT: it is not that, or not of this shape.
absl::StatusOr<std::shared_ptr<const PolicyData>> ReadSteering(const ArtefactData& artefact,
                                                               const ModelShape& shape);

// Null: the model has none.
std::shared_ptr<const SteeringVector> SteeringOf(const ModelShape& shape);

// How strongly: coefficient + growth x marked sentences so far.
struct SteeringOptions {
  float coefficient = 1;
  float growth = 0.02f;
};

// Of one request.
struct Steering {
  std::shared_ptr<const SteeringVector> vector;
  SteeringOptions options;
};

// Follows one sequence's tokens, the prompt's among them.
class SteeringState {
 public:
  explicit SteeringState(Steering steering);

  const SteeringVector& vector() const { return *steering_.vector; }
  // What the vector is multiplied by at the next token; 0: it is not added.
  float AmountAt(int32_t token) const;
  // The token is cached.
  void Add(int32_t token);

 private:
  // Marked sentences are counted after every so many tokens, as in SkipKV's code.
  static constexpr int64_t kRefresh = 128;

  bool InsideAfter(int32_t token) const;

  Steering steering_;
  int64_t tokens_ = 0, marked_ = 0, counted_ = 0;
  bool inside_, mark_seen_ = false;
};

}  // namespace epikv
