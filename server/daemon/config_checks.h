#pragma once

#include <vector>

#include "epikv/v1/config.pb.h"
#include "runtime/admission/rejection.h"

namespace epikv {

// What is wrong with it, all at once.
std::vector<FieldViolation> ViolationsOf(const v1::ServerConfig& config);
std::vector<FieldViolation> ViolationsOf(const v1::ModelSource& source);

// That no model is named, which who prints a configuration, or looks for a running daemon, may do.
std::vector<FieldViolation> MissingModel(const v1::ServerConfig& config);

}  // namespace epikv
