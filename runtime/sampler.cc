#include "runtime/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "policies/random.h"

namespace epikv {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Candidate {
  float weight;  // a logit, then the unnormalised probability
  int32_t token;
};

bool Likelier(const Candidate& a, const Candidate& b) {
  return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
}

absl::Status BrokenLogits(absl::Span<const float> logits) {
  for (size_t token = 0; token < logits.size(); ++token) {
    if (std::isnan(logits[token])) {
      return absl::InternalError(absl::StrCat("logits of token ", token, " are NaN"));
    }
    if (logits[token] == kInfinity) {
      return absl::InternalError(absl::StrCat("logits of token ", token, " are infinite"));
    }
  }
  return absl::InternalError("logits of all tokens are -inf");
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
    all[token] = {logits[token], static_cast<int32_t>(token)};
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
    best.push_back({logits[token], static_cast<int32_t>(token)});
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
  double mass = 0;
  for (size_t i = 0; i < nucleus.size(); ++i) {
    mass += nucleus[i].weight;
    if (mass >= top_p * total) {
      nucleus.resize(i + 1);
      break;
    }
  }
  return nucleus;
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

absl::StatusOr<int32_t> Argmax(absl::Span<const float> logits) {
  const absl::StatusOr<float> peak = Peak(logits);
  if (!peak.ok()) return peak.status();
  return static_cast<int32_t>(std::find(logits.begin(), logits.end(), *peak) - logits.begin());
}

absl::StatusOr<int32_t> Sample(absl::Span<const float> logits, const SamplingParams& params,
                               uint64_t draw_index) {
  if (params.greedy()) return Argmax(logits);
  const absl::StatusOr<float> peak = Peak(logits);
  if (!peak.ok()) return peak.status();

  const size_t top_k = static_cast<size_t>(params.top_k.value_or(0));
  std::vector<Candidate> candidates =
      top_k > 0 && top_k < logits.size() ? TopK(logits, top_k) : AllTokens(logits);
  for (Candidate& c : candidates) c.weight = std::exp((c.weight - *peak) / *params.temperature);
  if (params.top_p.value_or(1) < 1) candidates = Nucleus(candidates, *params.top_p);
  return Pick(candidates, CounterRng(params.seed, CounterRng::kSamplerStream).Uniform(draw_index));
}

absl::StatusOr<float> LogProb(absl::Span<const float> logits, int32_t token) {
  const absl::StatusOr<float> peak = Peak(logits);
  if (!peak.ok()) return peak.status();
  double sum = 0;
  for (float logit : logits) sum += std::exp(logit - *peak);
  return static_cast<float>(double{logits[token]} - *peak - std::log(sum));
}

}  // namespace epikv
