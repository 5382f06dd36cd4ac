#pragma once

#include <cstdint>
#include <vector>

#include "policies/protection.h"
#include "runtime/admission/admission.h"
#include "runtime/admission/rejection.h"
#include "runtime/kv/kv_layout.h"
#include "runtime/request/request.h"

namespace epikv {

// Fills one Request step by step and collects everything that is wrong on the way.
class Resolver {
 public:
  Resolver(const Admission& admission, RequestOptions options)
      : admission_(admission), options_(std::move(options)) {}

  // Of fields that mean the same under every policy and budget.
  void CheckFields();
  // Puts the packets' tokens before the prompt, and soft ones around it.
  void AddPackets();
  // False: they are at fault, and say nothing of what follows from them.
  bool ResolveLengths();
  void CheckSteering();
  const PolicySpec* ResolvePolicy();
  bool ResolveBudget();
  // Of what is asked, whatever the budget. Without lengths the context is the bound.
  bool CheckProtection(bool has_lengths);
  void ResolveProtectionAndDemand();

  bool ok() const { return violations_.empty(); }
  Request& request() { return request_; }
  Rejection TakeRejection() { return violations_.Take(); }

 private:
  // Budgets of the lanes under a budget of the request.
  std::vector<int64_t> LaneBudgets(int64_t budget) const;
  ResolvedProtection ProtectionUnder(int64_t budget) const;
  int64_t SmallestBudget(int64_t longest) const;
  void CheckPromptLogprobs(int64_t least_budget);
  int64_t PromptLogitBytes() const;
  int64_t LongestLane(int64_t longest) const;
  void ResolveReads(int64_t longest);
  bool OutgrowsContext() const;
  void CheckOutgrown();
  bool IsOfModel(const Packet& packet) const;
  void CheckPackets(const KvLayout& layout);
  // Of the packets' tokens, those that the lane does not get which gets most.
  int64_t LeastMissing() const;
  void AddGuardAround(const PolicySpec& spec);
  void ResolveGuesses();
  void ResolveTier(int64_t longest, const KvLayout& layout);
  void CheckRound(int64_t longest);
  void CheckRanks();

  const Admission& admission_;
  RequestOptions options_;
  Request request_;
  Violations violations_;
};

}  // namespace epikv
