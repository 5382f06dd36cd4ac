#pragma once

namespace epikv {

class Ranks;

// While it lives, the operators of model_shard.h, called on this thread, exchange with these ranks.
// Null: they throw. Scopes may nest.
class RanksScope {
 public:
  explicit RanksScope(Ranks* ranks);
  ~RanksScope();
  RanksScope(const RanksScope&) = delete;
  RanksScope& operator=(const RanksScope&) = delete;

 private:
  Ranks* const outer_;
};

}  // namespace epikv
