#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/experiments/store/sql_session.h"

namespace epikv {

// The database in a file. Where there is none it is made, for its owner alone, if `make`, else it
// is kUnavailable; its folder must be there. Nobody in this process may open and close that file by
// other means: that would free SQLite's locks. Its log lies beside it (-wal, -shm).
absl::StatusOr<std::unique_ptr<SqlSession>> OpenSqlite(const std::string& path,
                                                       const SqlTimeouts& timeouts,
                                                       bool make = true);

}  // namespace epikv
