#include "runtime/admission/forecast.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/string_view.h"

namespace epikv {
namespace {

constexpr int64_t kLeastSteps = 16;  // before these, nothing is predicted
// Of a step with fewer prefill tokens, most of the time is the step's own: it says nothing of them.
constexpr int64_t kLeastPrefillSample = 64;
constexpr size_t kRemembered = 64;  // prompts, outputs and deadlines
constexpr double kLastSteps = 32;   // the present is about so many
// A step counts for so many times what it was expected to take at most. One in which the process
// was stopped says nothing of the next; where steps stay slow, each moves the present on.
constexpr double kMostOfExpected = 8;

// A step or a few, where steps are short; and no longer than anybody would wait.
constexpr absl::Duration kShortestRetry = absl::Milliseconds(100);
constexpr absl::Duration kLongestRetry = absl::Minutes(5);
constexpr absl::Duration kUnmeasuredRetry = absl::Seconds(1);
// Of what is served meanwhile, what is left to them by those who come anew.
constexpr double kRetryShare = .5;
// Between refusals of one overload, however short.
constexpr absl::Duration kQuiet = absl::Seconds(1);

int Index(Priority priority) { return static_cast<int>(priority); }

// Tokens decoded one by one: the first output comes with the prompt.
double DecodeTokens(const Request& request) {
  return request.force_in_chunks ? 0 : static_cast<double>(request.max_output_tokens - 1);
}

void Remember(int64_t used, int64_t most, std::deque<double>& shares) {
  if (most <= 0) return;
  shares.push_back(static_cast<double>(used) / static_cast<double>(most));
  if (shares.size() > kRemembered) shares.pop_front();
}

// Of what is remembered; nothing: `unknown`.
double Least(const std::deque<double>& shares, double unknown) {
  return shares.empty() ? unknown : *std::min_element(shares.begin(), shares.end());
}

double Mean(const std::deque<double>& shares) {
  if (shares.empty()) return 1;
  return std::reduce(shares.begin(), shares.end()) / static_cast<double>(shares.size());
}

void Lower(double& least, double value) { least = least == 0 ? value : std::min(least, value); }

}  // namespace

Work& Work::operator+=(const Work& other) {
  requests += other.requests;
  tokens += other.tokens;
  bytes += other.bytes;
  prefill += other.prefill;
  decode += other.decode;
  byte_prefill += other.byte_prefill;
  byte_decode += other.byte_decode;
  most_prefill = std::max(most_prefill, other.most_prefill);
  most_decode = std::max(most_decode, other.most_decode);
  most_tokens = std::max(most_tokens, other.most_tokens);
  return *this;
}

Work& Work::operator-=(const Work& other) {
  requests -= other.requests;
  tokens -= other.tokens;
  bytes -= other.bytes;
  prefill -= other.prefill;
  decode -= other.decode;
  byte_prefill -= other.byte_prefill;
  byte_decode -= other.byte_decode;
  return *this;
}

Work Work::operator*(double share) const {
  Work part = *this;
  for (double* field : {&part.requests, &part.tokens, &part.bytes, &part.prefill, &part.decode,
                        &part.byte_prefill, &part.byte_decode}) {
    *field *= share;
  }
  return part;
}

Work WorkOf(const Request& request) {
  const double bytes = static_cast<double>(request.demand.peak_bytes());
  const double completions = static_cast<double>(request.completions());
  const double prefill = static_cast<double>(request.computed_tokens());
  const double decode = DecodeTokens(request);
  const double tokens = static_cast<double>(request.most_tokens());
  return {.requests = completions,  // each takes a place
          .tokens = tokens,
          .bytes = bytes,
          .prefill = prefill,
          .decode = completions * decode,
          .byte_prefill = bytes * prefill,
          .byte_decode = static_cast<double>(request.demand.decode_bytes) * completions * decode,
          .most_prefill = prefill,
          .most_decode = decode,
          .most_tokens = tokens};
}

Work WorkLeft(const Request& request, int64_t cached_tokens, int64_t num_outputs, const Pace& pace,
              int64_t completions) {
  const double decoded = static_cast<double>(std::max<int64_t>(0, num_outputs - 1));
  const double prefill =
      static_cast<double>(std::max<int64_t>(0, request.prefill_tokens() - cached_tokens));
  const double decode = std::max(0., DecodeTokens(request) * pace.decode_share - decoded);
  Work left = WorkOf(request);
  // The shares are taken here: what is cached or was decoded counts whole.
  left.prefill = left.most_prefill = prefill / pace.prefill_share;
  left.byte_prefill = left.bytes * left.prefill;
  left.most_decode = pace.decode_share > 0 ? decode / pace.decode_share : 0;
  left.decode = static_cast<double>(completions) * left.most_decode;
  left.byte_decode = static_cast<double>(request.demand.decode_bytes) * left.decode;
  return left;
}

absl::Duration PredictRun(const Request& request, const Pace& pace) {
  return absl::Seconds(
      pace.SecondsOf(static_cast<double>(request.computed_tokens()), DecodeTokens(request)));
}

absl::Duration PredictLeastRun(const Request& request, const Pace& pace) {
  double decode = static_cast<double>(std::max<int64_t>(1, request.min_output_tokens) - 1);
  const bool may_stop = !request.stop_strings.empty() || !request.stop_tokens.empty();
  if (!request.forced.empty() || (request.ignore_end && !may_stop)) decode = DecodeTokens(request);
  return absl::Seconds(static_cast<double>(request.computed_tokens()) * pace.prefill_share *
                           pace.seconds_per_prefill_token +
                       decode * pace.seconds_per_decode_token);
}

void PaceMeter::OnStep(absl::Duration duration, int64_t prefill_tokens, int64_t decode_tokens,
                       PerStream per_stream) {
  const double seconds = absl::ToDoubleSeconds(duration);
  if (seconds <= 0) return;  // the clock was set
  const double counted =
      std::min(seconds, MostCounted(prefill_tokens, decode_tokens, per_stream.mean));
  ++steps_;
  if (prefill_tokens > 0) {
    const double per_token = seconds / static_cast<double>(prefill_tokens);
    if (prefill_tokens >= kLeastPrefillSample) Lower(best_.seconds_per_prefill_token, per_token);
    prefill_seconds_ += counted - prefill_seconds_ / kLastSteps;
    prefill_tokens_ += static_cast<double>(prefill_tokens) - prefill_tokens_ / kLastSteps;
    present_.seconds_per_prefill_token = prefill_seconds_ / prefill_tokens_;
  }
  if (decode_tokens > 0) {
    Lower(best_.seconds_per_decode_token, seconds / per_stream.most);
    double& present = present_.seconds_per_decode_token;
    const double per_token = counted / per_stream.mean;
    present = present == 0 ? per_token : present + (per_token - present) / kLastSteps;
  }
}

double PaceMeter::MostCounted(int64_t prefill_tokens, int64_t decode_tokens,
                              double per_stream) const {
  const double per_token = present_.seconds_per_prefill_token,
               step = per_stream * present_.seconds_per_decode_token;
  const bool unknown =
      (prefill_tokens > 0 && per_token == 0) || (decode_tokens > 0 && step == 0) || !measured();
  if (unknown) return std::numeric_limits<double>::infinity();
  return kMostOfExpected * (static_cast<double>(prefill_tokens) * per_token + step);
}

void PaceMeter::OnPrompt(int64_t prefill, int64_t prompt) { Remember(prefill, prompt, prompts_); }

void PaceMeter::OnOutput(int64_t decoded, int64_t most) { Remember(decoded, most, outputs_); }

void PaceMeter::OnDeadline(bool missed) {
  missed_ <<= 1;
  missed_[0] = missed;
}

bool PaceMeter::measured() const { return steps_ >= kLeastSteps; }

Pace PaceMeter::best() const {
  Pace pace = best_;
  pace.prefill_share = Least(prompts_, 1);
  pace.decode_share = Least(outputs_, 0);
  return pace;
}

Pace PaceMeter::present() const {
  Pace pace = present_;
  pace.prefill_share = Mean(prompts_);
  pace.decode_share = Mean(outputs_);
  return pace;
}

void Backlog::Add(const SchedulingOptions& scheduling, const Work& work) {
  classes_[Index(scheduling.priority)][scheduling.tenant] += work;
  total_ += work;
}

Work Backlog::Of(const std::string& tenant) const {
  Work work;
  for (const auto& tenants : classes_) {
    if (const auto found = tenants.find(tenant); found != tenants.end()) work += found->second;
  }
  return work;
}

int64_t Backlog::NumTenants() const {
  absl::flat_hash_set<absl::string_view> names;
  for (const auto& tenants : classes_) {
    for (const auto& [tenant, work] : tenants) names.insert(tenant);
  }
  return static_cast<int64_t>(names.size());
}

Backlog& Backlog::operator+=(const Backlog& other) {
  for (int i = 0; i < kNumPriorities; ++i) {
    for (const auto& [tenant, work] : other.classes_[i]) {
      Add({.priority = static_cast<Priority>(i), .tenant = tenant}, work);
    }
  }
  return *this;
}

Backlog::Ahead Backlog::AheadOf(const SchedulingOptions& scheduling, double tokens,
                                double quantum_tokens) const {
  Ahead ahead;
  const int own_class = Index(scheduling.priority);
  for (int i = own_class + 1; i < kNumPriorities; ++i) {
    for (const auto& [tenant, work] : classes_[i]) {
      ahead.likely += work;
      ahead.least += work;
      ahead.higher = true;
    }
  }
  const auto& peers = classes_[own_class];
  const auto own = peers.find(scheduling.tenant);
  const double own_tokens = tokens + (own == peers.end() ? 0 : own->second.tokens);
  const double own_most = own == peers.end() ? 0 : own->second.most_tokens;
  for (const auto& [tenant, work] : peers) {
    if (tenant == scheduling.tenant) {
      ahead.likely += work;
      ahead.least += work;
      continue;
    }
    // By its turn as many tokens of each other tenant were served as of its own, but for one
    // quantum and one request.
    const double least =
        own_tokens - quantum_tokens - std::max({tokens, own_most, work.most_tokens});
    ahead.likely += work * std::min(1., own_tokens / work.tokens);
    ahead.least += work * std::clamp(least / work.tokens, 0., 1.);
  }
  return ahead;
}

// Work that always used all of the room would be done after work / room. The next request begins
// before that: what was ahead of it has been admitted then, and may still run for as long as the
// longest of it takes.
WaitBounds WaitFor(const Room& room, const Work& running, const Work& ahead, double bytes,
                   const Pace& pace) {
  const bool has_place = ahead.requests + 1 <= room.free_places;
  const bool has_bytes = ahead.bytes + bytes <= room.free_bytes;
  WaitBounds bounds{.at_once = has_place && has_bytes};
  auto widen = [&](double seconds) {
    const double longest = pace.SecondsOf(std::max(running.most_prefill, ahead.most_prefill),
                                          std::max(running.most_decode, ahead.most_decode));
    bounds.least = std::max(bounds.least, seconds - longest);
    bounds.most = std::max(bounds.most, seconds);
  };
  if (!has_place) {
    widen(pace.SecondsOf(running.prefill + ahead.prefill, running.decode + ahead.decode) /
          room.places);
  }
  if (!has_bytes) {
    widen(pace.SecondsOf(running.byte_prefill + ahead.byte_prefill,
                         running.byte_decode + ahead.byte_decode) /
          room.bytes);
  }
  return bounds;
}

Forecast Predict(const Outlook& outlook, const Request& request, absl::Time now) {
  const Work own = WorkOf(request);
  const Backlog::Ahead ahead =
      outlook.waiting.AheadOf(request.scheduling, own.tokens, outlook.quantum_tokens);
  Forecast forecast{.position = std::round(ahead.likely.requests)};
  const WaitBounds likely =
      WaitFor(outlook.room, outlook.running_present, ahead.likely, own.bytes, outlook.present);
  if (likely.at_once) forecast.wait = absl::ZeroDuration();
  if (!outlook.measured) return forecast;
  const absl::Duration since = std::max(absl::ZeroDuration(), now - outlook.at);
  auto from_now = [&](double seconds) {
    return std::max(absl::ZeroDuration(), absl::Seconds(seconds) - since);
  };
  forecast.wait = from_now((likely.least + likely.most) / 2);
  const WaitBounds best =
      WaitFor(outlook.room, outlook.running_best, ahead.least, own.bytes, outlook.best);
  forecast.least_wait = from_now(best.least);
  // It rises to the class of those before it.
  if (ahead.higher) forecast.least_wait = std::min(forecast.least_wait, outlook.ageing);
  forecast.least_run = PredictLeastRun(request, outlook.best);
  return forecast;
}

std::optional<absl::Duration> PredictWaitBehindAll(const Outlook& outlook) {
  const WaitBounds bounds =
      WaitFor(outlook.room, outlook.running_present, outlook.waiting.total(), 0, outlook.present);
  if (bounds.at_once) return absl::ZeroDuration();
  if (!outlook.measured) return std::nullopt;
  return absl::Seconds((bounds.least + bounds.most) / 2);
}

absl::Duration RetryTimes::After(absl::Duration late, const Work& work, const Outlook& outlook,
                                 absl::Time now) {
  // The last overload is over when nobody was refused for half as long as it took.
  if (now - last_ > (last_ - first_) / 2 + kQuiet) {
    refused_ = {};
    first_ = now;
  }
  last_ = now;
  refused_ += work;
  if (!outlook.measured) return kUnmeasuredRetry;
  const double running = std::max(1., outlook.room.places - outlook.room.free_places);
  const double seconds = outlook.present.SecondsOf(refused_.prefill, refused_.decode) / running;
  return std::clamp(late + absl::Seconds(seconds / kRetryShare), kShortestRetry, kLongestRetry);
}

}  // namespace epikv
