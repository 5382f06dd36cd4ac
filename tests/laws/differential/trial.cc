#include "tests/laws/differential/trial.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "policies/registry.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace {

using Json = nlohmann::json;

// Draws that are the same with every standard library.
class Dice {
 public:
  explicit Dice(uint64_t seed) : bits_(seed) {}

  uint64_t Bits() { return bits_(); }
  // In [low, high].
  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
  }
  double Unit() { return static_cast<double>(Bits() >> 11) * 0x1p-53; }
  bool Chance(double p) { return Unit() < p; }
  template <class T>
  T Of(std::initializer_list<T> items) {
    return items.begin()[Int(0, static_cast<int64_t>(items.size()) - 1)];
  }
  // In [low, high], all magnitudes alike.
  int64_t Magnitude(int64_t low, int64_t high) {
    const double l = std::log(static_cast<double>(low)), h = std::log(static_cast<double>(high));
    // Of an empty range, its upper end.
    return std::min(
        std::max(std::llround(std::exp(l + (h - l) * Unit())), static_cast<long long>(low)),
        static_cast<long long>(high));
  }

 private:
  std::mt19937_64 bits_;
};

constexpr int64_t kLongestOutput = 120;
// Those with windows more often: their layers differ.
constexpr const char* kModels[] = {"gqa",     "mqa",         "mha",         "bent",     "windows",
                                   "windows", "windows_mqa", "windows_mqa", "gqa_bf16", "sample"};

EngineSetup DrawSetup(Dice& dice) {
  EngineSetup setup;
  setup.model = kModels[dice.Int(0, std::ssize(kModels) - 1)];
  setup.deterministic = dice.Chance(0.3);
  setup.chunk_tokens =
      setup.deterministic ? dice.Of<int64_t>({16, 32, 64}) : dice.Of<int64_t>({8, 16, 24, 32, 64});
  setup.max_step_tokens = dice.Of<int64_t>({16, 19, 37, 64, 512, 512});
  setup.pool_tokens = dice.Of<int64_t>({250, 500, 1500, 8000});
  setup.prefix_share = dice.Of({0.0, 0.1, 0.5, 1.0});
  setup.max_running = dice.Of<int64_t>({2, 4, 256, 256});
  if (dice.Chance(0.5)) setup.constraint_work = 1;  // tokens of constraints are read one a step
  if (dice.Chance(0.5)) setup.max_round_pairs = 1;  // costly rounds are one a step
  setup.decode_kernel =
      dice.Of({DecodeKernel::kBatch, DecodeKernel::kFlash, DecodeKernel::kMatmul});
  setup.prefill_kernel = dice.Of({PrefillKernel::kBatch, PrefillKernel::kFlash});
  if (dice.Chance(0.2)) setup.kv_dtype = KvDType::kInt8;
  setup.mass_interval = dice.Of<int64_t>({0, 0, 8});
  const bool bent = setup.model == "bent" || setup.model.starts_with("windows");
  setup.device_path =
      !setup.deterministic && setup.kv_dtype == KvDType::kModel && !bent && dice.Chance(0.3);
  setup.recorded = setup.device_path && dice.Chance(0.7);
  return setup;
}

int64_t DrawInt(Dice& dice, const ParamSpec& param) {
  const auto low = static_cast<int64_t>(param.min), high = static_cast<int64_t>(param.max);
  return dice.Int(low, std::min(high, low + dice.Of<int64_t>({3, 6, 20, 100})));
}

