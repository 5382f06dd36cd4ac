#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "server/experiments/definition/windows.h"
#include "server/experiments/store/store.h"

namespace epikv {

// What one window of a switchback experiment has put out.
struct WindowOutput {
  int64_t window = 0;
  bool exposed = false;          // eviction could act in one of its requests
  double tokens_per_second = 0;  // of the time after its wash-out
};

// The output of windows, from requests that are analysed, by `began`. A request's tokens are of the
// window in which it began, wherever it ended.
//
// A window counts when the one after it is over, too: by then what began in it has ended. Windows
// count from the one after that of the first request, which may have seen the start, and those in
// which no request began count as 0: to leave them out would leave out those in which an arm took
// the server down.
class Throughput {
 public:
  // start, over: of the experiment. What a clock that was wrong has put before it makes no windows.
  Throughput(const Windows& windows, absl::Time start, absl::Time over, absl::Time now);

  void Add(const RequestRow& row);
  // The windows that count and that had ended by then, in order, each once. Precondition: all
  // requests that began until then were added.
  std::vector<WindowOutput> Take(absl::Time until);

 private:
  struct Sum {
    int64_t tokens = 0;
    bool exposed = false;
  };
  const Windows windows_;
  const int64_t first_;  // that may count
  const absl::Time last_end_;
  std::map<int64_t, Sum> sums_;  // of windows that were not taken
  std::optional<int64_t> next_;  // to be taken
};

}  // namespace epikv
