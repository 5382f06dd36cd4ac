#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "runtime/attention/attention.h"
#include "runtime/forward/cpu_forward.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/model/model.h"
#include "runtime/model/rope_table.h"
#include "runtime/signals/signals.h"
#include "runtime/step/drafter.h"
#include "runtime/step/step_stats.h"

namespace epikv {

struct StepItem;

struct ModelDrafterOptions {
  int64_t pool_rows = 0;   // of its KV pool
  int64_t vocab_size = 0;  // of the model that it guesses for: tokens beyond are no guesses
  DecodeKernel decode_kernel = DecodeKernel::kBatch;
  PrefillKernel prefill_kernel = PrefillKernel::kBatch;
};

// Drafts with a Model on the CPU, over whole caches in a pool of its own. Guesses are cached behind
// the tokens of their sequence; those that come true stay.
class ModelDrafter final : public Drafter {
 public:
  ModelDrafter(std::unique_ptr<Model> model, ModelDrafterOptions options);
  ~ModelDrafter() override;

  bool Open(SequenceId id, absl::Span<const int32_t> prompt, int64_t tokens) override;
  void Close(SequenceId id) override;
  std::vector<std::vector<int32_t>> Guess(absl::Span<const DraftItem> items,
                                          int64_t read_tokens) override;
  absl::Duration guess_time() const override { return guess_time_; }

  const KvPool& pool() const { return pool_; }

 private:
  struct Drafted;

  // Keeps what has come true of the last guesses, and forgets the others.
  static void Follow(Drafted& drafted, absl::Span<const int32_t> tokens);
  // Whether the tokens are of its own vocabulary, which may be smaller.
  bool Knows(absl::Span<const int32_t> tokens) const;
  // Caches what is new of the items, `room` tokens at most.
  void ReadOn(absl::Span<const DraftItem> items, int64_t room);
  struct Share {
    Drafted* drafted = nullptr;
    absl::Span<const int32_t> tokens;
    const std::map<int32_t, float>* logit_bias = nullptr;
  };
  // Runs tokens of sequences behind what they have cached, without committing them. The likeliest
  // token after each one's last. Measures guess_time where each has one.
  std::vector<int32_t> Run(absl::Span<const Share> shares);
  void NoteGuessTime(absl::Duration took);

  const std::unique_ptr<Model> model_;
  const ModelDrafterOptions options_;
  const ModelShape shape_;
  std::vector<RopeTable> ropes_;
  KvPool pool_;
  LaneRowsOfStep no_rows_;  // of attention: nothing is measured
  StepStats times_;         // nobody reads them
  CpuForward forward_;
  std::unordered_map<SequenceId, std::unique_ptr<Drafted>> open_;
  absl::Duration guess_time_;
};

}  // namespace epikv