ParamValue DrawParam(Dice& dice, const ParamSpec& param) {
  auto choice = [&] {
    return std::string(param.choices[dice.Int(0, static_cast<int64_t>(param.choices.size()) - 1)]);
  };
  switch (param.type) {
    case ParamType::kBool:
      return dice.Chance(0.5);
    case ParamType::kInt:
      return DrawInt(dice, param);
    case ParamType::kFloat:
      // Of no range of its own: a threshold, for shares of attention or for logits.
      if (param.min < -1e6) return dice.Unit() * dice.Of<double>({0.1, 4, -4});
      return param.min + dice.Unit() * (std::min(param.max, param.min + 2) - param.min);
    case ParamType::kChoice:
      return choice();
    case ParamType::kIntList: {
      if (param.name == "bits") {  // three of these alone are any
        std::vector<int64_t> bits(3);
        for (int64_t& of : bits) of = dice.Of<int64_t>({2, 4, 8});
        return bits;
      }
      std::vector<int64_t> list(dice.Int(0, 8));
      for (int64_t& item : list) item = DrawInt(dice, param);
      return list;
    }
    case ParamType::kChoiceList: {
      std::vector<std::string> list(dice.Int(0, 2));
      for (std::string& item : list) item = choice();
      return list;
    }
  }
  return false;
}

void DrawKv(Dice& dice, int64_t prompt, int64_t output, KvOptions& kv) {
  const absl::Span<const PolicySpec* const> policies = AllPolicies();
  const PolicySpec& spec = *policies[dice.Int(0, static_cast<int64_t>(policies.size()) - 1)];
  if (dice.Chance(0.05)) kv.prefix_salt = "";
  kv.prefix_salt = dice.Of<const char*>({"", "", "", "salt"});
  kv.bypass_prefix_cache = dice.Chance(0.1);
  kv.positions = dice.Of({PositionMode::kAbsolute, PositionMode::kAbsolute, PositionMode::kAbsolute,
                          PositionMode::kCompact, PositionMode::kCache});
  if (dice.Chance(0.15)) return;  // the whole cache
  kv.policy = std::string(spec.name);
  kv.params = SmallParams(spec);
  for (const ParamSpec& param : spec.params) {
    if (dice.Chance(0.25)) kv.params[std::string(param.name)] = DrawParam(dice, param);
    // It says nothing by itself.
    const bool of_select = param.name == "threshold" && param.min < -1e6;  // ThresholdParam
    if (of_select && kv.params.contains("threshold")) {
      kv.params["select"] = std::string("threshold");
    }
  }
  if (spec.name == "full") return;
  switch (dice.Int(0, 9)) {
    case 0:
      kv.budget = dice.Unit();
      break;
    case 1:
    case 2:
      kv.budget = dice.Magnitude(8, prompt + output);
      break;
    default:  // above the prompt, with something left to evict
      kv.budget = prompt + kRoomBesidePrompt + dice.Int(0, std::max<int64_t>(1, output / 2));
  }
  ProtectionOptions& protection = kv.protection;
  if (dice.Chance(0.15)) {
    protection.equal = true;
    return;
  }
  if (dice.Chance(0.2)) protection.prompt = dice.Chance(0.5);
  if (dice.Chance(0.2)) protection.sinks = dice.Of<int64_t>({0, 1, 4, 20});
  if (dice.Chance(0.2)) protection.recent = dice.Of<int64_t>({0, 1, 8, 40});
  for (int64_t spans = dice.Chance(0.1) ? dice.Int(1, 3) : 0; spans > 0; --spans) {
    const int64_t begin = dice.Int(0, prompt + output - 1);
    protection.spans.push_back({begin, std::min(prompt + output, begin + dice.Int(1, 10))});
  }
}

// Read in part, or with a tier. Where bits may differ from run to run, all of it or none: a page
// whose bound is next to another's would be chosen or not.
void DrawBeside(Dice& dice, bool deterministic, KvOptions& kv) {
  if (!deterministic && kv.policy == "quest") kv.budget = int64_t{1} << 20;
  if (deterministic && dice.Chance(0.15)) kv.read_tokens = dice.Int(48, 120);
  if (!dice.Chance(0.25)) return;
  kv.tier.tokens = dice.Magnitude(1, 200);
  if (dice.Chance(0.6)) kv.tier.fetch = kv.tier.tokens;
  if (kv.tier.fetch > 0 && dice.Chance(0.3)) kv.tier.doubt = 1e-9;
  if (!deterministic) return;
  if (dice.Chance(0.5)) kv.tier.fetch = std::min<int64_t>(kv.tier.tokens, 16 * dice.Int(1, 4));
  if (kv.tier.fetch > 0 && dice.Chance(0.3)) kv.tier.doubt = dice.Of({0.5, 2.0, 3.0, 4.0});
  if (dice.Chance(0.4)) {
    kv.tier.guard = GuardRule{.asked = dice.Int(1, 40),
                              .follow = dice.Chance(0.3),
                              .relax_times = dice.Of<int64_t>({0, 0, 2}),
                              .relax_prob = dice.Of({0.0, 0.0, 0.5})};
  }
}

