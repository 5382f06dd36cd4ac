#include "server/policy_service.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "server/param_values.h"
#include "server/rpc.h"

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

// Parameters whose default this model cannot give (no calibration, say) show null.
v1::Policy ToProto(const PolicySpec& spec, const ModelShape& shape) {
  const ResolvedParams defaults = ResolveParams(spec, {}, shape);
  v1::Policy proto;
  proto.set_name(std::string(spec.name));
  proto.set_summary(std::string(spec.summary));
  proto.set_paper(std::string(spec.paper));
  for (const ParamSpec& param : spec.params) {
    *proto.add_params() = ToProto(param, defaults.params);
  }
  proto.set_evaluation_only(spec.evaluation_only);
  if (!defaults.violations.empty()) return proto;
  const PolicyTraits traits = spec.traits(defaults.params, shape);
  for (absl::string_view signal : traits.signals.Names()) proto.add_signals(std::string(signal));
  proto.set_granularity(std::string(GranularityName(traits.granularity)));
  proto.set_prompt_eviction(std::string(PromptEvictionName(traits.prompt)));
  proto.set_sink_tokens(traits.published.sinks);
  proto.set_slack_tokens(traits.slack);
  return proto;
}

}  // namespace

grpc::ServerUnaryReactor* PolicyService::ListPolicies(grpc::CallbackServerContext* context,
                                                      const grpc::ByteBuffer* in,
                                                      grpc::ByteBuffer* out) {
  auto list = [this](const v1::ListPoliciesRequest& request) -> Answer<v1::ListPoliciesResponse> {
    if (auto refusal = model_.Refuse(request.model())) return *std::move(refusal);
    v1::ListPoliciesResponse response;
    for (const PolicySpec* spec : model_.admission.catalog()) {
      *response.add_policies() = ToProto(*spec, model_.admission.shape());
    }
    return response;
  };
  return AnswerAtOnce<v1::ListPoliciesRequest>("PolicyService/ListPolicies", metrics_, *context,
                                               *in, *out, list);
}

grpc::ServerUnaryReactor* PolicyService::GetPolicy(grpc::CallbackServerContext* context,
                                                   const grpc::ByteBuffer* in,
                                                   grpc::ByteBuffer* out) {
  auto get = [this](const v1::GetPolicyRequest& request) -> Answer<v1::Policy> {
    if (auto refusal = model_.Refuse(request.model())) return *std::move(refusal);
    const PolicySpec* spec = FindPolicy(model_.admission.catalog(), request.name());
    if (spec != nullptr) return ToProto(*spec, model_.admission.shape());
    return NotFound("policy", request.name(),
                    absl::StrCat("unknown policy '", request.name(),
                                 "'; known: ", KnownPolicies(model_.admission.catalog())));
  };
  return AnswerAtOnce<v1::GetPolicyRequest>("PolicyService/GetPolicy", metrics_, *context, *in,
                                            *out, get);
}

}  // namespace epikv
