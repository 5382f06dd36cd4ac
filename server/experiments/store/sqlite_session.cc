#include "server/experiments/store/sqlite_session.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

// Instructions of SQLite's machine between looks at the clock: well below a millisecond.
constexpr int kStepsBetweenLooks = 10'000;
constexpr int kRetryMs = 5;

absl::StatusCode CodeOf(int result) {
  switch (result & 0xff) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_FULL:
    case SQLITE_IOERR:
    case SQLITE_CANTOPEN:
    case SQLITE_NOMEM:
    case SQLITE_READONLY:
    case SQLITE_PROTOCOL:
    case SQLITE_INTERRUPT:
    case SQLITE_SCHEMA:
      return absl::StatusCode::kUnavailable;
    case SQLITE_CONSTRAINT:
    case SQLITE_MISMATCH:
    case SQLITE_TOOBIG:
    case SQLITE_RANGE:
      return absl::StatusCode::kInvalidArgument;
    case SQLITE_NOTADB:
      return absl::StatusCode::kFailedPrecondition;
    case SQLITE_CORRUPT:
      return absl::StatusCode::kDataLoss;
    case SQLITE_PERM:
    case SQLITE_AUTH:
      return absl::StatusCode::kPermissionDenied;
    default:
      return absl::StatusCode::kInternal;
  }
}

class SqliteSession final : public SqlSession {
 public:
  SqliteSession(std::string path, sqlite3* database, const SqlTimeouts& timeouts)
      : path_(std::move(path)), database_(database), timeouts_(timeouts) {
    sqlite3_extended_result_codes(database_, 1);
    sqlite3_busy_timeout(database_,
                         static_cast<int>(absl::ToInt64Milliseconds(timeouts.statement)));
    sqlite3_progress_handler(
        database_, kStepsBetweenLooks,
        [](void* session) -> int {
          return SteadyTime() > static_cast<SqliteSession*>(session)->deadline_ ? 1 : 0;
        },
        this);
  }
  ~SqliteSession() override { sqlite3_close_v2(database_); }

  absl::Status Begin() override {
    // What is committed to a file that was removed or replaced would be lost.
    if (Moved()) return absl::UnavailableError(absl::StrCat("'", path_, "' was removed"));
    transaction_deadline_ = SteadyTime() + timeouts_.transaction;
    return Run("BEGIN IMMEDIATE");
  }
  absl::Status Commit() override { return Run("COMMIT"); }
  void Rollback() override {
    if (sqlite3_get_autocommit(database_) != 0) return;
    transaction_deadline_ = absl::InfiniteDuration();
    Run("ROLLBACK").IgnoreError();
  }

