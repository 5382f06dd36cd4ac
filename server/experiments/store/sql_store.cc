#include "server/experiments/store/sql_store.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/base/durations.h"
#include "server/experiments/store/postgres_session.h"
#include "server/experiments/store/request_reader.h"
#include "server/experiments/store/schema.h"
#include "server/experiments/store/sqlite_session.h"
#include "server/experiments/store/write_batch.h"

namespace epikv {
namespace {

// Connections that wait for their next use.
constexpr size_t kMaxIdle = 3;
constexpr int64_t kForgetRows = 2000;

constexpr absl::string_view kForgetParts =
    "DELETE FROM participations WHERE experiment = $1 AND (began_us, request) IN (SELECT began_us, "
    "request FROM participations WHERE experiment = $1 ORDER BY began_us, request LIMIT $2) "
    "RETURNING request";
// Its end and outcomes go with it.
constexpr absl::string_view kForgetRequest =
    "DELETE FROM requests WHERE id = $1 AND NOT EXISTS (SELECT 1 FROM participations "
    "WHERE request = $1)";
constexpr absl::string_view kForgetWaiting =
    "DELETE FROM waiting_outcomes WHERE (tenant, request_id, metric, outcome_key, received_us) IN "
    "(SELECT tenant, request_id, metric, outcome_key, received_us FROM waiting_outcomes "
    "WHERE received_us < $1 LIMIT $2) RETURNING 1";

using Open = std::function<absl::StatusOr<std::unique_ptr<SqlSession>>()>;

absl::StatusOr<int64_t> RevisionOf(SqlSession& session) {
  const absl::StatusOr<std::vector<SqlRow>> rows = session.Query("SELECT revision FROM revisions");
  if (!rows.ok()) return rows.status();
  if (rows->size() != 1) {
    return absl::DataLossError(
        "the experiment store is damaged: its table revisions must have exactly one row");
  }
  return IntOf(rows->front()[0]);
}

absl::StatusOr<Definitions> DefinitionsOf(SqlSession& session) {
  Definitions definitions;
  // First: definitions that are newer than their revision are only read once more.
  const absl::StatusOr<int64_t> revision = RevisionOf(session);
  if (!revision.ok()) return revision.status();
  definitions.revision = *revision;
  const absl::StatusOr<std::vector<SqlRow>> rows =
      session.Query("SELECT name, etag, definition FROM experiments");
  if (!rows.ok()) return rows.status();
  for (const SqlRow& row : *rows) {
    v1::Experiment& experiment = definitions.experiments.emplace_back();
    const SqlBytes* definition = std::get_if<SqlBytes>(&row[2]);
    if (definition == nullptr || !experiment.ParseFromString(definition->bytes)) {
      return absl::DataLossError(
          absl::StrCat("the definition of experiment '", TextOf(row[0]), "' cannot be read"));
    }
    experiment.set_etag(TextOf(row[1]));
  }
  // Databases sort texts each in its own way.
  std::sort(definitions.experiments.begin(), definitions.experiments.end(),
            [](const v1::Experiment& a, const v1::Experiment& b) { return a.name() < b.name(); });
  return definitions;
}

const v1::Experiment* Find(const std::vector<v1::Experiment>& all, const std::string& name) {
  const auto at = std::find_if(all.begin(), all.end(), [&name](const v1::Experiment& experiment) {
    return experiment.name() == name;
  });
  return at == all.end() ? nullptr : &*at;
}

class SqlStore final : public Store {
 public:
  explicit SqlStore(Open open) : open_(std::move(open)) {}

  absl::StatusOr<WriteResult> Write(absl::Span<const v1::ExperimentRecord> records,
                                    Source source) override {
    return InTransaction([&](SqlSession& session) -> absl::StatusOr<WriteResult> {
      const absl::StatusOr<std::shared_ptr<const Definitions>> definitions = Cached(session);
      if (!definitions.ok()) return definitions.status();
      return WriteRecords(session, **definitions, records, source);
    });
  }

  absl::StatusOr<Definitions> Experiments() override {
    return WithSession([](SqlSession& session) { return DefinitionsOf(session); });
  }
  absl::StatusOr<int64_t> Revision() override {
    return WithSession([](SqlSession& session) { return RevisionOf(session); });
  }

