#include "server/messages/param_values.h"

#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

using google::protobuf::ListValue;
using google::protobuf::Struct;
using google::protobuf::Value;

struct SetValue {
  Value& value;
  void operator()(bool v) const { value.set_bool_value(v); }
  void operator()(int64_t v) const { value.set_number_value(static_cast<double>(v)); }
  void operator()(double v) const { value.set_number_value(v); }
  void operator()(const std::string& v) const { value.set_string_value(v); }
  void operator()(const std::vector<int64_t>& v) const {
    ListValue& list = *value.mutable_list_value();
    for (int64_t item : v) list.add_values()->set_number_value(static_cast<double>(item));
  }
  void operator()(const std::vector<std::string>& v) const {
    ListValue& list = *value.mutable_list_value();
    for (const std::string& item : v) list.add_values()->set_string_value(item);
  }
};

constexpr int kMaxParams = 64;  // no policy takes as many

// Beyond 2^53 a double no longer says which integer was meant.
bool IsWhole(double number) { return number == std::floor(number) && std::abs(number) < 0x1p53; }

std::optional<ParamValue> IntList(const ListValue& list) {
  std::vector<int64_t> items;
  for (const Value& item : list.values()) {
    if (!item.has_number_value() || !IsWhole(item.number_value())) return std::nullopt;
    items.push_back(static_cast<int64_t>(item.number_value()));
  }
  return items;
}

std::optional<ParamValue> StringList(const ListValue& list) {
  std::vector<std::string> items;
  for (const Value& item : list.values()) {
    if (!item.has_string_value()) return std::nullopt;
    items.push_back(item.string_value());
  }
  return items;
}

std::optional<ParamValue> FromValue(const Value& value) {
  switch (value.kind_case()) {
    case Value::kBoolValue:
      return value.bool_value();
    case Value::kNumberValue:
      return value.number_value();  // the policy's schema says whether it has to be whole
    case Value::kStringValue:
      return value.string_value();
    case Value::kListValue:
      return value.list_value().values_size() > 0 && value.list_value().values(0).has_string_value()
                 ? StringList(value.list_value())
                 : IntList(value.list_value());
    default:
      return std::nullopt;
  }
}

}  // namespace

Value ToValue(const ParamValue& value) {
  Value result;
  std::visit(SetValue{result}, value);
  return result;
}

Struct ToStruct(const Params& params) {
  Struct result;
  for (const auto& [name, value] : params.values()) {
    (*result.mutable_fields())[name] = ToValue(value);
  }
  return result;
}

GivenParams FromStruct(const Struct& values, const std::string& prefix) {
  GivenParams given;
  if (values.fields_size() > kMaxParams) {
    given.violations.push_back(
        {prefix, absl::StrCat("has ", values.fields_size(), " entries, at most ", kMaxParams)});
    return given;
  }
  for (const auto& [name, value] : values.fields()) {
    if (std::optional<ParamValue> param = FromValue(value)) {
      given.params[name] = *std::move(param);
    } else {
      given.violations.push_back(
          {absl::StrCat(prefix, ".", name),
           "must be a bool, a number, a string, or a list of integers or of strings"});
    }
  }
  return given;
}

}  // namespace epikv
