#include "server/models/policy_service.h"

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "policies/costs.h"
#include "policies/protection.h"
#include "runtime/admission/unknown_policy.h"
#include "runtime/kv/kv_layout.h"
#include "server/messages/param_values.h"
#include "server/messages/params_schema.h"

namespace epikv {
namespace {

v1::PolicyParam ToProto(const ParamSpec& spec, const Params& defaults) {
  v1::PolicyParam proto;
  proto.set_name(std::string(spec.name));
  proto.set_type(std::string(ParamTypeName(spec.type)));
  proto.mutable_default_value()->set_null_value(google::protobuf::NULL_VALUE);
  const auto found = defaults.values().find(spec.name);
  if (found != defaults.values().end()) *proto.mutable_default_value() = ToValue(found->second);
  if (spec.type == ParamType::kInt || spec.type == ParamType::kFloat ||
      spec.type == ParamType::kIntList) {
    proto.set_min(spec.min);
    proto.set_max(spec.max);
  }
  for (absl::string_view choice : spec.choices) proto.add_choices(std::string(choice));
  proto.set_help(std::string(spec.help));
  return proto;
}

v1::PolicyCost ToProto(const PolicyCost& cost) {
  v1::PolicyCost proto;
  proto.set_level(std::string(CostLevel(cost.share_of_step)));
  proto.set_share_of_step(cost.share_of_step);
  proto.set_cpu_us_per_token(cost.cpu_us_per_token);
  proto.set_cached_tokens(cost.cached_tokens);
  proto.set_made_with(std::string(CostsMadeWith()));
  return proto;
}

v1::DefaultProtection ToProto(const PublishedProtection& published) {
  v1::DefaultProtection proto;
  if (!published.prompt) proto.set_protect_prompt(false);
  proto.set_sink_tokens(published.sinks);
  if (published.recent_share.has_value()) {
    proto.set_recent_share(*published.recent_share);
  } else if (published.recent.has_value()) {
    proto.set_recent_tokens(*published.recent);
  }
  return proto;
}

// What a request may set a parameter to, of those that can be listed.
std::vector<ParamValue> Listable(const ParamSpec& param) {
  std::vector<ParamValue> values;
  if (param.type == ParamType::kBool) values = {false, true};
  for (absl::string_view choice : param.choices) {
    const std::string item(choice);
    values.push_back(param.type == ParamType::kChoiceList ? ParamValue(std::vector{item})
                                                          : ParamValue(item));
  }
  return values;
}

std::string ValueName(const ParamValue& value) {
  if (const auto* is = std::get_if<bool>(&value)) return *is ? "true" : "false";
  if (const auto* list = std::get_if<std::vector<std::string>>(&value)) return list->front();
  return std::get<std::string>(value);
}

// What Admission refuses whatever the request's lengths, and why, from what it decides by: the
// traits, and the policy's own check of each value beside the other parameters' defaults.
void AddIncompatibleOptions(const PolicySpec& spec, const PolicyTraits& traits,
                            const ModelShape& shape, v1::Policy& proto) {
  auto add = [&](absl::string_view field, absl::string_view value, absl::string_view reason) {
    v1::IncompatibleOption& option = *proto.add_incompatible_options();
    option.set_field(std::string(field));
    option.set_value(std::string(value));
    option.set_reason(std::string(reason));
  };
  if (traits.evicts) {
    add("kv.budget", "absent", "it evicts, so it needs a budget: max_tokens or keep_ratio");
    add("cadence", "SCORE_CADENCE_CHUNK",
        "it evicts, which needs scoring of one token a step (SCORE_CADENCE_DECODE)");
    if (traits.prompt == PromptEviction::kRefuses) {
      add("kv.budget", absl::StrCat("below prompt + ", kRoomBesidePrompt),
          "it cannot evict prompt tokens");
    }
    if (traits.prompt == PromptEviction::kByChunk) {
      add("output.prompt_logprobs",
          absl::StrCat("true with a budget below prompt + ", kRoomBesidePrompt),
          "it evicts the prompt while it is cached");
    }
  } else if (traits.reads.has_value()) {
    add("kv.read_tokens", "above 0", "its budget is what a decode step reads");
  } else {
    add("kv.budget", "below prompt + max_output_tokens - 1", "it evicts nothing");
  }
  if (ReadsRows(traits) || traits.reads.has_value()) {
    add("kv.positions", "POSITION_MODE_CACHE", "it reads keys or queries");
  } else if (traits.pool != Pool::kLane) {
    add("kv.positions", "POSITION_MODE_CACHE", "its heads share one budget");
  }
  for (const ParamSpec& param : spec.params) {
    for (const ParamValue& value : Listable(param)) {
      const ResolvedParams resolved =
          ResolveParams(spec, {{std::string(param.name), value}}, shape);
      if (resolved.violations.empty()) continue;
      add(absl::StrCat("kv.policy_params.", param.name), ValueName(value),
          resolved.violations.front().description);
    }
  }
}

// With the default parameters and no residual steps of its own.
void AddStateBytes(const ModelShape& shape, const KvFormat& format, const PolicyTraits& traits,
                   v1::Policy& proto) {
  const KvLayout plain = LayoutOf(shape, format, {}, 0);
  ReadLimit read;
  if (traits.reads.has_value()) read = {.tokens = 1, .rule = *traits.reads};
  const KvLayout layout =
      LayoutOf(shape, format, traits, traits.residual_layers.size(), PositionMode::kAbsolute, read);
  proto.set_state_bytes_per_token(layout.num_lanes * (layout.row_bytes - plain.row_bytes) +
                                  layout.num_tables * layout.slot_bytes +
                                  layout.state_bytes_per_token);
  proto.set_state_bytes_per_sequence(layout.state_bytes);
}

// Parameters whose default this model cannot give (no calibration, say) show null.
v1::Policy ToProto(const PolicySpec& spec, const Admission& admission) {
  const ModelShape& shape = admission.shape();
  const ResolvedParams defaults = ResolveParams(spec, {}, shape);
  v1::Policy proto;
  proto.set_name(std::string(spec.name));
  proto.set_summary(std::string(spec.summary));
  proto.set_paper(std::string(spec.paper));
  for (const ParamSpec& param : spec.params) {
    *proto.add_params() = ToProto(param, defaults.params);
  }
  *proto.mutable_params_schema() = ParamsSchema(spec, defaults.params);
  proto.set_evaluation_only(spec.evaluation_only);
  proto.set_needs_artefact(spec.read_data != nullptr);
  proto.set_has_artefact(shape.artefacts.contains(spec.name));
  if (const PolicyCost* cost = FindCost(spec.name)) *proto.mutable_cost() = ToProto(*cost);
  if (!defaults.violations.empty()) return proto;
  const PolicyTraits traits = spec.traits(defaults.params, shape);
  for (absl::string_view signal : traits.signals.Names()) proto.add_signals(std::string(signal));
  proto.set_granularity(std::string(GranularityName(traits.granularity)));
  proto.set_prompt_eviction(std::string(PromptEvictionName(traits.prompt)));
  proto.set_slack_tokens(traits.slack);
  *proto.mutable_default_protection() = ToProto(traits.published);
  AddIncompatibleOptions(spec, traits, shape, proto);
  for (absl::string_view column : traits.columns) proto.add_columns(std::string(column));
  AddStateBytes(shape, admission.kv_format(), traits, proto);
  return proto;
}

}  // namespace

PolicyService::PolicyService(const Models& models, const Frontend& frontend)
    : Service(frontend), models_(models) {
  AnswerAtOnce("PolicyService/ListPolicies", &PolicyService::ListPolicies);
  AnswerAtOnce("PolicyService/GetPolicy", &PolicyService::GetPolicy);
}

Answer<v1::ListPoliciesResponse> PolicyService::ListPolicies(
    const v1::ListPoliciesRequest& request) {
  const auto found = models_.Find(request.model());
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const Admission& admission = *std::get<ModelPtr>(found)->admission;
  v1::ListPoliciesResponse response;
  for (const PolicySpec* spec : admission.catalog()) {
    *response.add_policies() = ToProto(*spec, admission);
  }
  return response;
}

Answer<v1::Policy> PolicyService::GetPolicy(const v1::GetPolicyRequest& request) {
  const auto found = models_.Find(request.model());
  if (const auto* refusal = std::get_if<grpc::Status>(&found)) return *refusal;
  const Admission& admission = *std::get<ModelPtr>(found)->admission;
  const PolicySpec* spec = FindPolicy(admission.catalog(), request.name());
  if (spec != nullptr) return ToProto(*spec, admission);
  return NotFound("policy", request.name(), UnknownPolicy(admission.catalog(), request.name()));
}

}  // namespace epikv
