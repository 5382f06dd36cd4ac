#pragma once

#include <sqlite3.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "server/experiments/postgres_session.h"
#include "server/experiments/sql_store.h"
#include "server/experiments/sqlite_session.h"
#include "tests/postgres_server.h"
#include "tests/temporary_folder.h"

namespace epikv {

// Where a test's store is, which the test can take away.
class StorePlace {
 public:
  virtual ~StorePlace() = default;
  virtual std::string where() const = 0;
  virtual absl::StatusOr<std::unique_ptr<SqlSession>> Connect() const = 0;
  // Until ComeBack, writing is an outage.
  virtual void GoAway() = 0;
  virtual void ComeBack() = 0;

  std::unique_ptr<Store> Open(const SqlTimeouts& timeouts = {}) const {
    absl::StatusOr<std::unique_ptr<Store>> store = OpenStore(where(), timeouts);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  // As another program would.
  std::vector<SqlRow> Execute(absl::string_view sql) const {
    absl::StatusOr<std::unique_ptr<SqlSession>> session = Connect();
    EXPECT_TRUE(session.ok()) << session.status();
    absl::StatusOr<std::vector<SqlRow>> rows = (*session)->Query(sql);
    EXPECT_TRUE(rows.ok()) << sql << ": " << rows.status();
    return rows.ok() ? *std::move(rows) : std::vector<SqlRow>();
  }
};

class SqlitePlace final : public StorePlace {
 public:
  ~SqlitePlace() override { ComeBack(); }
  std::string where() const override { return folder_.File("experiments.db"); }
  absl::StatusOr<std::unique_ptr<SqlSession>> Connect() const override {
    return OpenSqlite(where(), {});
  }
  void GoAway() override {
    ASSERT_EQ(sqlite3_open(where().c_str(), &blocker_), SQLITE_OK);
    sqlite3_busy_timeout(blocker_, 10'000);
    ASSERT_EQ(sqlite3_exec(blocker_, "BEGIN EXCLUSIVE", nullptr, nullptr, nullptr), SQLITE_OK);
  }
  void ComeBack() override {
    sqlite3_close(blocker_);
    blocker_ = nullptr;
  }

 private:
  TemporaryFolder folder_;
  sqlite3* blocker_ = nullptr;
};

class PostgresPlace final : public StorePlace {
 public:
  explicit PostgresPlace(PostgresServer& server)
      : server_(server), database_(server.MakeDatabase()) {}
  ~PostgresPlace() override { ComeBack(); }
  std::string where() const override { return server_.Url(database_); }
  absl::StatusOr<std::unique_ptr<SqlSession>> Connect() const override {
    return OpenPostgres(*PostgresAddress::Parse(where()), {});
  }
  void GoAway() override {
    server_.Stop();
    away_ = true;
  }
  void ComeBack() override {
    if (away_) server_.Start();
    away_ = false;
  }
  const std::string& database() const { return database_; }

 private:
  PostgresServer& server_;
  const std::string database_;
  bool away_ = false;
};

// The tests' server, started by the first that asks.
inline PostgresServer& SharedPostgres() {
  static PostgresServer server(PostgresServer::Sync::kOff);
  return server;
}

// A kind of store as a test's parameter.
struct StoreKind {
  std::string name;
  std::function<std::unique_ptr<StorePlace>()> make;
};
inline const StoreKind kSqlite = {"Sqlite", [] { return std::make_unique<SqlitePlace>(); }};
inline const StoreKind kPostgres = {
    "Postgres", [] { return std::make_unique<PostgresPlace>(SharedPostgres()); }};

inline std::string NameOf(const ::testing::TestParamInfo<StoreKind>& kind) {
  return kind.param.name;
}
inline void PrintTo(const StoreKind& kind, std::ostream* out) { *out << kind.name; }

}  // namespace epikv
