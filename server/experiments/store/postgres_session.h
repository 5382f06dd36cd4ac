#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "server/experiments/store/postgres_address.h"
#include "server/experiments/store/sql_session.h"

namespace epikv {

// Looks up names with the system's resolver, whose own limits hold beside the timeouts. A server
// that hangs is given up a second after the statement timeout, which it should have kept itself.
absl::StatusOr<std::unique_ptr<SqlSession>> OpenPostgres(const PostgresAddress& address,
                                                         const SqlTimeouts& timeouts);

}  // namespace epikv