  absl::StatusOr<v1::Experiment> Create(const v1::Experiment& experiment) override {
    return InTransaction([&](SqlSession& session) -> absl::StatusOr<v1::Experiment> {
      const absl::StatusOr<Definitions> all = DefinitionsOf(session);
      if (!all.ok()) return all.status();
      if (Find(all->experiments, experiment.name()) != nullptr) {
        return absl::AlreadyExistsError(
            absl::StrCat("an experiment '", experiment.name(), "' exists already"));
      }
      return Put(session, experiment, all->revision + 1);
    });
  }

  absl::StatusOr<v1::Experiment> Replace(const v1::Experiment& experiment,
                                         const std::string& etag) override {
    auto edit = [&](const std::vector<v1::Experiment>& all) -> absl::StatusOr<v1::Experiment> {
      const v1::Experiment* old = Find(all, experiment.name());
      if (old != nullptr && old->etag() == etag) return experiment;
      return absl::AbortedError(absl::StrCat("experiment '", experiment.name(),
                                             "' has changed since it was read: read it again"));
    };
    return Change(experiment.name(), edit);
  }

  absl::StatusOr<v1::Experiment> Change(const std::string& name, Edit edit) override {
    return InTransaction([&](SqlSession& session) -> absl::StatusOr<v1::Experiment> {
      const absl::StatusOr<Definitions> all = DefinitionsOf(session);
      if (!all.ok()) return all.status();
      if (Find(all->experiments, name) == nullptr) {
        return absl::NotFoundError(absl::StrCat("there is no experiment '", name, "'"));
      }
      absl::StatusOr<v1::Experiment> changed = edit(all->experiments);
      if (!changed.ok()) return changed.status();
      if (changed->name() != name) return absl::InternalError("an edit must keep the name");
      return Put(session, *changed, all->revision + 1);
    });
  }