void DrawSampling(Dice& dice, RequestOptions& options) {
  SamplingParams& s = options.sampling;
  s.seed = dice.Bits() >> 12;  // exact in JSON's doubles
  if (dice.Chance(0.6)) s.temperature = dice.Of({0.3f, 0.7f, 1.0f, 1.0f, 2.0f});
  if (dice.Chance(0.2)) s.top_k = dice.Of({1, 2, 5, 50});
  if (dice.Chance(0.2)) s.top_p = dice.Of({0.1f, 0.5f, 0.95f});
  if (dice.Chance(0.1)) s.min_p = dice.Of({0.05f, 0.5f});
  if (dice.Chance(0.1)) s.typical_p = dice.Of({0.2f, 0.9f});
  if (dice.Chance(0.1)) s.repetition_penalty = dice.Of({0.5f, 1.2f});
  if (dice.Chance(0.1)) s.frequency_penalty = dice.Of({-0.5f, 0.5f});
  if (dice.Chance(0.1)) s.presence_penalty = dice.Of({-1.0f, 1.0f});
  for (int64_t n = dice.Chance(0.1) ? dice.Int(1, 5) : 0; n > 0; --n) {
    s.logit_bias[static_cast<int32_t>(dice.Int(0, 90))] = dice.Of({-100.0f, -1.0f, 1.0f, 5.0f});
  }
  if (!s.greedy() && dice.Chance(0.35)) options.completions = dice.Int(2, 4);
}

void DrawStop(Dice& dice, StopOptions& stop) {
  if (dice.Chance(0.15)) stop.strings.push_back(absl::StrCat("w", dice.Int(0, 99)));
  if (dice.Chance(0.1)) stop.strings.push_back(dice.Of<const char*>({":", "ok", "7 ", "1 w"}));
  for (int64_t n = dice.Chance(0.15) ? dice.Int(1, 4) : 0; n > 0; --n) {
    stop.tokens.push_back(static_cast<int32_t>(dice.Int(0, 90)));
  }
  stop.include = dice.Chance(0.3);
  if (dice.Chance(0.15)) stop.min_output_tokens = dice.Int(1, *stop.max_output_tokens);
  stop.ignore_end = dice.Chance(0.5);
}

