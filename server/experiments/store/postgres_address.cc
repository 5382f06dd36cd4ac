#include "server/experiments/store/postgres_address.h"

#include <libpq-fe.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"

namespace epikv {

absl::StatusOr<PostgresAddress> PostgresAddress::Parse(const std::string& url) {
  char* problem = nullptr;
  const std::unique_ptr<PQconninfoOption, void (*)(PQconninfoOption*)> options(
      PQconninfoParse(url.c_str(), &problem), PQconninfoFree);
  PQfreemem(problem);  // may quote the password
  if (options == nullptr) {
    return absl::InvalidArgumentError(
        "not a PostgreSQL URL (not shown, it may hold a password); as in "
        "postgresql://user:password@host:5432/database?sslmode=verify-full");
  }
  PostgresAddress address;
  for (const PQconninfoOption* option = options.get(); option->keyword != nullptr; ++option) {
    if (option->val != nullptr) address.parameters_.push_back({option->keyword, option->val});
  }
  return address;
}

std::string PostgresAddress::Name() const {
  return absl::StrCat("postgresql://", ValueOf("host", ValueOf("hostaddr", "")), ":",
                      ValueOf("port", "5432"), "/", ValueOf("dbname", ValueOf("user", "")));
}

std::string PostgresAddress::Scrubbed(std::string message) const {
  for (absl::string_view name : {"password", "sslpassword"}) {
    const std::string secret = ValueOf(std::string(name), "");
    if (!secret.empty()) absl::StrReplaceAll({{secret, "***"}}, &message);
  }
  return message;
}

std::string PostgresAddress::ValueOf(const std::string& name, const std::string& otherwise) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.name == name && !parameter.value.empty()) return parameter.value;
  }
  return otherwise;
}

}  // namespace epikv
