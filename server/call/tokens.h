#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

// Who may call, by bearer tokens of which only digests are kept, or by client certificates.

namespace epikv {

enum class Role { kUser, kOperator, kExperimenter };

absl::string_view RoleName(Role role);  // "user"

struct Identity {
  std::string name;  // empty: anonymous, where no tokens are asked for
  Role role = Role::kUser;

  // Every role may do what a user may, and who is anonymous everything.
  bool May(Role needed) const { return needed == Role::kUser || needed == role || name.empty(); }
};

// A file of tokens, read. Immutable.
class TokenTable {
 public:
  struct Token {
    Identity identity;
    absl::Time until = absl::InfiniteFuture();  // by the wall clock
  };

  // A line says by what somebody is known:
  //
  //   role name digest              a token, by its SHA-256 in lower-case hex
  //   role name digest until=TIME   the same, up to a time in RFC 3339
  //   role name san:VALUE           a client certificate, by a subject alternative name
  //
  // A name may have several lines, of one role. Blank lines and those that begin with '#' count for
  // nothing. The error names the lines that are wrong, and quotes none of them: one may hold the
  // token itself.
  static absl::StatusOr<TokenTable> Parse(absl::string_view text);

  // Whose token it is, or was until it expired; null: nobody's. Takes as long whoever it is.
  const Token* Find(absl::string_view token) const;

  // Who is known by one of a certificate's names; null: nobody, or several.
  const Identity* FindCertificate(const std::vector<absl::string_view>& names) const;

  bool has_certificates() const { return !certificates_.empty(); }
  size_t size() const { return entries_.size() + certificates_.size(); }

 private:
  using Digest = std::array<uint8_t, 32>;
  struct Entry {
    Token token;
    Digest digest;
  };
  struct Parser;

  std::vector<Entry> entries_;
  std::map<std::string, Identity, std::less<>> certificates_;  // by their name
};

}  // namespace epikv
