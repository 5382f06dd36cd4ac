#include "server/call/tokens.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace epikv {
namespace {

constexpr Role kRoles[] = {Role::kUser, Role::kOperator, Role::kExperimenter};
constexpr size_t kMaxNameBytes = 64;
// Of a file that is something else altogether, its first lines say enough.
constexpr size_t kMostProblems = 10;

std::optional<Role> RoleCalled(absl::string_view name) {
  for (const Role role : kRoles) {
    if (RoleName(role) == name) return role;
  }
  return std::nullopt;
}

bool IsName(absl::string_view name) {
  return name.size() <= kMaxNameBytes && std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ||
                  c == '-' || c == '@';
         });
}

bool IsLowerHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f'); });
}

}  // namespace

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kUser:
      return "user";
    case Role::kOperator:
      return "operator";
    case Role::kExperimenter:
      return "experimenter";
  }
  return "";
}

struct TokenTable::Parser {
  TokenTable table;
  std::set<std::string, std::less<>> names;
  std::set<Digest> digests;
  std::vector<std::string> problems;

  void AddLine(size_t number, absl::string_view line) {
    auto wrong = [&](absl::string_view what) {
      problems.push_back(absl::StrCat("line ", number, ": ", what));
    };
    if (line.empty() || line.front() == '#') return;
    const std::vector<absl::string_view> fields =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (fields.empty()) return;
    if (fields.size() != 3) return wrong("must be `role name sha256-of-the-token`");
    const std::optional<Role> role = RoleCalled(fields[0]);
    if (!role.has_value()) wrong("the role must be user, operator or experimenter");
    const bool named = IsName(fields[1]);
    if (!named) wrong("the name must be at most 64 letters, digits, '.', '_', '-' and '@'");
    if (named && !names.emplace(fields[1]).second) wrong("the name is already on an earlier line");
    Digest digest;
    if (fields[2].size() != 2 * digest.size() || !IsLowerHex(fields[2])) {
      return wrong("the digest must be 64 lower-case hex digits");
    }
    const std::string bytes = absl::HexStringToBytes(fields[2]);
    std::copy(bytes.begin(), bytes.end(), digest.begin());
    if (!digests.insert(digest).second) wrong("the digest is already on an earlier line");
    if (!role.has_value()) return;
    table.entries_.push_back({{.name = std::string(fields[1]), .role = *role}, digest});
  }
};

absl::StatusOr<TokenTable> TokenTable::Parse(absl::string_view text) {
  Parser parser;
  size_t number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    parser.AddLine(++number, line);
    if (parser.problems.size() > kMostProblems) {
      parser.problems.back() = "...";
      break;
    }
  }
  // A file that somebody is about to write would lock everybody out.
  if (parser.table.entries_.empty() && parser.problems.empty()) {
    parser.problems.push_back("the file has no token");
  }
  if (parser.problems.empty()) return std::move(parser.table);
  return absl::InvalidArgumentError(absl::StrJoin(parser.problems, "; "));
}

const Identity* TokenTable::Find(absl::string_view token) const {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  const Identity* found = nullptr;
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(digest.data(), entry.digest.data(), digest.size()) == 0) {
      found = &entry.identity;
    }
  }
  return found;
}

}  // namespace epikv
