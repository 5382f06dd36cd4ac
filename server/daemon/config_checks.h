#pragma once

#include <optional>
#include <vector>

#include "epikv/v1/config.pb.h"
#include "runtime/admission/rejection.h"

namespace epikv {

// What is wrong with it, all at once.
std::vector<FieldViolation> ViolationsOf(const v1::ServerConfig& config);
std::vector<FieldViolation> ViolationsOf(const v1::ModelSource& source);

// That no model is named. Who prints a configuration, or looks for a running daemon, need not name
// one.
std::optional<FieldViolation> MissingModel(const v1::ServerConfig& config);

}  // namespace epikv
