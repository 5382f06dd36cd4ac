#include "server/messages/params_schema.h"

#include <string>

#include "server/messages/param_values.h"

namespace epikv {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

Value String(absl::string_view text) {
  Value value;
  value.set_string_value(std::string(text));
  return value;
}

Value Number(double number) {
  Value value;
  value.set_number_value(number);
  return value;
}

Value Bool(bool is) {
  Value value;
  value.set_bool_value(is);
  return value;
}

Value Object(Struct object) {
  Value value;
  *value.mutable_struct_value() = std::move(object);
  return value;
}

// Of a value, or of a list's items.
Struct Scalar(const ParamSpec& param) {
  Struct schema;
  auto& fields = *schema.mutable_fields();
  switch (param.type) {
    case ParamType::kBool:
      fields["type"] = String("boolean");
      break;
    case ParamType::kInt:
    case ParamType::kIntList:
    case ParamType::kFloat:
      fields["type"] = String(param.type == ParamType::kFloat ? "number" : "integer");
      fields["minimum"] = Number(param.min);
      fields["maximum"] = Number(param.max);
      break;
    case ParamType::kChoice:
    case ParamType::kChoiceList:
      fields["type"] = String("string");
      for (absl::string_view choice : param.choices) {
        *fields["enum"].mutable_list_value()->add_values() = String(choice);
      }
      break;
  }
  return schema;
}

Struct Property(const ParamSpec& param, const Params& defaults) {
  Struct schema = Scalar(param);
  if (param.type == ParamType::kIntList || param.type == ParamType::kChoiceList) {
    Struct list;
    (*list.mutable_fields())["type"] = String("array");
    (*list.mutable_fields())["items"] = Object(std::move(schema));
    schema = std::move(list);
  }
  auto& fields = *schema.mutable_fields();
  fields["description"] = String(param.help);
  const auto found = defaults.values().find(param.name);
  if (found != defaults.values().end()) fields["default"] = ToValue(found->second);
  return schema;
}

}  // namespace

Struct ParamsSchema(const PolicySpec& spec, const Params& defaults) {
  Struct properties;
  for (const ParamSpec& param : spec.params) {
    (*properties.mutable_fields())[std::string(param.name)] = Object(Property(param, defaults));
  }
  Struct schema;
  auto& fields = *schema.mutable_fields();
  fields["$schema"] = String("https://json-schema.org/draft/2020-12/schema");
  fields["title"] = String(spec.name);
  fields["description"] = String(spec.summary);
  fields["type"] = String("object");
  fields["properties"] = Object(std::move(properties));
  fields["additionalProperties"] = Bool(false);
  return schema;
}

}  // namespace epikv
