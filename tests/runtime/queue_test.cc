#include "runtime/admission/queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace queue_test {

using ::testing::ElementsAre;

Request Asked(const std::string& tenant, int64_t tokens, Priority priority = Priority::kNormal) {
  Request request{.prompt = std::vector<int32_t>(tokens - 1, 0), .max_output_tokens = 1};
  request.scheduling = {.priority = priority, .tenant = tenant};
  return request;
}

// A queue whose requests are numbered from 0 in order of arrival.
class QueueTest : public ::testing::Test {
 protected:
  explicit QueueTest(QueueRule rule = {.ageing = absl::Seconds(10), .quantum_tokens = 100})
      : queue_(rule) {}

  int64_t Push(const std::string& tenant, int64_t tokens, Priority priority = Priority::kNormal) {
    queue_.Push(SequenceId{next_}, Asked(tenant, tokens, priority), now_);
    return next_++;
  }
  int64_t Head() {
    const std::optional<SequenceId> head = queue_.Head(now_);
    return head.has_value() ? static_cast<int64_t>(*head) : -1;
  }
  int64_t Pop() {
    const int64_t head = Head();
    if (head >= 0) queue_.PopHead();
    return head;
  }
  std::vector<int64_t> PopAll() {
    std::vector<int64_t> order;
    while (queue_.size() > 0) order.push_back(Pop());
    return order;
  }

  absl::Time now_ = absl::FromUnixSeconds(1000);
  RequestQueue queue_;
  int64_t next_ = 0;
};

TEST_F(QueueTest, NobodyWaits) {
  EXPECT_EQ(Head(), -1);
  EXPECT_EQ(queue_.size(), 0);
}

TEST_F(QueueTest, OfOneTenantFirstComeFirstServed) {
  for (const int64_t tokens : {50, 5000, 1, 100}) Push("a", tokens);
  EXPECT_THAT(PopAll(), ElementsAre(0, 1, 2, 3));
}

TEST_F(QueueTest, HigherPrioritiesGoFirst) {
  Push("a", 10, Priority::kLow);
  Push("a", 10, Priority::kNormal);
  Push("a", 10, Priority::kHigh);
  Push("b", 10, Priority::kHigh);
  Push("b", 10, Priority::kNormal);
  EXPECT_THAT(PopAll(), ElementsAre(2, 3, 1, 4, 0));
}

TEST_F(QueueTest, HeadGivesWayToAHigherPriorityAlone) {
  Push("a", 500);
  EXPECT_EQ(Head(), 0);
  Push("b", 1);
  Push("a", 1, Priority::kLow);
  EXPECT_EQ(Head(), 0);
  const int64_t high = Push("c", 1, Priority::kHigh);
  EXPECT_EQ(Head(), high);
  queue_.Remove(SequenceId{high});
  EXPECT_EQ(Head(), 0);
}

TEST_F(QueueTest, TenantsTakeTurnsOfAQuantum) {
  for (int i = 0; i < 4; ++i) Push("a", 50);   // 0 to 3
  for (int i = 0; i < 2; ++i) Push("b", 100);  // 4 and 5
  EXPECT_THAT(PopAll(), ElementsAre(0, 1, 4, 2, 3, 5));
}

TEST_F(QueueTest, LargeRequestIsSavedFor) {
  Push("a", 250);
  for (int i = 0; i < 4; ++i) Push("b", 100);
  EXPECT_THAT(PopAll(), ElementsAre(1, 2, 0, 3, 4));
}

TEST_F(QueueTest, TenantThatWaitsNoMoreKeepsNothing) {
  const int64_t large = Push("a", 100000);
  Push("b", 100);
  Push("b", 100);
  Push("b", 100);
  Push("b", 100);
  for (int i = 0; i < 3; ++i) Pop();
  queue_.Remove(SequenceId{large});  // after it has saved for three turns
  for (int i = 0; i < 4; ++i) Push("a", 100);
  EXPECT_THAT(PopAll(), ElementsAre(5, 4, 6, 7, 8)) << "one a turn";
  EXPECT_EQ(queue_.tenants(Priority::kNormal), 0);
}

TEST_F(QueueTest, TenantsAreThoseThatWait) {
  for (int i = 0; i < 100; ++i) {
    const int64_t id = Push(absl::StrCat("tenant ", i), 10);
    EXPECT_EQ(queue_.tenants(Priority::kNormal), 1);
    queue_.Remove(SequenceId{id});
  }
  EXPECT_EQ(queue_.tenants(Priority::kNormal), 0);
}

