#include "policies/spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace epikv {
namespace {

// The value as the parameter's type, or nothing if it is of another.
std::optional<ParamValue> Coerce(const ParamValue& value, ParamType type) {
  const auto* as_int = std::get_if<int64_t>(&value);
  const auto* as_float = std::get_if<double>(&value);
  switch (type) {
    case ParamType::kBool:
      if (std::holds_alternative<bool>(value)) return value;
      return std::nullopt;
    case ParamType::kInt:
      if (as_int != nullptr) return value;
      // Beyond 2^53 a float no longer says which integer was meant.
      if (as_float != nullptr && *as_float == std::floor(*as_float) &&
          std::abs(*as_float) < 0x1p53) {
        return ParamValue(static_cast<int64_t>(*as_float));
      }
      return std::nullopt;
    case ParamType::kFloat:
      if (as_float != nullptr && std::isfinite(*as_float)) return value;
      if (as_int != nullptr) return ParamValue(static_cast<double>(*as_int));
      return std::nullopt;
    case ParamType::kChoice:
      if (std::holds_alternative<std::string>(value)) return value;
      return std::nullopt;
    case ParamType::kIntList:
      if (std::holds_alternative<std::vector<int64_t>>(value)) return value;
      return std::nullopt;
    case ParamType::kChoiceList:
      if (std::holds_alternative<std::vector<std::string>>(value)) return value;
      // An empty list says nothing of its items.
      if (value == ParamValue(std::vector<int64_t>())) return std::vector<std::string>();
      return std::nullopt;
  }
  return std::nullopt;
}

// What is wrong with a value of the right type; empty if nothing is.
std::string RangeError(const ParamSpec& spec, const ParamValue& value) {
  if (spec.type == ParamType::kInt || spec.type == ParamType::kFloat) {
    const double number =
        spec.type == ParamType::kInt ? std::get<int64_t>(value) * 1.0 : std::get<double>(value);
    if (number < spec.min || number > spec.max) {
      return absl::StrCat("must be between ", spec.min, " and ", spec.max, ", is ", number);
    }
  }
  auto known = [&](const std::string& choice) {
    return std::find(spec.choices.begin(), spec.choices.end(), choice) != spec.choices.end();
  };
  if (spec.type == ParamType::kChoice) {
    const std::string& choice = std::get<std::string>(value);
    if (!known(choice)) {
      return absl::StrCat("must be one of ", absl::StrJoin(spec.choices, ", "), ", is '", choice,
                          "'");
    }
  }
  if (spec.type == ParamType::kChoiceList) {
    const auto& items = std::get<std::vector<std::string>>(value);
    for (auto item = items.begin(); item != items.end(); ++item) {
      if (!known(*item)) {
        return absl::StrCat("items must be of ", absl::StrJoin(spec.choices, ", "), ", one is '",
                            *item, "'");
      }
      if (std::find(items.begin(), item, *item) != item) {
        return absl::StrCat("has '", *item, "' twice");
      }
    }
  }
  if (spec.type == ParamType::kIntList) {
    for (int64_t item : std::get<std::vector<int64_t>>(value)) {
      if (item < spec.min || item > spec.max) {
        return absl::StrCat("items must be between ", spec.min, " and ", spec.max, ", one is ",
                            item);
      }
    }
  }
  return "";
}

std::string TypeWanted(const ParamSpec& spec) {
  const std::string choices = absl::StrJoin(spec.choices, ", ");
  if (spec.type == ParamType::kChoice) return absl::StrCat("one of ", choices);
  if (spec.type == ParamType::kChoiceList) return absl::StrCat("a list of ", choices);
  return absl::StrCat("of type ", ParamTypeName(spec.type));
}

std::string KnownParams(const PolicySpec& spec) {
  if (spec.params.empty()) return "it takes none";
  return absl::StrCat("known: ",
                      absl::StrJoin(spec.params, ", ", [](std::string* out, const ParamSpec& p) {
                        absl::StrAppend(out, p.name);
                      }));
}

// Null if there is none.
const ParamSpec* FindParam(const PolicySpec& spec, absl::string_view name) {
  for (const ParamSpec& param : spec.params) {
    if (param.name == name) return &param;
  }
  return nullptr;
}

}  // namespace

absl::string_view SignalName(Signal signal) {
  switch (signal) {
    case Signal::kResidualStep:
      return "residual_step";
    case Signal::kAttentionRow:
      return "attention_row";
    case Signal::kKeys:
      return "keys";
    case Signal::kValues:
      return "values";
    case Signal::kPromptAttention:
      return "prompt_attention";
    case Signal::kQueries:
      return "queries";
    case Signal::kOutputProjection:
      return "output_projection";
    case Signal::kQueryMoments:
      return "query_moments";
    case Signal::kLogitEntropy:
      return "logit_entropy";
    case Signal::kResidualDistance:
      return "residual_distance";
    case Signal::kResidual:
      return "residual";
    case Signal::kFinalHidden:
      return "final_hidden";
    case Signal::kGate:
      return "gate";
  }
  return "";
}

