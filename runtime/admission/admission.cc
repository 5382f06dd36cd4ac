#include "runtime/admission/admission.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/signals/signals.h"

namespace epikv {
namespace {

constexpr size_t kMaxStopStrings = 16, kMaxStopStringBytes = 256, kMaxStopTokens = 64;
constexpr size_t kMaxIdBytes = 128, kMaxTenantBytes = 64, kMaxSaltBytes = 128, kMaxSpans = 64;
constexpr size_t kMaxLogitBiases = 1024;
constexpr float kMostLogitBias = 100;
constexpr int64_t kMaxTopLogprobs = 20, kMaxCompletions = 16;

// Reads queries of tokens before the newest.
bool ReadsPastQueries(const PolicyTraits& traits) {
  return traits.signals.Has(Signal::kQueries) || traits.signals.Has(Signal::kQueryMoments);
}

// Some layer's window is narrower than `tokens`.
bool HidesTokens(const Manifest& manifest, int64_t tokens) {
  return std::any_of(manifest.layers.begin(), manifest.layers.end(), [=](const LayerFacts& layer) {
    return layer.window.has_value() && *layer.window < tokens;
  });
}

// Fills one Request step by step and collects everything that is wrong on the way.
class Resolver {
 public:
  Resolver(const Admission& admission, RequestOptions options)
      : admission_(admission), options_(std::move(options)) {}

  void CheckTokens();
  void CheckSampling();
  void CheckStop();
  void CheckOutput();
  void CheckScheduling();
  // False: they are at fault, and say nothing of what follows from them.
  bool ResolveLengths();
  const PolicySpec* ResolvePolicy();
  bool ResolveBudget();
  // Of what is asked, whatever the budget. Without lengths the context is the bound.
  bool CheckProtection(bool has_lengths);
  void ResolveProtectionAndDemand();

  bool ok() const { return rejection_.violations.empty(); }
  Request& request() { return request_; }
  Rejection TakeRejection();

 private:
  void Violate(absl::string_view field, std::string description) {
    if (rejection_.violations.size() == kMaxViolations) return;
    rejection_.violations.push_back({std::string(field), std::move(description)});
  }
  // The first specific reason wins; plain violations are INVALID_REQUEST.
  void Because(absl::string_view reason, std::map<std::string, std::string> metadata,
               absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    if (!rejection_.reason.empty()) return;
    rejection_.reason = std::string(reason);
    rejection_.metadata = std::move(metadata);
    rejection_.code = code;
  }
  bool InVocabulary(int32_t token) const {
    return token >= 0 && token < admission_.manifest().vocab_size;
  }
  void ViolateVocabulary(absl::string_view field, int32_t token);
  void CheckRange(absl::string_view field, const std::vector<int32_t>& ids);
  void CheckLogitBias();
  // Budgets of the lanes under a budget of the request.
  std::vector<int64_t> LaneBudgets(int64_t budget) const;
  ResolvedProtection ProtectionUnder(int64_t budget) const;
  int64_t SmallestBudget(int64_t longest) const;
  void CheckPromptLogprobs(int64_t least_budget);
  int64_t PromptLogitBytes() const;