TEST_F(QueueTest, WaitingRequestRisesOneClassAtATime) {
  Push("a", 10, Priority::kLow);
  now_ += absl::Seconds(9);
  Push("b", 10, Priority::kNormal);
  EXPECT_EQ(Head(), 1);
  now_ += absl::Seconds(1);
  EXPECT_EQ(Head(), 1) << "both are of one class now, and this one was the head";
  EXPECT_EQ(Pop(), 1);
  const int64_t high = Push("b", 10, Priority::kHigh);
  EXPECT_EQ(Head(), high);
  now_ += absl::Milliseconds(9999);
  EXPECT_EQ(Pop(), high);
  EXPECT_EQ(Head(), 0);
  now_ += absl::Milliseconds(1);
  Push("b", 10, Priority::kHigh);
  EXPECT_EQ(Head(), 0) << "it has reached the highest class, and was the head";
}

TEST_F(QueueTest, OldRequestGoesBeforeItsTenantsNewOnesOfItsClass) {
  Push("a", 10, Priority::kLow);
  now_ += absl::Seconds(10);
  Push("a", 10, Priority::kNormal);
  EXPECT_THAT(PopAll(), ElementsAre(0, 1));
}

// Until it is in the highest class, and then for one turn of each other tenant.
TEST_F(QueueTest, NobodyStarvesUnderAFloodOfHigherPriority) {
  const int64_t low = Push("a", 100, Priority::kLow);
  const absl::Time end = now_ + absl::Seconds(20);
  for (int i = 0; i < 50; ++i) Push("b", 100, Priority::kHigh);
  std::optional<absl::Time> admitted;
  int after = 0;
  while (!admitted.has_value()) {
    ASSERT_LT(after, 3);
    Push("b", 100, Priority::kHigh);
    if (Pop() == low) admitted = now_;
    if (now_ >= end) ++after;
    now_ += absl::Milliseconds(100);
  }
  EXPECT_GE(*admitted, end) << "the flood goes first until then";
}

TEST_F(QueueTest, BacklogIsWhatWaitsByClassAndTenant) {
  Push("a", 10);
  Push("b", 20, Priority::kHigh);
  Push("a", 30, Priority::kLow);
  EXPECT_EQ(queue_.backlog().total().requests, 3);
  EXPECT_EQ(queue_.backlog().total().tokens, 60);
  const auto ahead = queue_.backlog().AheadOf({.tenant = "a"}, 5, 100);
  EXPECT_EQ(ahead.likely.tokens, 30);
  EXPECT_TRUE(ahead.higher);
  Pop();
  EXPECT_EQ(queue_.backlog().total().tokens, 40);
  EXPECT_FALSE(queue_.backlog().AheadOf({.tenant = "a"}, 5, 100).higher);
}

// Laws over random runs.

class QueueLaws : public QueueTest, public ::testing::WithParamInterface<int> {
 protected:
  QueueLaws() : QueueTest({.ageing = absl::Seconds(10), .quantum_tokens = QuantumOf(GetParam())}) {}
  static int64_t QuantumOf(int seed) {
    const int64_t quanta[] = {1, 7, 100, 1000};
    return quanta[seed % 4];
  }
  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }

  std::mt19937 random_{static_cast<uint32_t>(GetParam())};
};

// One tenant floods, the other always has a little more to do: neither gets ahead.
TEST_P(QueueLaws, TenantsThatBothWaitGetTheSameTokens) {
  constexpr int64_t kLargest = 300;
  std::map<int64_t, std::pair<std::string, int64_t>> asked;
  std::map<std::string, int64_t> waiting, admitted;
  auto push = [&](const std::string& tenant, int64_t tokens) {
    asked[Push(tenant, tokens)] = {tenant, tokens};
    ++waiting[tenant];
  };
  for (int i = 0; i < 500; ++i) push("flood", Draw(200, kLargest));
  for (int i = 0; i < 400; ++i) {
    while (waiting["modest"] < 2) push("modest", Draw(1, kLargest));
    push("flood", Draw(200, kLargest));
    const auto& [tenant, tokens] = asked.at(Pop());
    --waiting[tenant];
    admitted[tenant] += tokens;
    ASSERT_LE(std::abs(admitted["flood"] - admitted["modest"]),
              queue_.rule().quantum_tokens + kLargest);
  }
  EXPECT_GT(admitted["modest"], 1000);
}

