#include "runtime/text/tokenizer/merges.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>

namespace epikv {
namespace {

constexpr size_t kNone = ~size_t{0};
constexpr size_t kFew = 48;      // tokens; their merges take time quadratic in them
constexpr size_t kMostEnds = 4;  // ends of a token that are told apart
constexpr int kMostRounds = 16;  // of looking for more ends

// A token of a text being merged, in a doubly linked list.
struct Symbol {
  int32_t token;
  size_t previous, next;  // kNone at the ends
  bool merged_away = false;
};

// A merge that was possible when it was queued.
struct Candidate {
  int32_t rank;
  size_t position;  // of the left symbol
  int32_t result;
  bool operator>(const Candidate& other) const {
    return rank != other.rank ? rank > other.rank : position > other.position;
  }
};

// The tokens that text may begin, or end, with which has become one token.
using Ends = std::vector<int32_t>;

// Whether `ends` has grown.
bool Add(Ends& ends, const Ends& more) {
  bool grown = false;
  for (int32_t token : more) {
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) continue;
    ends.push_back(token);
    grown = true;
  }
  return grown;
}

}  // namespace

Merges::Merges(Table table, absl::Span<const int32_t> initial) : table_(std::move(table)) {
  FindJoints(initial);
}

void Merges::FindJoints(absl::Span<const int32_t> initial) {
  int32_t largest = -1;
  for (const auto& [pair, merge] : table_) {
    largest = std::max({largest, pair.first, pair.second, merge.result});
  }
  std::vector<Ends> first(static_cast<size_t>(largest) + 1), last(first.size());
  for (int32_t token : initial) {
    if (token >= 0 && token <= largest) first[token] = last[token] = {token};
  }
  std::vector<std::pair<Pair, Merge>> by_rank(table_.begin(), table_.end());
  std::sort(by_rank.begin(), by_rank.end(),
            [](const auto& a, const auto& b) { return a.second.rank < b.second.rank; });
  // A merge of what comes later is rare: few rounds find all ends.
  bool grown = true;
  for (int round = 0; grown; ++round) {
    if (round == kMostRounds) return;
    grown = false;
    for (const auto& [pair, merge] : by_rank) {
      grown |= Add(first[merge.result], first[pair.first]);
      grown |= Add(last[merge.result], last[pair.second]);
      if (std::max(first[merge.result].size(), last[merge.result].size()) > kMostEnds) return;
    }
  }
  for (const auto& [pair, merge] : table_) {
    for (int32_t left : last[pair.first]) {
      for (int32_t right : first[pair.second]) joints_.emplace(left, right);
    }
  }
  cuts_ = true;
}

void Merges::Apply(absl::Span<const int32_t> tokens, std::vector<int32_t>& ids) const {
  while (tokens.size() > kFew) {
    size_t size = 1;
    while (size < tokens.size() && MayJoin(tokens[size - 1], tokens[size])) ++size;
    const absl::Span<const int32_t> run = tokens.subspan(0, size);
    run.size() > kFew ? ApplyToMany(run, ids) : ApplyToFew(run, ids);
    tokens.remove_prefix(size);
  }
  if (!tokens.empty()) ApplyToFew(tokens, ids);
}

const Merges::Merge* Merges::Find(int32_t left, int32_t right) const {
  const auto merge = table_.find(Pair(left, right));
  return merge == table_.end() ? nullptr : &merge->second;
}

void Merges::ApplyToFew(absl::Span<const int32_t> tokens, std::vector<int32_t>& ids) const {
  std::array<int32_t, kFew> left;
  std::array<const Merge*, kFew> merges;  // of each with the one after it
  size_t size = tokens.size();
  std::copy(tokens.begin(), tokens.end(), left.begin());
  for (size_t i = 0; i + 1 < size; ++i) merges[i] = Find(left[i], left[i + 1]);
  while (true) {
    size_t best = kNone;
    for (size_t i = 0; i + 1 < size; ++i) {
      if (merges[i] == nullptr) continue;
      if (best == kNone || merges[i]->rank < merges[best]->rank) best = i;
    }
    if (best == kNone) break;
    left[best] = merges[best]->result;
    std::copy(left.begin() + best + 2, left.begin() + size, left.begin() + best + 1);
    std::copy(merges.begin() + best + 1, merges.begin() + size - 1, merges.begin() + best);
    --size;
    if (best + 1 < size) merges[best] = Find(left[best], left[best + 1]);
    if (best > 0) merges[best - 1] = Find(left[best - 1], left[best]);
  }
  ids.insert(ids.end(), left.begin(), left.begin() + size);
}

void Merges::ApplyToMany(absl::Span<const int32_t> tokens, std::vector<int32_t>& ids) const {
  std::vector<Symbol> symbols(tokens.size());
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < symbols.size(); ++i) {
    symbols[i] = {tokens[i], i == 0 ? kNone : i - 1, i + 1 == symbols.size() ? kNone : i + 1};
    if (i + 1 == symbols.size()) break;
    const Merge* merge = Find(tokens[i], tokens[i + 1]);
    if (merge != nullptr) candidates.push_back({merge->rank, i, merge->result});
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<Candidate>> queue(
      std::greater<Candidate>(), std::move(candidates));
  const auto consider = [&](size_t left) {
    if (left == kNone || symbols[left].next == kNone) return;
    const Merge* merge = Find(symbols[left].token, symbols[symbols[left].next].token);
    if (merge != nullptr) queue.push({merge->rank, left, merge->result});
  };

  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.position];
    if (left.merged_away || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    // A candidate is stale unless its neighbours still give what was queued.
    const Merge* merge = Find(left.token, right.token);
    if (merge == nullptr || merge->result != top.result) continue;
    left.token = top.result;
    left.next = right.next;
    right.merged_away = true;
    if (left.next != kNone) symbols[left.next].previous = top.position;
    consider(left.previous);
    consider(top.position);
  }
  for (const Symbol& symbol : symbols) {
    if (!symbol.merged_away) ids.push_back(symbol.token);
  }
}

}  // namespace epikv