  const Admission& admission_;
  RequestOptions options_;
  Request request_;
  Rejection rejection_;
};

void Resolver::ViolateVocabulary(absl::string_view field, int32_t token) {
  const int64_t vocab = admission_.manifest().vocab_size;
  Violate(field, absl::StrCat("token id ", token, " is outside the vocabulary [0, ", vocab, ")"));
  Because("TOKEN_RANGE", {{"vocab_size", absl::StrCat(vocab)}}, absl::StatusCode::kOutOfRange);
}

void Resolver::CheckRange(absl::string_view field, const std::vector<int32_t>& ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (InVocabulary(ids[i])) continue;
    ViolateVocabulary(absl::StrCat(field, "[", i, "]"), ids[i]);
    return;  // one of a kind is enough
  }
}

void Resolver::CheckTokens() {
  if (options_.id.size() > kMaxIdBytes) {
    Violate("request_id",
            absl::StrCat("has ", options_.id.size(), " bytes, at most ", kMaxIdBytes));
  }
  if (options_.prompt.empty()) Violate("prompt", "is empty; at least one token is needed");
  CheckRange("prompt.token_ids.ids", options_.prompt);
  if (const size_t bytes = options_.kv.prefix_salt.size(); bytes > kMaxSaltBytes) {
    Violate("kv.cache_salt", absl::StrCat("has ", bytes, " bytes, at most ", kMaxSaltBytes));
  }
  CheckRange("continuation", options_.forced);
}

void Resolver::CheckSampling() {
  const SamplingParams& s = options_.sampling;
  if (s.temperature.has_value() && !(std::isfinite(*s.temperature) && *s.temperature >= 0)) {
    Violate("sampling.temperature",
            absl::StrCat("must be a finite number >= 0, is ", *s.temperature));
  }
  if (s.top_p.has_value() && !(*s.top_p > 0 && *s.top_p <= 1)) {
    Violate("sampling.top_p", absl::StrCat("must be in (0, 1], is ", *s.top_p));
  }
  if (s.top_k.has_value() && *s.top_k < 0) {
    Violate("sampling.top_k", absl::StrCat("must be >= 0, is ", *s.top_k));
  }
  if (s.typical_p.has_value() && !(*s.typical_p > 0 && *s.typical_p <= 1)) {
    Violate("sampling.typical_p", absl::StrCat("must be in (0, 1], is ", *s.typical_p));
  }
  auto check = [&](absl::string_view field, std::optional<float> value, float least, float most) {
    if (!value.has_value() || (least <= *value && *value <= most)) return;
    Violate(field, absl::StrCat("must be in [", least, ", ", most, "], is ", *value));
  };
  check("sampling.min_p", s.min_p, 0, 1);
  // Farther from 1 a logit might overflow.
  check("sampling.repetition_penalty", s.repetition_penalty, 0.01f, 100);
  check("sampling.frequency_penalty", s.frequency_penalty, -2, 2);
  check("sampling.presence_penalty", s.presence_penalty, -2, 2);
  CheckLogitBias();
  const int64_t most = std::min(kMaxCompletions, admission_.limits().max_running_requests);
  if (options_.completions < 1 || options_.completions > most) {
    Violate("sampling.n", absl::StrCat("must be from 1 to ", most, ", is ", options_.completions));
  } else if (options_.completions > 1 && s.greedy()) {
    Violate("sampling.n",
            absl::StrCat("must be 1 where temperature is 0, is ", options_.completions,
                         ": all completions would be the same"));
  }
}

void Resolver::CheckLogitBias() {
  const std::map<int32_t, float>& biases = options_.sampling.logit_bias;
  if (biases.size() > kMaxLogitBiases) {
    Violate("sampling.logit_bias",
            absl::StrCat("has ", biases.size(), " items, at most ", kMaxLogitBiases));
    return;
  }
  for (const auto& [token, bias] : biases) {
    const std::string field = absl::StrCat("sampling.logit_bias[", token, "]");
    if (!InVocabulary(token)) ViolateVocabulary(field, token);
    if (std::abs(bias) <= kMostLogitBias) continue;
    Violate(field,
            absl::StrCat("must be in [", -kMostLogitBias, ", ", kMostLogitBias, "], is ", bias));
  }
}

void Resolver::CheckStop() {
  const StopOptions& stop = options_.stop;
  if (stop.strings.size() > kMaxStopStrings) {
    Violate("stop.stop_strings",
            absl::StrCat("has ", stop.strings.size(), " items, at most ", kMaxStopStrings));
  }
  for (size_t i = 0; i < std::min(stop.strings.size(), kMaxStopStrings); ++i) {
    if (!stop.strings[i].empty() && stop.strings[i].size() <= kMaxStopStringBytes) continue;
    Violate(absl::StrCat("stop.stop_strings[", i, "]"),
            absl::StrCat("must have 1 to ", kMaxStopStringBytes, " bytes, has ",
                         stop.strings[i].size()));
  }
  if (stop.tokens.size() > kMaxStopTokens) {
    Violate("stop.stop_token_ids",
            absl::StrCat("has ", stop.tokens.size(), " items, at most ", kMaxStopTokens));
  }
  CheckRange("stop.stop_token_ids", stop.tokens);
  if (stop.max_output_tokens.has_value() && *stop.max_output_tokens < 1) {
    Violate("stop.max_output_tokens", "must be at least 1");
  }
}

void Resolver::CheckScheduling() {
  const size_t bytes = options_.scheduling.tenant.size();
  if (bytes > kMaxTenantBytes) {
    Violate("scheduling.tenant", absl::StrCat("has ", bytes, " bytes, at most ", kMaxTenantBytes));
  }
}

void Resolver::CheckOutput() {
  const int64_t top = options_.output.top_logprobs;
  if (top > kMaxTopLogprobs) {
    Violate(options_.forced.empty() ? "output.top_logprobs" : "top_logprobs",
            absl::StrCat("must be at most ", kMaxTopLogprobs, ", is ", top));
  }
}

bool Resolver::ResolveLengths() {
  const int64_t context = admission_.manifest().context_length;
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  const int64_t left = context - prompt;
  const bool scores = !options_.forced.empty();
  const int64_t max_output =
      scores ? static_cast<int64_t>(options_.forced.size())
             : admission_.MaxOutputTokens(options_.stop.max_output_tokens, prompt);
  if (max_output > left) {
    Violate(prompt >= context ? "prompt"
            : scores          ? "continuation"
                              : "stop.max_output_tokens",
            absl::StrCat("prompt (", prompt, ") + max output (", max_output,
                         ") tokens are over the context length ", context));
    Because("CONTEXT_LENGTH", {{"context_length", absl::StrCat(context)},
                               {"prompt_tokens", absl::StrCat(prompt)},
                               {"max_output_tokens", absl::StrCat(max_output)}});
    return false;
  }
  request_.max_output_tokens = max_output;
  if (max_output > 0 && options_.stop.min_output_tokens > max_output) {
    Violate("stop.min_output_tokens", absl::StrCat("is ", options_.stop.min_output_tokens,
                                                   ", more than max_output_tokens, ", max_output));
  }
  return prompt > 0 && max_output > 0;
}

const PolicySpec* Resolver::ResolvePolicy() {
  const bool has_budget = !std::holds_alternative<std::monostate>(options_.kv.budget);
  std::string name = options_.kv.policy;
  if (name.empty()) name = has_budget ? admission_.DefaultPolicy() : "full";
  if (name.empty()) {
    Violate("kv.policy", absl::StrCat("a budget needs a policy: this model has no default; known: ",
                                      KnownPolicies(admission_.catalog())));
    return nullptr;
  }
  const PolicySpec* spec = FindPolicy(admission_.catalog(), name);
  if (spec == nullptr) {
    Violate("kv.policy", absl::StrCat("unknown policy '", name,
                                      "'; known: ", KnownPolicies(admission_.catalog())));
    return nullptr;
  }
  if (spec->read_data != nullptr && !admission_.shape().artefacts.contains(name)) {
    Violate("kv.policy", absl::StrCat("policy '", name,
                                      "' needs statistics of this model: `epikv "
                                      "calibrate ",
                                      name,
                                      "` measures them, and the daemon loads "
                                      "them at start (--artefact_dir)"));
    Because("ARTEFACT_MISSING", {{"policy", name}}, absl::StatusCode::kFailedPrecondition);
    return nullptr;
  }
  const size_t faults = rejection_.violations.size();
  for (const auto& [param, value] : options_.kv.params) {
    const auto* list = std::get_if<std::vector<int64_t>>(&value);
    const size_t most = admission_.manifest().context_length;
    if (list == nullptr || list->size() <= most) continue;
    Violate(absl::StrCat("kv.policy_params.", param),
            absl::StrCat("has ", list->size(), " items, at most the context length, ", most));
  }
  if (rejection_.violations.size() > faults) return nullptr;
  ResolvedParams resolved = ResolveParams(*spec, options_.kv.params, admission_.shape());
  for (ParamViolation& violation : resolved.violations) {
    Violate(violation.param.empty() ? std::string("kv.policy_params")
                                    : absl::StrCat("kv.policy_params.", violation.param),
            std::move(violation.description));
  }
  if (!resolved.violations.empty()) return nullptr;
  request_.spec = spec;
  request_.params = std::move(resolved.params);
  request_.traits = spec->traits(request_.params, admission_.shape());
  if (request_.traits.evicts && !has_budget) {
    Violate("kv.budget", absl::StrCat("policy '", name, "' needs max_tokens or keep_ratio"));
    return nullptr;
  }
  if (options_.force_in_chunks && request_.traits.evicts) {
    Violate("cadence",
            absl::StrCat("scoring in chunks is only possible under 'full', not '", name, "'"));
  }
  if (options_.force_in_chunks && options_.output.residual_steps) {
    Violate("residual_steps", "are measured at decode cadence, not in chunks");
  }
  return spec;
}

bool Resolver::ResolveBudget() {
  const int64_t total = static_cast<int64_t>(options_.prompt.size()) + request_.max_output_tokens;
  request_.budget = total;
  int64_t asked = total;
  if (const auto* tokens = std::get_if<int64_t>(&options_.kv.budget)) {
    if (*tokens < 1) {
      Violate("kv.max_tokens", "must be at least 1");
      return false;
    }
    asked = *tokens;
  }
  if (const auto* ratio = std::get_if<double>(&options_.kv.budget)) {
    if (!(*ratio > 0 && *ratio <= 1)) {
      Violate("kv.keep_ratio", absl::StrCat("must be in (0, 1], is ", *ratio));
      return false;
    }
    asked = TokensOf(*ratio, total);
  }
  if (request_.spec == nullptr) return true;
  if (request_.traits.evicts) {
    request_.budget = asked;
  } else if (asked < total - 1) {  // the last output token is never cached
    Violate("kv.budget",
            absl::StrCat("policy '", request_.spec->name, "' evicts nothing and may cache ",
                         total - 1, " tokens, more than the budget of ", asked,
                         "; leave the budget out, or choose a policy that evicts"));
    Because("KV_BUDGET", {{"budget", absl::StrCat(asked)}, {"min", absl::StrCat(total - 1)}});
    return false;
  }
  return true;
}

// Most tokens that a lane holds while a prompt is cached in chunks, with a round after each.
int64_t PeakByChunk(int64_t prefill, int64_t budget, int64_t chunk) {
  const int64_t whole = prefill / chunk * chunk;  // the last chunk may be a part of one
  const int64_t in_last_part = std::min(budget, whole) + prefill - whole;
  if (whole == 0) return in_last_part;
  return std::max(in_last_part, std::min(budget, whole - chunk) + chunk);
}

// Lane capacities from lengths alone. budgets: of each lane; longest: tokens ever cached. Exact
// where all lanes have the same budget; an upper bound where they differ, for they have their
// rounds together.
KvDemand DemandOf(const Request& request, const std::vector<int64_t>& budgets, int64_t longest,
                  int64_t chunk, const KvLayout& layout) {
  KvDemand demand;
  const int64_t prefill = request.prefill_tokens();
  for (int64_t budget : budgets) {
    int64_t while_prefilling = prefill, while_decoding = longest;
    if (request.traits.evicts) {
      const int64_t after_prefill = std::min(prefill, budget);
      while_decoding =
          std::min(after_prefill + longest - prefill, budget + request.traits.slack + 1);
      if (request.traits.prompt == PromptEviction::kByChunk) {
        while_prefilling = PeakByChunk(prefill, budget, chunk);
      }
    }
    demand.budget.push_back(budget);
    demand.prefill.push_back(std::max(while_prefilling, while_decoding));
    demand.decode.push_back(while_decoding);
  }
  demand.prefill_bytes =
      BytesOf(layout, demand.prefill) + std::min(prefill, chunk) * layout.step_bytes_per_row;
  demand.decode_bytes = BytesOf(layout, demand.decode) + layout.step_bytes_per_row;
  return demand;
}

std::vector<int64_t> Resolver::LaneBudgets(int64_t budget) const {
  const ModelShape& shape = admission_.shape();
  if (request_.spec->lane_budgets != nullptr) {
    return request_.spec->lane_budgets(request_.params, shape, budget);
  }
  return std::vector<int64_t>(shape.num_layers * shape.num_kv_heads, budget);
}

// Protection is the same in all lanes, so the leanest one decides.
ResolvedProtection Resolver::ProtectionUnder(int64_t budget) const {
  const std::vector<int64_t> budgets = LaneBudgets(budget);
  const int64_t least = *std::min_element(budgets.begin(), budgets.end());
  ResolvedProtection resolved = ResolveProtection(
      options_.kv.protection, request_.traits, static_cast<int64_t>(options_.prompt.size()), least);
  resolved.smallest_budget += budget - least;
  return resolved;
}

// The smallest budget, from the one asked for on, under which the request can run. A lane's budget
// grows no faster than the request's, so no step goes too far.
int64_t Resolver::SmallestBudget(int64_t longest) const {
  int64_t budget = request_.budget;
  while (budget < longest) {
    const int64_t smallest = ProtectionUnder(budget).smallest_budget;
    if (smallest <= budget) break;
    budget = smallest;
  }
  return std::min(budget, longest);  // under which nothing is evicted
}

bool Resolver::CheckProtection(bool has_lengths) {
  const int64_t total =
      has_lengths ? static_cast<int64_t>(options_.prompt.size()) + request_.max_output_tokens
                  : admission_.manifest().context_length;
  ProtectionOptions& asked = options_.kv.protection;
  const size_t faults = rejection_.violations.size();
  const bool details = asked.prompt.has_value() || asked.sinks.has_value() ||
                       asked.recent.has_value() || !asked.spans.empty();
  if (!asked.equal.has_value()) {
    asked.equal = admission_.defaults().equal_protection && !details;
  } else if (*asked.equal && details) {
    Violate("kv.equal_protection", "excludes the other protection settings");
  }
  auto check = [&](absl::string_view field, std::optional<int64_t>& tokens) {
    if (!tokens.has_value()) return;
    if (*tokens < 0) Violate(field, absl::StrCat("must be at least 0, is ", *tokens));
    tokens = std::min(*tokens, total);
  };
  check("kv.sink_tokens", asked.sinks);
  check("kv.recent_tokens", asked.recent);
  if (asked.spans.size() > kMaxSpans) {
    Violate("kv.protected_spans",
            absl::StrCat("has ", asked.spans.size(), " items, at most ", kMaxSpans));
  }
  for (size_t i = 0; i < std::min(asked.spans.size(), kMaxSpans); ++i) {
    const TokenSpan& span = asked.spans[i];
    if (0 <= span.begin && span.begin < span.end && span.end <= total) continue;
    if (0 <= span.begin && span.begin < span.end) {
      Because("SPAN_RANGE", {{"tokens", absl::StrCat(total)}, {"end", absl::StrCat(span.end)}},
              absl::StatusCode::kOutOfRange);
    }
    Violate(
        absl::StrCat("kv.protected_spans[", i, "]"),
        absl::StrCat("must not be empty, must begin at 0 or later and must end at or before ",
                     has_lengths ? "prompt + max output (" : "the context length (", total, ")"));
  }
  return rejection_.violations.size() == faults;
}

// What the tokens behind a chunk say is not what they say of the prompt once it has been evicted.
void Resolver::CheckPromptLogprobs(int64_t least_budget) {
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  const bool keeps_it = request_.traits.prompt != PromptEviction::kByChunk ||
                        prompt + kRoomBesidePrompt <= least_budget;
  if (!options_.output.prompt_logprobs || keeps_it) return;
  Violate("output.prompt_logprobs",
          absl::StrCat("policy '", request_.spec->name, "' evicts the prompt of ", prompt,
                       " tokens before it is cached whole under a budget of ", least_budget,
                       " tokens, so the figures would not be the prompt's; the smallest budget is ",
                       prompt + kRoomBesidePrompt));
  Because(
      "PROMPT_EVICTED",
      {{"budget", absl::StrCat(least_budget)}, {"min", absl::StrCat(prompt + kRoomBesidePrompt)}},
      absl::StatusCode::kFailedPrecondition);
}

// Logits of all rows of a prompt chunk, where they are wanted: as the model gives them, and fp32.
int64_t Resolver::PromptLogitBytes() const {
  const bool wanted = options_.output.prompt_logprobs || request_.force_in_chunks ||
                      request_.traits.signals.Has(Signal::kLogitEntropy);
  if (!wanted) return 0;
  const Manifest& manifest = admission_.manifest();
  const int64_t rows =
      std::min(request_.prefill_tokens(), admission_.limits().prefill_chunk_tokens);
  return rows * manifest.vocab_size * (manifest.dtype == DType::kFloat32 ? 4 : 2 + 4);
}

void Resolver::ResolveProtectionAndDemand() {
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  // The last output token is never cached.
  const int64_t longest = prompt + request_.max_output_tokens - 1;
  const bool evicts = request_.traits.evicts && request_.budget < longest;
  const ResolvedProtection resolved =
      evicts ? ProtectionUnder(request_.budget)
             : ResolveProtection(options_.kv.protection, request_.traits, prompt, longest);
  request_.protection = resolved.protection;
  if (evicts && resolved.smallest_budget > request_.budget) {
    const int64_t smallest = SmallestBudget(longest);
    Violate("kv.budget",
            absl::StrCat("a budget of ", request_.budget, " tokens does not hold what policy '",
                         request_.spec->name, "' must keep of a prompt of ", prompt,
                         " tokens; the smallest is ", smallest));
    Because("KV_BUDGET",
            {{"budget", absl::StrCat(request_.budget)}, {"min", absl::StrCat(smallest)}});
  }
  if (!evicts) {
    // Nobody will be asked to drop anything: nothing is measured, and the bits are those of `full`.
    request_.traits = {.evicts = false, .uncalibrated = request_.traits.uncalibrated};
  }
  if (options_.kv.positions == PositionMode::kCache && !admission_.limits().turns_keys) {
    Violate("kv.positions",
            "the model runs on a GPU, where positions in the cache are not supported; choose "
            "absolute or compact positions");
  }
  if (options_.kv.positions == PositionMode::kCache && ReadsRows(request_.traits)) {
    Violate("kv.positions",
            absl::StrCat("policy '", request_.spec->name,
                         "' reads keys or queries, which have no lasting positions in a cache of "
                         "ranks; choose absolute or compact positions"));
  }
  if (options_.kv.positions == PositionMode::kCompact && ReadsPastQueries(request_.traits) &&
      HidesTokens(admission_.manifest(), longest)) {
    Violate("kv.positions",
            absl::StrCat("policy '", request_.spec->name,
                         "' reads past queries, whose compact positions are not kept, and the "
                         "model's windows hide by position; choose absolute positions"));
  }
  request_.tap_layers = request_.traits.residual_layers;
  if (options_.output.residual_steps) {
    request_.tap_layers.resize(admission_.shape().num_layers);
    std::iota(request_.tap_layers.begin(), request_.tap_layers.end(), int64_t{0});
  }
  const KvLayout layout =
      LayoutOf(admission_.shape(), admission_.kv_format(), request_.traits,
               static_cast<int64_t>(request_.tap_layers.size()), options_.kv.positions);
  const std::vector<int64_t> budgets =
      evicts ? LaneBudgets(request_.budget) : std::vector<int64_t>(layout.num_lanes, longest);
  if (evicts) CheckPromptLogprobs(*std::min_element(budgets.begin(), budgets.end()));
  request_.demand =
      DemandOf(request_, budgets, longest, admission_.limits().prefill_chunk_tokens, layout);
  request_.demand.prefill_bytes += PromptLogitBytes();
  request_.demand.completions = options_.completions;
  const int64_t capacity = admission_.limits().kv_capacity_bytes;
  if (request_.demand.peak_bytes() > capacity) {
    Violate("kv.budget",
            absl::StrCat("the request can hold up to ", request_.demand.peak_bytes(),
                         " bytes of KV cache and the pool has ", capacity,
                         ": it can never run here; lower the budget",
                         options_.completions > 1 ? ", n" : "", " or max_output_tokens"));
    Because("KV_POOL_TOO_SMALL",
            {{"needed_bytes", absl::StrCat(request_.demand.peak_bytes())},
             {"capacity_bytes", absl::StrCat(capacity)}},
            absl::StatusCode::kFailedPrecondition);
  }
}

Rejection Resolver::TakeRejection() {
  if (rejection_.reason.empty()) rejection_.reason = "INVALID_REQUEST";
  const FieldViolation& first = rejection_.violations.front();
  rejection_.message = absl::StrCat(first.field, ": ", first.description);
  if (rejection_.violations.size() > 1) {
    absl::StrAppend(&rejection_.message, " (and ", rejection_.violations.size() - 1, " more)");
    // Several kinds of fault at once are one bad request.
    rejection_.code = absl::StatusCode::kInvalidArgument;
  }
  return std::move(rejection_);
}

}  // namespace

