#include "runtime/admission/request_checks.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

constexpr size_t kMaxStopStrings = 16, kMaxStopStringBytes = 256, kMaxStopTokens = 64;
constexpr size_t kMaxIdBytes = 128, kMaxSaltBytes = 128;
constexpr size_t kMaxLogitBiases = 1024;
constexpr float kMostLogitBias = 100;
constexpr float kMostSteering = 100;
constexpr int64_t kMaxTopLogprobs = 20, kMaxCompletions = 16;

class RequestChecks {
 public:
  RequestChecks(const RequestOptions& options, int64_t vocab_size, int64_t max_running_requests,
                Violations& violations)
      : options_(options),
        vocab_size_(vocab_size),
        max_running_requests_(max_running_requests),
        violations_(violations) {}

  void Tokens();
  void Sampling();
  void Stop();
  void Output();
  void Scheduling();

 private:
  bool InVocabulary(int32_t token) const { return token >= 0 && token < vocab_size_; }
  void OutsideVocabulary(absl::string_view field, int32_t token);
  void TokenRange(absl::string_view field, const std::vector<int32_t>& ids);
  void LogitBias();

  const RequestOptions& options_;
  const int64_t vocab_size_, max_running_requests_;
  Violations& violations_;
};

void RequestChecks::OutsideVocabulary(absl::string_view field, int32_t token) {
  violations_.Add(
      field, absl::StrCat("token id ", token, " is outside the vocabulary [0, ", vocab_size_, ")"));
  violations_.Because("TOKEN_RANGE", {{"vocab_size", absl::StrCat(vocab_size_)}},
                      absl::StatusCode::kOutOfRange);
}

void RequestChecks::TokenRange(absl::string_view field, const std::vector<int32_t>& ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (InVocabulary(ids[i])) continue;
    OutsideVocabulary(absl::StrCat(field, "[", i, "]"), ids[i]);
    return;  // one of a kind is enough
  }
}

void RequestChecks::Tokens() {
  if (options_.id.size() > kMaxIdBytes) {
    violations_.Add("request_id",
                    absl::StrCat("has ", options_.id.size(), " bytes, at most ", kMaxIdBytes));
  }
  if (options_.prompt.empty()) violations_.Add("prompt", "is empty; at least one token is needed");
  TokenRange("prompt.token_ids.ids", options_.prompt);
  if (const size_t bytes = options_.kv.prefix_salt.size(); bytes > kMaxSaltBytes) {
    violations_.Add("kv.cache_salt",
                    absl::StrCat("has ", bytes, " bytes, at most ", kMaxSaltBytes));
  }
  TokenRange("continuation", options_.forced);
}

void RequestChecks::Sampling() {
  const SamplingParams& s = options_.sampling;
  if (s.temperature.has_value() && !(std::isfinite(*s.temperature) && *s.temperature >= 0)) {
    violations_.Add("sampling.temperature",
                    absl::StrCat("must be a finite number >= 0, is ", *s.temperature));
  }
  if (s.top_p.has_value() && !(*s.top_p > 0 && *s.top_p <= 1)) {
    violations_.Add("sampling.top_p", absl::StrCat("must be in (0, 1], is ", *s.top_p));
  }
  if (s.top_k.has_value() && *s.top_k < 0) {
    violations_.Add("sampling.top_k", absl::StrCat("must be >= 0, is ", *s.top_k));
  }
  if (s.typical_p.has_value() && !(*s.typical_p > 0 && *s.typical_p <= 1)) {
    violations_.Add("sampling.typical_p", absl::StrCat("must be in (0, 1], is ", *s.typical_p));
  }
  auto check = [&](absl::string_view field, std::optional<float> value, float least, float most) {
    if (!value.has_value() || (least <= *value && *value <= most)) return;
    violations_.Add(field, absl::StrCat("must be in [", least, ", ", most, "], is ", *value));
  };
  check("sampling.min_p", s.min_p, 0, 1);
  // Farther from 1 a logit might overflow.
  check("sampling.repetition_penalty", s.repetition_penalty, 0.01f, 100);
  check("sampling.frequency_penalty", s.frequency_penalty, -2, 2);
  check("sampling.presence_penalty", s.presence_penalty, -2, 2);
  if (options_.steering.has_value()) {
    check("sampling.steering.coefficient", options_.steering->coefficient, -kMostSteering,
          kMostSteering);
    check("sampling.steering.growth", options_.steering->growth, -kMostSteering, kMostSteering);
  }
  if (options_.guess_tokens < 0 || options_.guess_tokens > kMostGuesses) {
    violations_.Add("speculation.max_tokens", absl::StrCat("must be from 0 to ", kMostGuesses,
                                                           ", is ", options_.guess_tokens));
  }
  LogitBias();
  const int64_t most = std::min(kMaxCompletions, max_running_requests_);
  if (options_.completions < 1 || options_.completions > most) {
    violations_.Add("sampling.n",
                    absl::StrCat("must be from 1 to ", most, ", is ", options_.completions));
  } else if (options_.completions > 1 && s.greedy()) {
    violations_.Add("sampling.n",
                    absl::StrCat("must be 1 where temperature is 0, is ", options_.completions,
                                 ": all completions would be the same"));
  }
}

