#include "runtime/admission/resolver.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "runtime/admission/kv_demand.h"
#include "runtime/admission/request_checks.h"
#include "runtime/admission/unknown_policy.h"
#include "runtime/kv/kv_layout.h"
#include "runtime/request/draft.h"

namespace epikv {
namespace {

// The fewest that a decode step reads of a lane (Quest's own).
constexpr int64_t kLeastPages = 3;

// How far a request may go beyond the context whose positions are counted in what is cached.
constexpr int64_t kMostContexts = 64;

constexpr size_t kMaxSpans = 64;
constexpr size_t kMaxPackets = 64;
// Of what a round computes of one lane: PolicyTraits::floats_per_token.
constexpr int64_t kMaxRoundBytes = int64_t{1} << 30;

// Reads queries of tokens before the newest.
bool ReadsPastQueries(const PolicyTraits& traits) {
  return traits.signals.Has(Signal::kQueries) || traits.signals.Has(Signal::kQueryMoments) ||
         traits.pass.any();
}

// What a policy is told of each token as a forward reads it.
bool MeasuresTokens(const PolicyTraits& traits) {
  return traits.signals.Has(Signal::kLogitEntropy) ||
         traits.signals.Has(Signal::kResidualDistance) || traits.signals.Has(Signal::kGate) ||
         traits.signals.Has(Signal::kFinalHidden);
}

// Some layer's window is narrower than `tokens`.
bool HidesTokens(const Manifest& manifest, int64_t tokens) {
  return std::any_of(manifest.layers.begin(), manifest.layers.end(), [=](const LayerFacts& layer) {
    return layer.window.has_value() && *layer.window < tokens;
  });
}

}  // namespace

void Resolver::CheckFields() {
  CheckRequest(options_, admission_.manifest().vocab_size, admission_.limits().max_running_requests,
               violations_);
}

void Resolver::AddPackets() {
  std::vector<int32_t>& prompt = request_.prompt;
  if (options_.packets.size() > kMaxPackets) {
    violations_.Add("packets",
                    absl::StrCat("has ", options_.packets.size(), " items, at most ", kMaxPackets));
    options_.packets.clear();
  }
  for (size_t i = 0; i < options_.packets.size(); ++i) {
    const std::shared_ptr<const Packet>& packet = options_.packets[i];
    if (!IsOfModel(*packet)) {
      violations_.Add(absl::StrCat("packets[", i, "]"),
                      "holds K and V of another model, or of another kv_dtype");
      continue;
    }
    prompt.insert(prompt.end(), packet->tokens.begin(), packet->tokens.end());
    request_.packets.push_back(packet);
  }
  request_.packet_tokens = std::ssize(prompt);
  if (options_.wrap && !options_.prompt.empty()) {
    request_.soft = SoftTokensOf(admission_.shape());
    if (request_.soft == nullptr) {
      violations_.Add("soft_tokens",
                      "needs soft tokens of this model: `epikv calibrate packet` trains them, and "
                      "the daemon loads them at start (--artefact_dir)");
      violations_.Because("ARTEFACT_MISSING", {{"policy", std::string(kPacketArtefact)}},
                          absl::StatusCode::kFailedPrecondition);
    }
  }
  const std::vector<int32_t>& asked = options_.prompt;
  if (request_.soft != nullptr) prompt.insert(prompt.end(), request_.soft->header, asked.front());
  prompt.insert(prompt.end(), asked.begin(), asked.end());
  if (request_.soft != nullptr) prompt.insert(prompt.end(), request_.soft->trailer, asked.back());
  if (options_.prompt.empty()) return;  // it is at fault, packets or none
  options_.prompt = prompt;
}

bool Resolver::IsOfModel(const Packet& packet) const {
  const ModelShape& shape = admission_.shape();
  const KvFormat format = admission_.kv_format();
  const int32_t vocab = static_cast<int32_t>(admission_.manifest().vocab_size);
  const auto tables = std::ssize(packet.tables);
  return packet.num_layers == shape.num_layers && packet.num_kv_heads == shape.num_kv_heads &&
         packet.key_width == shape.key_width && packet.value_width == shape.value_width &&
         packet.format.model == format.model && packet.format.stored == format.stored &&
         (tables == 1 || tables == shape.num_layers || tables == packet.num_lanes()) &&
         !packet.tokens.empty() &&
         std::all_of(packet.tokens.begin(), packet.tokens.end(),
                     [=](int32_t token) { return token >= 0 && token < vocab; });
}

int64_t Resolver::LeastMissing() const {
  int64_t least = request_.packet_tokens;
  const int64_t lanes = admission_.shape().num_layers * admission_.shape().num_kv_heads;
  for (int64_t lane = 0; least > 0 && lane < lanes; ++lane) {
    least = std::min(least, request_.MissingOf(lane));
  }
  return least;
}

// Packets hold rows of the CPU's memory, and no more of what a forward would have measured.
void Resolver::CheckPackets(const KvLayout& layout) {
  const bool on_gpu = !admission_.limits().turns_keys;
  if (options_.output.packet && options_.completions > 1) {
    violations_.Add("sampling.n", "one completion alone can be kept as a packet");
  }
  if (on_gpu && (options_.output.packet || !request_.packets.empty() || options_.wrap)) {
    violations_.Add("packets", "packets work on a CPU, not on a GPU");
  }
  if (options_.output.prompt_logprobs && !request_.packets.empty()) {
    violations_.Add("output.prompt_logprobs",
                    "no log-probabilities are known of the tokens of packets");
  }
  if (MeasuresTokens(request_.traits) && !request_.packets.empty()) {
    violations_.Add("kv.policy",
                    absl::StrCat("policy '", request_.spec->name,
                                 "' measures tokens as the model reads them, and those of packets "
                                 "were read before"));
  }
  const bool evicted =
      std::any_of(request_.packets.begin(), request_.packets.end(), [](const auto& packet) {
        return packet->rows() < packet->num_tokens() * packet->num_lanes();
      });
  const PolicyTraits& traits = request_.traits;
  if (evicted && traits.pass.chunk > 0 && traits.prompt == PromptEviction::kAtEnd) {
    violations_.Add("kv.policy",
                    absl::StrCat("policy '", request_.spec->name,
                                 "' looks at a whole prompt, and of a packet some tokens were "
                                 "evicted"));
  }
  const bool ragged = std::any_of(
      request_.packets.begin(), request_.packets.end(),
      [&](const auto& packet) { return std::ssize(packet->tables) > layout.num_tables; });
  if (ragged) {
    violations_.Add("packets",
                    absl::StrCat("a packet holds other tokens in other layers or heads, "
                                 "and policy '",
                                 request_.spec->name, "' keeps the same in all of them"));
  }
}

void Resolver::CheckRanks() {
  constexpr absl::string_view kNot = " while several ranks serve the model (--tensor_parallel)";
  if (!DecidesByParts(*request_.spec, request_.traits)) {
    violations_.Add("kv.policy", absl::StrCat("policy '", request_.spec->name,
                                              "' compares KV heads with one another, or has "
                                              "statistics of each, which it cannot",
                                              kNot));
  }
  if (options_.output.packet || !options_.packets.empty() || options_.wrap) {
    violations_.Add("packets", absl::StrCat("packets do not work", kNot));
  }
  if (options_.steering.has_value()) {
    violations_.Add("sampling.steering", absl::StrCat("steering does not work", kNot));
  }
  if (options_.kv.tier.tokens > 0) {
    violations_.Add("kv.tier", absl::StrCat("there is no tier", kNot));
  }
}

// Positions are then counted in what is cached, and only that must fit the context: CheckOutgrown.
bool Resolver::OutgrowsContext() const {
  return options_.kv.positions != PositionMode::kAbsolute &&
         (!std::holds_alternative<std::monostate>(options_.kv.budget) || LeastMissing() > 0);
}

void Resolver::CheckOutgrown() {
  if (!OutgrowsContext()) return;
  const KvDemand& demand = request_.demand;
  const int64_t most = std::max(*std::max_element(demand.prefill.begin(), demand.prefill.end()),
                                *std::max_element(demand.decode.begin(), demand.decode.end()));
  const int64_t context = admission_.manifest().context_length;
  if (most <= context) return;
  violations_.Add("kv.budget", absl::StrCat("up to ", most,
                                            " tokens would be cached at once, and the context "
                                            "has ",
                                            context,
                                            ": lower the budget, or choose a policy that evicts "
                                            "a prompt while it is cached"));
  violations_.Because("CONTEXT_LENGTH", {{"context_length", absl::StrCat(context)},
                                         {"cached_tokens", absl::StrCat(most)}});
}

bool Resolver::ResolveLengths() {
  const int64_t context =
      admission_.manifest().context_length * (OutgrowsContext() ? kMostContexts : 1);
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  const int64_t left = context - prompt;
  const bool scores = !options_.forced.empty();
  const int64_t by_default = OutgrowsContext() ? admission_.defaults().max_output_tokens
                                               : admission_.MaxOutputTokens({}, prompt);
  const int64_t max_output = scores ? static_cast<int64_t>(options_.forced.size())
                                    : options_.stop.max_output_tokens.value_or(by_default);
  if (max_output > left) {
    violations_.Add(prompt >= context ? "prompt"
                    : scores          ? "continuation"
                                      : "stop.max_output_tokens",
                    absl::StrCat("prompt (", prompt, ") + max output (", max_output,
                                 ") tokens are more than the context length ", context));
    violations_.Because("CONTEXT_LENGTH", {{"context_length", absl::StrCat(context)},
                                           {"prompt_tokens", absl::StrCat(prompt)},
                                           {"max_output_tokens", absl::StrCat(max_output)}});
    return false;
  }
  request_.max_output_tokens = max_output;
  if (max_output > 0 && options_.stop.min_output_tokens > max_output) {
    violations_.Add("stop.min_output_tokens",
                    absl::StrCat("is ", options_.stop.min_output_tokens,
                                 ", more than max_output_tokens, ", max_output));
  }
  return prompt > 0 && max_output > 0;
}

void Resolver::CheckSteering() {
  if (!options_.steering.has_value() || SteeringOf(admission_.shape()) != nullptr) return;
  violations_.Add("sampling.steering",
                  "needs a steering vector of this model, which the daemon loads at start "
                  "(--artefact_dir)");
  violations_.Because("ARTEFACT_MISSING", {{"policy", std::string(kSteering)}},
                      absl::StatusCode::kFailedPrecondition);
}

const PolicySpec* Resolver::ResolvePolicy() {
  const bool has_budget = !std::holds_alternative<std::monostate>(options_.kv.budget);
  std::string name = options_.kv.policy;
  if (name.empty()) name = has_budget ? admission_.DefaultPolicy() : "full";
  if (name.empty()) {
    violations_.Add("kv.policy",
                    "a budget needs a policy, and this model has no default policy; "
                    "`epikv policies --all` lists all");
    return nullptr;
  }
  const PolicySpec* spec = FindPolicy(admission_.catalog(), name);
  if (spec == nullptr) {
    violations_.Add("kv.policy", UnknownPolicy(admission_.catalog(), name));
    return nullptr;
  }
  if (spec->read_data != nullptr && !admission_.shape().artefacts.contains(name)) {
    violations_.Add("kv.policy", absl::StrCat("policy '", name,
                                              "' needs statistics of this model: `epikv "
                                              "calibrate ",
                                              name,
                                              "` measures them, and the daemon loads "
                                              "them at start (--artefact_dir)"));
    violations_.Because("ARTEFACT_MISSING", {{"policy", name}},
                        absl::StatusCode::kFailedPrecondition);
    return nullptr;
  }
  const size_t faults = violations_.count();
  for (const auto& [param, value] : options_.kv.params) {
    const auto* list = std::get_if<std::vector<int64_t>>(&value);
    const size_t most = admission_.manifest().context_length;
    if (list == nullptr || list->size() <= most) continue;
    violations_.Add(
        absl::StrCat("kv.policy_params.", param),
        absl::StrCat("has ", list->size(), " items, at most the context length, ", most));
  }
  if (violations_.count() > faults) return nullptr;
  ResolvedParams resolved = ResolveParams(*spec, options_.kv.params, admission_.shape());
  for (ParamViolation& violation : resolved.violations) {
    violations_.Add(violation.param.empty() ? std::string("kv.policy_params")
                                            : absl::StrCat("kv.policy_params.", violation.param),
                    std::move(violation.description));
  }
  if (!resolved.violations.empty()) return nullptr;
  request_.spec = spec;
  request_.params = std::move(resolved.params);
  request_.traits = spec->traits(request_.params, admission_.shape());
  if (request_.traits.evicts && !has_budget) {
    violations_.Add("kv.budget", absl::StrCat("policy '", name,
                                              "' evicts, so it needs a budget: kv.max_tokens or "
                                              "kv.keep_ratio (--budget at the command line)"));
    return nullptr;
  }
  if (options_.force_in_chunks && request_.traits.evicts) {
    violations_.Add(
        "cadence",
        absl::StrCat("scoring in chunks is only possible under 'full', not '", name, "'"));
  }
  if (options_.force_in_chunks && options_.output.residual_steps) {
    violations_.Add(
        "residual_steps",
        "can only be measured one token a step, not in chunks; choose SCORE_CADENCE_DECODE");
  }
  if (options_.kv.tier.guard.has_value() && request_.traits.evicts) AddGuardAround(*spec);
  return spec;
}

void Resolver::AddGuardAround(const PolicySpec& spec) {
  if (!spec.scores || request_.traits.pool != Pool::kLane) {
    violations_.Add("kv.tier.guard",
                    absl::StrCat("policy '", spec.name, "' ",
                                 spec.scores ? "shares one budget among heads"
                                             : "gives tokens no scores, by which a guard goes"));
    return;
  }
  const bool by_more = request_.params.Has("select") && request_.params.Choice("select") != "top_k";
  if (by_more || request_.traits.rounds_every > 0) {
    violations_.Add("kv.tier.guard",
                    absl::StrCat("policy '", spec.name, "' drops by more than the lowest scores",
                                 by_more ? " here: choose select = top_k" : ""));
    return;
  }
  const GuardRule& rule = *options_.kv.tier.guard;
  if (rule.asked < 1 || rule.asked > 1024) {
    violations_.Add("kv.tier.guard.asked", absl::StrCat("must be 1 to 1024, is ", rule.asked));
  }
  if (!(rule.relax_prob >= 0 && rule.relax_prob <= 1)) {
    violations_.Add("kv.tier.guard.relax_prob",
                    absl::StrCat("must be in [0, 1], is ", rule.relax_prob));
  }
  AddGuard(admission_.shape(), request_.traits);
}

bool Resolver::ResolveBudget() {
  const int64_t total = static_cast<int64_t>(options_.prompt.size()) + request_.max_output_tokens;
  request_.budget = total;
  int64_t asked = total;
  if (const auto* tokens = std::get_if<int64_t>(&options_.kv.budget)) {
    if (*tokens < 1) {
      violations_.Add("kv.max_tokens", "must be at least 1");
      return false;
    }
    asked = *tokens;
  }
  if (const auto* ratio = std::get_if<double>(&options_.kv.budget)) {
    if (!(*ratio > 0 && *ratio <= 1)) {
      violations_.Add("kv.keep_ratio", absl::StrCat("must be in (0, 1], is ", *ratio));
      return false;
    }
    asked = TokensOf(*ratio, total);
  }
  if (request_.spec == nullptr) return true;
  if (request_.traits.evicts) {
    request_.budget = asked;
  } else if (request_.traits.reads.has_value()) {
    request_.read = {.tokens = asked, .rule = *request_.traits.reads};
  } else if (asked < total - 1) {  // the last output token is never cached
    violations_.Add("kv.budget",
                    absl::StrCat("policy '", request_.spec->name, "' evicts nothing and may cache ",
                                 total - 1, " tokens, more than the budget of ", asked,
                                 "; leave the budget out, or choose a policy that evicts"));
    violations_.Because("KV_BUDGET",
                        {{"budget", absl::StrCat(asked)}, {"min", absl::StrCat(total - 1)}});
    return false;
  }
  return true;
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
  const size_t faults = violations_.count();
  asked.thinking = options_.thinking.has_value() ? std::min(asked.thinking, total) : 0;
  if (options_.kv.evict_thinking && options_.thinking.has_value() &&
      request_.traits.plans_all_lanes) {
    violations_.Add(
        "kv.thinking.evict",
        absl::StrCat("policy '", request_.spec->name,
                     "' holds equally many tokens of each stretch of text in all lanes, "
                     "which it could not any more"));
  }
  const bool details = asked.prompt.has_value() || asked.sinks.has_value() ||
                       asked.recent.has_value() || !asked.spans.empty() || asked.thinking > 0;
  if (!asked.equal.has_value()) {
    asked.equal = admission_.defaults().equal_protection && !details;
  } else if (*asked.equal && details) {
    violations_.Add("kv.equal_protection", "cannot be set together with other protection settings");
  }
  auto check = [&](absl::string_view field, std::optional<int64_t>& tokens) {
    if (!tokens.has_value()) return;
    if (*tokens < 0) violations_.Add(field, absl::StrCat("must be at least 0, is ", *tokens));
    tokens = std::min(*tokens, total);
  };
  check("kv.sink_tokens", asked.sinks);
  check("kv.recent_tokens", asked.recent);
  if (asked.spans.size() > kMaxSpans) {
    violations_.Add("kv.protected_spans",
                    absl::StrCat("has ", asked.spans.size(), " items, at most ", kMaxSpans));
  }
  for (size_t i = 0; i < std::min(asked.spans.size(), kMaxSpans); ++i) {
    const TokenSpan& span = asked.spans[i];
    if (0 <= span.begin && span.begin < span.end && span.end <= total) continue;
    if (0 <= span.begin && span.begin < span.end) {
      violations_.Because("SPAN_RANGE",
                          {{"tokens", absl::StrCat(total)}, {"end", absl::StrCat(span.end)}},
                          absl::StatusCode::kOutOfRange);
    }
    violations_.Add(
        absl::StrCat("kv.protected_spans[", i, "]"),
        absl::StrCat("must have end > begin, begin >= 0 and end <= ",
                     has_lengths ? "prompt + max output (" : "the context length (", total, ")"));
  }
  return violations_.count() == faults;
}

// What the tokens behind a chunk say is not what they say of the prompt once it has been evicted.
void Resolver::CheckPromptLogprobs(int64_t least_budget) {
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  const bool keeps_it = request_.traits.prompt != PromptEviction::kByChunk ||
                        prompt + kRoomBesidePrompt <= least_budget;
  if (!options_.output.prompt_logprobs || keeps_it) return;
  violations_.Add(
      "output.prompt_logprobs",
      absl::StrCat("policy '", request_.spec->name, "' would evict part of the prompt (", prompt,
                   " tokens) before all of it is cached, so log-probabilities would not be those "
                   "of the whole prompt; the budget is ",
                   least_budget, ", the smallest that works is ", prompt + kRoomBesidePrompt));
  violations_.Because(
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

// Most tokens that a lane can hold. Where lanes share a budget, one of them may have all of it, up
// to all tokens that are cached, which are `longest`.
int64_t Resolver::LongestLane(int64_t longest) const {
  const std::vector<int64_t>& held = request_.demand.prefill;
  const auto together =
      static_cast<size_t>(request_.traits.pool == Pool::kLane    ? 1
                          : request_.traits.pool == Pool::kLayer ? admission_.shape().num_kv_heads
                                                                 : held.size());
  int64_t most = 0;
  for (size_t lane = 0; lane < held.size(); lane += together) {
    const auto first = held.begin() + static_cast<int64_t>(lane);
    const auto last = first + static_cast<int64_t>(together);
    most = std::max({most, *std::max_element(first, last),
                     std::min(longest, std::accumulate(first, last, int64_t{0}))});
  }
  return most;
}

// Pages are of keys as they lie in the lanes, on the CPU.
void Resolver::ResolveReads(int64_t longest) {
  ReadLimit& read = request_.read;
  const bool by_policy = read.tokens > 0;
  const absl::string_view field = by_policy ? "kv.budget" : "kv.read_tokens";
  if (by_policy && options_.kv.read_tokens > 0) {
    violations_.Add("kv.read_tokens", absl::StrCat("the budget of policy '", request_.spec->name,
                                                   "' is what is read: leave one of them out"));
  }
  if (!by_policy) read.tokens = options_.kv.read_tokens;
  if (read.tokens >= longest) read.tokens = 0;  // all there can be
  if (read.tokens == 0) return;
  const int64_t least = kLeastPages * read.rule.page;
  if (read.tokens < least) {
    violations_.Add(field, absl::StrCat("a decode step reads ", kLeastPages, " pages of ",
                                        read.rule.page, " tokens at least, which are ", least,
                                        "; asked for are ", read.tokens));
    violations_.Because("KV_BUDGET",
                        {{"budget", absl::StrCat(read.tokens)}, {"min", absl::StrCat(least)}});
  }
  if (options_.kv.positions == PositionMode::kCache) {
    violations_.Add("kv.positions",
                    "with cache positions keys change at every step, and what is read of a cache "
                    "is chosen by keys; choose absolute or compact positions");
  }
  if (!admission_.limits().turns_keys) {
    violations_.Add(field, "a part of a cache can be read on a CPU, not on a GPU");
  }
}

// None where what follows a guess depends on more than the tokens before it: on thinking that may
// end with it and go, on what a step changes in its sequence. And none where each row would turn
// all keys.
void Resolver::ResolveGuesses() {
  if (options_.guess_source == GuessSource::kDraft && !admission_.limits().drafts) {
    violations_.Add("speculation.source", "is DRAFT, and this model has no draft model");
  }
  const KvOptions& kv = options_.kv;
  const PolicyTraits& traits = request_.traits;
  const bool by_text =
      options_.thinking.has_value() && (kv.evict_thinking || kv.protection.thinking > 0);
  const bool by_step = traits.rounds_rows || request_.read.tokens > 0 ||
                       (kv.tier.tokens > 0 && traits.evicts) || options_.steering.has_value();
  const bool turns = kv.positions == PositionMode::kCache;
  const bool on_gpu = !admission_.limits().turns_keys;
  if (by_text || by_step || turns || on_gpu || !options_.forced.empty()) return;
  request_.guess_tokens = options_.guess_tokens;
  request_.guess_source = options_.guess_source;
}

// A request that evicts nothing needs none. On a CPU, where rows of the pool can be written.
void Resolver::ResolveTier(int64_t longest, const KvLayout& layout) {
  const TierOptions& asked = options_.kv.tier;
  const bool evicts = request_.traits.evicts;
  if (asked.guard.has_value() && asked.tokens == 0) {
    violations_.Add("kv.tier.guard", "tokens come back from the tier: kv.tier.tokens is 0");
  }
  if (asked.fetch > asked.tokens) {
    violations_.Add("kv.tier.fetch", absl::StrCat("a tier of ", asked.tokens, " tokens has no ",
                                                  asked.fetch, " to attend to"));
  }
  if (asked.fetch > 0 && asked.fetch < std::min(kTierPage, asked.tokens)) {
    violations_.Add("kv.tier.fetch", absl::StrCat("tokens are fetched by pages of ", kTierPage,
                                                  ": ask for ", kTierPage, " at least"));
  }
  if (!(asked.doubt >= 0 && std::isfinite(asked.doubt))) {
    violations_.Add("kv.tier.doubt",
                    absl::StrCat("must be a finite number, at least 0, is ", asked.doubt));
  } else if (asked.doubt > 0 && asked.fetch == 0) {
    violations_.Add("kv.tier.doubt", "nothing is fetched in doubt: kv.tier.fetch is 0");
  }
  const std::vector<LayerFacts>& layers = admission_.manifest().layers;
  if (asked.fetch > 0 && std::all_of(layers.begin(), layers.end(),
                                     [](const LayerFacts& of) { return of.window.has_value(); })) {
    violations_.Add("kv.tier.fetch",
                    "layers with a window fetch nothing, and all of this model's have one");
  }
  if (asked.tokens == 0) return;
  if (!admission_.limits().turns_keys) {
    violations_.Add("kv.tier", "a tier works on a CPU, not on a GPU");
  }
  if (!evicts) return;
  request_.tier = asked;
  request_.tier.tokens = std::min(asked.tokens, longest);
  request_.demand.tier_bytes =
      TierBytes(layout, admission_.shape(), {admission_.kv_format(), request_.tier.dtype},
                request_.tier.tokens);
  const int64_t capacity = admission_.limits().tier_capacity_bytes;
  if (request_.demand.peak_tier_bytes() <= capacity) return;
  violations_.Add(
      "kv.tier.tokens",
      capacity == 0
          ? "this server has no tier below its KV pool (--kv_tier_bytes)"
          : absl::StrCat("the request's tier takes ", request_.demand.peak_tier_bytes(),
                         " bytes, and this server has ", capacity, " for all (--kv_tier_bytes)"));
  violations_.Because("KV_TIER_TOO_SMALL",
                      {{"needed_bytes", absl::StrCat(request_.demand.peak_tier_bytes())},
                       {"capacity_bytes", absl::StrCat(capacity)}},
                      absl::StatusCode::kFailedPrecondition);
}

// In a round nobody else has a token, and no reservation counts its memory.
void Resolver::CheckRound(int64_t longest) {
  const PolicyTraits& traits = request_.traits;
  const auto refuse = [&](absl::string_view field, std::string description,
                          std::map<std::string, std::string> metadata) {
    violations_.Add(field, std::move(description));
    violations_.Because("ROUND_TOO_LARGE", std::move(metadata),
                        absl::StatusCode::kFailedPrecondition);
  };
  auto pairs_over = [&](const std::vector<int64_t>& lanes) {
    double pairs = 0;
    for (const int64_t held : lanes) {
      const auto tokens = static_cast<double>(held);
      pairs += static_cast<double>(traits.pairs_per_token) * tokens;
      if (traits.compares_all_pairs) pairs += tokens * (tokens - 1) / 2;
    }
    return pairs;
  };
  // A lane's capacity in the prompt is that of decode at least.
  const double pairs = pairs_over(request_.demand.prefill);
  const int64_t most = admission_.limits().max_round_pairs;
  if (pairs <= static_cast<double>(most)) {
    request_.demand.prefill_round_pairs = static_cast<int64_t>(pairs);
    request_.demand.decode_round_pairs = static_cast<int64_t>(pairs_over(request_.demand.decode));
  } else {
    refuse(traits.compares_all_pairs ? "kv.policy_params.redundancy" : "kv.policy_params",
           absl::StrFormat("policy '%s' could compare %.0f pairs of tokens in one round, more than "
                           "%d (--max_round_pairs): choose %sa smaller budget or a shorter prompt",
                           request_.spec->name, pairs, most,
                           traits.compares_all_pairs ? "redundancy = linear, " : ""),
           {{"pairs", absl::StrFormat("%.0f", pairs)}, {"most_pairs", absl::StrCat(most)}});
  }
  const int64_t group = admission_.shape().num_heads / admission_.shape().num_kv_heads;
  const double bytes = static_cast<double>(traits.floats_per_token) * sizeof(float) *
                       static_cast<double>(group) * static_cast<double>(LongestLane(longest));
  if (bytes > kMaxRoundBytes) {
    const bool ahead = traits.pass.lookahead > traits.window;
    refuse(
        ahead ? "kv.policy_params.pseudo_tokens" : "kv.policy_params.window",
        absl::StrFormat("policy '%s' would take %.0f bytes for the logits of %d queries in one "
                        "round, more than %d: choose fewer",
                        request_.spec->name, bytes, traits.window + traits.pass.lookahead,
                        kMaxRoundBytes),
        {{"bytes", absl::StrFormat("%.0f", bytes)}, {"most_bytes", absl::StrCat(kMaxRoundBytes)}});
  }
}

void Resolver::ResolveProtectionAndDemand() {
  const int64_t prompt = static_cast<int64_t>(options_.prompt.size());
  // The last output token is never cached.
  const int64_t longest = prompt + request_.max_output_tokens - 1;
  const int64_t most = longest - LeastMissing();  // of one lane
  const bool evicts = request_.traits.evicts && request_.budget < most;
  const bool rounds = request_.traits.evicts && request_.traits.rounds_rows;
  const ResolvedProtection resolved =
      evicts ? ProtectionUnder(request_.budget)
             : ResolveProtection(options_.kv.protection, request_.traits, prompt, longest);
  request_.protection = resolved.protection;
  if (evicts && resolved.smallest_budget > request_.budget) {
    const int64_t smallest = SmallestBudget(longest);
    violations_.Add(
        "kv.budget",
        absl::StrCat("a budget of ", request_.budget, " tokens is too small for what policy '",
                     request_.spec->name, "' must keep of a prompt of ", prompt,
                     " tokens; the smallest budget is ", smallest));
    violations_.Because(
        "KV_BUDGET", {{"budget", absl::StrCat(request_.budget)}, {"min", absl::StrCat(smallest)}});
  }
  if (!evicts && !rounds) {
    // Nobody will be asked to drop or to round anything: nothing is measured, and the bits are
    // those of `full`.
    request_.traits = {.evicts = false, .uncalibrated = request_.traits.uncalibrated};
    for (const auto& packet : request_.packets) {  // each lane has what its packet has
      if (packet->tables.size() > 1) request_.traits.granularity = Granularity::kHead;
    }
  }
  ResolveReads(most);
  if (admission_.limits().by_ranks) CheckRanks();
  if (options_.kv.positions == PositionMode::kCache && !admission_.limits().turns_keys) {
    violations_.Add("kv.positions",
                    "cache positions do not work on a GPU; choose absolute or compact positions");
  }
  if (options_.kv.positions == PositionMode::kCache && ReadsRows(request_.traits)) {
    violations_.Add("kv.positions",
                    absl::StrCat("policy '", request_.spec->name,
                                 "' reads keys or queries, whose positions change at every step "
                                 "with cache positions; choose absolute or compact positions"));
  }
  if (options_.kv.positions == PositionMode::kCache && request_.traits.pool != Pool::kLane) {
    violations_.Add("kv.positions",
                    absl::StrCat("policy '", request_.spec->name,
                                 "' shares one budget among heads, any of which may hold most of "
                                 "it, and with cache positions a layer's keys are copied at every "
                                 "step; choose absolute or compact positions"));
  }
  if (options_.kv.positions == PositionMode::kCompact && ReadsPastQueries(request_.traits) &&
      HidesTokens(admission_.manifest(), longest)) {
    violations_.Add(
        "kv.positions",
        absl::StrCat("policy '", request_.spec->name,
                     "' reads past queries, and compact positions of past queries are not kept; "
                     "this model's attention windows need them: choose absolute positions"));
  }
  request_.tap_layers = request_.traits.residual_layers;
  if (options_.output.residual_steps) {
    request_.tap_layers.resize(admission_.shape().num_layers);
    std::iota(request_.tap_layers.begin(), request_.tap_layers.end(), int64_t{0});
  }
  ResolveGuesses();
  const KvLayout layout = LayoutOf(admission_.shape(), admission_.kv_format(), request_.traits,
                                   static_cast<int64_t>(request_.tap_layers.size()),
                                   options_.kv.positions, request_.read, request_.guess_tokens);
  CheckPackets(layout);
  const std::vector<int64_t> budgets =
      evicts ? LaneBudgets(request_.budget) : std::vector<int64_t>(layout.num_lanes, longest);
  if (evicts) CheckPromptLogprobs(*std::min_element(budgets.begin(), budgets.end()));
  request_.demand =
      DemandOf(request_, budgets, longest, admission_.limits().prefill_chunk_tokens, layout);
  request_.demand.prefill_bytes += PromptLogitBytes();
  CheckOutgrown();
  CheckRound(longest);
  const ScratchPass& pass = request_.traits.pass;
  const int64_t rows = prompt + ScratchRows(pass, prompt);
  // Behind what is left of a prompt its positions are those of CheckOutgrown.
  const bool behind_rest = OutgrowsContext() && request_.traits.prompt == PromptEviction::kByChunk;
  if (request_.demand.passes && pass.chunk > 0 && !behind_rest &&
      rows > admission_.manifest().context_length) {
    violations_.Add(
        "kv.policy_params.chunk",
        absl::StrCat("policy '", request_.spec->name, "' would read up to ", rows - prompt,
                     " tokens behind a prompt of ", prompt, ", and the context has ",
                     admission_.manifest().context_length, ": choose a smaller chunk"));
  }
  AddDraft(request_,
           LayoutOf(admission_.shape(), admission_.kv_format(), DraftTraits(),
                    /*num_tap_layers=*/0, options_.kv.positions),
           request_.demand);
  request_.demand.completions = options_.completions;
  ResolveTier(longest, layout);
  const int64_t capacity = admission_.limits().kv_capacity_bytes;
  if (request_.demand.peak_bytes() > capacity) {
    violations_.Add("kv.budget",
                    absl::StrCat("the request can hold up to ", request_.demand.peak_bytes(),
                                 " bytes of KV cache and the pool has ", capacity,
                                 ": it can never run here; lower the budget",
                                 options_.completions > 1 ? ", n" : "", " or max_output_tokens"));
    violations_.Because("KV_POOL_TOO_SMALL",
                        {{"needed_bytes", absl::StrCat(request_.demand.peak_bytes())},
                         {"capacity_bytes", absl::StrCat(capacity)}},
                        absl::StatusCode::kFailedPrecondition);
  }
}

}  // namespace epikv
