#include "policies/guard.h"

#include <algorithm>

namespace epikv {

void Guard::Hit(int32_t token) { std::erase(old_, token); }

void Guard::BeginIfOver(absl::Span<const int32_t> cached, absl::Span<const int32_t> may_go) {
  if (!old_.empty()) return;
  old_.assign(may_go.begin(), may_go.end());
  unguarded_.assign(cached.begin(), cached.end());
  gone_.clear();
  errors_ = 0;
}

// A number is drawn even where it cannot matter, as in their code.
bool Guard::Guards(int32_t token, const Draw& draw) {
  if (!gone_.contains(token)) return false;
  if (options_.relax_times > 0) return ++errors_ >= options_.relax_times;
  return draw() > options_.relax_prob;
}

int32_t Guard::Chance(const Draw& draw) const {
  return old_[static_cast<size_t>(draw() * static_cast<double>(old_.size()))];
}

void Guard::Drop(int32_t victim) {
  gone_.insert(victim);
  std::erase(old_, victim);
  std::erase(unguarded_, victim);
}

void Guard::Forget(int32_t begin, int32_t end) {
  const auto gone = [=](int32_t token) { return token >= begin && token < end; };
  std::erase_if(old_, gone);
  std::erase_if(unguarded_, gone);
  std::erase_if(gone_, gone);
}

int32_t Guard::Miss(int32_t token, absl::Span<const int32_t> cached, const Predict& predict,
                    const Draw& draw) {
  BeginIfOver(cached, cached);
  const bool guards = Guards(token, draw);
  // Where everything is guarded, their code has nobody to follow: then, too, it is left to chance.
  const bool by_chance = (guards && !options_.follow_if_guarded) || unguarded_.empty();
  const int32_t victim = by_chance ? Chance(draw) : predict(unguarded_);
  Drop(victim);
  if (!guards) Add(token);
  return victim;
}

}  // namespace epikv
