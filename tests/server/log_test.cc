#include "server/base/log.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

namespace epikv {
namespace log_test {

TEST(LineLimitTest, KeepsBackWhatIsTooMuchInASecondAndSaysSo) {
  LineLimit limit(2);
  const absl::Time start = absl::UnixEpoch();
  EXPECT_EQ(limit.Take(start), 0);
  EXPECT_EQ(limit.Take(start), 0);
  EXPECT_EQ(limit.Take(start), std::nullopt);
  EXPECT_EQ(limit.Take(start + absl::Milliseconds(999)), std::nullopt);
  EXPECT_EQ(limit.Take(start + absl::Seconds(1)), 2);
  EXPECT_EQ(limit.Take(start + absl::Seconds(1)), 0);
  EXPECT_EQ(limit.Take(start + absl::Seconds(1)), std::nullopt);
  EXPECT_EQ(limit.Take(start + absl::Hours(1)), 1);
}

// stderr is a pipe that nobody reads but this object.
class StderrPipe {
 public:
  StderrPipe() : before_(dup(STDERR_FILENO)) {
    EXPECT_EQ(pipe2(ends_.data(), O_NONBLOCK), 0);
    // As a shell gives it: writing waits.
    EXPECT_EQ(fcntl(ends_[1], F_SETFL, 0), 0);
    dup2(ends_[1], STDERR_FILENO);
  }
  ~StderrPipe() {
    dup2(before_, STDERR_FILENO);
    for (const int file : {before_, ends_[0], ends_[1]}) close(file);
  }
  std::string Read() const {
    std::string text;
    std::array<char, 4096> part;
    for (;;) {
      const ssize_t bytes = read(ends_[0], part.data(), part.size());
      if (bytes <= 0) return text;
      text.append(part.data(), static_cast<size_t>(bytes));
    }
  }

 private:
  const int before_;
  std::array<int, 2> ends_;
};

TEST(LogTest, AFullPipeHoldsNobodyUp) {
  const Log log;
  StderrPipe pipe;
  constexpr int kLines = 2000;  // of 100 bytes: three times what a pipe holds
  absl::Notification done;
  std::thread writer([&] {
    for (int i = 0; i < kLines; ++i) log.Warn(std::string(100, 'x'));
    done.Notify();
  });
  const bool in_time = done.WaitForNotificationWithTimeout(absl::Seconds(30));
  std::string text = pipe.Read();
  while (!in_time && !done.HasBeenNotified()) text += pipe.Read();  // or it would never end
  writer.join();
  EXPECT_TRUE(in_time);
  const auto lines = std::count(text.begin(), text.end(), '\n');
  EXPECT_GT(lines, 100);
  EXPECT_LT(lines, kLines);
  log.Warn("there is room again");
  EXPECT_THAT(pipe.Read(), ::testing::HasSubstr(absl::StrCat(
                               "there is room again (", kLines - lines, " lines before this one")));
}

}  // namespace log_test
}  // namespace epikv
