#include "policies/artefact.h"

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "policies/soft_tokens.h"
#include "policies/steering.h"

namespace epikv {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kFormat = "epikv.artefact/1";

// Artefacts that are of no policy, and have data alone.
using ReadData = absl::StatusOr<std::shared_ptr<const PolicyData>> (*)(const ArtefactData&,
                                                                       const ModelShape&);
constexpr std::pair<absl::string_view, ReadData> kOfTheModel[] = {
    {kSteering, &ReadSteering}, {kPacketArtefact, &ReadSoftTokens}};
ReadData ReaderOfTheModel(absl::string_view name) {
  for (const auto& [known, read] : kOfTheModel) {
    if (known == name) return read;
  }
  return nullptr;
}

std::string TextOf(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

bool IsInt(const Json& value) {
  if (!value.is_number_unsigned()) return value.is_number_integer();
  return value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

bool IsText(const Json& value) { return value.is_string(); }

template <class T>
std::optional<std::vector<T>> ListOf(const Json& value, bool (*is)(const Json&)) {
  std::vector<T> list;
  for (const Json& item : value) {
    if (!is(item)) return std::nullopt;
    list.push_back(item.get<T>());
  }
  return list;
}

std::optional<ParamValue> ParamOf(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (IsInt(value)) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) return std::nullopt;
  if (auto numbers = ListOf<int64_t>(value, &IsInt)) return *std::move(numbers);
  if (auto names = ListOf<std::string>(value, &IsText)) return *std::move(names);
  return std::nullopt;
}

// Takes `params` as this model's defaults, if they would do as a request's.
absl::Status AddParams(const Json& params, const PolicySpec& spec, ModelShape& shape) {
  if (!params.is_object()) return absl::InvalidArgumentError("params is no object");
  if (!spec.calibrated) {
    return absl::InvalidArgumentError(absl::StrCat("policy '", spec.name, "' takes no params"));
  }
  for (const ParamSpec& param : spec.params) {
    if (params.contains(param.name) == param.fallback.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("params.", param.name,
                       param.fallback.has_value() ? ": has a default of its own" : ": is missing"));
    }
  }
  std::map<std::string, ParamValue> values;
  for (const auto& [name, value] : params.items()) {
    std::optional<ParamValue> param = ParamOf(value);
    if (!param.has_value()) return absl::InvalidArgumentError(absl::StrCat("params.", name));
    values[name] = *std::move(param);
  }
  const ResolvedParams resolved = ResolveParams(spec, values, shape);
  if (!resolved.violations.empty()) {
    const ParamViolation& first = resolved.violations.front();
    return absl::InvalidArgumentError(absl::StrCat("params", first.param.empty() ? "" : ".",
                                                   first.param, ": ", first.description));
  }
  shape.calibrated[std::string(spec.name)] = std::move(values);
  return absl::OkStatus();
}

// Of the file of arrays that `file` names; none if it names none.
absl::StatusOr<NamedArrays> ArraysOf(const Json& file, absl::string_view policy,
                                     absl::string_view weights, const ReadBeside& read) {
  if (!file.contains("arrays")) return NamedArrays();
  const std::string name = TextOf(file, "arrays");
  if (name.empty() || name == "." || name == ".." || absl::StrContains(name, '/')) {
    return absl::InvalidArgumentError("arrays must be the name of a file beside this one");
  }
  const absl::StatusOr<std::string> bytes = read(name);
  if (!bytes.ok()) {
    return absl::Status(bytes.status().code(), absl::StrCat("arrays: ", bytes.status().message()));
  }
  absl::StatusOr<Safetensors> arrays = ReadSafetensors(*bytes);
  if (!arrays.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", arrays.status().message()));
  }
  // So that nobody puts another's beside it.
  for (const auto& [fact, wanted] : {std::pair("policy", policy), std::pair("weights", weights)}) {
    const auto said = arrays->metadata.find(fact);
    if (said != arrays->metadata.end() && said->second == wanted) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": its ", fact, " is '",
                     said == arrays->metadata.end() ? "" : said->second, "', not '", wanted, "'"));
  }
  return std::move(arrays->arrays);
}

}  // namespace

absl::Status AddArtefact(absl::string_view text, PolicyCatalog catalog, absl::string_view weights,
                         const ReadBeside& read, ModelShape& shape) {
  const Json file = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError("not a JSON object");
  if (TextOf(file, "format") != kFormat) {
    return absl::InvalidArgumentError(absl::StrCat("format must be \"", kFormat, "\""));
  }
  const std::string policy = TextOf(file, "policy");
  const ReadData of_the_model = ReaderOfTheModel(policy);
  const PolicySpec* spec = of_the_model != nullptr ? nullptr : FindPolicy(catalog, policy);
  if (spec == nullptr && of_the_model == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("unknown policy '", policy, "'"));
  }
  if (shape.artefacts.contains(policy)) {
    return absl::InvalidArgumentError(absl::StrCat("a second artefact of policy '", policy, "'"));
  }
  const Json model = file.value("model", Json::object());
  const std::string made_for = model.is_object() ? TextOf(model, "weights") : "";
  if (made_for.empty()) return absl::InvalidArgumentError("model.weights is missing");
  if (weights.empty()) {
    return absl::FailedPreconditionError(
        "the model file does not say which weights it holds: export it again");
  }
  if (made_for != weights) {
    return absl::FailedPreconditionError(
        absl::StrCat("made for another model, '", TextOf(model, "name"), "' with weights ",
                     made_for, "; the served model's are ", weights));
  }
  const auto data = file.find("data"), params = file.find("params");
  if (data == file.end() && params == file.end()) {
    return absl::InvalidArgumentError("holds neither params nor data");
  }
  if (data == file.end() && file.contains("arrays")) {
    return absl::InvalidArgumentError("has arrays, and no data");
  }
  const ReadData read_data = of_the_model != nullptr ? of_the_model : spec->read_data;
  if ((data != file.end()) != (read_data != nullptr)) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy '", policy, "' takes ", read_data == nullptr ? "no data" : "data"));
  }
  if (of_the_model != nullptr && params != file.end()) {
    return absl::InvalidArgumentError(absl::StrCat(policy, " takes no params"));
  }
  std::shared_ptr<const PolicyData> known;
  if (data != file.end()) {
    const absl::StatusOr<NamedArrays> arrays = ArraysOf(file, policy, weights, read);
    if (!arrays.ok()) return arrays.status();
    absl::StatusOr<std::shared_ptr<const PolicyData>> made =
        read_data({.json = data->dump(), .arrays = *arrays}, shape);
    if (!made.ok()) {
      return absl::Status(made.status().code(), absl::StrCat("data: ", made.status().message()));
    }
    known = *std::move(made);
  }
  // From here on: the policy may ask for it when its parameters are completed.
  shape.artefacts[policy] = std::move(known);
  const absl::Status added =
      params == file.end() ? absl::OkStatus() : AddParams(*params, *spec, shape);
  if (!added.ok()) shape.artefacts.erase(policy);
  return added;
}

}  // namespace epikv
