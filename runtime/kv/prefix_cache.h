#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "absl/types/span.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/kv/prefix_tree.h"
#include "runtime/kv/sequence_cache.h"
#include "runtime/request/request.h"

namespace epikv {

// K and V of what requests began with, as they were when nothing of them had been evicted, in rows
// of the pool that no request has reserved. What was used least recently goes first. Engine thread.
//
// A block holds rows, and the residual after each model block of its last token: what a policy that
// measures steps starts from. Everything else that policies know of a prompt they observe again.
class PrefixCache {
 public:
  using Block = PrefixTree::Block;

  // block_tokens 0: nothing is kept. residuals: floats that go with a block.
  PrefixCache(KvPool& pool, int64_t num_lanes, int64_t block_tokens, int64_t residuals);

  int64_t block_tokens() const { return tree_.block_tokens(); }
  int64_t bytes() const { return bytes_; }

  // From now on blocks hold at most so many bytes.
  void Limit(int64_t bytes);
  void Clear();

  // The blocks of the longest known prefix of the request's prompt that it may start from.
  std::vector<Block> Match(const Request& request);
  bool Contains(Block block) const { return tree_.Contains(block); }
  // Writes a block's rows into the slots that the sequence's next tokens take.
  void Load(Block block, SequenceCache& cache) const;
  absl::Span<const float> residuals(Block block) const { return contents_.at(block).residuals; }

  // What of a sequence is kept: `tokens` from its beginning, up to and with `last`; and what was
  // cached since, of the prompt and of the output: the next turn of a chat begins with both.
  struct Kept {
    Block last = PrefixTree::kNone;
    int64_t tokens = 0;
    std::vector<int32_t> since;  // no more than a block and the step after it
  };
  // Whether the step that caches the tokens up to `end` completes the block after `kept`.
  bool Wants(const Kept& kept, const Request& request, const SequenceCache& cache,
             int64_t end) const;
  // Of the tokens that a step has cached.
  void OnCached(Kept& kept, absl::Span<const int32_t> tokens) const;
  // Keeps that block, now that they are. `kept` stays as it is where there is no room, where the
  // blocks before it have gone, and where this throws.
  void Keep(Kept& kept, const Request& request, const SequenceCache& cache,
            absl::Span<const float> residuals);

 private:
  struct Content {
    PoolRows rows;
    std::vector<float> residuals;
  };
  bool MakeRoom(Block parent);
  void Drop(Block block);

  KvPool& pool_;
  const int64_t num_lanes_;
  const int64_t block_bytes_;
  PrefixTree tree_;
  using Contents = std::unordered_map<Block, Content>;
  Contents contents_;
  int64_t bytes_ = 0, limit_ = 0;
  SequenceId next_rows_{-1};  // blocks hold rows under ids of their own, which no sequence has
};

}  // namespace epikv
