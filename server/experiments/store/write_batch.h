#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "epikv/v1/experiment_record.pb.h"
#include "server/experiments/store/sql_session.h"
#include "server/experiments/store/store.h"

namespace epikv {

// Writes records as Store::Write says, within the session's open transaction, which it leaves open.
// Some ten round trips, however many records.
absl::StatusOr<WriteResult> WriteRecords(SqlSession& session, const Definitions& definitions,
                                         absl::Span<const v1::ExperimentRecord> records,
                                         Source source);

}  // namespace epikv
