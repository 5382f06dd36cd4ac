#pragma once

#include <vector>

#include "epikv/v1/config.pb.h"
#include "runtime/admission/rejection.h"

namespace epikv {

// What is wrong with it, all at once.
std::vector<FieldViolation> ViolationsOf(const v1::ServerConfig& config);
std::vector<FieldViolation> ViolationsOf(const v1::ModelSource& source);

// What keeps a daemon from running by it: no model, or a port that is open to everybody. Who prints
// a configuration, or looks for a running daemon, is not asked.
std::vector<FieldViolation> ViolationsOfRun(const v1::ServerConfig& config);

}  // namespace epikv
