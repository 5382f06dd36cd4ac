// The process that recorder_test.cc kills: recorder_crash STORE SPOOL FIRST. Records requests and
// outcomes, numbered from FIRST on, without end, and prints "w17" once outcome 17 is acknowledged
// by the store, "s17" by the spool, "e17" if it is refused.
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/experiments/store/recorder.h"
#include "server/experiments/store/sql_store.h"
#include "tests/fixtures/experiment_records.h"

namespace epikv {
namespace {

// At most so many unanswered.
class Turnstile {
 public:
  void Enter() {
    absl::MutexLock lock(&mu_);
    auto room = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return inside_ < 64; };
    mu_.Await(absl::Condition(&room));
    ++inside_;
  }
  void Leave() {
    absl::MutexLock lock(&mu_);
    --inside_;
  }

 private:
  absl::Mutex mu_;
  int inside_ ABSL_GUARDED_BY(mu_) = 0;
};

void Print(int64_t number, const absl::StatusOr<Recorded>& recorded) {
  const Recorded what = recorded.value_or(Recorded::kInvalid);
  const bool written = what == Recorded::kWritten || what == Recorded::kDuplicate;
  const char* word = written ? "w" : what == Recorded::kSpooled ? "s" : "e";
  const std::string line = absl::StrCat(word, number, "\n");
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(1);
}

int Run(const std::string& where, const std::string& folder, int64_t number) {
  const absl::StatusOr<std::unique_ptr<Store>> store =
      OpenStore(where, {.connect = absl::Milliseconds(300),
                        .statement = absl::Milliseconds(200),
                        .transaction = absl::Milliseconds(500)});
  absl::StatusOr<std::unique_ptr<Spool>> spool = Spool::Open(folder, {.segment_bytes = 4096});
  if (!store.ok() || !spool.ok()) {
    fprintf(stderr, "%s %s\n", store.status().ToString().c_str(),
            spool.status().ToString().c_str());
    return 1;
  }
  RecorderObserver nobody;
  Turnstile turnstile;
  Recorder recorder(**store, *std::move(spool), nobody,
                    {.max_batch = 50, .last_backoff = absl::Milliseconds(20)});
  for (;; ++number) {
    // Fewer than a store can take: else what an outage of a moment has left would never end.
    absl::SleepFor(absl::Milliseconds(1));
    turnstile.Enter();
    const std::string id = absl::StrCat("id", number), client = absl::StrCat("c", number);
    const double at = static_cast<double>(number) * 1e-3;
    recorder.Record(Record(Begun{.id = id, .client = client, .at = at}));
    recorder.Record(Ended(id, at));
    recorder.Record(Record(Seen{.client = client, .at = at, .value = static_cast<double>(number)}),
                    [&turnstile, number](const absl::StatusOr<Recorded>& recorded) {
                      Print(number, recorded);
                      turnstile.Leave();
                    });
  }
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  int64_t first = 0;
  if (argc != 4 || !absl::SimpleAtoi(argv[3], &first)) return 2;
  return epikv::Run(argv[1], argv[2], first);
}