std::vector<absl::string_view> SignalSet::Names() const {
  std::vector<absl::string_view> names;
  for (Signal s : {Signal::kResidualStep, Signal::kAttentionRow, Signal::kKeys, Signal::kValues,
                   Signal::kPromptAttention, Signal::kQueries, Signal::kOutputProjection,
                   Signal::kQueryMoments, Signal::kLogitEntropy, Signal::kResidualDistance,
                   Signal::kResidual, Signal::kGate, Signal::kFinalHidden}) {
    if (Has(s)) names.push_back(SignalName(s));
  }
  return names;
}

absl::string_view GranularityName(Granularity granularity) {
  switch (granularity) {
    case Granularity::kToken:
      return "token";
    case Granularity::kLayer:
      return "layer";
    case Granularity::kHead:
      return "head";
  }
  return "";
}

absl::string_view PromptEvictionName(PromptEviction eviction) {
  switch (eviction) {
    case PromptEviction::kRefuses:
      return "refuses";
    case PromptEviction::kByChunk:
      return "by_chunk";
    case PromptEviction::kAtEnd:
      return "at_end";
  }
  return "";
}

absl::string_view ParamTypeName(ParamType type) {
  switch (type) {
    case ParamType::kBool:
      return "bool";
    case ParamType::kInt:
      return "int";
    case ParamType::kFloat:
      return "float";
    case ParamType::kChoice:
      return "choice";
    case ParamType::kIntList:
      return "int_list";
    case ParamType::kChoiceList:
      return "choice_list";
  }
  return "";
}

void AddGuard(const ModelShape& shape, PolicyTraits& traits) {
  constexpr int64_t kBytesOfToken = 64;  // that is old, and that is not guarded
  const int64_t tables = traits.granularity == Granularity::kToken ? 1
                         : traits.granularity == Granularity::kLayer
                             ? shape.num_layers
                             : shape.num_layers * shape.num_kv_heads;
  traits.signals = traits.signals | Signal::kQueries | Signal::kKeys;
  traits.window = std::max<int64_t>(traits.window, 1);
  traits.state_bytes_per_token += tables * kBytesOfToken;
  traits.recalls = true;
}

bool DecidesByParts(const PolicySpec& spec, const PolicyTraits& traits) {
  if (!traits.evicts) return true;
  if (traits.granularity == Granularity::kHead) {
    const bool of_each_head = spec.read_data != nullptr;  // what its artefact says
    return traits.pool == Pool::kLane && !traits.compares_heads && !of_each_head;
  }
  constexpr Signal kOfHeads[] = {Signal::kAttentionRow, Signal::kKeys,
                                 Signal::kValues,       Signal::kPromptAttention,
                                 Signal::kQueries,      Signal::kOutputProjection,
                                 Signal::kQueryMoments};
  const bool reads_heads = std::any_of(std::begin(kOfHeads), std::end(kOfHeads),
                                       [&](Signal of) { return traits.signals.Has(of); });
  return traits.averages_heads || !reads_heads;
}

const PolicySpec* FindPolicy(PolicyCatalog catalog, absl::string_view name) {
  for (const PolicySpec* spec : catalog) {
    if (spec->name == name) return spec;
  }
  return nullptr;
}

ResolvedParams ResolveParams(const PolicySpec& spec, const std::map<std::string, ParamValue>& given,
                             const ModelShape& shape) {
  ResolvedParams resolved;
  auto violate = [&](absl::string_view param, std::string description) {
    resolved.violations.push_back({std::string(param), std::move(description)});
  };
  for (const auto& [name, value] : given) {
    const ParamSpec* param = FindParam(spec, name);
    if (param == nullptr) {
      violate(name,
              absl::StrCat("policy '", spec.name, "' has no such parameter; ", KnownParams(spec)));
      continue;
    }
    const std::optional<ParamValue> typed = Coerce(value, param->type);
    if (!typed.has_value()) {
      violate(name, absl::StrCat("must be ", TypeWanted(*param)));
      continue;
    }
    if (std::string error = RangeError(*param, *typed); !error.empty()) {
      violate(name, std::move(error));
      continue;
    }
    resolved.params.Set(name, *typed);
  }
  for (const ParamSpec& param : spec.params) {
    if (!resolved.params.Has(param.name) && param.fallback.has_value()) {
      resolved.params.Set(param.name, *param.fallback);
    }
  }
  if (resolved.violations.empty() && spec.complete != nullptr) {
    if (absl::Status status = spec.complete(resolved.params, shape); !status.ok()) {
      // "param: what is wrong" is that parameter's, anything else of several together.
      const std::pair<std::string, std::string> parts =
          absl::StrSplit(status.message(), absl::MaxSplits(": ", 1));
      if (FindParam(spec, parts.first) != nullptr) {
        violate(parts.first, parts.second);
      } else {
        violate("", std::string(status.message()));
      }
    }
  }
  return resolved;
}

}  // namespace epikv