bool ReadsRows(const PolicyTraits& traits) {
  const SignalSet& signals = traits.signals;
  return signals.Has(Signal::kKeys) || signals.Has(Signal::kQueries) ||
         signals.Has(Signal::kQueryMoments);
}

int64_t TokensOf(double ratio, int64_t tokens) {
  // Of 100 tokens 0.07 are 7, though in doubles they are a little more.
  constexpr double kRounding = 1 - 1e-15;
  return static_cast<int64_t>(std::ceil(ratio * static_cast<double>(tokens) * kRounding));
}

ModelShape ShapeOf(const Manifest& manifest) {
  ModelShape shape{.num_layers = manifest.num_layers(),
                   .num_heads = manifest.num_heads,
                   .num_kv_heads = manifest.num_kv_heads,
                   .key_width = manifest.layers.front().key_width,
                   .value_width = manifest.layers.front().value_width,
                   .hidden_size = manifest.hidden_size};
  for (const LayerFacts& layer : manifest.layers) {
    const Rope& rope = manifest.ropes[layer.rope];
    shape.ropes.push_back({.interleaved = rope.layout == Rope::Layout::kInterleaved,
                           .inv_freq = rope.inv_freq,
                           .attention_factor = rope.attention_factor});
  }
  if (manifest.calibration.has_value()) {
    const Calibration& c = *manifest.calibration;
    shape.calibrated[c.policy] = {
        {"layer_a", c.layer_a}, {"layer_b", c.layer_b}, {"sign", c.sign}, {"window", c.window}};
  }
  return shape;
}

