#include "runtime/executor/evicted_prefixes.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace epikv {
namespace {

// Of prompts that are remembered without their rows.
constexpr size_t kMostSeen = 256;
constexpr int64_t kMostSeenTokens = 1 << 20;

// The pool's name for rows that no sequence has, no draft and no cached prefix.
SequenceId RowsOf(int64_t kept) {
  return SequenceId{std::numeric_limits<int64_t>::min() / 2 - kept};
}

std::string TextOf(const ParamValue& value) {
  return std::visit(
      [](const auto& v) {
        using T = std::decay_t<decltype(v)>;
        if constexpr (std::is_same_v<T, std::vector<int64_t>> ||
                      std::is_same_v<T, std::vector<std::string>>) {
          return absl::StrJoin(v, ",");
        } else if constexpr (std::is_same_v<T, double>) {
          return absl::StrCat(absl::Hex(std::bit_cast<uint64_t>(v)));
        } else {
          return absl::StrCat(v);
        }
      },
      value);
}

// All of a request that what its policy has left depends on, but for its prompt, and for what a
// policy may or may not ask for. Empty: it neither takes nor leaves anything.
std::string IdentityOf(const Request& request) {
  const PolicyTraits& traits = request.traits;
  if (!traits.evicts || traits.prompt != PromptEviction::kByChunk || traits.rounds_rows ||
      MeasuresPrompt(traits) || request.demand.passes || request.bypass_prefix_cache ||
      request.tier.tokens > 0 || request.steering.has_value() || request.output.prompt_logprobs ||
      request.output.kv_trace) {
    return "";
  }
  const Protection& kept = request.protection;
  // Lengths go before what anybody can choose.
  std::string identity = absl::StrCat(
      request.prefix_salt.size(), ":", request.prefix_salt, ";", request.spec->name, ";",
      request.budget, ";", absl::StrJoin(request.demand.budget, ","), ";",
      static_cast<int>(request.positions), ";", request.read.tokens, ";",
      absl::StrJoin(request.tap_layers, ","), ";", kept.prompt, ",", kept.sinks, ",", kept.recent);
  for (const TokenSpan& span : kept.spans)
    absl::StrAppend(&identity, ",", span.begin, "-", span.end);
  for (const auto& [name, value] : request.params.values()) {
    const std::string text = TextOf(value);
    absl::StrAppend(&identity, ";", name, "=", text.size(), ":", text);
  }
  return identity;
}

Request CutDown(const Request& request) {
  return {.sampling = {.seed = request.sampling.seed},
          .spec = request.spec,
          .traits = request.traits,
          .budget = request.budget,
          .protection = request.protection,
          .positions = request.positions,
          .read = request.read,
          .tap_layers = request.tap_layers,
          .demand = {.budget = request.demand.budget}};
}

int64_t SharedTokens(absl::Span<const int32_t> a, absl::Span<const int32_t> b) {
  const size_t both = std::min(a.size(), b.size());
  return std::mismatch(a.begin(), a.begin() + both, b.begin()).first - a.begin();
}

}  // namespace

EvictedPrefixes::Entry::Entry(SequenceId id, const OpenSequence& from, std::string named,
                              int64_t count)
    : request(CutDown(from.request)),
      sequence(id, request, from, from.cache.UsedRows(), from.cache.shape()),
      identity(std::move(named)),
      tokens(from.request.prompt.begin(), from.request.prompt.begin() + count),
      prompt_tokens(std::ssize(from.request.prompt)) {
  if (from.state != nullptr) sequence.state = from.state->Clone();
  constexpr int64_t kBeside = 4096;  // of all that is not counted
  bytes =
      sequence.cache.bytes() + std::ssize(tokens) * static_cast<int64_t>(sizeof(int32_t)) + kBeside;
}

void EvictedPrefixes::Drop(Entries::iterator entry) {
  bytes_ -= entry->bytes;
  entries_.erase(entry);
}

