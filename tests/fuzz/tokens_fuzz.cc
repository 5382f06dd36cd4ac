// A file of tokens: all of it is read, or the error names lines and quotes none of them.

#include <openssl/sha.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/call/tokens.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

constexpr absl::string_view kFaults[] = {
    "must be `role name sha256-of-the-token [until=TIME]`, or `role name san:VALUE`",
    "the role must be user, operator or experimenter",
    "the name must be at most 64 letters, digits, '.', '_', '-' and '@'",
    "the name has another role on an earlier line",
    "a certificate has an end of its own",
    "a certificate's name is missing",
    "the certificate's name is already on an earlier line",
    "after the digest, until=TIME must be a time like 2027-01-31T00:00:00Z",
    "the digest must be 64 lower-case hex digits",
    "the digest is already on an earlier line",
};

// Nothing of the file, and so no token and no digest, can be in a fault but the number of a line.
void CheckFault(absl::string_view fault, size_t lines) {
  if (fault == "..." || fault == "the file has no token") return;
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(fault, absl::MaxSplits(": ", 1));
  absl::string_view number = parts.first;
  size_t line = 0;
  Require(absl::ConsumePrefix(&number, "line ") && absl::SimpleAtoi(number, &line) && line >= 1 &&
              line <= lines,
          "a fault names a line", fault);
  Require(std::find(std::begin(kFaults), std::end(kFaults), parts.second) != std::end(kFaults),
          "a fault says one of few things", fault);
}

std::string DigestOf(absl::string_view token) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

// Blank lines and comments hold none.
size_t CountEntries(const std::vector<absl::string_view>& lines) {
  return std::count_if(lines.begin(), lines.end(), [](absl::string_view line) {
    return line.find_first_not_of(" \t") != line.npos && line.front() != '#';
  });
}

void CheckFile(const std::string& text) {
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(text);
  if (!table.ok()) {
    Require(!table.status().message().empty(), "an error has a text");
    for (absl::string_view fault : absl::StrSplit(table.status().message(), "; ")) {
      CheckFault(fault, lines.size());
    }
    return;
  }
  Require(table->size() == CountEntries(lines) && table->size() > 0, "every line is read");
  Require(!TokenTable::Parse(absl::StrCat(text, "\n", text)).ok(), "nobody is there twice");

  // One more, who is not there yet, is found by his token, and nobody else is.
  const std::string token = absl::StrCat("token of ", text.size());
  Require(table->Find(token) == nullptr, "a stranger is nobody");
  const absl::StatusOr<TokenTable> longer =
      TokenTable::Parse(absl::StrCat(text, "\n# and\noperator last@ ", DigestOf(token), "\n"));
  if (!longer.ok()) {
    Require(absl::StrContains(text, "last@"), "a line is added", longer.status().message());
    return;
  }
  const TokenTable::Token* found = longer->Find(token);
  Require(found != nullptr && found->identity.name == "last@" &&
              found->identity.role == Role::kOperator && found->until == absl::InfiniteFuture(),
          "who is added is found");
  Require(longer->size() == table->size() + 1, "one is added");
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckFile({reinterpret_cast<const char*>(data), size});
  return 0;
}
