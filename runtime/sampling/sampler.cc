#include "runtime/sampling/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "policies/random.h"
#include "runtime/base/reason.h"

namespace epikv {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Of candidates by probability, and by logit, which stands in `weight` at first.
bool Likelier(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

// -inf: that of all.
absl::Status BrokenLogit(float logit, size_t token) {
  if (logit == -kInfinity) return absl::InternalError("logits of all tokens are -inf");
  return absl::InternalError(
      absl::StrCat("logits of token ", token, " are ", std::isnan(logit) ? "NaN" : "infinite"));
}

absl::Status BrokenLogits(absl::Span<const float> logits) {
  for (size_t token = 0; token < logits.size(); ++token) {
    if (!(logits[token] < kInfinity)) return BrokenLogit(logits[token], token);
  }
  return BrokenLogit(-kInfinity, 0);
}

// The highest logit. Independent lanes, so that the compiler can use vector registers: this pass
// over the vocabulary is the whole cost of a greedy token.
absl::StatusOr<float> Peak(absl::Span<const float> logits) {
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> best;
  std::array<int32_t, kLanes> broken{};
  best.fill(-kInfinity);
  const float* row = logits.data();
  const size_t whole = logits.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float logit = row[i + lane];
      best[lane] = logit > best[lane] ? logit : best[lane];
      broken[lane] |= !(logit < kInfinity);  // NaN or +inf
    }
  }
  for (size_t i = whole; i < logits.size(); ++i) {
    best[0] = std::max(best[0], row[i]);
    broken[0] |= !(row[i] < kInfinity);
  }
  const float peak = *std::max_element(best.begin(), best.end());
  const bool any_broken = std::any_of(broken.begin(), broken.end(), [](int32_t b) { return b; });
  if (any_broken || peak == -kInfinity) return BrokenLogits(logits);
  return peak;
}

std::vector<Candidate> AllTokens(absl::Span<const float> logits) {
  std::vector<Candidate> all(logits.size());
  for (size_t token = 0; token < logits.size(); ++token) {
    all[token] = {static_cast<int32_t>(token), logits[token]};
  }
  return all;
}

// The k likeliest, likeliest first. Precondition: 1 <= k < vocab. Only what beats the k-th best so
// far is kept, so almost all of a large vocabulary costs one comparison a token.
std::vector<Candidate> TopK(absl::Span<const float> logits, size_t k) {
  std::vector<Candidate> best;
  const size_t capacity = std::min(logits.size(), 2 * k + 64);
  best.reserve(capacity);
  const auto shrink = [&best, k] {
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), Likelier);
    best.resize(k);
  };
  float bar = -kInfinity;  // tokens come in ascending order: one that ties with the k-th loses
  for (size_t token = 0; token < logits.size(); ++token) {
    if (best.size() >= k && !(logits[token] > bar)) continue;
    best.push_back({static_cast<int32_t>(token), logits[token]});
    if (best.size() == capacity) {
      shrink();
      bar = best[k - 1].weight;
    }
  }
  shrink();
  std::sort(best.begin(), best.end(), Likelier);
  return best;
}

double Total(const std::vector<Candidate>& candidates) {
  double total = 0;
  for (const Candidate& c : candidates) total += c.weight;
  return total;
}

// The smallest head of them that weighs `mass`: how many. All of them, if they weigh less.
size_t HeadOfMass(const std::vector<Candidate>& candidates, double mass) {
  double sum = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    sum += candidates[i].weight;
    if (sum >= mass) return i + 1;
  }
  return candidates.size();
}

