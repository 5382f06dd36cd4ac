#include "runtime/kv/prefix_cache.h"

#include <algorithm>
#include <optional>

namespace epikv {
namespace {

// Positions at the tokens' ranks keep keys before rotation: other bytes.
bool SharesRows(const Request& request) {
  return !request.bypass_prefix_cache && request.positions != PositionMode::kCache;
}

// How many tokens of a prompt may be copied. The last one always runs, for its logits. What only a
// forward over the prompt gives is lost; but policies that look at a prompt when it is cached,
// alone, need the newest queries of it and no others. And no round may have been due before.
int64_t MostCopied(const Request& request) {
  const PolicyTraits& traits = request.traits;
  const int64_t most = std::ssize(request.prompt) - 1;
  if (request.output.prompt_logprobs) return 0;
  if (traits.evicts && traits.prompt == PromptEviction::kAtEnd && !traits.recalls) {
    PolicyTraits others = traits;
    others.signals = others.signals.Without(Signal::kQueries);
    if (!MeasuresPrompt(others))
      return std::max<int64_t>(0, most + 1 - std::max<int64_t>(traits.window, 1));
  }
  if (MeasuresPrompt(traits)) return 0;
  const std::vector<int64_t>& budget = request.demand.budget;
  return std::min(most, *std::min_element(budget.begin(), budget.end()));
}

}  // namespace

PrefixCache::PrefixCache(KvPool& pool, int64_t num_lanes, int64_t block_tokens, int64_t residuals)
    : pool_(pool),
      num_lanes_(num_lanes),
      block_bytes_(num_lanes * block_tokens * (pool.key_bytes() + pool.value_bytes()) +
                   residuals * static_cast<int64_t>(sizeof(float)) +
                   block_tokens * static_cast<int64_t>(sizeof(int32_t))),
      tree_(block_tokens) {}

void PrefixCache::Limit(int64_t bytes) {
  limit_ = bytes;
  while (bytes_ > limit_) Drop(*tree_.Oldest());
}

void PrefixCache::Clear() {
  while (const std::optional<Block> oldest = tree_.Oldest()) Drop(*oldest);
}

void PrefixCache::Drop(Block block) {
  tree_.Remove(block);
  contents_.erase(block);
  bytes_ -= block_bytes_;
}

std::vector<PrefixCache::Block> PrefixCache::Match(const Request& request) {
  if (block_tokens() == 0 || !SharesRows(request)) return {};
  const int64_t most = MostCopied(request);
  if (most <= 0) return {};
  return tree_.Match(request.prefix_salt, absl::MakeConstSpan(request.prompt).first(most));
}

void PrefixCache::Load(Block block, SequenceCache& cache) const {
  const int64_t count = block_tokens();
  const int64_t first = contents_.at(block).rows.first_row();
  std::vector<RowMove> copies;
  for (int64_t lane = 0; lane < num_lanes_; ++lane) {
    const int64_t layer = lane / cache.num_kv_heads(), head = lane % cache.num_kv_heads();
    const int64_t slot = cache.table(cache.TableOf(layer, head)).NextSlot();
    copies.push_back({.from = first + lane * count,
                      .to = cache.Lane(layer, head).first_row + slot,
                      .count = count});
  }
  pool_.Copy(copies);
}

bool PrefixCache::Wants(const Kept& kept, const Request& request, const SequenceCache& cache,
                        int64_t end) const {
  return block_tokens() > 0 && limit_ >= block_bytes_ && end == kept.tokens + block_tokens() &&
         SharesRows(request) && cache.Untouched();
}

void PrefixCache::OnCached(Kept& kept, absl::Span<const int32_t> tokens) const {
  if (static_cast<int64_t>(kept.since.size()) > block_tokens()) return;  // none is kept any more
  kept.since.insert(kept.since.end(), tokens.begin(), tokens.end());
}

void PrefixCache::Keep(Kept& kept, const Request& request, const SequenceCache& cache,
                       absl::Span<const float> residuals) {
  const int64_t count = block_tokens(), first = kept.tokens;
  const absl::Span<const int32_t> tokens = kept.since;
  if (kept.last != PrefixTree::kNone && !tree_.Contains(kept.last)) return;
  if (std::ssize(tokens) != count) return;  // not all of its tokens were told of
  std::optional<Block> block = tree_.Find(kept.last, request.prefix_salt, tokens);
  if (!block.has_value()) {
    if (!MakeRoom(kept.last)) return;
    Content content = {.rows = PoolRows(pool_, next_rows_, num_lanes_ * count),
                       .residuals = {residuals.begin(), residuals.end()}};
    next_rows_ = SequenceId{static_cast<int64_t>(next_rows_) - 1};
    std::vector<RowMove> copies;
    for (int64_t lane = 0; lane < num_lanes_; ++lane) {
      const LaneRows from = cache.Lane(lane / cache.num_kv_heads(), lane % cache.num_kv_heads());
      copies.push_back({.from = from.first_row + first,
                        .to = content.rows.first_row() + lane * count,
                        .count = count});
    }
    pool_.Copy(copies);
    // What it takes is there before the tree knows of it: from then on nothing throws.
    Contents one;
    one.emplace(0, std::move(content));
    Contents::node_type node = one.extract(one.begin());
    contents_.reserve(contents_.size() + 1);
    block = tree_.Add(kept.last, request.prefix_salt, tokens);
    node.key() = *block;
    contents_.insert(std::move(node));
    bytes_ += block_bytes_;
  }
  kept = {.last = *block, .tokens = first + count};
}

// For one block more, behind `parent`.
bool PrefixCache::MakeRoom(Block parent) {
  while (bytes_ + block_bytes_ > limit_) {
    const std::optional<Block> oldest = tree_.Oldest();
    if (!oldest.has_value() || *oldest == parent) return false;
    Drop(*oldest);
  }
  return true;
}

}  // namespace epikv