void EvictedPrefixes::Limit(int64_t bytes) {
  limit_ = bytes;
  while (bytes_ > limit_) Drop(std::prev(entries_.end()));
}

void EvictedPrefixes::Clear() {
  while (!entries_.empty()) Drop(entries_.begin());
  seen_.clear();
  seen_tokens_ = 0;
}

EvictedPrefixes::Found EvictedPrefixes::Match(const Request& request) {
  const std::string identity = IdentityOf(request);
  if (identity.empty()) return {};
  const auto prompt = absl::MakeConstSpan(request.prompt);
  auto best = entries_.end();
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    const OpenSequence::Asked& asked = entry->sequence.asked;
    const int64_t count = std::ssize(entry->tokens);
    // The last prompt token always runs, for its logits.
    if (entry->identity != identity || count >= std::ssize(prompt) ||
        (best != entries_.end() && count <= std::ssize(best->tokens)) ||
        (asked.seed && entry->request.sampling.seed != request.sampling.seed) ||
        (asked.prompt_tokens && entry->prompt_tokens != std::ssize(prompt)) ||
        prompt.first(count) != absl::MakeConstSpan(entry->tokens)) {
      continue;
    }
    best = entry;
  }
  if (best == entries_.end()) return {};
  entries_.splice(entries_.begin(), entries_, best);
  return {.sequence = &best->sequence, .tokens = std::ssize(best->tokens)};
}

std::vector<int64_t> EvictedPrefixes::PlacesOf(const Request& request) {
  const std::string identity = IdentityOf(request);
  const auto prompt = absl::MakeConstSpan(request.prompt);
  const int64_t least =
      *std::min_element(request.demand.budget.begin(), request.demand.budget.end());
  if (identity.empty() || std::ssize(prompt) <= least) return {};
  int64_t shared = 0;
  auto same = seen_.end();
  for (auto seen = seen_.begin(); seen != seen_.end(); ++seen) {
    if (seen->identity != identity) continue;
    const int64_t count = SharedTokens(seen->prompt, prompt);
    shared = std::max(shared, std::min(count, std::ssize(prompt) - 1));
    if (count == std::ssize(prompt) && count == std::ssize(seen->prompt)) same = seen;
  }
  if (same != seen_.end()) {
    seen_.splice(seen_.begin(), seen_, same);
  } else {
    seen_.push_front({identity, request.prompt});
    seen_tokens_ += std::ssize(prompt);
    while (seen_.size() > kMostSeen || (seen_tokens_ > kMostSeenTokens && seen_.size() > 1)) {
      seen_tokens_ -= std::ssize(seen_.back().prompt);
      seen_.pop_back();
    }
  }
  std::vector<int64_t> places;
  for (const int64_t tokens : {shared, std::ssize(prompt) - 1}) {
    const int64_t place = tokens / chunk_ * chunk_;
    if (place > least && (places.empty() || places.back() < place)) places.push_back(place);
  }
  return places;
}

void EvictedPrefixes::Keep(const OpenSequence& sequence, int64_t tokens) {
  std::string identity = IdentityOf(sequence.request);
  const auto begins = absl::MakeConstSpan(sequence.request.prompt).first(tokens);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (entry->identity != identity || absl::MakeConstSpan(entry->tokens) != begins) continue;
    // As good as this one, or of no use to it: of another seed or length.
    Drop(entry);
    break;
  }
  // About what it takes, before it is made: rows go where prefixes may have to make room.
  const int64_t bytes = sequence.cache.bytes();
  while (!entries_.empty() && bytes_ + bytes > limit_) Drop(std::prev(entries_.end()));
  const std::vector<int64_t> rows = sequence.cache.UsedRows();
  if (bytes > limit_ || std::reduce(rows.begin(), rows.end()) > pool_.free_rows()) return;
  Entries made;
  made.emplace_back(RowsOf(kept_++), sequence, std::move(identity), tokens);
  bytes_ += made.front().bytes;
  entries_.splice(entries_.begin(), made);
  Limit(limit_);
}

}  // namespace epikv
