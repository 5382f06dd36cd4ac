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
#include "absl/strings/strip.h"

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
  std::map<std::string, Role, std::less<>> roles;  // by name
  std::set<Digest> digests;
  std::vector<std::string> problems;
  size_t line = 0;

  void AddLine(absl::string_view text) {
    ++line;
    if (text.empty() || text.front() == '#') return;
    const std::vector<absl::string_view> fields =
        absl::StrSplit(text, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (fields.empty()) return;
    if (fields.size() < 3 || fields.size() > 4) {
      return Wrong(
          "must be `role name sha256-of-the-token [until=TIME]`, or `role name san:VALUE`");
    }
    const std::optional<Identity> identity = ReadIdentity(fields[0], fields[1]);
    absl::string_view name = fields[2];
    if (absl::ConsumePrefix(&name, "san:")) {
      if (fields.size() == 4) Wrong("a certificate has an end of its own");
      if (name.empty()) return Wrong("a certificate's name is missing");
      if (!identity.has_value()) return;
      if (!table.certificates_.emplace(name, *identity).second) {
        Wrong("the certificate's name is already on an earlier line");
      }
      return;
    }
    const std::optional<Digest> digest = ReadDigest(fields[2]);
    const std::optional<absl::Time> until =
        fields.size() == 4 ? ReadUntil(fields[3]) : absl::InfiniteFuture();
    if (!identity.has_value() || !digest.has_value() || !until.has_value()) return;
    table.entries_.push_back({{.identity = *identity, .until = *until}, *digest});
  }

 private:
  void Wrong(absl::string_view what) {
    problems.push_back(absl::StrCat("line ", line, ": ", what));
  }

  std::optional<Identity> ReadIdentity(absl::string_view role_name, absl::string_view name) {
    const std::optional<Role> role = RoleCalled(role_name);
    if (!role.has_value()) Wrong("the role must be user, operator or experimenter");
    if (!IsName(name)) {
      Wrong("the name must be at most 64 letters, digits, '.', '_', '-' and '@'");
      return std::nullopt;
    }
    if (!role.has_value()) return std::nullopt;
    if (roles.emplace(name, *role).first->second != *role) {
      Wrong("the name has another role on an earlier line");
      return std::nullopt;
    }
    return Identity{.name = std::string(name), .role = *role};
  }

  std::optional<Digest> ReadDigest(absl::string_view hex) {
    Digest digest;
    if (hex.size() != 2 * digest.size() || !IsLowerHex(hex)) {
      Wrong("the digest must be 64 lower-case hex digits");
      return std::nullopt;
    }
    const std::string bytes = absl::HexStringToBytes(hex);
    std::copy(bytes.begin(), bytes.end(), digest.begin());
    if (!digests.insert(digest).second) Wrong("the digest is already on an earlier line");
    return digest;
  }

  std::optional<absl::Time> ReadUntil(absl::string_view text) {
    absl::Time until;
    if (absl::ConsumePrefix(&text, "until=") &&
        absl::ParseTime(absl::RFC3339_full, text, &until, nullptr)) {
      return until;
    }
    Wrong("after the digest, until=TIME must be a time like 2027-01-31T00:00:00Z");
    return std::nullopt;
  }
};

absl::StatusOr<TokenTable> TokenTable::Parse(absl::string_view text) {
  Parser parser;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    parser.AddLine(line);
    if (parser.problems.size() > kMostProblems) {
      parser.problems.back() = "...";
      break;
    }
  }
  // A file that somebody is about to write would lock everybody out.
  if (parser.table.size() == 0 && parser.problems.empty()) {
    parser.problems.push_back("the file has no token");
  }
  if (parser.problems.empty()) return std::move(parser.table);
  return absl::InvalidArgumentError(absl::StrJoin(parser.problems, "; "));
}

const TokenTable::Token* TokenTable::Find(absl::string_view token) const {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  const Token* found = nullptr;
  for (const Entry& entry : entries_) {
    if (CRYPTO_memcmp(digest.data(), entry.digest.data(), digest.size()) == 0) {
      found = &entry.token;
    }
  }
  return found;
}

const Identity* TokenTable::FindCertificate(const std::vector<absl::string_view>& names) const {
  const Identity* found = nullptr;
  for (const absl::string_view name : names) {
    const auto known = certificates_.find(name);
    if (known == certificates_.end()) continue;
    if (found != nullptr && found->name != known->second.name) return nullptr;
    found = &known->second;
  }
  return found;
}

}  // namespace epikv