// The smallest set of the likeliest with a share of at least `top_p`, likeliest first. What is
// lighter than (1 - top_p) / n of the total can be left out before sorting: all of it together
// weighs less than 1 - top_p.
std::vector<Candidate> Nucleus(const std::vector<Candidate>& candidates, double top_p) {
  const double total = Total(candidates);
  const double floor = (1 - top_p) * total / static_cast<double>(candidates.size());
  std::vector<Candidate> nucleus;
  std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(nucleus),
               [floor](const Candidate& c) { return c.weight >= floor; });
  std::sort(nucleus.begin(), nucleus.end(), Likelier);
  nucleus.resize(HeadOfMass(nucleus, top_p * total));
  return nucleus;
}

// The smallest set with a share of at least `typical_p` whose -log p is nearest to the entropy,
// nearest first.
std::vector<Candidate> Typical(std::vector<Candidate> candidates, double typical_p) {
  struct Surprising {
    Candidate candidate;
    double distance;  // of -log p from the entropy
  };
  std::erase_if(candidates, [](const Candidate& c) { return !(c.weight > 0); });
  const double total = Total(candidates);
  double entropy = 0;
  std::vector<Surprising> order;
  for (const Candidate& c : candidates) {
    const double surprise = std::log(total) - std::log(double{c.weight});
    entropy += c.weight / total * surprise;
    order.push_back({c, surprise});
  }
  for (Surprising& s : order) s.distance = std::abs(s.distance - entropy);
  std::sort(order.begin(), order.end(), [](const Surprising& a, const Surprising& b) {
    return a.distance != b.distance ? a.distance < b.distance
                                    : a.candidate.token < b.candidate.token;
  });
  std::vector<Candidate> typical;
  double mass = 0;
  for (const Surprising& s : order) {
    if (mass >= typical_p * total) break;
    mass += s.candidate.weight;
    typical.push_back(s.candidate);
  }
  return typical;
}

bool Penalises(const SamplingParams& params) {
  return params.repetition_penalty.value_or(1) != 1 || params.frequency_penalty.value_or(0) != 0 ||
         params.presence_penalty.value_or(0) != 0;
}

bool Adjusts(const SamplingParams& params, const Draw& draw) {
  return !params.logit_bias.empty() || !draw.masked.empty() || !draw.allowed.empty() ||
         Penalises(params);
}

void Penalise(std::vector<float>& logits, const SamplingParams& params, const Draw& draw) {
  std::vector<int32_t> in_outputs(logits.size());
  for (int32_t token : draw.outputs) ++in_outputs[token];
  if (const float penalty = params.repetition_penalty.value_or(1); penalty != 1) {
    std::vector<bool> seen(logits.size());
    for (const absl::Span<const int32_t> tokens : {draw.prompt, draw.outputs}) {
      for (int32_t token : tokens) {
        if (seen[token]) continue;
        seen[token] = true;
        logits[token] = logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty;
      }
    }
  }
  const float frequency = params.frequency_penalty.value_or(0);
  const float presence = params.presence_penalty.value_or(0);
  for (int32_t token : draw.outputs) {
    const int32_t count = std::exchange(in_outputs[token], 0);
    if (count > 0) logits[token] -= frequency * static_cast<float>(count) + presence;
  }
}

// Bias, mask and penalties.
std::vector<float> Adjusted(absl::Span<const float> logits, const SamplingParams& params,
                            const Draw& draw) {
  std::vector<float> adjusted(logits.begin(), logits.end());
  for (const auto& [token, bias] : params.logit_bias) adjusted[token] += bias;
  for (int32_t token : draw.masked) adjusted[token] = -kInfinity;
  if (!draw.allowed.empty()) {
    for (size_t token = 0; token < adjusted.size(); ++token) {
      const bool allowed = draw.allowed[token / 32] >> (token % 32) & 1;
      if (!allowed) adjusted[token] = -kInfinity;
    }
  }
  if (Penalises(params)) Penalise(adjusted, params, draw);
  return adjusted;
}

int32_t FirstOf(absl::Span<const float> logits, float peak) {
  return static_cast<int32_t>(std::find(logits.begin(), logits.end(), peak) - logits.begin());
}

