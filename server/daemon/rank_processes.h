#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "runtime/ranks/ranks.h"

namespace epikv {

// The processes of --tensor_parallel. This one is rank 0, and the others are forked from it: they
// share its memory of Ranks and its standard error, no signal but SIGKILL ends them, and they end
// with it. Where there are memory nodes enough, each is bound to its own. Made before this process
// has any other thread.
class RankProcesses {
 public:
  // run: the life of another rank. Its process ends with the status that it returns.
  RankProcesses(int size, absl::FunctionRef<int(std::shared_ptr<Ranks>)> run);

  const std::shared_ptr<Ranks>& ranks() const { return ranks_; }

  // Has a thread of its own wait for the others. One that ends with a status other than 0, or by a
  // signal, has failed: all exchanges throw from then on (Ranks::Fail), and `on_failure` is told
  // why, once. Lives as long as the process.
  void Watch(std::function<void(const std::string& why)> on_failure);

 private:
  std::shared_ptr<Ranks> ranks_;  // rank 0's
  std::vector<pid_t> others_;     // by rank, from 1 on
};

}  // namespace epikv