// Deficit round robin word by word: one turn after another, one quantum a turn.
class PlainRoundRobin {
 public:
  explicit PlainRoundRobin(int64_t quantum) : quantum_(quantum) {}
  void Push(int64_t id, const std::string& tenant, int64_t tokens) {
    for (Turn& turn : turns_) {
      if (turn.tenant != tenant) continue;
      turn.waiting.push_back({id, tokens});
      return;
    }
    turns_.push_back({tenant, turns_.empty() ? quantum_ : 0, {{id, tokens}}});
  }
  int64_t Pop() {
    while (turns_.front().waiting.front().second > turns_.front().saved) {
      turns_.splice(turns_.end(), turns_, turns_.begin());
      turns_.front().saved += quantum_;
    }
    Turn& turn = turns_.front();
    const auto [id, tokens] = turn.waiting.front();
    turn.saved -= tokens;
    turn.waiting.pop_front();
    if (turn.waiting.empty()) {
      turns_.pop_front();
      if (!turns_.empty()) turns_.front().saved += quantum_;
    }
    return id;
  }

 private:
  struct Turn {
    std::string tenant;
    int64_t saved;
    std::deque<std::pair<int64_t, int64_t>> waiting;  // id, tokens
  };
  const int64_t quantum_;
  std::list<Turn> turns_;
};

TEST_P(QueueLaws, RoundsThatNobodyCanUseMayBeSkipped) {
  PlainRoundRobin plain(queue_.rule().quantum_tokens);
  int64_t waiting = 0;
  for (int i = 0; i < 3000; ++i) {
    if (waiting == 0 || Draw(0, 99) < 49) {
      const std::string tenant = absl::StrCat(Draw(0, 6));
      const int64_t tokens = Draw(0, 3) == 0 ? Draw(1, 5000) : Draw(1, 50);
      plain.Push(Push(tenant, tokens), tenant, tokens);
      ++waiting;
    } else {
      ASSERT_EQ(Pop(), plain.Pop()) << "at " << i;
      --waiting;
    }
  }
}

// Whoever arrives, leaves or grows older: the head is of the highest class, stays while nobody of a
// higher one waits, and is the first of its tenant's class when it is chosen.
TEST_P(QueueLaws, HeadHoldsItsPlace) {
  struct Entry {
    std::string tenant;
    int priority;
    absl::Time since;
  };
  std::map<int64_t, Entry> waiting;
  auto class_of = [&](const Entry& entry) {
    const int risen = static_cast<int>((now_ - entry.since) / absl::Seconds(10));
    return std::min(kNumPriorities - 1, entry.priority + risen);
  };
  int64_t last = -1, left = 0, stayed = 0;
  for (int i = 0; i < 3000; ++i) {
    now_ += absl::Milliseconds(Draw(0, 500));
    const int64_t what = Draw(0, 9);
    if (what < 5) {
      const Entry entry{absl::StrCat(Draw(0, 3)), static_cast<int>(Draw(0, 2)), now_};
      waiting[Push(entry.tenant, Draw(1, 400), static_cast<Priority>(entry.priority))] = entry;
    } else if (what < 7 && !waiting.empty()) {
      const auto leaving = std::next(waiting.begin(), Draw(0, waiting.size() - 1));
      queue_.Remove(SequenceId{leaving->first});
      if (leaving->first == last) last = -1;
      waiting.erase(leaving);
      ++left;
    } else if (what < 9 && last >= 0 && Head() == last) {
      queue_.PopHead();
      waiting.erase(last);
      last = -1;
    }
    const int64_t head = Head();
    ASSERT_EQ(head < 0, waiting.empty());
    if (head < 0) continue;
    const Entry& entry = waiting.at(head);
    for (const auto& [id, other] : waiting) {
      ASSERT_LE(class_of(other), class_of(entry));
      const bool passed = id < head && other.tenant == entry.tenant;
      if (head != last && passed) {
        ASSERT_LT(class_of(other), class_of(entry));
      }
    }
    if (last >= 0 && head != last) {
      ASSERT_GT(class_of(entry), class_of(waiting.at(last)));
    }
    if (head == last) ++stayed;
    last = head;
    ASSERT_EQ(queue_.size(), static_cast<int64_t>(waiting.size()));
  }
  EXPECT_GT(left, 100);
  EXPECT_GT(stayed, 100);
}

INSTANTIATE_TEST_SUITE_P(Seeds, QueueLaws, ::testing::Range(0, 12));

}  // namespace queue_test
}  // namespace epikv