// Stages 6 and 7 of Candidates.
std::vector<Candidate> NarrowFurther(std::vector<Candidate> candidates,
                                     const SamplingParams& params) {
  if (const float least = params.min_p.value_or(0); least > 0) {  // the likeliest weighs 1
    std::erase_if(candidates, [least](const Candidate& c) { return c.weight < least; });
  }
  if (params.typical_p.value_or(1) < 1) {
    candidates = Typical(std::move(candidates), *params.typical_p);
  }
  return candidates;
}

// Stages 3 to 7 of Candidates.
std::vector<Candidate> Narrow(absl::Span<const float> logits, float peak,
                              const SamplingParams& params) {
  if (params.greedy()) return {{.token = FirstOf(logits, peak), .weight = 1}};
  const size_t top_k = static_cast<size_t>(params.top_k.value_or(0));
  std::vector<Candidate> candidates =
      top_k > 0 && top_k < logits.size() ? TopK(logits, top_k) : AllTokens(logits);
  for (Candidate& c : candidates) c.weight = std::exp((c.weight - peak) / *params.temperature);
  if (params.top_p.value_or(1) < 1) candidates = Nucleus(candidates, *params.top_p);
  return NarrowFurther(std::move(candidates), params);
}

// The candidate at share `uniform`, in [0, 1), of the total weight.
int32_t Pick(const std::vector<Candidate>& candidates, double uniform) {
  const double target = uniform * Total(candidates);
  double mass = 0;
  int32_t last = candidates.front().token;  // rounding may leave the target at the very end
  for (const Candidate& c : candidates) {
    if (!(c.weight > 0)) continue;
    mass += c.weight;
    last = c.token;
    if (mass > target) break;
  }
  return last;
}

}  // namespace

void FillIn(const SamplingParams& defaults, SamplingParams& params) {
  auto fill = [&](auto member) {
    if (!(params.*member).has_value()) params.*member = defaults.*member;
  };
  fill(&SamplingParams::temperature);
  fill(&SamplingParams::top_p);
  fill(&SamplingParams::top_k);
  fill(&SamplingParams::min_p);
  fill(&SamplingParams::typical_p);
  fill(&SamplingParams::repetition_penalty);
  fill(&SamplingParams::frequency_penalty);
  fill(&SamplingParams::presence_penalty);
}

SamplingParams SamplingOf(const SamplingParams& params, int64_t completion) {
  SamplingParams of = params;
  of.seed += static_cast<uint64_t>(completion);
  return of;
}

absl::StatusOr<int32_t> Argmax(absl::Span<const float> logits) {
  const absl::StatusOr<float> peak = Peak(logits);
  if (!peak.ok()) return peak.status();
  return FirstOf(logits, *peak);
}

absl::StatusOr<int32_t> CheckedArgmax(float highest, int32_t token) {
  if (!std::isfinite(highest)) return BrokenLogit(highest, token);
  return token;
}

RowNeed RowNeedOf(const SamplingParams& params, const Draw& draw) {
  if (Adjusts(params, draw)) return RowNeed::kRow;
  if (params.greedy()) return RowNeed::kHighest;
  if (params.top_k.value_or(0) > 0 || params.top_p.value_or(1) < 1) return RowNeed::kHead;
  if (params.typical_p.value_or(1) < 1) return RowNeed::kRow;
  return params.min_p.value_or(0) > 0 ? RowNeed::kHead : RowNeed::kDrawn;
}

double ShareOf(const SamplingParams& params, uint64_t draw) {
  return CounterRng(params.seed, CounterRng::kSamplerStream).Uniform(draw);
}

