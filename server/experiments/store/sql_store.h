#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/experiments/store/sql_session.h"
#include "server/experiments/store/store.h"

namespace epikv {

// where: a PostgreSQL URL (postgresql:// or postgres://), else the path of an SQLite file, made
// where it is not there. An outage is no error: the store begins once it is over. Errors say what
// is wrong with what was given: kInvalidArgument, kFailedPrecondition (not ours, newer, no such
// database or folder), kUnauthenticated, kPermissionDenied.
absl::StatusOr<std::unique_ptr<Store>> OpenStore(const std::string& where,
                                                 const SqlTimeouts& timeouts = {});

}  // namespace epikv
