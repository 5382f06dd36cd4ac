#pragma once

#include <google/protobuf/struct.pb.h>

#include <map>
#include <string>
#include <vector>

#include "policies/spec.h"
#include "runtime/admission/admission.h"

// Policy parameters as google.protobuf.Struct, whose only number is a double.

namespace epikv {

google::protobuf::Value ToValue(const ParamValue& value);
google::protobuf::Struct ToStruct(const Params& params);

struct GivenParams {
  std::map<std::string, ParamValue> params;
  std::vector<FieldViolation> violations;  // values of a kind that no parameter has
};

// prefix: path of the struct in its request.
GivenParams FromStruct(const google::protobuf::Struct& values, const std::string& prefix);

}  // namespace epikv
