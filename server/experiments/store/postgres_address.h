#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace epikv {

// Where a PostgreSQL database is. Holds a password, which it shows to nobody.
class PostgresAddress {
 public:
  // url: postgresql://[user[:password]@][host][:port][/database][?parameter=value&...], as libpq
  // understands it. kInvalidArgument, without quoting it.
  static absl::StatusOr<PostgresAddress> Parse(const std::string& url);

  // "postgresql://host:port/database", for people.
  std::string Name() const;
  // Without the password and whatever else is a secret.
  std::string Scrubbed(std::string message) const;

  struct Parameter {
    std::string name;
    std::string value;
  };
  const std::vector<Parameter>& parameters() const { return parameters_; }

 private:
  std::string ValueOf(const std::string& name, const std::string& otherwise) const;

  std::vector<Parameter> parameters_;  // those that were given
};

}  // namespace epikv
