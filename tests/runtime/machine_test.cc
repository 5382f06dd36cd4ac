#include "runtime/base/machine.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

namespace epikv {
namespace machine_test {

// As a KV pool takes it: no page of it is there before it is written.
class ReservedMemoryTest : public testing::Test {
 protected:
  ~ReservedMemoryTest() override { munmap(memory_, bytes_); }
  char* Map(int64_t bytes) {
    bytes_ = bytes;
    memory_ = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    return memory_;
  }

 private:
  int64_t bytes_ = 0;
  char* memory_ = nullptr;
};

TEST_F(ReservedMemoryTest, IsUntouchedUntilItIsWritten) {
  constexpr int64_t kBytes = 256 << 20;
  char* const memory = Map(kBytes);
  const ReservedMemory reserved(memory, kBytes);
  EXPECT_EQ(reserved.UntouchedBytes(), kBytes);
  std::memset(memory, 1, kBytes / 4);
  const int64_t left = reserved.UntouchedBytes();
  EXPECT_LE(left, kBytes - kBytes / 4);
  EXPECT_GE(left, kBytes - kBytes / 4 - (4 << 20)) << "pages may be large ones";
}

TEST_F(ReservedMemoryTest, CountsWholePagesOfWhatItIsGiven) {
  constexpr int64_t kBytes = 1 << 20;
  char* const memory = Map(kBytes);
  const ReservedMemory odd(memory + 1, kBytes - 2);
  EXPECT_LT(odd.UntouchedBytes(), kBytes);
  EXPECT_GE(odd.UntouchedBytes(), kBytes - 2 * 65536);
  const ReservedMemory none(memory, 0);
  EXPECT_EQ(none.UntouchedBytes(), 0);
}

// Others use the machine meanwhile: by and large.
TEST(MemorySetAsideTest, IsNotAvailable) {
  const int64_t before = AvailableMemoryBytes(), third = before / 3, noise = before / 6;
  {
    const MemorySetAside one(third), other(third);
    EXPECT_NEAR(AvailableMemoryBytes(), before - 2 * third, noise);
    const MemorySetAside more(before);
    EXPECT_EQ(AvailableMemoryBytes(), 0);
  }
  EXPECT_NEAR(AvailableMemoryBytes(), before, noise);
}

TEST_F(ReservedMemoryTest, IsNotAvailableTwice) {
  const int64_t before = AvailableMemoryBytes(), half = before / 2, noise = before / 4;
  {
    const ReservedMemory reserved(Map(half), half);
    EXPECT_NEAR(AvailableMemoryBytes(), before - half, noise);
  }
  EXPECT_NEAR(AvailableMemoryBytes(), before, noise);
}

TEST(MachineTest, HasCpus) { EXPECT_GE(CpuQuota(), 1); }

}  // namespace machine_test
}  // namespace epikv
