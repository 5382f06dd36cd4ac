#include "server/call/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace tokens_test {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;
using ::testing::Not;

// `printf one | sha256sum`, and so on.
constexpr char kDigestOfOne[] = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
constexpr char kDigestOfTwo[] = "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3";

std::string Faults(const std::string& text) {
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(text);
  return table.ok() ? "" : std::string(table.status().message());
}

TEST(TokenTableTest, FindsTheOwnersOfTokens) {
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(absl::StrCat(
      "# staff\n\n  \noperator ann\t", kDigestOfOne, "\nuser  bob.b-1@x_y ", kDigestOfTwo));
  ASSERT_EQ(table.status(), absl::OkStatus());
  ASSERT_EQ(table->size(), 2u);
  ASSERT_NE(table->Find("one"), nullptr);
  EXPECT_EQ(table->Find("one")->identity.name, "ann");
  EXPECT_EQ(table->Find("one")->identity.role, Role::kOperator);
  ASSERT_NE(table->Find("two"), nullptr);
  EXPECT_EQ(table->Find("two")->identity.name, "bob.b-1@x_y");
  EXPECT_EQ(table->Find("two")->identity.role, Role::kUser);
  for (const char* stranger : {"", "on", "one ", "One", kDigestOfOne}) {
    EXPECT_EQ(table->Find(stranger), nullptr) << stranger;
  }
}

TEST(TokenTableTest, EveryRoleMayDoWhatAUserMay) {
  const Role roles[] = {Role::kUser, Role::kOperator, Role::kExperimenter};
  for (const Role has : roles) {
    for (const Role needs : roles) {
      EXPECT_EQ((Identity{"x", has}.May(needs)), needs == Role::kUser || needs == has)
          << RoleName(has) << " " << RoleName(needs);
    }
  }
}

TEST(TokenTableTest, EverythingThatIsWrongIsNamedByLine) {
  const std::string faults = Faults(
      absl::StrCat("root ann ", kDigestOfOne, "\nuser bob\nuser c ", kDigestOfTwo, " d\nuser eve ",
                   kDigestOfOne, "0\nuser a/b ", kDigestOfTwo, "\nuser ok ", std::string(64, 'A'),
                   "\nuser e ", kDigestOfTwo, " until=2027-01-31T00:00:00Z more"));
  EXPECT_THAT(faults,
              AllOf(HasSubstr("line 1: the role must be user, operator or experimenter"),
                    HasSubstr("line 2: must be `role name sha256-of-the-token"),
                    HasSubstr("line 3: after the digest, until=TIME must be"),
                    HasSubstr("line 4: the digest must be 64 lower-case hex digits"),
                    HasSubstr("line 5: the name must be at most 64"),
                    HasSubstr("line 6: the digest must"), HasSubstr("line 7: must be `role name")));
  EXPECT_THAT(Faults(absl::StrCat("user f ", kDigestOfTwo,
                                  " until=tomorrow\nuser g san:g until=2027-01-31T00:00:00Z",
                                  "\nuser h san:")),
              AllOf(HasSubstr("line 1: after the digest, until=TIME must be a time"),
                    HasSubstr("line 2: a certificate has an end of its own"),
                    HasSubstr("line 3: a certificate's name is missing")));
}

TEST(TokenTableTest, ANameHasOneRoleAndADigestOneName) {
  EXPECT_THAT(Faults(absl::StrCat("user a ", kDigestOfOne, "\noperator a ", kDigestOfTwo)),
              HasSubstr("line 2: the name has another role on an earlier line"));
  EXPECT_THAT(Faults(absl::StrCat("user a ", kDigestOfOne, "\noperator b ", kDigestOfOne)),
              HasSubstr("line 2: the digest is already on an earlier line"));
  EXPECT_THAT(Faults("user a san:x\nuser b san:x"),
              HasSubstr("line 2: the certificate's name is already on an earlier line"));
}

