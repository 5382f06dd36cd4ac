#include "runtime/ranks/ranks.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/elements.h"
#include "runtime/base/machine.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

// How long a rank spins before it sleeps: in a forward, whose ranks come within a layer's jitter of
// one another, and while it waits for work.
constexpr absl::Duration kForwardSpin = absl::Milliseconds(1), kIdleSpin = absl::Microseconds(50);
// So many waits of a forward spin briefly after one that spun in vain: the other rank has no core.
constexpr int kBriefAfterVain = 64;
constexpr int kChecksOfClock = 64;  // looks between two looks at the clock
// After so long asleep a rank looks whether another has failed without a word.
constexpr timespec kNap = {.tv_sec = 0, .tv_nsec = 100'000'000};
// Sums of more elements are shared out among the ranks.
constexpr int64_t kSharedSum = 16384;

constexpr size_t kReason = 1024;
constexpr size_t kCacheLine = 64;

// Elements that are summed at a time.
constexpr int64_t kBlock = 256;

// Elements [from, from + count) of all parts. all: room for them in fp32.
template <class T>
EPIKV_INLINE void SumBlock(const T* const* parts, int size, int64_t from, int64_t count, float* all,
                           T* out) {
  for (int64_t i = 0; i < count; ++i) all[i] = Load(parts[0] + from + i);
  for (int r = 1; r < size; ++r) {
    for (int64_t i = 0; i < count; ++i) all[i] += Load(parts[r] + from + i);
  }
  for (int64_t i = 0; i < count; ++i) Store(out + i, all[i]);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Between processes, unlike std::atomic's.
void Sleep(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &kNap, nullptr, 0);
}
void Wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

struct RankMemory {
  struct alignas(kCacheLine) Place {
    std::atomic<uint32_t> met = 0;  // how often this rank has met the others
    std::atomic<uint32_t> sleepers = 0;
    // What it meets them for: the last exchange and the one before, which others may still look at.
    std::atomic<uint64_t> exchanges[2] = {};
  };
  struct Header {
    Place places[kMostRanks];
    std::atomic<uint32_t> failing = 0, failed = 0;  // the reason is being written; is there
    char reason[kReason] = {};
  };

  RankMemory(int size, int64_t slot_bytes)
      : size(size),
        slot_bytes((slot_bytes + static_cast<int64_t>(kCacheLine) - 1) &
                   -static_cast<int64_t>(kCacheLine)),
        bytes(sizeof(Header) + 2 * static_cast<size_t>(size) * this->slot_bytes) {
    void* const mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    header = new (mapped) Header();
  }
  ~RankMemory() { munmap(header, bytes); }
  RankMemory(const RankMemory&) = delete;
  RankMemory& operator=(const RankMemory&) = delete;

  char* slots() const { return reinterpret_cast<char*>(header) + sizeof(Header); }

  const int size;
  const int64_t slot_bytes;
  const size_t bytes;
  Header* header = nullptr;
};

std::shared_ptr<RankMemory> Ranks::Share(int size, int64_t slot_bytes) {
  return std::make_shared<RankMemory>(size, slot_bytes);
}

Ranks::Ranks(std::shared_ptr<RankMemory> memory, int rank)
    : memory_(std::move(memory)), rank_(rank), size_(memory_->size), spins_(CpuQuota() >= size_) {}

char* Ranks::Slot(int rank) const {
  return memory_->slots() + (static_cast<int64_t>(second_) * size_ + rank) * memory_->slot_bytes;
}

void Ranks::Meet(Exchange exchange, int64_t count) {
  RankMemory::Header& shared = *memory_->header;
  RankMemory::Place& own = shared.places[rank_];
  const uint64_t purpose = static_cast<uint64_t>(count) << 8 | static_cast<uint64_t>(exchange);
  ++met_;
  own.exchanges[met_ % 2].store(purpose, std::memory_order_relaxed);  // `met` publishes it
  own.met.store(met_);
  if (own.sleepers.load() > 0) Wake(own.met);
  const bool briefly = exchange == Exchange::kCall || brief_ > 0;
  const absl::Duration spin = !spins_ ? absl::ZeroDuration() : briefly ? kIdleSpin : kForwardSpin;
  brief_ = std::max(0, brief_ - 1);
  for (int other = 0; other < size_; ++other) {
    RankMemory::Place& place = shared.places[other];
    const auto here = [&] { return static_cast<int32_t>(place.met.load() - met_) >= 0; };
    absl::Time until = absl::InfiniteFuture();
    for (int looks = 0; !here(); ++looks) {
      if (shared.failed.load() != 0) throw RankFailure(failure());
      if (looks % kChecksOfClock == 0) {
        const absl::Time now = SteadyNow();
        if (looks == 0) until = now + spin;
        if (now >= until) {
          if (!briefly) brief_ = kBriefAfterVain;
          break;
        }
      }
      Pause();
    }
    while (!here()) {
      if (shared.failed.load() != 0) throw RankFailure(failure());
      place.sleepers.fetch_add(1);
      const uint32_t seen = place.met.load();
      if (static_cast<int32_t>(seen - met_) < 0) Sleep(place.met, seen);
      place.sleepers.fetch_sub(1);
    }
    if (place.exchanges[met_ % 2].load(std::memory_order_relaxed) != purpose) {
      Fail(absl::StrCat("ranks ", std::min(rank_, other), " and ", std::max(rank_, other),
                        " have come apart: their exchanges differ"));
    }
  }
  if (shared.failed.load() != 0) throw RankFailure(failure());
}