  absl::Status RunEach(absl::string_view sql, absl::Span<const SqlRow> calls,
                       OnRow on_row) override {
    SetDeadline();
    std::string text(sql);
    std::replace(text.begin(), text.end(), '$', '?');  // ?1 is the first parameter, wherever it is
    sqlite3_stmt* statement = nullptr;
    int result = sqlite3_prepare_v2(database_, text.c_str(), -1, &statement, nullptr);
    const absl::Cleanup finalize = [&statement] { sqlite3_finalize(statement); };
    if (result != SQLITE_OK) return Error(result);
    for (size_t call = 0; call < calls.size(); ++call) {
      SetDeadline();
      if (result = Bind(statement, calls[call]); result != SQLITE_OK) return Error(result);
      while ((result = sqlite3_step(statement)) == SQLITE_ROW) on_row(call, RowOf(statement));
      if (result != SQLITE_DONE) return Error(result);
      sqlite3_reset(statement);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> Tables() override {
    absl::StatusOr<std::vector<SqlRow>> rows = Query(
        "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE "
        "'sqlite\\_%' ESCAPE '\\'");
    if (!rows.ok()) return rows.status();
    std::vector<std::string> names;
    for (const SqlRow& row : *rows) names.push_back(TextOf(row[0]));
    return names;
  }

  // The write-ahead log. While another process switches to it SQLite does not wait by itself.
  absl::Status Adopt() override {
    const absl::Duration give_up = SteadyTime() + timeouts_.statement;
    for (;;) {
      absl::StatusOr<std::vector<SqlRow>> mode = Query("PRAGMA journal_mode = WAL");
      if (mode.ok() && TextOf(mode->at(0)[0]) == "wal") return absl::OkStatus();
      if (mode.ok()) {
        return absl::FailedPreconditionError(
            absl::StrCat("'", path_,
                         "': SQLite cannot keep a write-ahead log there, as on network file "
                         "systems; put the file on a local disk, or use PostgreSQL"));
      }
      if (!absl::IsUnavailable(mode.status()) || SteadyTime() > give_up) return mode.status();
      sqlite3_sleep(kRetryMs);
    }
  }

  bool usable() override { return sqlite3_get_autocommit(database_) != 0 && !failed_ && !Moved(); }

 private:
  void SetDeadline() {
    deadline_ = SteadyTime() + timeouts_.statement;
    if (sqlite3_get_autocommit(database_) == 0)
      deadline_ = std::min(deadline_, transaction_deadline_);
  }

  bool Moved() {
    int moved = 0;
    sqlite3_file_control(database_, "main", SQLITE_FCNTL_HAS_MOVED, &moved);
    return moved != 0;
  }

  absl::Status Error(int result) {
    const absl::StatusCode code = CodeOf(result);
    // Nothing is wrong with a session that only had to wait too long, or was given what is wrong.
    failed_ = failed_ || (result & 0xff) == SQLITE_IOERR || code == absl::StatusCode::kDataLoss;
    return absl::Status(code, absl::StrCat("'", path_, "': ", sqlite3_errmsg(database_)));
  }

  static int Bind(sqlite3_stmt* statement, const SqlRow& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      const int index = static_cast<int>(i) + 1;
      const int result = std::visit(
          [statement, index](const auto& value) { return BindOne(statement, index, value); },
          values[i]);
      if (result != SQLITE_OK) return result;
    }
    return SQLITE_OK;
  }
  static int BindOne(sqlite3_stmt* statement, int index, std::monostate) {
    return sqlite3_bind_null(statement, index);
  }
  static int BindOne(sqlite3_stmt* statement, int index, int64_t value) {
    return sqlite3_bind_int64(statement, index, value);
  }
  static int BindOne(sqlite3_stmt* statement, int index, double value) {
    return sqlite3_bind_double(statement, index, value);
  }
  // The values outlive the step that reads them.
  static int BindOne(sqlite3_stmt* statement, int index, const std::string& value) {
    return sqlite3_bind_text64(statement, index, value.data(), value.size(), nullptr, SQLITE_UTF8);
  }
  static int BindOne(sqlite3_stmt* statement, int index, const SqlBytes& value) {
    return sqlite3_bind_blob64(statement, index, value.bytes.data(), value.bytes.size(), nullptr);
  }

  static SqlRow RowOf(sqlite3_stmt* statement) {
    SqlRow row;
    const int columns = sqlite3_column_count(statement);
    row.reserve(static_cast<size_t>(columns));
    for (int i = 0; i < columns; ++i) row.push_back(ValueOf(statement, i));
    return row;
  }
  static SqlValue ValueOf(sqlite3_stmt* statement, int column) {
    switch (sqlite3_column_type(statement, column)) {
      case SQLITE_INTEGER:
        return int64_t{sqlite3_column_int64(statement, column)};
      case SQLITE_FLOAT:
        return sqlite3_column_double(statement, column);
      case SQLITE_TEXT:
      case SQLITE_BLOB: {
        const bool text = sqlite3_column_type(statement, column) == SQLITE_TEXT;
        const void* bytes = sqlite3_column_blob(statement, column);
        const auto size = static_cast<size_t>(sqlite3_column_bytes(statement, column));
        std::string value = size == 0 ? "" : std::string(static_cast<const char*>(bytes), size);
        if (text) return value;
        return SqlBytes{std::move(value)};
      }
      default:
        return std::monostate();
    }
  }

  const std::string path_;
  sqlite3* const database_;
  const SqlTimeouts timeouts_;
  absl::Duration deadline_ = absl::InfiniteDuration();  // of the statement under way
  absl::Duration transaction_deadline_;
  bool failed_ = false;
};

// SQLite would make it for all to read. What was there is not opened: see the header.
absl::Status MakeFile(const std::string& path) {
  const int made = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (made >= 0) {
    close(made);
    return absl::OkStatus();
  }
  if (errno == EEXIST && access(path.c_str(), R_OK | W_OK) == 0) return absl::OkStatus();
  const bool outage = errno == ENOSPC || errno == EDQUOT || errno == EIO || errno == EMFILE ||
                      errno == ENFILE || errno == ENOMEM;
  return absl::Status(
      outage ? absl::StatusCode::kUnavailable : absl::StatusCode::kFailedPrecondition,
      absl::StrCat("cannot write '", path, "': ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SqlSession>> OpenSqlite(const std::string& path,
                                                       const SqlTimeouts& timeouts, bool make) {
  if (make) {
    if (absl::Status status = MakeFile(path); !status.ok()) return status;
  }
  std::error_code no_folder;
  const std::string whole = std::filesystem::absolute(path, no_folder).string();
  if (no_folder) return absl::FailedPreconditionError("the working directory is gone");
  sqlite3* database = nullptr;
  const int result = sqlite3_open_v2(whole.c_str(), &database,
                                     SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
  if (database == nullptr) return absl::UnavailableError("SQLite has no memory");
  auto session = std::make_unique<SqliteSession>(path, database, timeouts);
  if (result != SQLITE_OK) {
    return absl::Status(CodeOf(result),
                        absl::StrCat("cannot open '", path, "': ", sqlite3_errmsg(database)));
  }
  // FULL: a commit has been synced. None of these changes the file.
  for (absl::string_view pragma : {"PRAGMA synchronous = FULL", "PRAGMA foreign_keys = ON"}) {
    if (absl::Status status = session->Run(pragma); !status.ok()) return status;
  }
  return session;
}

}  // namespace epikv