ConstraintText DrawConstraint(Dice& dice) {
  switch (dice.Int(0, 3)) {
    case 0:
      return {ConstraintText::Kind::kChoice, {"w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "no", "yes"}};
    case 1:
      return {ConstraintText::Kind::kJsonSchema,
              {R"({"type": "array", "items": {"type": "integer"}, "maxItems": 20})"}};
    case 2:
      return {ConstraintText::Kind::kGrammar, {R"(root ::= ("w" [0-9]+ " "?)+)"}};
    default:
      return {ConstraintText::Kind::kRegex, {dice.Of<const char*>({"(w[0-9]+ ?)+", "[a-z0-9 ]*"})}};
  }
}

Ask DrawAsk(Dice& dice, const std::vector<EngineSetup>& engines, const std::vector<Ask>& before) {
  Ask ask;
  ask.engine = dice.Int(0, static_cast<int64_t>(engines.size()) - 1);
  const int64_t chunk = engines[ask.engine].chunk_tokens;
  ask.at_step = dice.Chance(0.5) ? 0 : dice.Int(1, 60);
  ask.text = dice.Bits() >> 12;
  ask.own = dice.Magnitude(1, 120);
  int64_t prompt = ask.own;
  if (dice.Chance(0.5)) {
    ask.shared_text = dice.Bits() % 2;
    ask.shared = std::max<int64_t>(0, dice.Int(1, 4) * chunk + dice.Int(-1, 1));
    if (dice.Chance(0.3)) ask.own = dice.Int(1, 4);
    if (dice.Chance(0.3)) {
      ask.packets = std::min<int64_t>(ask.shared, dice.Int(1, 3));
      ask.evicted_packets = dice.Chance(0.4);
    }
    prompt = ask.shared + ask.own;
  } else if (!before.empty() && dice.Chance(0.4)) {
    const auto other = dice.Int(0, static_cast<int64_t>(before.size()) - 1);
    const Ask& first = before[other];
    if (first.engine == ask.engine && first.forced == 0 && !first.idle &&
        !first.continues.has_value()) {
      ask.continues = other;
      ask.own = dice.Int(1, 20);
      prompt = first.shared + first.own + *first.options.stop.max_output_tokens + ask.own;
    }
  }
  const int64_t output = dice.Magnitude(1, kLongestOutput);
  RequestOptions& options = ask.options;
  DrawKv(dice, prompt, output, options.kv);
  OutputOptions& wants = options.output;
  options.stop.max_output_tokens = output;
  wants.kv_trace = dice.Chance(0.75);
  wants.residual_steps = dice.Chance(0.2);
  wants.kept = dice.Chance(0.7);
  wants.top_logprobs = dice.Chance(0.2) ? dice.Int(1, 5) : 0;
  if (dice.Chance(0.2)) {
    ask.forced = output;
    options.stop = {};
    options.sampling.seed = dice.Bits() >> 12;
    options.force_in_chunks = !wants.residual_steps && dice.Chance(0.3);
  } else {
    wants.logprobs = dice.Chance(0.8);
    wants.prompt_logprobs = dice.Chance(0.15);
    wants.progress = dice.Chance(0.2);
    DrawSampling(dice, options);
    DrawStop(dice, options.stop);
    if (dice.Chance(0.12)) ask.constraint = DrawConstraint(dice);
  }
  options.scheduling.priority = dice.Of({Priority::kLow, Priority::kNormal, Priority::kHigh});
  options.scheduling.tenant = dice.Of<const char*>({"", "", "a", "b"});
  if (dice.Chance(0.1)) ask.idle = options.completions == 1;
  if (dice.Chance(0.15)) ask.cancel_after = dice.Magnitude(1, 150);
  wants.packet = options.completions == 1 && dice.Chance(0.2);
  if (dice.Chance(0.07)) ask.deadline_after = dice.Magnitude(1, 300);
  for (int64_t n = dice.Chance(0.15) ? dice.Int(1, 2) : 0; n > 0; --n) {
    const int64_t begin = dice.Int(0, 80);
    ask.pauses.emplace_back(begin, begin + dice.Int(1, 40));
  }
  if (dice.Chance(0.4)) {
    options.guess_tokens = dice.Int(1, kMostGuesses);
    if (dice.Chance(0.5) && !engines[ask.engine].device_path) {
      options.guess_source = GuessSource::kDraft;
    }
  }
  DrawBeside(dice, engines[ask.engine].deterministic, options.kv);
  return ask;
}

// JSON ---------------------------------------------------------------------------------------

constexpr std::array kPositions = {"absolute", "compact", "cache"};
constexpr std::array kPriorities = {"low", "normal", "high"};
constexpr std::array kDecodeKernels = {"batch", "flash", "matmul"};
constexpr std::array kPrefillKernels = {"batch", "flash"};
constexpr std::array kGuessSources = {"prompt", "draft"};
constexpr std::array kDTypes = {"model", "int8"};
constexpr std::array kConstraints = {"regex", "choice", "json_schema", "grammar"};

// One walk over the fields, which either writes those that differ from the default, or reads.
class Fields {
 public:
  Fields(Json& json, bool reads) : json_(json), reads_(reads) {}

  template <class T>
  void Is(const char* name, T& value, const T& fallback) {
    if (reads_) {
      if (json_.contains(name)) json_.at(name).get_to(value);
    } else if (value != fallback) {
      json_[name] = value;
    }
  }
  template <class T>
  void Is(const char* name, std::optional<T>& value, const std::optional<T>&) {
    if (reads_) {
      if (json_.contains(name)) value = json_.at(name).get<T>();
    } else if (value.has_value()) {
      json_[name] = *value;
    }
  }
  template <class E, size_t n>
  void Is(const char* name, E& value, const E& fallback, const std::array<const char*, n>& names) {
    if (!reads_) {
      if (value != fallback) json_[name] = names[static_cast<size_t>(value)];
      return;
    }
    if (!json_.contains(name)) return;
    const auto at = std::find(names.begin(), names.end(), json_.at(name).get<std::string>());
    if (at == names.end()) throw std::invalid_argument(absl::StrCat("unknown ", name));
    value = static_cast<E>(at - names.begin());
  }

  Json& json() { return json_; }
  bool reads() const { return reads_; }

 private:
  Json& json_;
  const bool reads_;
};

void Visit(Fields& f, EngineSetup& s) {
  const EngineSetup d;
  f.Is("model", s.model, d.model);
  f.Is("pool_tokens", s.pool_tokens, d.pool_tokens);
  f.Is("prefix_share", s.prefix_share, d.prefix_share);
  f.Is("chunk_tokens", s.chunk_tokens, d.chunk_tokens);
  f.Is("max_step_tokens", s.max_step_tokens, d.max_step_tokens);
  f.Is("max_running", s.max_running, d.max_running);
  f.Is("constraint_work", s.constraint_work, d.constraint_work);
  f.Is("max_round_pairs", s.max_round_pairs, d.max_round_pairs);
  f.Is("decode_kernel", s.decode_kernel, d.decode_kernel, kDecodeKernels);
  f.Is("prefill_kernel", s.prefill_kernel, d.prefill_kernel, kPrefillKernels);
  f.Is("kv_dtype", s.kv_dtype, d.kv_dtype, kDTypes);
  f.Is("deterministic", s.deterministic, d.deterministic);
  f.Is("device_path", s.device_path, d.device_path);
  f.Is("recorded", s.recorded, d.recorded);
  f.Is("mass_interval", s.mass_interval, d.mass_interval);
}

Json JsonOf(const ParamValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

ParamValue ParamOf(const std::string& policy, const std::string& name, const Json& json) {
  const PolicySpec* spec = FindPolicy(LawPolicies(), policy);
  if (spec == nullptr) throw std::invalid_argument(absl::StrCat("no policy ", policy));
  for (const ParamSpec& param : spec->params) {
    if (param.name != name) continue;
    switch (param.type) {
      case ParamType::kBool:
        return json.get<bool>();
      case ParamType::kInt:
        return json.get<int64_t>();
      case ParamType::kFloat:
        return json.get<double>();
      case ParamType::kChoice:
        return json.get<std::string>();
      case ParamType::kIntList:
        return json.get<std::vector<int64_t>>();
      case ParamType::kChoiceList:
        return json.get<std::vector<std::string>>();
    }
  }
  throw std::invalid_argument(absl::StrCat(policy, " has no parameter ", name));
}

void VisitSampling(Fields& f, RequestOptions& options) {
  SamplingParams& s = options.sampling;
  f.Is("n", options.completions, int64_t{1});
  f.Is("seed", s.seed, uint64_t{0});
  f.Is("temperature", s.temperature, {});
  f.Is("top_k", s.top_k, {});
  f.Is("top_p", s.top_p, {});
  f.Is("min_p", s.min_p, {});
  f.Is("typical_p", s.typical_p, {});
  f.Is("repetition_penalty", s.repetition_penalty, {});
  f.Is("frequency_penalty", s.frequency_penalty, {});
  f.Is("presence_penalty", s.presence_penalty, {});
  f.Is("logit_bias", s.logit_bias, {});
}

void VisitStop(Fields& f, StopOptions& stop) {
  f.Is("max_output_tokens", stop.max_output_tokens, {});
  f.Is("stop_strings", stop.strings, {});
  f.Is("stop_tokens", stop.tokens, {});
  f.Is("include_stop", stop.include, false);
  f.Is("min_output_tokens", stop.min_output_tokens, int64_t{0});
  f.Is("ignore_end", stop.ignore_end, false);
}

void VisitOutput(Fields& f, OutputOptions& wants) {
  f.Is("logprobs", wants.logprobs, false);
  f.Is("top_logprobs", wants.top_logprobs, int64_t{0});
  f.Is("prompt_logprobs", wants.prompt_logprobs, false);
  f.Is("progress", wants.progress, false);
  f.Is("kv_trace", wants.kv_trace, false);
  f.Is("residual_steps", wants.residual_steps, false);
  f.Is("kept", wants.kept, false);
  f.Is("packet", wants.packet, false);
}

void VisitBudget(Fields& f, KvOptions& kv) {
  Json& json = f.json();
  if (f.reads()) {
    if (json.contains("budget")) kv.budget = json.at("budget").get<int64_t>();
    if (json.contains("keep_ratio")) kv.budget = json.at("keep_ratio").get<double>();
    if (json.contains("params")) {
      for (const auto& [name, value] : json.at("params").items()) {
        kv.params[name] = ParamOf(kv.policy, name, value);
      }
    }
    return;
  }
  if (const auto* tokens = std::get_if<int64_t>(&kv.budget)) json["budget"] = *tokens;
  if (const auto* ratio = std::get_if<double>(&kv.budget)) json["keep_ratio"] = *ratio;
  for (const auto& [name, value] : kv.params) json["params"][name] = JsonOf(value);
}

void VisitKv(Fields& f, KvOptions& kv) {
  f.Is("policy", kv.policy, std::string());
  VisitBudget(f, kv);
  f.Is("positions", kv.positions, PositionMode::kAbsolute, kPositions);
  f.Is("salt", kv.prefix_salt, std::string());
  f.Is("read_tokens", kv.read_tokens, int64_t{0});
  f.Is("tier_tokens", kv.tier.tokens, int64_t{0});
  f.Is("tier_fetch", kv.tier.fetch, int64_t{0});
  f.Is("tier_doubt", kv.tier.doubt, 0.0);
  std::optional<int64_t> asked;
  GuardRule guard = kv.tier.guard.value_or(GuardRule());
  if (kv.tier.guard.has_value()) asked = guard.asked;
  f.Is("guard", asked, {});
  f.Is("guard_follow", guard.follow, false);
  f.Is("guard_relax_times", guard.relax_times, int64_t{0});
  f.Is("guard_relax_prob", guard.relax_prob, 0.0);
  if (asked.has_value()) {
    guard.asked = *asked;
    kv.tier.guard = guard;
  }
  f.Is("bypass_prefix_cache", kv.bypass_prefix_cache, false);
  f.Is("equal_protection", kv.protection.equal, {});
  f.Is("protect_prompt", kv.protection.prompt, {});
  f.Is("sinks", kv.protection.sinks, {});
  f.Is("recent", kv.protection.recent, {});
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (const TokenSpan& span : kv.protection.spans) spans.emplace_back(span.begin, span.end);
  f.Is("spans", spans, {});
  kv.protection.spans.clear();
  for (const auto& [begin, end] : spans) kv.protection.spans.push_back({begin, end});
}

void Visit(Fields& f, Ask& ask) {
  const Ask d;
  f.Is("engine", ask.engine, d.engine);
  f.Is("at_step", ask.at_step, d.at_step);
  f.Is("shared", ask.shared, d.shared);
  f.Is("shared_text", ask.shared_text, d.shared_text);
  f.Is("own", ask.own, d.own);
  f.Is("text", ask.text, d.text);
  f.Is("continues", ask.continues, {});
  f.Is("packets", ask.packets, d.packets);
  f.Is("evicted_packets", ask.evicted_packets, d.evicted_packets);
  f.Is("forced", ask.forced, d.forced);
  f.Is("force_in_chunks", ask.options.force_in_chunks, false);
  VisitSampling(f, ask.options);
  VisitStop(f, ask.options.stop);
  VisitOutput(f, ask.options.output);
  VisitKv(f, ask.options.kv);
  f.Is("priority", ask.options.scheduling.priority, Priority::kNormal, kPriorities);
  f.Is("tenant", ask.options.scheduling.tenant, std::string());
  f.Is("idle", ask.idle, d.idle);
  f.Is("guess_tokens", ask.options.guess_tokens, int64_t{0});
  f.Is("guess_source", ask.options.guess_source, GuessSource::kPrompt, kGuessSources);
  f.Is("cancel_after", ask.cancel_after, {});
  f.Is("deadline_after", ask.deadline_after, {});
  f.Is("pauses", ask.pauses, {});
  if (!f.reads()) {
    if (!ask.constraint.has_value()) return;
    const auto kind = static_cast<size_t>(ask.constraint->kind);
    f.json()["constraint"] = {{kConstraints[kind], ask.constraint->texts}};
    return;
  }
  if (!f.json().contains("constraint")) return;
  for (size_t kind = 0; kind < kConstraints.size(); ++kind) {
    if (!f.json().at("constraint").contains(kConstraints[kind])) continue;
    ask.constraint = ConstraintText{.kind = static_cast<ConstraintText::Kind>(kind)};
    f.json().at("constraint").at(kConstraints[kind]).get_to(ask.constraint->texts);
  }
}

template <class T>
Json WriteAll(const std::vector<T>& items) {
  Json list = Json::array();
  for (T item : items) {
    Json json = Json::object();
    Fields fields(json, /*reads=*/false);
    Visit(fields, item);
    list.push_back(std::move(json));
  }
  return list;
}

template <class T>
std::vector<T> ReadAll(Json list) {
  std::vector<T> items;
  for (Json& json : list) {
    Fields fields(json, /*reads=*/true);
    Visit(fields, items.emplace_back());
  }
  return items;
}

}  // namespace

std::vector<std::string> TrialModels() {
  const std::set<std::string> names(std::begin(kModels), std::end(kModels));
  return {names.begin(), names.end()};
}

Trial DrawTrial(uint64_t seed) {
  Dice dice(seed);
  Trial trial;
  trial.engines.push_back(DrawSetup(dice));
  if (dice.Chance(0.15)) trial.engines.push_back(DrawSetup(dice));
  for (int64_t asks = dice.Int(1, 8); asks > 0; --asks) {
    trial.asks.push_back(DrawAsk(dice, trial.engines, trial.asks));
  }
  if (dice.Chance(0.1)) trial.drops.push_back(dice.Int(1, 100));
  return trial;
}

Json ToJson(const Trial& trial) {
  Json json = {{"engines", WriteAll(trial.engines)}, {"asks", WriteAll(trial.asks)}};
  if (!trial.drops.empty()) json["drops"] = trial.drops;
  return json;
}

Trial TrialOf(const Json& json) {
  Trial trial = {.engines = ReadAll<EngineSetup>(json.at("engines")),
                 .asks = ReadAll<Ask>(json.at("asks")),
                 .drops = json.value("drops", std::vector<int64_t>())};
  for (size_t i = 0; i < trial.asks.size(); ++i) {
    const Ask& ask = trial.asks[i];
    const bool known = ask.engine >= 0 && ask.engine < std::ssize(trial.engines);
    if (!known || ask.continues.value_or(0) < 0 ||
        (ask.continues.has_value() && *ask.continues >= static_cast<int64_t>(i))) {
      throw std::invalid_argument(absl::StrCat("ask ", i, " names what is not there"));
    }
  }
  return trial;
}

std::vector<int32_t> TokensOfText(uint64_t text, int64_t count, int64_t vocab_size) {
  Dice dice(text);
  std::vector<int32_t> order(vocab_size), tokens;
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = i % vocab_size;
    std::swap(order[place], order[dice.Int(place, vocab_size - 1)]);
    tokens.push_back(order[place]);
  }
  return tokens;
}

}  // namespace epikv