template <class T>
void Ranks::SumOf(T* data, int64_t count) {
  const int64_t most = memory_->slot_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < count; begin += most) {
    const int64_t piece = std::min(most, count - begin);
    T* const own = reinterpret_cast<T*>(Slot(rank_));
    std::memcpy(own, data + begin, piece * sizeof(T));
    Meet(Exchange::kSum, piece);
    const auto sum = [&](int64_t from, int64_t to, T* out) {
      const T* parts[kMostRanks];
      for (int r = 0; r < size_; ++r) parts[r] = reinterpret_cast<const T*>(Slot(r));
      float all[kBlock];
      for (; from < to; from += kBlock) {
        const int64_t count = std::min(kBlock, to - from);
        if (count == kBlock) {  // a number that the compiler knows
          SumBlock(parts, size_, from, kBlock, all, out + from);
        } else {
          SumBlock(parts, size_, from, count, all, out + from);
        }
      }
    };
    if (piece <= kSharedSum || size_ == 2) {
      sum(0, piece, data + begin);
    } else {  // each sums a part, where only it reads, and takes the others'
      const auto part = [&](int r) { return piece * r / size_; };
      sum(part(rank_), part(rank_ + 1), own);
      Meet(Exchange::kSharedSum, piece);
      for (int r = 0; r < size_; ++r) {
        std::memcpy(data + begin + part(r), reinterpret_cast<const T*>(Slot(r)) + part(r),
                    (part(r + 1) - part(r)) * sizeof(T));
      }
    }
    second_ = !second_;
  }
}

void Ranks::Sum(void* data, int64_t count, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return SumOf(static_cast<float*>(data), count);
    case DType::kBFloat16:
      return SumOf(static_cast<BFloat16*>(data), count);
    case DType::kFloat16:
      return SumOf(static_cast<Float16*>(data), count);
  }
}

void Ranks::Average(float* data, int64_t count) {
  SumOf(data, count);
  for (int64_t i = 0; i < count; ++i) data[i] /= static_cast<float>(size_);
}

void Ranks::Gather(const void* part, int64_t bytes, void* all) {
  const auto* const from = static_cast<const char*>(part);
  auto* const to = static_cast<char*>(all);
  for (int64_t begin = 0; begin < bytes; begin += memory_->slot_bytes) {
    const int64_t piece = std::min(memory_->slot_bytes, bytes - begin);
    std::memcpy(Slot(rank_), from + begin, piece);
    Meet(Exchange::kGather, piece);
    for (int r = 0; r < size_; ++r) std::memcpy(to + r * bytes + begin, Slot(r), piece);
    second_ = !second_;
  }
}

int64_t Ranks::Least(int64_t value) {
  int64_t all[kMostRanks];
  Gather(&value, sizeof(value), all);
  return *std::min_element(all, all + size_);
}

void Ranks::Agree(uint64_t value, const char* what) {
  uint64_t all[kMostRanks];
  Gather(&value, sizeof(value), all);
  for (int r = 1; r < size_; ++r) {
    if (all[r] == all[0]) continue;
    Fail(absl::StrCat("rank ", r, " came to another result than rank 0: ", what));
    throw RankFailure(failure());
  }
}

void Ranks::Send(absl::string_view message) {
  const uint64_t size = message.size();
  std::memcpy(Slot(0), &size, sizeof(size));
  Meet(Exchange::kCall, 0);
  second_ = !second_;
  for (size_t begin = 0; begin < message.size(); begin += memory_->slot_bytes) {
    const absl::string_view piece = message.substr(begin, memory_->slot_bytes);
    std::memcpy(Slot(0), piece.data(), piece.size());
    Meet(Exchange::kMessage, static_cast<int64_t>(piece.size()));
    second_ = !second_;
  }
}

std::string Ranks::Receive() {
  Meet(Exchange::kCall, 0);
  uint64_t size = 0;
  std::memcpy(&size, Slot(0), sizeof(size));
  second_ = !second_;
  std::string message(size, '\0');
  for (size_t begin = 0; begin < message.size(); begin += memory_->slot_bytes) {
    const size_t piece = std::min<size_t>(memory_->slot_bytes, message.size() - begin);
    Meet(Exchange::kMessage, static_cast<int64_t>(piece));
    std::memcpy(message.data() + begin, Slot(0), piece);
    second_ = !second_;
  }
  return message;
}

void Ranks::Fail(absl::string_view why) {
  RankMemory::Header& shared = *memory_->header;
  if (shared.failing.exchange(1) == 0) {
    std::memcpy(shared.reason, why.data(), std::min(why.size(), kReason - 1));
  } else {  // another writes its reason, unless it was killed as it did
    for (int i = 0; i < 100 && shared.failed.load() == 0; ++i) usleep(100);
  }
  shared.failed.store(1);
  for (RankMemory::Place& place : shared.places) Wake(place.met);
}

std::string Ranks::failure() const {
  const RankMemory::Header& shared = *memory_->header;
  return shared.failed.load() != 0 ? std::string(shared.reason) : std::string();
}

}  // namespace epikv
