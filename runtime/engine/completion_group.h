#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/engine/sequence.h"
#include "runtime/request/request.h"
#include "runtime/step/step_executor.h"

namespace epikv {

// The completions of one request. The first caches the prompt; then each has KV of its own.
struct CompletionGroup {
  explicit CompletionGroup(const Request& r) : request(r), live(r.completions()) {}

  const Request request;
  int64_t live;  // completions that have not ended
  bool forked = false;
  std::vector<std::unique_ptr<Sequence>> siblings;  // until then, once they have begun
  // What the prompt took, the same for all completions.
  CacheFacts prompt_kv;
  int64_t prompt_rounds = 0, prompt_evicted = 0;
  Finished total;                            // of those that have ended
  int64_t held_entries = 0, held_bytes = 0;  // their peaks since they have forked

  // A completion has ended. closed: by Engine::Close.
  void Add(const Sequence& s, const Finished& closed);
};

}  // namespace epikv
