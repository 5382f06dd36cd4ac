#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/laws/differential/trial.h"

namespace epikv {

// Something that a trial shows and that must not be. kind: "differs", "law", "hung".
class Finding : public std::runtime_error {
 public:
  Finding(std::string kind, const std::string& what)
      : std::runtime_error(what), kind_(std::move(kind)) {}
  const std::string& kind() const { return kind_; }

 private:
  const std::string kind_;
};

// What trials have gone through, summed.
struct Tally {
  int64_t requests = 0, refused = 0, whole = 0, cut = 0, failed = 0;
  int64_t tokens = 0, rounds = 0;  // compared
  int64_t ties = 0;                // answers that are compared up to a choice that rounding decides
  void Add(const Tally& other);
  std::string ToString() const;
};

// One answer that was whole and traced, for whoever wants to hold it against other oracles.
struct Answer {
  std::string model;
  std::vector<int32_t> prompt, tokens;
  std::vector<float> logprobs;
  nlohmann::json evictions;
};

// Runs the trial's engines step by step, and each of its requests once more: alone, on a plain
// engine of the same model, chunk and KV dtype, without cached prefixes, neighbours, completions or
// pauses. Throws Finding unless
// - in deterministic mode the bits are the same;
// - else log-probabilities agree within rounding, and tokens and victims are the same up to the
//   first choice that noise of the size of rounding, in the plain run's queries, keys and values,
//   changes as well (in a narrow dtype: up to the first that differs);
// - what was cut short is the beginning of the whole answer;
// - after every step used <= reserved <= pool, and at the end nothing is held.
// answers, if not null: takes those of float32 at absolute positions that were whole and traced.
Tally PlayTrial(const Trial& trial, std::vector<Answer>* answers = nullptr);

// Loads the models of drawn trials and runs each, so that processes that are forked need not.
void WarmUpModels();

}  // namespace epikv