void RequestChecks::LogitBias() {
  const std::map<int32_t, float>& biases = options_.sampling.logit_bias;
  if (biases.size() > kMaxLogitBiases) {
    violations_.Add("sampling.logit_bias",
                    absl::StrCat("has ", biases.size(), " items, at most ", kMaxLogitBiases));
    return;
  }
  for (const auto& [token, bias] : biases) {
    const std::string field = absl::StrCat("sampling.logit_bias[", token, "]");
    if (!InVocabulary(token)) OutsideVocabulary(field, token);
    if (std::abs(bias) <= kMostLogitBias) continue;
    violations_.Add(
        field, absl::StrCat("must be in [", -kMostLogitBias, ", ", kMostLogitBias, "], is ", bias));
  }
}

void RequestChecks::Stop() {
  const StopOptions& stop = options_.stop;
  if (stop.strings.size() > kMaxStopStrings) {
    violations_.Add("stop.stop_strings",
                    absl::StrCat("has ", stop.strings.size(), " items, at most ", kMaxStopStrings));
  }
  for (size_t i = 0; i < std::min(stop.strings.size(), kMaxStopStrings); ++i) {
    if (!stop.strings[i].empty() && stop.strings[i].size() <= kMaxStopStringBytes) continue;
    violations_.Add(absl::StrCat("stop.stop_strings[", i, "]"),
                    absl::StrCat("must have 1 to ", kMaxStopStringBytes, " bytes, has ",
                                 stop.strings[i].size()));
  }
  if (stop.tokens.size() > kMaxStopTokens) {
    violations_.Add("stop.stop_token_ids",
                    absl::StrCat("has ", stop.tokens.size(), " items, at most ", kMaxStopTokens));
  }
  TokenRange("stop.stop_token_ids", stop.tokens);
  if (stop.max_output_tokens.has_value() && *stop.max_output_tokens < 1) {
    violations_.Add("stop.max_output_tokens", "must be at least 1");
  }
}

void RequestChecks::Scheduling() {
  const size_t bytes = options_.scheduling.tenant.size();
  if (bytes > kMaxTenantBytes) {
    violations_.Add("scheduling.tenant",
                    absl::StrCat("has ", bytes, " bytes, at most ", kMaxTenantBytes));
  }
}

void RequestChecks::Output() {
  const int64_t top = options_.output.top_logprobs;
  if (top > kMaxTopLogprobs) {
    violations_.Add(options_.forced.empty() ? "output.top_logprobs" : "top_logprobs",
                    absl::StrCat("must be at most ", kMaxTopLogprobs, ", is ", top));
  }
}

}  // namespace

void CheckRequest(const RequestOptions& options, int64_t vocab_size, int64_t max_running_requests,
                  Violations& violations) {
  RequestChecks checks(options, vocab_size, max_running_requests, violations);
  checks.Tokens();
  checks.Sampling();
  checks.Stop();
  checks.Output();
  checks.Scheduling();
}

}  // namespace epikv