KvLayout LayoutOf(const ModelShape& shape, const KvFormat& format, const PolicyTraits& traits,
                  int64_t num_tap_layers, PositionMode positions) {
  const int64_t element = ElementBytes(format.model), key_bytes = format.RowBytes(shape.key_width);
  KvLayout layout;
  layout.num_lanes = shape.num_layers * shape.num_kv_heads;
  layout.row_bytes = key_bytes + format.RowBytes(shape.value_width);
  layout.num_tables = traits.granularity == Granularity::kToken   ? 1
                      : traits.granularity == Granularity::kLayer ? shape.num_layers
                                                                  : layout.num_lanes;
  layout.slot_bytes = 2 * sizeof(int32_t) + traits.columns.size() * sizeof(float);
  layout.state_bytes_per_token = traits.state_bytes_per_token;
  // The probabilities that a step's query gave each slot.
  if (traits.signals.Has(Signal::kAttentionRow) || traits.signals.Has(Signal::kPromptAttention)) {
    const int64_t layers = traits.attention_layers.empty()
                               ? shape.num_layers
                               : static_cast<int64_t>(traits.attention_layers.size());
    layout.state_bytes_per_token += layers * shape.num_kv_heads * sizeof(float);
  }
  // The logits of one layer that a decode row is made of.
  if (traits.signals.Has(Signal::kAttentionRow)) {
    layout.state_bytes_per_token += shape.num_heads * sizeof(float);
  }
  // The keys of one layer, turned.
  if (positions == PositionMode::kCache) {
    layout.state_bytes_per_token += shape.num_kv_heads * key_bytes;
  }
  // Residuals after every block, until the last one is there.
  if (traits.signals.Has(Signal::kResidualDistance)) {
    layout.step_bytes_per_row = shape.num_layers * shape.hidden_size * element;
  }
  // The residual before, and the one of the step that is not yet committed.
  layout.state_bytes = traits.state_bytes + 2 * num_tap_layers * shape.hidden_size * 4 +
                       (traits.signals.Has(Signal::kQueryMoments)
                            ? QueryMomentsBytes(shape.num_layers, shape.num_heads, shape.key_width)
                            : 0) +
                       QueryWindow::Bytes(shape.num_layers, traits.window,
                                          shape.num_heads * shape.key_width * element);
  return layout;
}

