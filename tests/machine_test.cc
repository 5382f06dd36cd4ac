#include "runtime/machine.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <optional>

namespace epikv {
namespace {

constexpr int64_t kBytes = 256 << 20, kNoise = 96 << 20;

// As a KV pool takes it: no page of it is there before it is written.
class ReservedMemoryTest : public testing::Test {
 protected:
  ReservedMemoryTest()
      : memory_(static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {}
  ~ReservedMemoryTest() override { munmap(memory_, kBytes); }

  char* const memory_;
};

TEST_F(ReservedMemoryTest, IsUntouchedUntilItIsWritten) {
  const ReservedMemory reserved(memory_, kBytes);
  EXPECT_EQ(reserved.UntouchedBytes(), kBytes);
  std::memset(memory_, 1, kBytes / 4);
  const int64_t left = reserved.UntouchedBytes();
  EXPECT_LE(left, kBytes - kBytes / 4);
  EXPECT_GE(left, kBytes - kBytes / 4 - (4 << 20)) << "pages may be large ones";
}

TEST_F(ReservedMemoryTest, CountsWholePagesOfWhatItIsGiven) {
  const ReservedMemory odd(memory_ + 1, kBytes - 2);
  EXPECT_LT(odd.UntouchedBytes(), kBytes);
  EXPECT_GE(odd.UntouchedBytes(), kBytes - 2 * 65536);
  const ReservedMemory none(memory_, 0);
  EXPECT_EQ(none.UntouchedBytes(), 0);
}

// Others use the machine meanwhile, so by and large.
TEST_F(ReservedMemoryTest, IsNotAvailableTwice) {
  const int64_t before = AvailableMemoryBytes();
  std::optional<ReservedMemory> reserved;
  reserved.emplace(memory_, kBytes);
  EXPECT_NEAR(AvailableMemoryBytes(), before - kBytes, kNoise);
  std::memset(memory_, 1, kBytes / 2);
  EXPECT_NEAR(AvailableMemoryBytes(), before - kBytes, kNoise);
  reserved.reset();
  EXPECT_NEAR(AvailableMemoryBytes(), before - kBytes / 2, kNoise);
}

TEST(MachineTest, HasCpus) { EXPECT_GE(CpuQuota(), 1); }

}  // namespace
}  // namespace epikv
