#include "server/models/model_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace model_files_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// `printf one | sha256sum`
constexpr char kOne[] = "sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";

absl::Status Checked(const std::string& path, const ModelFileRules& rules) {
  return ModelFile::Check(path, rules).status();
}

class ModelFilesTest : public ::testing::Test {
 protected:
  ModelFilesTest() {
    std::filesystem::create_directories(folder_.File("models/a"));
    std::filesystem::create_directories(folder_.File("models2"));
    folder_.Write("models/a/in.pt", "one");
    folder_.Write("models2/out.pt", "one");
  }
  TemporaryFolder folder_;
  const std::string root_ = folder_.File("models");
};

TEST_F(ModelFilesTest, WithoutRulesAnyFileMayBeLoaded) {
  EXPECT_EQ(Checked(folder_.File("models2/out.pt"), {}), absl::OkStatus());
  EXPECT_EQ(ModelFile::Check("nowhere.pt", {})->path(), "nowhere.pt") << "the reader tells it";
}

TEST_F(ModelFilesTest, AFileOutsideOfTheRootIsRefusedHoweverItIsNamed) {
  std::filesystem::create_symlink(folder_.File("models2/out.pt"), root_ + "/link.pt");
  std::filesystem::create_directory_symlink(folder_.File("models2"), root_ + "/folder");
  for (const std::string& path :
       {folder_.File("models2/out.pt"), root_ + "/../models2/out.pt", root_ + "/link.pt",
        root_ + "/folder/out.pt", root_ + "2/out.pt"}) {
    const absl::Status status = Checked(path, {.root = root_});
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is not in model_root"));
  }
  EXPECT_TRUE(absl::IsNotFound(Checked(root_ + "/none.pt", {.root = root_})));
  EXPECT_TRUE(absl::IsNotFound(Checked(root_ + "/a/in.pt", {.root = root_ + "/none"})));
}

TEST_F(ModelFilesTest, AFileInTheRootIsNamedWithoutLinks) {
  std::filesystem::create_symlink(root_ + "/a/in.pt", folder_.File("link.pt"));
  std::filesystem::create_directory_symlink(root_, folder_.File("root"));
  for (const std::string& path : {root_ + "/a/in.pt", root_ + "/a/../a/in.pt",
                                  folder_.File("link.pt"), folder_.File("root/a/in.pt")}) {
    for (const std::string& root : {root_, root_ + "/", folder_.File("root")}) {
      const absl::StatusOr<ModelFile> file = ModelFile::Check(path, {.root = root});
      ASSERT_EQ(file.status(), absl::OkStatus()) << path << " in " << root;
      EXPECT_EQ(file->path(), std::filesystem::canonical(root_ + "/a/in.pt").string());
    }
  }
}

TEST_F(ModelFilesTest, OnlyPinnedDigestsAreLoaded) {
  const std::string path = root_ + "/a/in.pt", other(71, '0');
  EXPECT_EQ(Checked(path, {.digests = {other, kOne}}), absl::OkStatus());
  const absl::Status status = Checked(path, {.digests = {other}});
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(kOne));
  EXPECT_TRUE(absl::IsNotFound(Checked(root_ + "/none.pt", {.digests = {kOne}})));
  EXPECT_FALSE(Checked(root_, {.digests = {kOne}}).ok()) << "a folder";
}

TEST_F(ModelFilesTest, AFileThatChangesMeanwhileIsTold) {
  const std::string path = root_ + "/a/in.pt";
  const ModelFile file = *ModelFile::Check(path, {.root = root_, .digests = {kOne}});
  EXPECT_EQ(file.CheckUnchanged(), absl::OkStatus());
  folder_.Write("models/a/in.pt", "two, longer");
  EXPECT_TRUE(absl::IsAborted(file.CheckUnchanged()));
}

TEST(DigestsTest, AreSeparatedByCommasOrSpaces) {
  EXPECT_THAT(SplitDigests(""), IsEmpty());
  EXPECT_THAT(SplitDigests("a, b c,\nd"), ElementsAre("a", "b", "c", "d"));
  EXPECT_TRUE(IsDigest(kOne));
  for (const char* wrong : {"", "sha256:", kOne + 7, "sha256:7692C3", "md5:0"}) {
    EXPECT_FALSE(IsDigest(wrong)) << wrong;
  }
}

}  // namespace model_files_test
}  // namespace epikv
