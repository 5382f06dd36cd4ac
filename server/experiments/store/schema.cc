#include "server/experiments/store/schema.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

// Tells our schema_version from those of others.
constexpr absl::string_view kApplication = "epikv experiments";

// Times are microseconds since 1970. `began_us` of a part is its request's: parts are read in its
// order. A request's client calls it `request_id`, not always another one each time.
constexpr absl::string_view kVersion1[] = {
    "CREATE TABLE revisions (one SMALLINT PRIMARY KEY CHECK (one = 1), revision BIGINT NOT NULL)",
    "INSERT INTO revisions (one, revision) VALUES (1, 0)",
    // definition: a serialised epikv.v1.Experiment.
    "CREATE TABLE experiments (name TEXT PRIMARY KEY, etag TEXT NOT NULL, "
    "definition BYTEA NOT NULL)",
    "CREATE TABLE requests (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, request_id TEXT NOT NULL, "
    "unit BIGINT NOT NULL, unit_is_request SMALLINT NOT NULL, model TEXT NOT NULL, "
    "began_us BIGINT NOT NULL, prompt_tokens BIGINT NOT NULL, max_output_tokens BIGINT NOT NULL, "
    "covariate DOUBLE PRECISION)",
    "CREATE INDEX requests_by_client ON requests (tenant, request_id, began_us)",
    "CREATE TABLE participations (experiment TEXT NOT NULL, began_us BIGINT NOT NULL, "
    "request TEXT NOT NULL REFERENCES requests (id) ON DELETE CASCADE, "
    "bucket_version BIGINT NOT NULL, arm TEXT NOT NULL, forced SMALLINT NOT NULL, "
    "exposed SMALLINT NOT NULL, PRIMARY KEY (experiment, began_us, request))",
    "CREATE INDEX participations_by_request ON participations (request)",
    "CREATE TABLE ends (request TEXT PRIMARY KEY REFERENCES requests (id) ON DELETE CASCADE, "
    "ended_us BIGINT NOT NULL, code TEXT NOT NULL, reason TEXT NOT NULL, "
    "finish_reason TEXT NOT NULL, request_seconds DOUBLE PRECISION, output_tokens BIGINT NOT NULL, "
    "kv_peak_tokens BIGINT, kv_evicted_tokens BIGINT, queue_seconds DOUBLE PRECISION, "
    "ttft_seconds DOUBLE PRECISION, time_per_output_token_seconds DOUBLE PRECISION)",
    "CREATE TABLE outcomes (request TEXT NOT NULL REFERENCES requests (id) ON DELETE CASCADE, "
    "metric TEXT NOT NULL, outcome_key TEXT NOT NULL, value DOUBLE PRECISION NOT NULL, "
    "happened_us BIGINT NOT NULL, received_us BIGINT NOT NULL, "
    "PRIMARY KEY (request, metric, outcome_key))",
    // Acknowledged ones whose request has not come yet.
    "CREATE TABLE waiting_outcomes (tenant TEXT NOT NULL, request_id TEXT NOT NULL, "
    "metric TEXT NOT NULL, outcome_key TEXT NOT NULL, value DOUBLE PRECISION NOT NULL, "
    "happened_us BIGINT NOT NULL, received_us BIGINT NOT NULL, "
    "PRIMARY KEY (tenant, request_id, metric, outcome_key, received_us))",
};

// Of requests that were replayed.
constexpr absl::string_view kVersion2[] = {
    "CREATE TABLE shadows (request TEXT PRIMARY KEY REFERENCES requests (id) ON DELETE CASCADE, "
    "compared_us BIGINT NOT NULL, tokens BIGINT NOT NULL, agreed_tokens BIGINT NOT NULL, "
    "kl_nats DOUBLE PRECISION NOT NULL)",
};

// The value of a label that the experiment's subgroups name.
constexpr absl::string_view kVersion3[] = {
    "ALTER TABLE participations ADD COLUMN subgroup TEXT NOT NULL DEFAULT ''",
};