std::optional<int32_t> DrawFromHead(LogitsHead head, const SamplingParams& params, uint64_t draw) {
  std::vector<Candidate>& candidates = head.likeliest;
  std::sort(candidates.begin(), candidates.end(), Likelier);  // those that tie, by token
  const float peak = candidates.front().weight;
  // A token that is not in the head is at most as likely as its last, and may tie with it.
  const float last = candidates.back().weight;
  const auto top_k = static_cast<size_t>(params.top_k.value_or(0));
  const bool cuts = top_k > 0 && !(head.whole && top_k >= candidates.size());
  if (cuts) {
    const bool has_all =
        head.whole || (top_k < candidates.size() && candidates[top_k - 1].weight > last);
    if (!has_all) return std::nullopt;
    candidates.resize(top_k);
    head.whole = true;
  }
  const auto weigh = [&](float logit) { return std::exp((logit - peak) / *params.temperature); };
  const float weight_of_last = weigh(last);
  for (Candidate& c : candidates) c.weight = weigh(c.weight);
  if (const double top_p = params.top_p.value_or(1); top_p < 1) {
    const double total = head.whole ? Total(candidates) : head.total;
    std::sort(candidates.begin(), candidates.end(), Likelier);  // logits that weigh alike, by token
    candidates.resize(HeadOfMass(candidates, top_p * total));
    if (!head.whole && !(candidates.back().weight > weight_of_last)) return std::nullopt;
  } else if (!cuts) {  // min_p alone, of which Sample leaves tokens in their order
    if (!head.whole && !(weight_of_last < params.min_p.value_or(0))) return std::nullopt;
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
  }
  return Pick(NarrowFurther(std::move(candidates), params), ShareOf(params, draw));
}

absl::StatusOr<std::vector<Candidate>> Candidates(absl::Span<const float> logits,
                                                  const SamplingParams& params, const Draw& draw) {
  const absl::StatusOr<float> raw_peak = Peak(logits);  // also of what is masked: broken is broken
  if (!raw_peak.ok()) return raw_peak.status();
  if (!Adjusts(params, draw)) return Narrow(logits, *raw_peak, params);
  std::vector<float> adjusted = Adjusted(logits, params, draw);
  absl::StatusOr<float> peak = Peak(adjusted);
  if (!peak.ok() && !draw.masked.empty()) {  // nothing is left: the mask gives way
    Draw unmasked = draw;
    unmasked.masked = {};
    adjusted = Adjusted(logits, params, unmasked);
    peak = Peak(adjusted);
  }
  if (!peak.ok() && !draw.allowed.empty()) {
    return WithReason(absl::FailedPreconditionError("the constraint allows only tokens that cannot "
                                                    "come next here (masked, or of probability 0)"),
                      kConstraintFailed);
  }
  if (!peak.ok()) return peak.status();
  return Narrow(adjusted, *peak, params);
}

absl::StatusOr<int32_t> Sample(absl::Span<const float> logits, const SamplingParams& params,
                               const Draw& draw) {
  if (RowNeedOf(params, draw) == RowNeed::kHighest) return Argmax(logits);
  const absl::StatusOr<std::vector<Candidate>> candidates = Candidates(logits, params, draw);
  if (!candidates.ok()) return candidates.status();
  return Pick(*candidates, ShareOf(params, draw.index));
}

absl::StatusOr<Logprobs> LogprobsOf(absl::Span<const float> logits, int32_t token,
                                    int64_t num_top) {
  const absl::StatusOr<float> peak = Peak(logits);
  if (!peak.ok()) return peak.status();
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - *peak);
  const auto logprob = [&, log_sum = std::log(sum)](float logit) {
    return static_cast<float>(double{logit} - *peak - log_sum);
  };
  Logprobs logprobs{.of_token = logprob(logits[token])};
  if (num_top == 0) return logprobs;
  const size_t k = static_cast<size_t>(num_top);
  std::vector<Candidate> top = k < logits.size() ? TopK(logits, k) : AllTokens(logits);
  std::sort(top.begin(), top.end(), Likelier);
  for (const Candidate& c : top) logprobs.top.push_back({c.token, logprob(c.weight)});
  return logprobs;
}

}  // namespace epikv
