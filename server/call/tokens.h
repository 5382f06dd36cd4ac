#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Who may call, by bearer tokens of which only digests are kept.

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
  // One line an identity, `role name digest`: the digest is the token's SHA-256 in lower-case hex.
  // Blank lines and those that begin with '#' count for nothing. The error names the lines that are
  // wrong, and quotes none of them: one may hold the token itself.
  static absl::StatusOr<TokenTable> Parse(absl::string_view text);

  // Whose token it is; null: nobody's. Takes as long whoever it is.
  const Identity* Find(absl::string_view token) const;

  size_t size() const { return entries_.size(); }

 private:
  using Digest = std::array<uint8_t, 32>;
  struct Entry {
    Identity identity;
    Digest digest;
  };
  struct Parser;

  std::vector<Entry> entries_;
};

}  // namespace epikv
