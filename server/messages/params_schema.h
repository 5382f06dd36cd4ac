#pragma once

#include <google/protobuf/struct.pb.h>

#include "policies/spec.h"

namespace epikv {

// A policy's parameters as a JSON Schema of draft 2020-12. `defaults`: those of the served model.
google::protobuf::Struct ParamsSchema(const PolicySpec& spec, const Params& defaults);

}  // namespace epikv
