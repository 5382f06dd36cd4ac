#include "server/call/access_log.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace access_log_test {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

v1::AccessLogEntry Entry(const std::string& request_id) {
  v1::AccessLogEntry entry;
  entry.set_method("GenerationService/Generate");
  entry.set_request_id(request_id);
  return entry;
}

class AccessLogTest : public ::testing::Test {
 protected:
  std::unique_ptr<AccessLog> Open(const std::string& path) {
    absl::StatusOr<std::unique_ptr<AccessLog>> log =
        AccessLog::Open(path, [this](int64_t lines) { dropped_ += lines; });
    EXPECT_EQ(log.status(), absl::OkStatus());
    return *std::move(log);
  }
  std::vector<nlohmann::json> Lines(const std::string& name) const {
    std::vector<nlohmann::json> lines;
    for (absl::string_view line : absl::StrSplit(folder_.Read(name), '\n', absl::SkipEmpty())) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }

  const TemporaryFolder folder_;
  std::atomic<int64_t> dropped_ = 0;
};

TEST_F(AccessLogTest, WritesAnObjectALine) {
  v1::AccessLogEntry entry = Entry("r1");
  entry.mutable_time()->set_seconds(1700000000);
  entry.mutable_time()->set_nanos(500000000);
  entry.set_seconds(0.25);
  entry.set_output_tokens(7);
  auto log = Open(folder_.File("log"));
  log->Write(entry);
  log->Write(Entry("r2"));
  log.reset();
  const auto lines = Lines("log");
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(lines[0], nlohmann::json::parse(R"({
    "time": "2023-11-14T22:13:20.500Z", "method": "GenerationService/Generate",
    "request_id": "r1", "seconds": 0.25, "output_tokens": 7
  })"));
  EXPECT_EQ(lines[1]["request_id"], "r2");
  EXPECT_EQ(dropped_, 0);
}

TEST_F(AccessLogTest, WhatClientsChoseCannotForgeALine) {
  auto log = Open(folder_.File("log"));
  const std::string forged = "x\"}\n{\"method\": \"forged\"}\r\x1b[2J\xe2\x80\xa8\t\\";
  log->Write(Entry(forged));
  log.reset();
  const auto lines = Lines("log");
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_EQ(lines[0]["request_id"], forged);
}

TEST_F(AccessLogTest, AppendsToWhatIsThere) {
  folder_.Write("log", "{}\n");
  auto log = Open(folder_.File("log"));
  log->Write(Entry("r"));
  log.reset();
  EXPECT_THAT(Lines("log"), SizeIs(2));
}

TEST_F(AccessLogTest, OthersCannotReadIt) {
  Open(folder_.File("log"));
  struct stat facts = {};
  ASSERT_EQ(stat(folder_.File("log").c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0007, 0u);
}

TEST_F(AccessLogTest, RenamedOrRemovedFileIsMadeAnew) {
  for (const char* away : {"log.1", ""}) {
    auto log = Open(folder_.File("log"));
    if (*away == '\0') {
      std::filesystem::remove(folder_.File("log"));
    } else {
      std::filesystem::rename(folder_.File("log"), folder_.File(away));
    }
    log->Write(Entry("after"));
    log.reset();
    ASSERT_THAT(Lines("log"), SizeIs(1)) << away;
    EXPECT_EQ(Lines("log")[0]["request_id"], "after");
  }
  EXPECT_EQ(folder_.Read("log.1"), "");
}

TEST_F(AccessLogTest, PathThatCannotBeWrittenIsAnError) {
  const std::string path = folder_.File("absent/log");
  EXPECT_THAT(AccessLog::Open(path, [](int64_t) {}).status().message(),
              HasSubstr(absl::StrCat("--access_log: cannot write '", path, "': No such file")));
}

// /dev/full is always full.
TEST_F(AccessLogTest, LinesThatAFullDiskDoesNotTakeAreCounted) {
  auto log = Open("/dev/full");
  for (int i = 0; i < 3; ++i) log->Write(Entry("r"));
  log.reset();
  EXPECT_EQ(dropped_, 3);
}

TEST_F(AccessLogTest, ReaderThatTakesNothingHoldsUpNobody) {
  const std::string pipe = folder_.File("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  constexpr int kEntries = 30000;  // more than pipe and queue hold
  auto log = Open(pipe);
  for (int i = 0; i < kEntries; ++i) log->Write(Entry(std::string(64, 'r')));
  log.reset();
  std::string text;
  char part[65536];
  for (ssize_t got; (got = read(reader, part, sizeof(part))) > 0;) text.append(part, got);
  close(reader);
  // Each was written or counted, and what was written is whole.
  int64_t written = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    EXPECT_TRUE(nlohmann::json::accept(line)) << line;
    ++written;
  }
  EXPECT_GT(dropped_, 0);
  EXPECT_EQ(written + dropped_, kEntries);
}

TEST_F(AccessLogTest, WithoutAPathNothingIsWritten) {
  auto log = Open("");
  log->Write(Entry("r"));
  log.reset();
  EXPECT_EQ(dropped_, 0);
}

}  // namespace access_log_test
}  // namespace epikv