// Pairs of answers. `pair_arm` is the arm that answers, too; '': none. Of a pair that was lost all
// figures are NULL.
constexpr absl::string_view kVersion4[] = {
    "ALTER TABLE participations ADD COLUMN pair_arm TEXT NOT NULL DEFAULT ''",
    "CREATE TABLE pairs (request TEXT PRIMARY KEY REFERENCES requests (id) ON DELETE CASCADE, "
    "settled_us BIGINT NOT NULL, shown_tokens BIGINT, shown_agreed_tokens BIGINT, "
    "shown_kl_nats DOUBLE PRECISION, hidden_tokens BIGINT, hidden_agreed_tokens BIGINT, "
    "hidden_kl_nats DOUBLE PRECISION)",
};

absl::Status NotOurs(absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat("this database is not an experiment store of epikv (", why,
                   "), and was not changed; name another database, or an empty one"));
}

// Of an empty database: 0.
absl::StatusOr<int64_t> VersionOf(SqlSession& session) {
  const absl::StatusOr<std::vector<std::string>> tables = session.Tables();
  if (!tables.ok()) return tables.status();
  if (tables->empty()) return 0;
  if (std::find(tables->begin(), tables->end(), "schema_version") == tables->end()) {
    return NotOurs(absl::StrCat("it has tables, such as '", tables->front(), "'"));
  }
  const absl::StatusOr<std::vector<SqlRow>> rows =
      session.Query("SELECT application, version FROM schema_version");
  if (absl::IsUnavailable(rows.status())) return rows.status();
  if (!rows.ok() || rows->size() != 1 || TextOf(rows->front()[0]) != kApplication) {
    return NotOurs("its table schema_version was made by another program");
  }
  return IntOf(rows->front()[1]);
}

absl::Status Apply(SqlSession& session, const Migration& migration, int64_t version) {
  if (version == 1) {
    for (absl::string_view statement :
         {"CREATE TABLE schema_version (application TEXT NOT NULL, version BIGINT NOT NULL)",
          "INSERT INTO schema_version (application, version) VALUES ('', 0)"}) {
      if (absl::Status status = session.Run(statement); !status.ok()) return status;
    }
  }
  for (const std::string& statement : migration.statements) {
    if (absl::Status status = session.Run(statement); !status.ok()) return status;
  }
  if (absl::Status status = session.Run("UPDATE schema_version SET application = $1, version = $2",
                                        {std::string(kApplication), version});
      !status.ok()) {
    return status;
  }
  return session.Commit();
}

// The next of them, if no other replica has been faster.
absl::Status Step(SqlSession& session, absl::Span<const Migration> migrations) {
  if (absl::Status status = session.Begin(); !status.ok()) return status;
  const absl::Cleanup rollback = [&session] { session.Rollback(); };
  const absl::StatusOr<int64_t> version = VersionOf(session);
  if (!version.ok()) return version.status();
  if (*version >= static_cast<int64_t>(migrations.size())) return absl::OkStatus();
  return Apply(session, migrations[static_cast<size_t>(*version)], *version + 1);
}

}  // namespace

absl::Span<const Migration> Migrations() {
  static const std::vector<Migration> all = {
      {.statements = {std::begin(kVersion1), std::end(kVersion1)}},
      {.statements = {std::begin(kVersion2), std::end(kVersion2)}},
      {.statements = {std::begin(kVersion3), std::end(kVersion3)}},
      {.statements = {std::begin(kVersion4), std::end(kVersion4)}}};
  return all;
}

absl::Status Migrate(SqlSession& session, absl::Span<const Migration> migrations) {
  const auto newest = static_cast<int64_t>(migrations.size());
  bool adopted = false;
  for (;;) {
    const absl::StatusOr<int64_t> version = VersionOf(session);
    if (!version.ok()) return version.status();
    if (*version > newest) {
      return absl::FailedPreconditionError(
          absl::StrCat("this experiment store was made by a newer epikvd: its schema has version ",
                       *version, ", and this daemon knows ", newest, ": update the daemon"));
    }
    if (!adopted) {
      if (absl::Status status = session.Adopt(); !status.ok()) return status;
      adopted = true;
    }
    if (*version == newest) return absl::OkStatus();
    if (absl::Status status = Step(session, migrations); !status.ok()) return status;
  }
}

}  // namespace epikv
