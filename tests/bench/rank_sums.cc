// What exchanging takes: sums and gathers of ranks, each a process, in microseconds of one.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/time/time.h"
#include "runtime/base/steady_time.h"
#include "runtime/ranks/ranks.h"

namespace epikv {
namespace {

constexpr int kTimes = 2000, kBatches = 9;

// The median over batches.
template <class Exchange>
double Microseconds(const Exchange& exchange) {
  std::vector<double> batches;
  for (int batch = 0; batch < kBatches; ++batch) {
    const absl::Time begin = SteadyNow();
    for (int i = 0; i < kTimes / kBatches; ++i) exchange();
    batches.push_back(absl::ToDoubleMicroseconds(SteadyNow() - begin) / (kTimes / kBatches));
  }
  std::nth_element(batches.begin(), batches.begin() + kBatches / 2, batches.end());
  return batches[kBatches / 2];
}

void Measure(Ranks& ranks, bool tells) {
  for (const int64_t rows : {1, 16, 512}) {
    std::vector<float> x(rows * 896, 1);
    const double sum = Microseconds([&] { ranks.Sum(x.data(), std::ssize(x), DType::kFloat32); });
    const double narrow =
        Microseconds([&] { ranks.Sum(x.data(), std::ssize(x), DType::kBFloat16); });
    if (tells) {
      std::printf("sum of %ld x 896: float32 %.2f, bfloat16 %.2f\n", static_cast<long>(rows), sum,
                  narrow);
    }
  }
  for (const int64_t rows : {1, 16}) {
    const int64_t part = 32000 / ranks.size();
    std::vector<float> x(rows * part), all(x.size() * ranks.size());
    const double gather = Microseconds(
        [&] { ranks.Gather(x.data(), std::ssize(x) * int64_t{sizeof(float)}, all.data()); });
    if (tells) {
      std::printf("gather of %ld x 32000 logits: %.2f\n", static_cast<long>(rows), gather);
    }
  }
}

}  // namespace
}  // namespace epikv

// rank_sums [RANKS]
int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const auto memory = epikv::Ranks::Share(size);
  for (int rank = 1; rank < size; ++rank) {
    if (fork() != 0) continue;
    epikv::Ranks own(memory, rank);
    epikv::Measure(own, /*tells=*/false);
    std::_Exit(0);
  }
  epikv::Ranks own(memory, 0);
  epikv::Measure(own, /*tells=*/true);
  while (wait(nullptr) > 0) {
  }
}
