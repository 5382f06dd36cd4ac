#include "server/experiments/store/postgres_session.h"

#include <libpq-fe.h>
#include <poll.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

// Names our one write lock among the advisory locks of a database.
constexpr int64_t kWriteLock = 0x65706b765f657870;
// A server that keeps its own limit answers within it.
constexpr absl::Duration kGrace = absl::Seconds(1);
constexpr int kTextFormat = 0;
constexpr int kBinaryFormat = 1;

struct Free {
  void operator()(PGconn* connection) const { PQfinish(connection); }
  void operator()(PGresult* result) const { PQclear(result); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

// Of the five letters of SQL's error states.
absl::StatusCode CodeOf(absl::string_view state) {
  const absl::string_view kind = state.substr(0, 2);
  // Values, constraints, and limits of the program: what no index can hold.
  if (kind == "22" || kind == "23" || kind == "54") return absl::StatusCode::kInvalidArgument;
  if (kind == "28") return absl::StatusCode::kUnauthenticated;
  if (state == "42501") return absl::StatusCode::kPermissionDenied;
  if (state == "3D000") return absl::StatusCode::kFailedPrecondition;  // no such database
  if (state == "XX001" || state == "XX002") return absl::StatusCode::kDataLoss;
  // Connections, transactions that others broke, resources, locks, shutdown and time, the system
  // below, and a server that takes no writes. What has no state at all is a connection, too.
  for (absl::string_view outage : {"08", "40", "53", "55", "57", "58"}) {
    if (kind == outage) return absl::StatusCode::kUnavailable;
  }
  if (state.empty() || state == "25006") return absl::StatusCode::kUnavailable;
  return absl::StatusCode::kInternal;
}

// "FATAL:  28P01: ..." -> 28P01. While it connects, libpq tells states only in its verbose texts.
absl::string_view StateIn(absl::string_view message) {
  constexpr absl::string_view kBefore = ":  ";
  for (size_t at = message.find(kBefore); at != message.npos; at = message.find(kBefore, at + 1)) {
    const absl::string_view state = message.substr(at + kBefore.size(), 5);
    if (state.size() == 5 && message.substr(at + kBefore.size() + 5, 1) == ":" &&
        std::all_of(state.begin(), state.end(),
                    [](unsigned char c) { return std::isdigit(c) || std::isupper(c); })) {
      return state;
    }
  }
  return "";
}

// A parameter as libpq sends it. Texts go as they are, so that a NUL in one is an error and no end.
struct Sent {
  explicit Sent(const SqlValue& value) {
    if (const auto* number = std::get_if<int64_t>(&value)) text = absl::StrCat(*number);
    if (const auto* number = std::get_if<double>(&value)) text = absl::StrFormat("%.17g", *number);
    if (const auto* string = std::get_if<std::string>(&value)) text = *string;
    if (const auto* bytes = std::get_if<SqlBytes>(&value)) text = bytes->bytes;
    null = IsNull(value);
    binary = std::holds_alternative<std::string>(value) || std::holds_alternative<SqlBytes>(value);
  }
  std::string text;
  bool null = false;
  bool binary = false;
};

SqlValue ValueOf(const PGresult* result, int row, int column) {
  constexpr Oid kBytes = 17, kInt8 = 20, kInt2 = 21, kInt4 = 23, kFloat8 = 701;
  if (PQgetisnull(result, row, column)) return std::monostate();
  const absl::string_view text(PQgetvalue(result, row, column),
                               static_cast<size_t>(PQgetlength(result, row, column)));
  int64_t whole = 0;
  double number = 0;
  switch (PQftype(result, column)) {
    case kInt8:
    case kInt4:
    case kInt2:
      return absl::SimpleAtoi(text, &whole) ? SqlValue(whole) : SqlValue();
    case kFloat8:
      return absl::SimpleAtod(text, &number) ? SqlValue(number) : SqlValue();
    case kBytes:  // \x and hexadecimal digits
      return SqlBytes{absl::HexStringToBytes(text.substr(2))};
    default:
      return std::string(text);
  }
}

class PostgresSession final : public SqlSession {
 public:
  // connection: one that has begun to connect, by PQconnectStartParams.
  PostgresSession(PostgresAddress address, Owned<PGconn> connection, const SqlTimeouts& timeouts)
      : address_(std::move(address)), connection_(std::move(connection)), timeouts_(timeouts) {}

  absl::Status Connect() {
    deadline_ = SteadyTime() + timeouts_.connect;
    PQsetErrorVerbosity(connection_.get(), PQERRORS_VERBOSE);
    PostgresPollingStatusType state = PGRES_POLLING_WRITING;
    while (state != PGRES_POLLING_OK && PQstatus(connection_.get()) != CONNECTION_BAD) {
      if (!Await(state == PGRES_POLLING_READING ? POLLIN : POLLOUT)) return TooSlow("connecting");
      state = PQconnectPoll(connection_.get());
      if (state == PGRES_POLLING_FAILED) break;
    }
    if (PQstatus(connection_.get()) != CONNECTION_OK) {
      const std::string message = PQerrorMessage(connection_.get());
      return Error(CodeOf(StateIn(message)), message);
    }
    PQsetErrorVerbosity(connection_.get(), PQERRORS_DEFAULT);
    PQsetnonblocking(connection_.get(), 1);
    return Configure();
  }

  absl::Status Begin() override {
    transaction_deadline_ = SteadyTime() + timeouts_.transaction;
    if (absl::Status status = Run("BEGIN ISOLATION LEVEL READ COMMITTED"); !status.ok()) {
      return status;
    }
    // Each statement after it sees what was committed before the lock was ours.
    return Run("SELECT pg_advisory_xact_lock($1)", {kWriteLock});
  }
  absl::Status Commit() override {
    absl::Status status = Run("COMMIT");
    // Of a transaction that had failed, COMMIT succeeds in rolling it back.
    if (status.ok() && last_command_ != "COMMIT") {
      return absl::InternalError(absl::StrCat(address_.Name(), ": rolled back"));
    }
    return status;
  }
  void Rollback() override {
    if (PQtransactionStatus(connection_.get()) == PQTRANS_IDLE) return;
    transaction_deadline_ = absl::InfiniteDuration();
    Run("ROLLBACK").IgnoreError();
  }

  absl::Status RunEach(absl::string_view sql, absl::Span<const SqlRow> calls,
                       OnRow on_row) override {
    if (calls.empty()) return absl::OkStatus();
    if (lost_) return absl::UnavailableError(absl::StrCat(address_.Name(), ": connection lost"));
    deadline_ = SteadyTime() + timeouts_.statement + kGrace;
    const bool within = PQtransactionStatus(connection_.get()) != PQTRANS_IDLE;
    if (within) deadline_ = std::min(deadline_, transaction_deadline_);
    if (!Send(std::string(sql), calls)) return Lost();
    absl::Status status = Receive(on_row);
    // Its answers are all read, or it is lost.
    if (!lost_ && PQexitPipelineMode(connection_.get()) != 1) return Lost();
    return status;
  }

  absl::StatusOr<std::vector<std::string>> Tables() override {
    absl::StatusOr<std::vector<SqlRow>> rows = Query(
        "SELECT c.relname::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
        "ON n.oid = c.relnamespace WHERE n.nspname = current_schema() "
        "AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT EXISTS (SELECT 1 FROM "
        "pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass "
        "AND d.objid = c.oid AND d.deptype = 'e')");
    if (!rows.ok()) return rows.status();
    std::vector<std::string> names;
    for (const SqlRow& row : *rows) names.push_back(TextOf(row[0]));
    return names;
  }

  absl::Status Adopt() override { return absl::OkStatus(); }

  // A server that went away has closed the connection, which reading sees without waiting.
  bool usable() override {
    return !lost_ && PQconsumeInput(connection_.get()) == 1 &&
           PQstatus(connection_.get()) == CONNECTION_OK &&
           PQpipelineStatus(connection_.get()) == PQ_PIPELINE_OFF &&
           PQtransactionStatus(connection_.get()) == PQTRANS_IDLE;
  }

 private:
  // A replica that vanishes within a transaction keeps its lock no longer than a statement may
  // take. All statements are meant to go by an index; a server whose statistics are old, as those
  // of a table that grows are, would rather sort the whole of it for every page that is read.
  absl::Status Configure() {
    const std::string limit = absl::StrCat(absl::ToInt64Milliseconds(timeouts_.statement), "ms");
    return Run(
        "SELECT set_config('statement_timeout', $1, false), set_config('lock_timeout', $1, false), "
        "set_config('idle_in_transaction_session_timeout', $1, false), "
        "set_config('enable_seqscan', 'off', false), set_config('enable_bitmapscan', 'off', "
        "false), "
        "set_config('enable_hashjoin', 'off', false), set_config('enable_mergejoin', 'off', "
        "false), "
        "set_config('jit', 'off', false), "
        "set_config('extra_float_digits', '1', false), set_config('bytea_output', 'hex', false), "
        "set_config('synchronous_commit', CASE current_setting('synchronous_commit') "
        "WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)",
        {limit});
  }

  // Whether all of it is on its way.
  bool Send(const std::string& sql, absl::Span<const SqlRow> calls) {
    PGconn* connection = connection_.get();
    if (PQenterPipelineMode(connection) != 1) return false;
    if (PQsendPrepare(connection, "", sql.c_str(), 0, nullptr) != 1) return false;
    for (const SqlRow& call : calls) {
      const std::vector<Sent> sent(call.begin(), call.end());
      std::vector<const char*> values;
      std::vector<int> lengths, formats;
      for (const Sent& parameter : sent) {
        values.push_back(parameter.null ? nullptr : parameter.text.c_str());
        lengths.push_back(static_cast<int>(parameter.text.size()));
        formats.push_back(parameter.binary ? kBinaryFormat : kTextFormat);
      }
      if (PQsendQueryPrepared(connection, "", static_cast<int>(call.size()), values.data(),
                              lengths.data(), formats.data(), kTextFormat) != 1) {
        return false;
      }
    }
    return PQpipelineSync(connection) == 1;
  }

  // The answers: one to the preparation, one to each call, each followed by null, and the end.
  absl::Status Receive(OnRow on_row) {
    absl::Status failed;
    for (size_t answers = 0;;) {
      if (absl::Status status = AwaitResult(); !status.ok()) return status;
      const Owned<PGresult> result(PQgetResult(connection_.get()));
      if (PQstatus(connection_.get()) == CONNECTION_BAD) return Lost();
      if (result == nullptr) {
        ++answers;
        continue;
      }
      switch (PQresultStatus(result.get())) {
        case PGRES_COMMAND_OK:
          last_command_ = PQcmdStatus(result.get());
          break;
        case PGRES_TUPLES_OK:
          for (int row = 0; row < PQntuples(result.get()); ++row) {
            on_row(answers - 1, RowOf(result.get(), row));
          }
          break;
        case PGRES_PIPELINE_SYNC:
          return failed;
        case PGRES_PIPELINE_ABORTED:  // what came after an error
          break;
        default:
          failed.Update(ErrorOf(result.get()));
      }
    }
  }

  static SqlRow RowOf(const PGresult* result, int row) {
    SqlRow values;
    const int columns = PQnfields(result);
    values.reserve(static_cast<size_t>(columns));
    for (int column = 0; column < columns; ++column) values.push_back(ValueOf(result, row, column));
    return values;
  }

  // Until PQgetResult would not block, sending meanwhile what is left to send.
  absl::Status AwaitResult() {
    PGconn* connection = connection_.get();
    for (;;) {
      const int unsent = PQflush(connection);
      if (unsent < 0 || PQconsumeInput(connection) != 1) return Lost();
      if (!PQisBusy(connection)) return absl::OkStatus();
      if (!Await(unsent > 0 ? POLLIN | POLLOUT : POLLIN)) return TooSlow("answering");
    }
  }

  // False: not before the deadline.
  bool Await(int events) {
    pollfd socket{
        .fd = PQsocket(connection_.get()), .events = static_cast<int16_t>(events), .revents = 0};
    for (;;) {
      const int64_t left_ms = absl::ToInt64Milliseconds(deadline_ - SteadyTime());
      const int ready = poll(&socket, 1, static_cast<int>(std::max(int64_t{0}, left_ms)));
      if (ready > 0) return true;
      if (ready == 0 || errno != EINTR) return false;
    }
  }

  // The connection is of no more use: an answer could still come.
  absl::Status TooSlow(absl::string_view doing) {
    lost_ = true;
    return absl::UnavailableError(
        absl::StrCat(address_.Name(), ": the server took too long ", doing));
  }

  absl::Status Lost() {
    lost_ = true;
    return Error(absl::StatusCode::kUnavailable, PQerrorMessage(connection_.get()));
  }

  absl::Status ErrorOf(const PGresult* result) {
    const char* state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
    const char* message = PQresultErrorField(result, PG_DIAG_MESSAGE_PRIMARY);
    return Error(CodeOf(state == nullptr ? "" : state),
                 message == nullptr ? PQresultErrorMessage(result) : message);
  }

  absl::Status Error(absl::StatusCode code, const std::string& message) {
    std::string line = address_.Scrubbed(message);
    std::replace(line.begin(), line.end(), '\n', ' ');
    return absl::Status(code, absl::StrCat(address_.Name(), ": ", line));
  }

  const PostgresAddress address_;
  Owned<PGconn> connection_;
  const SqlTimeouts timeouts_;
  absl::Duration deadline_;  // of what is under way
  absl::Duration transaction_deadline_;
  std::string last_command_;
  bool lost_ = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SqlSession>> OpenPostgres(const PostgresAddress& address,
                                                         const SqlTimeouts& timeouts) {
  // Ours first: of a parameter that is there twice, the last one counts.
  std::vector<const char*> names = {"fallback_application_name", "tcp_user_timeout"};
  const std::string limit_ms = absl::StrCat(absl::ToInt64Milliseconds(timeouts.statement));
  std::vector<const char*> values = {"epikvd", limit_ms.c_str()};
  for (const PostgresAddress::Parameter& parameter : address.parameters()) {
    names.push_back(parameter.name.c_str());
    values.push_back(parameter.value.c_str());
  }
  names.push_back("client_encoding");
  values.push_back("UTF8");
  names.push_back(nullptr);
  values.push_back(nullptr);
  Owned<PGconn> connection(PQconnectStartParams(names.data(), values.data(), 0));
  if (connection == nullptr) return absl::UnavailableError("libpq has no memory");
  auto session = std::make_unique<PostgresSession>(address, std::move(connection), timeouts);
  if (absl::Status status = session->Connect(); !status.ok()) return status;
  return session;
}

}  // namespace epikv
