// Ranks as processes: what they exchange through shared memory.

#include "runtime/ranks/ranks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace ranks_test {

constexpr int64_t kSlotBytes = 256;
constexpr int64_t kLargeSlotBytes = 1 << 17;  // for sums that ranks share out

// Runs `rank` as each of `size` ranks, the others than 0 in processes of their own, where true is
// what is to come of it.
void RunRanks(int size, const std::function<bool(Ranks&)>& rank, int64_t slot_bytes = kSlotBytes) {
  const std::shared_ptr<RankMemory> memory = Ranks::Share(size, slot_bytes);
  std::vector<pid_t> others;
  for (int r = 1; r < size; ++r) {
    const pid_t pid = fork();
    if (pid == 0) {
      Ranks own(memory, r);
      std::_Exit(rank(own) ? 0 : 1);
    }
    others.push_back(pid);
  }
  Ranks own(memory, 0);
  EXPECT_TRUE(rank(own));
  for (const pid_t pid : others) {
    int status = 0;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "process " << pid;
  }
}

class RanksOf : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, RanksOf, testing::Values(1, 2, 3, 8));

// Longer than a slot, and than what one rank sums alone.
TEST_P(RanksOf, SumTheSameBitsInEach) {
  const auto sum = [](Ranks& ranks) {
    bool right = true;
    for (const int64_t count : {1, 63, 64, 65, 1000, 40000}) {
      std::vector<float> x(count), expected(count);
      for (int64_t i = 0; i < count; ++i) {
        x[i] = static_cast<float>(i) / 7 + static_cast<float>(ranks.rank()) / 3;
        expected[i] = static_cast<float>(i) / 7;
        for (int r = 1; r < ranks.size(); ++r) {
          expected[i] += static_cast<float>(i) / 7 + static_cast<float>(r) / 3;
        }
      }
      ranks.Sum(x.data(), count, DType::kFloat32);
      right = right && x == expected;
    }
    return right;
  };
  RunRanks(GetParam(), sum);
  RunRanks(GetParam(), sum, kLargeSlotBytes);
}

TEST_P(RanksOf, SumNarrowTypesInFp32) {
  RunRanks(GetParam(), [](Ranks& ranks) {
    // 1.0078125 in bfloat16: the sum of all is rounded once.
    std::vector<uint16_t> x(300, 0x3f81);
    ranks.Sum(x.data(), 300, DType::kBFloat16);
    const float sum = 1.0078125f * static_cast<float>(ranks.size());
    const uint32_t wide = static_cast<uint32_t>(x[299]) << 16;
    float seen;
    memcpy(&seen, &wide, sizeof(seen));
    return std::abs(seen - sum) <= sum / 256;
  });
}

TEST_P(RanksOf, GatherSendAndAgree) {
  RunRanks(GetParam(), [](Ranks& ranks) {
    std::string part(700, static_cast<char>('a' + ranks.rank())), expected;
    for (int r = 0; r < ranks.size(); ++r) expected += std::string(700, static_cast<char>('a' + r));
    std::string all(expected.size(), ' ');
    ranks.Gather(part.data(), 700, all.data());
    bool right = all == expected;
    right = right && ranks.Least(10 - ranks.rank()) == 11 - ranks.size();
    for (const size_t size : {0, 1, 255, 256, 257, 5000}) {
      const std::string message(size, 'm');
      if (ranks.rank() == 0) {
        ranks.Send(message);
      } else {
        right = right && ranks.Receive() == message;
      }
    }
    ranks.Agree(7, "a number");
    return right;
  });
}

// Also one that sleeps by then.
TEST(Ranks, OneThatFailsIsHeardByAll) {
  RunRanks(3, [](Ranks& ranks) {
    if (ranks.rank() == 2) {
      usleep(20'000);
      ranks.Fail("the third has failed");
      ranks.Fail("again");
    }
    try {
      ranks.Least(1);
      if (ranks.rank() == 2) return false;
    } catch (const RankFailure& failure) {
      return std::string(failure.what()) == "the third has failed";
    }
    return false;
  });
}

TEST(Ranks, TheyCannotComeApartUnseen) {
  RunRanks(2, [](Ranks& ranks) {
    try {
      ranks.Agree(ranks.rank(), "a number");
      return false;
    } catch (const RankFailure& failure) {
      return std::string(failure.what()) == "rank 1 came to another result than rank 0: a number";
    }
  });
}

// As where one of them skips an exchange, for want of memory say.
TEST(Ranks, ExchangesThatDifferAreSeen) {
  RunRanks(3, [](Ranks& ranks) {
    std::vector<float> x(8, 1);
    try {
      ranks.Sum(x.data(), 8, DType::kFloat32);  // a slow rank may hear here what the others found
      if (ranks.rank() == 1) {
        ranks.Sum(x.data(), 7, DType::kFloat32);
      } else {
        ranks.Sum(x.data(), 8, DType::kFloat32);
      }
      return false;
    } catch (const RankFailure& failure) {
      return std::string(failure.what()).find("have come apart: their exchanges differ") !=
             std::string::npos;
    }
  });
  RunRanks(2, [](Ranks& ranks) {
    try {
      if (ranks.rank() == 0) {
        ranks.Send("");
      } else {
        ranks.Least(0);
      }
      return false;
    } catch (const RankFailure& failure) {
      return std::string(failure.what()) == "ranks 0 and 1 have come apart: their exchanges differ";
    }
  });
}

// Each waits for the others, many times.
TEST_P(RanksOf, MeetAgainAndAgain) {
  RunRanks(GetParam(), [](Ranks& ranks) {
    int64_t sum = 0;
    for (int64_t i = 0; i < 2000; ++i) {
      float x = 1;
      ranks.Average(&x, 1);
      sum += static_cast<int64_t>(x);
    }
    return sum == 2000;
  });
}

}  // namespace ranks_test
}  // namespace epikv