int64_t BytesOf(const KvLayout& layout, const std::vector<int64_t>& capacities) {
  const int64_t lanes_per_table = layout.num_lanes / layout.num_tables;
  int64_t bytes = layout.state_bytes, longest = 0;
  for (int64_t table = 0; table < layout.num_tables; ++table) {
    int64_t slots = 0;
    for (int64_t lane = table * lanes_per_table; lane < (table + 1) * lanes_per_table; ++lane) {
      bytes += capacities[lane] * layout.row_bytes;
      slots = std::max(slots, capacities[lane]);
    }
    bytes += slots * layout.slot_bytes;
    longest = std::max(longest, slots);
  }
  return bytes + longest * layout.state_bytes_per_token;
}

Admission::Admission(const Manifest& manifest, ModelShape shape, PolicyCatalog catalog,
                     AdmissionLimits limits)
    : manifest_(manifest),
      shape_(std::move(shape)),
      catalog_(catalog),
      limits_(std::move(limits)),
      defaults_(limits_.defaults) {}

int64_t Admission::MaxOutputTokens(std::optional<int64_t> asked, int64_t prompt_tokens) const {
  const int64_t left = manifest_.context_length - prompt_tokens;
  return asked.value_or(std::max<int64_t>(1, std::min(defaults().max_output_tokens, left)));
}

