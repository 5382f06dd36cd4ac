#pragma once

#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "runtime/request/request.h"

// How long a request will wait and run, from what was measured and from what is ahead of it. Pure
// functions over plain values, but for PaceMeter, which measures. Without torch, without threads.

namespace epikv {

// What requests have ahead of them, added up; also of a part of them, so nothing here is whole.
struct Work {
  double requests = 0;
  double tokens = 0;                         // prompts + max outputs
  double bytes = 0;                          // peak KV
  double prefill = 0, decode = 0;            // tokens, those to decode at most
  double byte_prefill = 0, byte_decode = 0;  // each request's tokens times what it holds meanwhile
  double most_prefill = 0, most_decode = 0;  // of one request
  double most_tokens = 0;                    // the same, as `tokens` counts

  Work& operator+=(const Work& other);
  // The most of one request stays as it is.
  Work& operator-=(const Work& other);
  Work operator*(double share) const;
};

Work WorkOf(const Request& request);

// How fast requests advance. All 0 until measured: nothing takes any time.
struct Pace {
  double seconds_per_prefill_token = 0;
  double seconds_per_decode_token = 0;  // of one stream
  double prefill_share = 1;             // of prompts, what is not copied from cached prefixes
  double decode_share = 0;              // of max outputs, what requests use

  double SecondsOf(double prefill, double decode) const {
    return prefill * prefill_share * seconds_per_prefill_token +
           decode * decode_share * seconds_per_decode_token;
  }
};

// What is left at this pace of a running request, or of some of its completions.
Work WorkLeft(const Request& request, int64_t cached_tokens, int64_t num_outputs, const Pace& pace,
              int64_t completions = 1);

// How long a request runs.
absl::Duration PredictRun(const Request& request, const Pace& pace);

// The least that it can: where it may end by itself, its prompt and the least output that it asked
// for. Outputs of other requests say nothing of its own.
absl::Duration PredictLeastRun(const Request& request, const Pace& pace);

// Measures the pace of steps that do something.
class PaceMeter {
 public:
  // Of the tokens that a step has decoded, those of one stream: several, where guesses came true.
  struct PerStream {
    double most = 1, mean = 1;
  };
  void OnStep(absl::Duration duration, int64_t prefill_tokens, int64_t decode_tokens,
              PerStream per_stream);
  void OnStep(absl::Duration duration, int64_t prefill_tokens, int64_t decode_tokens) {
    OnStep(duration, prefill_tokens, decode_tokens, {});
  }
  // A request has begun: of its prompt, so many tokens are not cached yet.
  void OnPrompt(int64_t prefill, int64_t prompt);
  // A request has ended well: it decoded so many tokens, of the most that it might have.
  void OnOutput(int64_t decoded, int64_t most);
  // A request with a deadline that was running has ended: in time, or at its deadline.
  void OnDeadline(bool missed);

  // Whether there is enough to go by.
  bool measured() const;
  // The fastest that was seen since the start, the least prefilled of the last 64 prompts and the
  // shortest of the last 64 outputs: no request is expected to do better.
  Pace best() const;
  // Of the last steps, and the means of the last 64 prompts and outputs. One step that took far
  // longer than the others hardly moves it.
  Pace present() const;
  // Whether one of the last 64 requests with deadlines that were started has missed its own.
  bool missing() const { return missed_.any(); }

 private:
  // Seconds that such a step counts for at most.
  double MostCounted(int64_t prefill_tokens, int64_t decode_tokens, double per_stream) const;

  int64_t steps_ = 0;
  Pace best_, present_;
  double prefill_seconds_ = 0, prefill_tokens_ = 0;  // of the last steps, older ones weigh less
  std::deque<double> prompts_, outputs_;             // prefill_share and decode_share of the last
  std::bitset<64> missed_;
};

// What waits, by the class it is in and by tenant.
class Backlog {
 public:
  // What is ahead of a request of this class and tenant under RequestQueue's rule.
  struct Ahead {
    Work likely;
    // Less of other tenants: what is served before it at least.
    Work least;
    bool higher = false;  // some of it is of a higher class
  };

  // In the class of `scheduling.priority`.
  void Add(const SchedulingOptions& scheduling, const Work& work);
  Backlog& operator+=(const Backlog& other);

  Ahead AheadOf(const SchedulingOptions& scheduling, double tokens, double quantum_tokens) const;
  const Work& total() const { return total_; }
  // One tenant's, of all classes.
  Work Of(const std::string& tenant) const;
  // How many tenants have any.
  int64_t NumTenants() const;

 private:
  std::array<absl::flat_hash_map<std::string, Work>, kNumPriorities> classes_;
  Work total_;
};

// What there is for running requests, and how much of it is free.
struct Room {
  double places = 0, free_places = 0;
  double bytes = 0, free_bytes = 0;
};

// The state of an engine after a step, as far as forecasts need it.
struct Outlook {
  absl::Time at = absl::InfinitePast();
  bool measured = false;
  Pace best, present;
  Room room;
  Work running_best, running_present;  // what is left, by either pace
  Backlog waiting;
  absl::Duration ageing;      // RequestQueue's rule
  double quantum_tokens = 0;  // the same
};

struct Forecast {
  double position = 0;  // requests ahead of this one
  // Until it is admitted. Absent before anything was measured, unless there is room at once.
  std::optional<absl::Duration> wait;
  // Less than these it cannot take, unless some of those ahead leave. 0 before it was measured.
  absl::Duration least_wait, least_run;
};

// How long work in `room` takes to make room for a request of `bytes`: between the time at which
// all of it would be done and the longest of it before. Zero if there is room at once.
struct WaitBounds {
  bool at_once = true;
  double least = 0, most = 0;  // seconds
};
WaitBounds WaitFor(const Room& room, const Work& running, const Work& ahead, double bytes,
                   const Pace& pace);

Forecast Predict(const Outlook& outlook, const Request& request, absl::Time now);
// Of a request of no size behind all that waits.
std::optional<absl::Duration> PredictWaitBehindAll(const Outlook& outlook);

// When those who were refused shall try again: one after another, each when all that were refused
// before it, and itself, could have been served. In a burst these are short delays, all different;
// in an overload that lasts they grow as it does, for those who come anew take what room there is.
class RetryTimes {
 public:
  // `late`: how much sooner its turn would have to come. The request is counted as refused.
  absl::Duration After(absl::Duration late, const Work& work, const Outlook& outlook,
                       absl::Time now);

 private:
  Work refused_;  // in this overload
  absl::Time first_ = absl::InfinitePast(), last_ = absl::InfinitePast();
};

}  // namespace epikv
