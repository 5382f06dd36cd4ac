#include "server/base/file_contents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace file_contents_test {

using ::testing::HasSubstr;

TEST(FileContentsTest, AreTheWholeFileAndItsVersion) {
  TemporaryFolder folder;
  folder.Write("a", std::string(200'000, 'x'));
  const auto contents = ReadFile(folder.File("a"));
  ASSERT_TRUE(contents.ok());
  EXPECT_EQ(contents->text, std::string(200'000, 'x'));
  EXPECT_EQ(contents->version, VersionOf(folder.File("a")));
  EXPECT_EQ(VersionOf(folder.File("none")), FileVersion());
}

// A pipe that nobody writes to must not hold up whoever reads.
TEST(FileContentsTest, OnlyRegularFilesAreRead) {
  TemporaryFolder folder;
  ASSERT_EQ(mkfifo(folder.File("pipe").c_str(), 0600), 0);
  for (const std::string& path : {folder.File("pipe"), folder.File("")}) {
    EXPECT_THAT(std::string(ReadFile(path).status().message()),
                HasSubstr("'" + path + "': it is not a regular file"));
  }
  EXPECT_THAT(std::string(ReadFile(folder.File("none")).status().message()),
              HasSubstr("cannot read '" + folder.File("none") + "'"));
}

}  // namespace file_contents_test
}  // namespace epikv