RequestDefaults Admission::defaults() const {
  absl::MutexLock lock(&mu_);
  return defaults_;
}

void Admission::SetDefaults(RequestDefaults defaults) {
  absl::MutexLock lock(&mu_);
  defaults_ = std::move(defaults);
}

Admission::Admission(const Manifest& manifest, PolicyCatalog catalog, AdmissionLimits limits)
    : Admission(manifest, ShapeOf(manifest), catalog, std::move(limits)) {}

std::string Admission::DefaultPolicy() const {
  const auto& calibration = manifest_.calibration;
  if (calibration.has_value() && calibration->confirmed) return calibration->policy;
  return defaults().policy;
}

int64_t Admission::kv_bytes_per_token() const {
  return shape_.num_layers * shape_.num_kv_heads * LayoutOf(shape_, kv_format(), {}, 0).row_bytes;
}

std::variant<Request, Rejection> Admission::Resolve(RequestOptions options) const {
  if (options.forced.empty()) FillIn(manifest_.sampling, options.sampling);
  Resolver resolver(*this, options);
  Request& request = resolver.request();
  request.prompt = options.prompt;
  request.forced = options.forced;
  request.force_in_chunks = options.force_in_chunks && !options.forced.empty();
  resolver.CheckTokens();
  resolver.CheckSampling();
  resolver.CheckStop();
  resolver.CheckOutput();
  resolver.CheckScheduling();
  const bool has_lengths = resolver.ResolveLengths();
  const PolicySpec* spec = resolver.ResolvePolicy();
  const bool has_budget = resolver.ResolveBudget();
  const bool has_protection = resolver.CheckProtection(has_lengths);
  if (has_lengths && has_protection && has_budget && spec != nullptr) {
    resolver.ResolveProtectionAndDemand();
  }
  if (!resolver.ok()) return resolver.TakeRejection();

  request.id = std::move(options.id);
  request.sampling = options.sampling;
  request.stop_strings = std::move(options.stop.strings);
  request.stop_tokens = std::move(options.stop.tokens);
  if (!options.stop.ignore_end) request.end_tokens = manifest_.eos_tokens;
  request.include_stop = options.stop.include;
  request.min_output_tokens = options.stop.min_output_tokens;
  request.ignore_end = options.stop.ignore_end;
  request.output = options.output;
  request.scheduling = std::move(options.scheduling);
  request.arm = std::move(options.arm);
  request.positions = options.kv.positions;
  request.prefix_salt = std::move(options.kv.prefix_salt);
  request.bypass_prefix_cache = options.kv.bypass_prefix_cache;
  auto failed = [&](absl::string_view why) {
    return Rejection{.code = absl::StatusCode::kInternal,
                     .reason = std::string(kPolicyFailed),
                     .message = absl::StrCat("policy '", spec->name, "' could not be made: ", why)};
  };
  try {
    request.policy = Share(*spec, request.params);
  } catch (const std::exception& e) {
    return failed(e.what());
  } catch (...) {
    return failed(kNoException);
  }
  request.arrival = options.arrival;
  request.deadline = options.deadline;
  return std::move(request);
}

std::shared_ptr<const Policy> Admission::Share(const PolicySpec& spec, const Params& params) const {
  absl::MutexLock lock(&mu_);
  std::weak_ptr<const Policy>& slot = shared_[{std::string(spec.name), params.values()}];
  std::shared_ptr<const Policy> policy = slot.lock();
  if (policy == nullptr) {
    policy = spec.make(params, shape_);
    slot = policy;
    std::erase_if(shared_, [](const auto& entry) { return entry.second.expired(); });
  }
  return policy;
}

}  // namespace epikv