  absl::Status ReadRequests(const Reading& reading, OnRequest on_request) override {
    const absl::StatusOr<Definitions> all = Experiments();
    if (!all.ok()) return all.status();
    const v1::Experiment* experiment = Find(all->experiments, reading.experiment);
    if (experiment == nullptr) {
      return absl::NotFoundError(absl::StrCat("there is no experiment '", reading.experiment, "'"));
    }
    RequestReader reader(*experiment, reading);
    while (!reader.done()) {
      // The callback runs without a session: it may take its time, and call the store.
      const absl::StatusOr<std::vector<RequestRow>> page =
          WithSession([&reader](SqlSession& session) { return reader.Next(session); });
      if (!page.ok()) return page.status();
      for (const RequestRow& row : *page) {
        if (absl::Status status = on_request(row); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Forget(absl::Time before) override {
    return InTransaction([before](SqlSession& session) -> absl::StatusOr<int64_t> {
      const absl::StatusOr<Definitions> all = DefinitionsOf(session);
      if (!all.ok()) return all.status();
      int64_t forgotten = 0;
      for (const v1::Experiment& experiment : all->experiments) {
        const absl::Time stop = TimeOf(experiment.stop_time());
        if (experiment.state() != v1::Experiment::STATE_STOPPED) continue;
        if (stop + OutcomeWindow(experiment) >= before) continue;
        const absl::StatusOr<int64_t> rows =
            ForgetRequests(session, experiment.name(), kForgetRows - forgotten);
        if (!rows.ok()) return rows.status();
        forgotten += *rows;
        if (forgotten >= kForgetRows) return forgotten;
      }
      const absl::StatusOr<std::vector<SqlRow>> waiting =
          session.Query(kForgetWaiting, {absl::ToUnixMicros(before), kForgetRows - forgotten});
      if (!waiting.ok()) return waiting.status();
      return forgotten + static_cast<int64_t>(waiting->size());
    });
  }

  // What is wrong with where it is; an outage is not.
  absl::Status CheckPlace() {
    const absl::StatusOr<std::unique_ptr<SqlSession>> session = Take();
    return absl::IsUnavailable(session.status()) ? absl::OkStatus() : session.status();
  }

 private:
  // An etag is the revision that made it: no other definition has the same.
  static absl::StatusOr<v1::Experiment> Put(SqlSession& session, v1::Experiment experiment,
                                            int64_t revision) {
    experiment.set_etag(absl::StrCat(revision));
    if (absl::Status status = session.Run(
            "INSERT INTO experiments (name, etag, definition) VALUES ($1, $2, $3) ON CONFLICT "
            "(name) DO UPDATE SET etag = excluded.etag, definition = excluded.definition",
            {experiment.name(), experiment.etag(), SqlBytes{experiment.SerializeAsString()}});
        !status.ok()) {
      return status;
    }
    if (absl::Status status = session.Run("UPDATE revisions SET revision = $1", {revision});
        !status.ok()) {
      return status;
    }
    return experiment;
  }

  static absl::StatusOr<int64_t> ForgetRequests(SqlSession& session, const std::string& experiment,
                                                int64_t max_rows) {
    const absl::StatusOr<std::vector<SqlRow>> requests =
        session.Query(kForgetParts, {experiment, max_rows});
    if (!requests.ok()) return requests.status();
    if (absl::Status status = session.RunEach(kForgetRequest, *requests); !status.ok()) {
      return status;
    }
    return static_cast<int64_t>(requests->size());
  }

  // As of the session's transaction.
  absl::StatusOr<std::shared_ptr<const Definitions>> Cached(SqlSession& session) {
    const absl::StatusOr<int64_t> revision = RevisionOf(session);
    if (!revision.ok()) return revision.status();
    {
      absl::MutexLock lock(&mu_);
      if (definitions_ != nullptr && definitions_->revision == *revision) return definitions_;
    }
    absl::StatusOr<Definitions> read = DefinitionsOf(session);
    if (!read.ok()) return read.status();
    auto definitions = std::make_shared<const Definitions>(*std::move(read));
    absl::MutexLock lock(&mu_);
    definitions_ = definitions;
    return definitions;
  }

  // What `act` returns, an absl::StatusOr.
  template <typename Act>
  auto WithSession(Act act) -> decltype(act(std::declval<SqlSession&>())) {
    absl::StatusOr<std::unique_ptr<SqlSession>> session = Take();
    if (!session.ok()) return session.status();
    auto result = act(**session);
    GiveBack(*std::move(session));
    return result;
  }

  // Committed if `act` returns OK.
  template <typename Act>
  auto InTransaction(Act act) -> decltype(act(std::declval<SqlSession&>())) {
    return WithSession([&act](SqlSession& session) -> decltype(act(session)) {
      const absl::Cleanup rollback = [&session] { session.Rollback(); };
      if (absl::Status status = session.Begin(); !status.ok()) return status;
      auto result = act(session);
      if (!result.ok()) return result;
      if (absl::Status status = session.Commit(); !status.ok()) return status;
      return result;
    });
  }

  absl::StatusOr<std::unique_ptr<SqlSession>> Take() {
    std::vector<std::unique_ptr<SqlSession>> useless;  // closed without the lock
    {
      absl::MutexLock lock(&mu_);
      while (!idle_.empty()) {
        std::unique_ptr<SqlSession> session = std::move(idle_.back());
        idle_.pop_back();
        if (session->usable()) return session;
        useless.push_back(std::move(session));
      }
    }
    absl::StatusOr<std::unique_ptr<SqlSession>> session = open_();
    if (!session.ok()) return session.status();
    // Of each connection, not once: the database may be another one by now.
    if (absl::Status status = Migrate(**session); !status.ok()) return status;
    return session;
  }
  void GiveBack(std::unique_ptr<SqlSession> session) {
    if (!session->usable()) return;
    absl::MutexLock lock(&mu_);
    if (idle_.size() < kMaxIdle) idle_.push_back(std::move(session));
  }

  const Open open_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<SqlSession>> idle_ ABSL_GUARDED_BY(mu_);
  // Shared with the Write that is using it.
  std::shared_ptr<const Definitions> definitions_ ABSL_GUARDED_BY(mu_);
};

absl::StatusOr<Open> OpenerOf(const std::string& where, const SqlTimeouts& timeouts) {
  if (where.empty()) return absl::InvalidArgumentError("no store was named");
  if (!absl::StartsWith(where, "postgresql://") && !absl::StartsWith(where, "postgres://")) {
    // One that was there is not made again: it was moved away, and what it holds with it.
    return Open([where, timeouts, was_there = std::make_shared<std::atomic<bool>>(false)] {
      auto session = OpenSqlite(where, timeouts, /*make=*/!*was_there);
      if (session.ok()) *was_there = true;
      return session;
    });
  }
  absl::StatusOr<PostgresAddress> address = PostgresAddress::Parse(where);
  if (!address.ok()) return address.status();
  return Open(
      [address = *std::move(address), timeouts] { return OpenPostgres(address, timeouts); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& where,
                                                 const SqlTimeouts& timeouts) {
  absl::StatusOr<Open> open = OpenerOf(where, timeouts);
  if (!open.ok()) return open.status();
  auto store = std::make_unique<SqlStore>(*std::move(open));
  if (absl::Status status = store->CheckPlace(); !status.ok()) return status;
  return store;
}

}  // namespace epikv
