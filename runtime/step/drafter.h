#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "runtime/request/sequence_id.h"

namespace epikv {

// A sequence whose next tokens are to be guessed.
struct DraftItem {
  SequenceId id{};
  absl::Span<const int32_t> tokens;  // prompt and output so far
  int64_t most = 0;                  // guesses
  // SamplingParams::logit_bias, which it follows, too; null: there is none.
  const std::map<int32_t, float>* logit_bias = nullptr;
};

// Guesses at what sequences say next, by a smaller model that caches their tokens, too (speculative
// decoding, Leviathan et al. 2023). What it guesses decides nothing but how fast tokens come.
// Without torch, as StepExecutor, and likewise the engine thread's alone.
class Drafter {
 public:
  virtual ~Drafter() = default;

  // Takes room for a sequence of this prompt that will have so many tokens. False: there is none,
  // or the draft does not know all its tokens.
  virtual bool Open(SequenceId id, absl::Span<const int32_t> prompt, int64_t tokens) = 0;
  virtual void Close(SequenceId id) = 0;

  // The likeliest tokens of each item, one after another. Of what it has not read yet it reads so
  // many tokens at most, shortest first; of an item that has more there are no guesses, and the
  // next call goes on. Tokens of a sequence only grow from call to call. Throws where a forward
  // fails; what was cached before stands.
  virtual std::vector<std::vector<int32_t>> Guess(absl::Span<const DraftItem> items,
                                                  int64_t read_tokens) = 0;

  // What one guess more of all items takes, as measured; zero: nothing was yet.
  virtual absl::Duration guess_time() const = 0;
};

}  // namespace epikv
