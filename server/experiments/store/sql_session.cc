#include "server/experiments/store/sql_session.h"

#include <utility>

namespace epikv {

absl::Status SqlSession::RunEach(absl::string_view sql, absl::Span<const SqlRow> calls) {
  return RunEach(sql, calls, [](size_t, const SqlRow&) {});
}

absl::Status SqlSession::Run(absl::string_view sql, const SqlRow& parameters) {
  return RunEach(sql, {&parameters, 1});
}

absl::StatusOr<std::vector<SqlRow>> SqlSession::Query(absl::string_view sql,
                                                      const SqlRow& parameters) {
  std::vector<SqlRow> rows;
  const absl::Status status = RunEach(
      sql, {&parameters, 1}, [&rows](size_t, SqlRow row) { rows.push_back(std::move(row)); });
  if (!status.ok()) return status;
  return rows;
}

int64_t IntOf(const SqlValue& value) {
  const int64_t* number = std::get_if<int64_t>(&value);
  return number == nullptr ? 0 : *number;
}

double DoubleOf(const SqlValue& value) {
  const double* number = std::get_if<double>(&value);
  return number == nullptr ? 0 : *number;
}

std::string TextOf(const SqlValue& value) {
  const std::string* text = std::get_if<std::string>(&value);
  return text == nullptr ? "" : *text;
}

bool IsNull(const SqlValue& value) { return std::holds_alternative<std::monostate>(value); }

}  // namespace epikv
