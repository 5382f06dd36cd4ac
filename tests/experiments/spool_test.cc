#include "server/experiments/store/spool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/experiment_records.h"
#include "tests/fixtures/temporary_folder.h"

namespace epikv {
namespace spool_test {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

v1::ExperimentRecord Named(const std::string& id) { return Record(Begun{.id = id}); }

std::string NameOf(const v1::ExperimentRecord& record) { return record.began().id(); }

class SpoolTest : public ::testing::Test {
 protected:
  std::string path() const { return folder_.File("spool"); }
  std::unique_ptr<Spool> Open(const SpoolOptions& options = {}) const {
    absl::StatusOr<std::unique_ptr<Spool>> spool = Spool::Open(path(), options);
    EXPECT_TRUE(spool.ok()) << spool.status();
    return spool.ok() ? *std::move(spool) : nullptr;
  }
  static void Append(Spool& spool, const std::vector<std::string>& ids) {
    std::vector<v1::ExperimentRecord> records;
    for (const std::string& id : ids) records.push_back(Named(id));
    const absl::Status status = spool.Append(records);
    EXPECT_TRUE(status.ok()) << status;
  }
  // Reads and removes all there is.
  static std::vector<std::string> Drain(Spool& spool, size_t at_once = 2) {
    std::vector<std::string> ids;
    while (!spool.empty()) {
      const absl::StatusOr<Spool::Batch> batch = spool.Read(at_once);
      EXPECT_TRUE(batch.ok()) << batch.status();
      if (!batch.ok()) break;
      for (const v1::ExperimentRecord& record : batch->records) ids.push_back(NameOf(record));
      spool.Remove(*batch);
    }
    return ids;
  }
  std::vector<std::string> Segments() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path())) {
      if (entry.path().extension() == ".spool") names.push_back(entry.path().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  static std::string Contents(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static void Put(const std::string& file, const std::string& contents) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << contents;
  }

  TemporaryFolder folder_;
};

TEST_F(SpoolTest, GivesBackWhatItTookInOrder) {
  const std::unique_ptr<Spool> spool = Open();
  EXPECT_TRUE(spool->empty());
  Append(*spool, {"a", "b", "c"});
  Append(*spool, {"d"});
  EXPECT_FALSE(spool->empty());
  EXPECT_THAT(Drain(*spool), ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(spool->bytes(), 0);
  EXPECT_THAT(Segments(), IsEmpty());
}

TEST_F(SpoolTest, RecordsAreAsTheyWere) {
  const v1::ExperimentRecord outcome =
      Record(Seen{.client = "c", .at = 1.5, .value = 1.0 / 3, .key = std::string("\0k", 2)});
  const std::unique_ptr<Spool> spool = Open();
  ASSERT_TRUE(spool->Append({&outcome, 1}).ok());
  EXPECT_EQ(spool->Read(1)->records.at(0).SerializeAsString(), outcome.SerializeAsString());
}

TEST_F(SpoolTest, OutlivesItsProcess) {
  Append(*Open(), {"a", "b"});
  Append(*Open(), {"c"});
  EXPECT_THAT(Drain(*Open()), ElementsAre("a", "b", "c"));
}

// A crash between the store's commit and the removal: what comes again changes nothing in a store.
TEST_F(SpoolTest, WhatWasReadAndNotRemovedComesAgain) {
  {
    const std::unique_ptr<Spool> spool = Open();
    Append(*spool, {"a", "b", "c"});
    EXPECT_THAT(spool->Read(2)->records, SizeIs(2));
    EXPECT_THAT(spool->Read(2)->records, SizeIs(2));
    spool->Remove(*spool->Read(1));
  }
  EXPECT_THAT(Drain(*Open()), ElementsAre("a", "b", "c"));
}

TEST_F(SpoolTest, TakesMoreWhileItIsBeingEmptied) {
  const std::unique_ptr<Spool> spool = Open({.segment_bytes = 100});
  std::vector<std::string> ids;
  int next = 0;
  for (int round = 0; round < 50; ++round) {
    Append(*spool, {absl::StrCat(next), absl::StrCat(next + 1)});
    next += 2;
    const absl::StatusOr<Spool::Batch> batch = spool->Read(1);
    ids.push_back(NameOf(batch->records.at(0)));
    spool->Remove(*batch);
  }
  for (std::string& id : Drain(*spool)) ids.push_back(std::move(id));
  ASSERT_THAT(ids, SizeIs(100));
  for (int i = 0; i < 100; ++i) EXPECT_EQ(ids[i], absl::StrCat(i));
}

TEST_F(SpoolTest, SegmentsThatAreDoneWithAreGone) {
  const std::unique_ptr<Spool> spool = Open({.segment_bytes = 1});  // a segment an Append
  for (const char* id : {"a", "b", "c"}) Append(*spool, {id});
  EXPECT_THAT(Segments(), SizeIs(3));
  const int64_t bytes = spool->bytes();
  spool->Remove(*spool->Read(10));
  EXPECT_THAT(Segments(), SizeIs(2));
  EXPECT_LT(spool->bytes(), bytes);
  EXPECT_THAT(Drain(*spool), ElementsAre("b", "c"));
}

TEST_F(SpoolTest, HoldsNoMoreThanItsBytes) {
  const std::unique_ptr<Spool> spool = Open({.max_bytes = 300});
  int taken = 0;
  while (spool->Append(std::vector{Named("x")}).ok()) ++taken;
  EXPECT_GT(taken, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(spool->Append(std::vector{Named("x")})));
  EXPECT_LE(spool->bytes(), 300);
  EXPECT_THAT(Drain(*spool), SizeIs(taken));
  Append(*spool, {"y"});
}

TEST_F(SpoolTest, AFullDiskTakesNothingAndHarmsNothing) {
  signal(SIGXFSZ, SIG_IGN);
  const std::unique_ptr<Spool> spool = Open();
  Append(*spool, {"a"});
  rlimit before = {};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit full = {.rlim_cur = static_cast<rlim_t>(spool->bytes() + 20),  // in mid-record
                       .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &full);
  const absl::Status status = spool->Append(std::vector{Named("b")});
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  Append(*spool, {"c"});
  EXPECT_THAT(Drain(*spool), ElementsAre("a", "c"));
  EXPECT_EQ(spool->damage().tails, 0);
}

TEST_F(SpoolTest, IsUsedByOneAlone) {
  const std::unique_ptr<Spool> spool = Open();
  const absl::Status second = Spool::Open(path()).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr("another process"));
}

TEST_F(SpoolTest, IsForItsOwnerAlone) {
  const std::unique_ptr<Spool> spool = Open();
  Append(*spool, {"a"});
  struct stat facts = {};
  ASSERT_EQ(stat(path().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700u);
  for (const std::string& file : {Segments().at(0), path() + "/lock"}) {
    ASSERT_EQ(stat(file.c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, 0600u) << file;
  }
}

TEST_F(SpoolTest, LeavesFilesOfOthersAlone) {
  Open();
  Put(path() + "/notes.txt", "mine");
  Put(path() + "/1.spool", "mine too");
  EXPECT_TRUE(Open()->empty());
  EXPECT_EQ(Contents(path() + "/notes.txt"), "mine");
  EXPECT_EQ(Contents(path() + "/1.spool"), "mine too");
}

TEST_F(SpoolTest, ATailTornAnywhereIsCutAndCounted) {
  Append(*Open(), {"a", "b"});
  const std::string file = Segments().at(0);
  const std::string two = Contents(file);
  Append(*Open(), {"last"});
  const std::string last = Contents(Segments().at(1)).substr(8);
  std::filesystem::remove(Segments().at(1));
  const std::string whole = two + last;
  for (size_t size = two.size() + 1; size < whole.size(); ++size) {
    Put(file, whole.substr(0, size));
    const std::unique_ptr<Spool> spool = Open();
    EXPECT_EQ(spool->damage().tails, 1);
    EXPECT_EQ(spool->damage().bytes, static_cast<int64_t>(size - two.size()));
    Append(*spool, {"next"});
    EXPECT_THAT(Drain(*spool), ElementsAre("a", "b", "next")) << size;
  }
}

// As a file system may leave it that had written its size before its blocks.
TEST_F(SpoolTest, ATailOfZerosOrRubbishIsCut) {
  Append(*Open(), {"a"});
  const std::string file = Segments().at(0);
  const std::string sound = Contents(file);
  for (const std::string& tail : {std::string(500, '\0'), std::string(500, '\xff')}) {
    Put(file, sound + tail);
    const std::unique_ptr<Spool> spool = Open();
    EXPECT_EQ(spool->damage().bytes, 500);
    EXPECT_THAT(Drain(*spool), ElementsAre("a"));
    Put(file, sound);
  }
}

TEST_F(SpoolTest, AByteThatChangedAnywhereLosesNoOtherSegment) {
  {
    const std::unique_ptr<Spool> spool = Open({.segment_bytes = 1});
    for (const char* id : {"a", "b", "c"}) Append(*spool, {id});
  }
  const std::vector<std::string> files = Segments();
  std::vector<std::string> sound;
  for (const std::string& file : files) sound.push_back(Contents(file));
  for (size_t at = 0; at < sound[1].size(); ++at) {
    for (size_t i = 0; i < files.size(); ++i) Put(files[i], sound[i]);
    std::string changed = sound[1];
    changed[at] ^= 0x40;
    Put(files[1], changed);
    const std::unique_ptr<Spool> spool = Open();
    const std::vector<std::string> ids = Drain(*spool);
    const bool in_record = at >= 8;  // behind the segment's own name
    EXPECT_THAT(ids, in_record ? ElementsAreArray({"a", "c"}) : ElementsAreArray({"a", "b", "c"}));
    EXPECT_EQ(spool->damage().tails, in_record ? 1 : 0) << at;
  }
}

TEST_F(SpoolTest, ANewSegmentThatACrashLeftEmptyIsNothing) {
  Append(*Open(), {"a"});
  Put(path() + "/00000000000000ff.spool", "epik");
  const std::unique_ptr<Spool> spool = Open();
  Append(*spool, {"b"});
  EXPECT_THAT(Drain(*spool), ElementsAre("a", "b"));
}

TEST_F(SpoolTest, ANewerProgramsSpoolIsRefused) {
  Open();
  Put(path() + "/0000000000000001.spool", "epikvSP9 something");
  const absl::Status status = Spool::Open(path()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("newer"));
  EXPECT_EQ(Contents(path() + "/0000000000000001.spool"), "epikvSP9 something");
}

TEST_F(SpoolTest, SaysWhereItCannotBe) {
  const absl::Status status = Spool::Open(folder_.File("no/such")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no/such"));
}

}  // namespace spool_test
}  // namespace epikv
