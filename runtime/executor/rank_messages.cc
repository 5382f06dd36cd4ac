#include "runtime/executor/rank_messages.h"

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

namespace epikv {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TokenSpan, begin, end)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Protection, prompt, sinks, recent, spans, thinking, thought)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(KvDemand, budget, prefill, decode, draft, passes, prefill_bytes,
                                   decode_bytes, prefill_round_pairs, decode_round_pairs,
                                   tier_bytes, completions)

namespace {

using nlohmann::json;

// With its alternative, since a whole number may stand for a real one.
json ParamMessage(const ParamValue& value) {
  return std::visit([&](const auto& of) { return json{value.index(), of}; }, value);
}

template <size_t kIndex = 0>
ParamValue ParamOf(size_t index, const json& value) {
  if constexpr (kIndex < std::variant_size_v<ParamValue>) {
    if (index != kIndex) return ParamOf<kIndex + 1>(index, value);
    return value.get<std::variant_alternative_t<kIndex, ParamValue>>();
  } else {
    throw std::invalid_argument("a parameter's value is of no known kind");
  }
}

}  // namespace

json RequestMessage(const Request& request) {
  json params = json::object();
  for (const auto& [name, value] : request.params.values()) params[name] = ParamMessage(value);
  return {{"id", request.id},
          {"prompt", request.prompt},
          {"forced", request.forced},
          {"force_in_chunks", request.force_in_chunks},
          {"seed", request.sampling.seed},
          {"max_output_tokens", request.max_output_tokens},
          {"prompt_logprobs", request.output.prompt_logprobs},
          {"kv_trace", request.output.kv_trace},
          {"kept", request.output.kept},
          {"residual_steps", request.output.residual_steps},
          {"evict_thinking", request.evict_thinking},
          {"policy", std::string(request.spec->name)},
          {"evicts", request.traits.evicts},
          {"params", std::move(params)},
          {"budget", request.budget},
          {"protection", request.protection},
          {"positions", static_cast<int>(request.positions)},
          {"read", {request.read.tokens, request.read.rule.page, request.read.rule.dense_layers}},
          {"prefix_salt", request.prefix_salt},
          {"bypass_prefix_cache", request.bypass_prefix_cache},
          {"guess_tokens", request.guess_tokens},
          {"tap_layers", request.tap_layers},
          {"demand", request.demand}};
}

std::unique_ptr<const Request> RequestOf(const json& message, PolicyCatalog catalog,
                                         const ModelShape& shape) {
  auto request = std::make_unique<Request>();
  message.at("id").get_to(request->id);
  message.at("prompt").get_to(request->prompt);
  message.at("forced").get_to(request->forced);
  message.at("force_in_chunks").get_to(request->force_in_chunks);
  message.at("seed").get_to(request->sampling.seed);
  message.at("max_output_tokens").get_to(request->max_output_tokens);
  message.at("prompt_logprobs").get_to(request->output.prompt_logprobs);
  message.at("kv_trace").get_to(request->output.kv_trace);
  message.at("kept").get_to(request->output.kept);
  message.at("residual_steps").get_to(request->output.residual_steps);
  message.at("evict_thinking").get_to(request->evict_thinking);
  const auto name = message.at("policy").get<std::string>();
  request->spec = FindPolicy(catalog, name);
  if (request->spec == nullptr) throw std::invalid_argument("there is no policy '" + name + "'");
  for (const auto& [param, value] : message.at("params").items()) {
    request->params.Set(param, ParamOf(value.at(0), value.at(1)));
  }
  if (message.at("evicts")) {
    request->traits = request->spec->traits(request->params, shape);
    request->policy = request->spec->make(request->params, shape);
  } else {  // nobody is asked to drop anything
    request->traits = {.evicts = false};
  }
  message.at("budget").get_to(request->budget);
  message.at("protection").get_to(request->protection);
  request->positions = static_cast<PositionMode>(message.at("positions").get<int>());
  const json& read = message.at("read");
  request->read = {.tokens = read.at(0), .rule = {.page = read.at(1), .dense_layers = read.at(2)}};
  message.at("prefix_salt").get_to(request->prefix_salt);
  message.at("bypass_prefix_cache").get_to(request->bypass_prefix_cache);
  message.at("guess_tokens").get_to(request->guess_tokens);
  message.at("tap_layers").get_to(request->tap_layers);
  message.at("demand").get_to(request->demand);
  return request;
}

json ItemsMessage(absl::Span<const WorkItem> items) {
  json all = json::array();
  for (const WorkItem& item : items) {
    json one = {{"id", static_cast<int64_t>(item.id)},
                {"tokens", std::vector<int32_t>(item.tokens.begin(), item.tokens.end())},
                {"first", item.first},
                {"decode", item.decode},
                {"ends_prefill", item.ends_prefill},
                {"evicts_prefill", item.evicts_prefill},
                {"num_outputs", item.num_outputs},
                {"pass", item.pass},
                {"completions", item.completions},
                {"ahead", item.ahead}};
    if (item.thinking.has_value()) {
      one["thinking"] = item.thinking->span;
      one["thinking_ended"] = item.thinking->ended;
    }
    all.push_back(std::move(one));
  }
  return all;
}

ReceivedItems::ReceivedItems(const json& message,
                             absl::FunctionRef<const Request*(SequenceId)> request) {
  tokens_.reserve(message.size());  // they are pointed to
  for (const json& one : message) {
    tokens_.push_back(one.at("tokens").get<std::vector<int32_t>>());
    const SequenceId id{one.at("id").get<int64_t>()};
    WorkItem item{.id = id,
                  .request = request(id),
                  .tokens = tokens_.back(),
                  .first = one.at("first"),
                  .decode = one.at("decode"),
                  .ends_prefill = one.at("ends_prefill"),
                  .evicts_prefill = one.at("evicts_prefill"),
                  .num_outputs = one.at("num_outputs"),
                  .pass = one.at("pass"),
                  .completions = one.at("completions"),
                  .ahead = one.at("ahead")};
    if (one.contains("thinking")) {
      item.thinking = {.span = one.at("thinking").get<TokenSpan>(),
                       .ended = one.at("thinking_ended")};
    }
    items_.push_back(std::move(item));
  }
}

}  // namespace epikv