TEST(TokenTableTest, ANameMayHaveSeveralTokensWithEndsOfTheirOwn) {
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(
      absl::StrCat("user ann ", kDigestOfOne, " until=2027-01-31T12:00:00+01:00\nuser ann ",
                   kDigestOfTwo, "\nuser ann san:a"));
  ASSERT_EQ(table.status(), absl::OkStatus());
  EXPECT_EQ(table->size(), 3u);
  EXPECT_EQ(table->Find("one")->identity.name, "ann");
  EXPECT_EQ(table->Find("one")->until, absl::FromUnixSeconds(1801393200));  // 11:00 in UTC
  EXPECT_EQ(table->Find("two")->identity.name, "ann");
  EXPECT_EQ(table->Find("two")->until, absl::InfiniteFuture());
}

TEST(TokenTableTest, ACertificateIsKnownByOneOfItsNames) {
  const absl::StatusOr<TokenTable> table =
      TokenTable::Parse("user ann san:spiffe://x/ann\nuser ann san:ann.x\noperator bob san:bob.x");
  ASSERT_EQ(table.status(), absl::OkStatus());
  EXPECT_TRUE(table->has_certificates());
  EXPECT_EQ(table->FindCertificate({"other", "ann.x", "spiffe://x/ann"})->name, "ann");
  EXPECT_EQ(table->FindCertificate({"bob.x"})->role, Role::kOperator);
  EXPECT_EQ(table->FindCertificate({}), nullptr);
  EXPECT_EQ(table->FindCertificate({"ann", "ann.x.y", "*.x"}), nullptr);
  EXPECT_EQ(table->FindCertificate({"ann.x", "bob.x"}), nullptr) << "of two people";
}

TEST(TokenTableTest, FileWithoutTokensIsRefused) {
  EXPECT_THAT(Faults(""), HasSubstr("no token"));
  EXPECT_THAT(Faults("# none yet\n\n"), HasSubstr("no token"));
}

TEST(TokenTableTest, ErrorsQuoteNothing) {
  EXPECT_THAT(Faults("user bob hunter2secret\nsecret\nsecret secret secret"),
              AllOf(Not(HasSubstr("secret")), Not(HasSubstr("bob"))));
}

TEST(TokenTableTest, FileOfSomethingElseIsNotListedLineByLine) {
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "line of a book\n";
  EXPECT_LT(Faults(text).size(), 1000u);
}

TEST(TokenTableTest, AnyBytesAreReadOrRefused) {
  EXPECT_NE(Faults(std::string("user \0 x", 8)), "");
  EXPECT_NE(Faults(absl::StrCat("user a ", kDigestOfOne, "\r\n")), "");
  EXPECT_NE(Faults(absl::StrCat("user \xff ", kDigestOfOne)), "");
  EXPECT_NE(Faults(absl::StrCat("user ", std::string(65, 'a'), " ", kDigestOfOne)), "");
}

// Bytes changed, taken out and put in: what is read is no more than was there.
TEST(TokenTableTest, DamagedFilesAreReadOrRefused) {
  const std::string whole =
      absl::StrCat("# us\noperator ann ", kDigestOfOne, "\n\nuser bob ", kDigestOfTwo, "\n");
  std::mt19937 random(1);
  int read = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text = whole;
    for (uint32_t change = random() % 4; change > 0; --change) {
      const size_t at = random() % text.size();
      const char byte = random() % 4 == 0 ? " \t\n#"[random() % 4] : static_cast<char>(random());
      switch (random() % 3) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.erase(at, 1 + random() % 80);
          break;
        default:
          text.insert(at, 1, byte);
      }
      if (text.empty()) break;
    }
    const absl::StatusOr<TokenTable> table = TokenTable::Parse(text);
    if (table.ok()) {
      ++read;
      EXPECT_THAT(table->size(), AllOf(Ge(1u), Le(2u)));
    } else {
      ++refused;
      EXPECT_NE(table.status().message(), "");
    }
  }
  EXPECT_GT(read, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace tokens_test
}  // namespace epikv
