#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/experiments/store/sql_session.h"

namespace epikv {

// From one version of the schema to the next; statements of all databases alike.
struct Migration {
  std::vector<std::string> statements;
};

// The first makes version 1 of an empty database. A migration that was released does not change;
// what it leaves must do for daemons of the version before, which may be running.
absl::Span<const Migration> Migrations();

// Brings the database to the version that `migrations` make. Each is one transaction; replicas may
// do so at once. kFailedPrecondition, and nothing changed: its version is newer, or its tables are
// another program's.
absl::Status Migrate(SqlSession& session, absl::Span<const Migration> migrations = Migrations());

}  // namespace epikv
