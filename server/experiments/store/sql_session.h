#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace epikv {

struct SqlBytes {
  std::string bytes;
};
using SqlValue = std::variant<std::monostate, int64_t, double, std::string, SqlBytes>;
using SqlRow = std::vector<SqlValue>;

// How long things may take. By a clock that does not jump.
struct SqlTimeouts {
  absl::Duration connect = absl::Seconds(2);
  // One round trip, or one wait for a lock.
  absl::Duration statement = absl::Seconds(5);
  // All of one transaction.
  absl::Duration transaction = absl::Seconds(10);
};

// One connection to a database that speaks the SQL which SQLite and PostgreSQL share: $1 is a
// parameter, ON CONFLICT, RETURNING, row values; types BIGINT, SMALLINT, DOUBLE PRECISION, TEXT,
// BYTEA. Of one thread at a time. Errors are those of Store.
class SqlSession {
 public:
  virtual ~SqlSession() = default;

  // Begins a transaction that holds the one write lock of the whole database until it ends, so
  // that writers of all processes come one after another and see what those before have committed.
  virtual absl::Status Begin() = 0;
  // OK: it survives power loss. An error: it may have been committed all the same.
  virtual absl::Status Commit() = 0;
  // Nothing where no transaction is open.
  virtual void Rollback() = 0;

  // Runs `sql` once for each element of `calls`, its parameters, in order, up to the first error;
  // in one round trip. call: which one gave the row.
  using OnRow = absl::FunctionRef<void(size_t call, SqlRow row)>;
  virtual absl::Status RunEach(absl::string_view sql, absl::Span<const SqlRow> calls,
                               OnRow on_row) = 0;

  // Tables and views, but those that come with the database or its extensions.
  virtual absl::StatusOr<std::vector<std::string>> Tables() = 0;
  // Changes the database's own settings; only for one that is known to be ours.
  virtual absl::Status Adopt() = 0;
  // False: of no more use, as far as can be told without a round trip.
  virtual bool usable() = 0;

  absl::Status RunEach(absl::string_view sql, absl::Span<const SqlRow> calls);
  absl::Status Run(absl::string_view sql, const SqlRow& parameters = {});
  absl::StatusOr<std::vector<SqlRow>> Query(absl::string_view sql, const SqlRow& parameters = {});
};

// Of a value that is not of that type: zero, empty.
int64_t IntOf(const SqlValue& value);
double DoubleOf(const SqlValue& value);
std::string TextOf(const SqlValue& value);
bool IsNull(const SqlValue& value);

}  // namespace epikv
