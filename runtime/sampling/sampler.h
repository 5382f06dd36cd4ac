#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

// Picks a token from one row of logits. Pure functions, any thread.
//
// Of every function: `logits` is [vocab], not empty. -inf is a token that cannot be; a NaN, a +inf
// or nothing but -inf is a broken forward and gives INTERNAL, naming the token.

namespace epikv {

class Constraint;

// How a request's tokens are drawn. Admission has checked the ranges given here.
struct SamplingParams {
  std::optional<float> temperature;                          // finite, >= 0; absent or 0: greedy
  std::optional<float> top_p;                                // in (0, 1]; absent: 1
  std::optional<int32_t> top_k;                              // >= 0; absent or 0: all
  std::optional<float> min_p;                                // in [0, 1]; absent: 0
  std::optional<float> typical_p;                            // in (0, 1]; absent: 1
  std::optional<float> repetition_penalty;                   // in [0.01, 100]; absent: 1
  std::optional<float> frequency_penalty, presence_penalty;  // in [-2, 2]; absent: 0
  std::map<int32_t, float> logit_bias;                       // by token, in [-100, 100]
  uint64_t seed = 0;
  // What the text has to be; null: anything. Draw.allowed says what follows from it.
  std::shared_ptr<const Constraint> constraint;

  bool greedy() const { return temperature.value_or(0) == 0; }
};

// Gives what `params` leaves out the value that `defaults` has; not the seed, nor the biases.
void FillIn(const SamplingParams& defaults, SamplingParams& params);

// Of a request's i-th completion: as a request of seed + i.
SamplingParams SamplingOf(const SamplingParams& params, int64_t completion);

// What a draw depends on beside logits and parameters. Tokens are of the vocabulary.
struct Draw {
  uint64_t index = 0;                 // of the request's draws, from 0
  absl::Span<const int32_t> prompt;   // for the repetition penalty
  absl::Span<const int32_t> outputs;  // before this draw; for all penalties
  absl::Span<const int32_t> masked;   // may not be drawn, unless nothing else is possible
  // Of tokens that may be drawn, a bit each, from the lowest bit; empty: all. [ceil(vocab / 32)]
  absl::Span<const uint32_t> allowed;
};

// The token with the highest logit, of several the lowest.
absl::StatusOr<int32_t> Argmax(absl::Span<const float> logits);

// What Argmax says of logits whose highest, or first NaN, a device has found.
absl::StatusOr<int32_t> CheckedArgmax(float highest, int32_t token);

// What Sample needs of a row of logits that lies on a device, which finds it there. From what is
// least to bring to what is most.
enum class RowNeed {
  kHighest,  // the Argmax is the token
  kDrawn,    // a token at the draw's share of the softmax of logits / temperature
  kHead,     // the likeliest tokens, for DrawFromHead
  kRow,      // all of it
};
RowNeed RowNeedOf(const SamplingParams& params, const Draw& draw);

// The number in [0, 1) that decides a draw.
double ShareOf(const SamplingParams& params, uint64_t draw);

struct Candidate {
  int32_t token = 0;
  float weight = 0;  // probability, not normalised
};

// The likeliest tokens of a row whose logits are finite or -inf.
struct LogitsHead {
  std::vector<Candidate> likeliest;  // and their logits, descending; not empty
  bool whole = false;                // the row has no others
  double total = 0;                  // of exp((logit - highest) / temperature), of the whole row
};

// What Sample gives of such a row. nullopt: it depends on more than the head.
// Precondition: RowNeedOf(params, draw) is kHead.
std::optional<int32_t> DrawFromHead(LogitsHead head, const SamplingParams& params, uint64_t draw);

// What Sample draws from; never empty. The stages, in the order of Hugging Face's generate (and of
// vLLM, but that it puts min_p before top_k):
//   1. logit_bias is added; tokens that are `masked`, or not `allowed`, become impossible. None is
//      left: FAILED_PRECONDITION (kConstraintFailed) where some are not `allowed`.
//   2. Penalties. Of tokens in prompt or outputs, positive logits are divided by the repetition
//      penalty and others multiplied; then frequency_penalty is subtracted for each time that a
//      token is in the outputs, and presence_penalty once. Bias comes first, so that a penalty acts
//      on what the caller wants, as in both.
//   3. Greedy: the Argmax alone. Else the softmax of logits / temperature, over
//   4. the top_k likeliest tokens; of those
//   5. the smallest set of the likeliest with a share of at least top_p; of those
//   6. the ones at least min_p times as likely as the likeliest; of those
//   7. the smallest set with a share of at least typical_p whose surprise, -log p, is nearest to
//      its mean, the entropy.
// Of tokens that tie at a cut the lower stays.
absl::StatusOr<std::vector<Candidate>> Candidates(absl::Span<const float> logits,
                                                  const SamplingParams& params, const Draw& draw);

// One token of the Candidates. Depends on the arguments alone: the same seed gives the same text in
// any batch. A greedy token without bias, mask and penalties costs one pass over the logits.
absl::StatusOr<int32_t> Sample(absl::Span<const float> logits, const SamplingParams& params,
                               const Draw& draw);

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
  bool operator==(const TokenLogprob&) const = default;
};

struct Logprobs {
  float of_token = 0;
  std::vector<TokenLogprob> top;  // likeliest first, of tokens that tie the lower
};

// Natural logarithms of the softmax over the raw logits, before all of the above: of `token`, and
// of the `num_top` likeliest tokens (of all, if there are fewer).
// Precondition: 0 <= token < vocab.
absl::StatusOr<Logprobs> LogprobsOf(absl::Span<const float> logits, int32_t token,
                                    int64_t num_top = 0);

}  // namespace epikv
