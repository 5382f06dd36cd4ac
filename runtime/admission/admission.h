#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "runtime/admission/rejection.h"
#include "runtime/kernels/kv_format.h"
#include "runtime/model/manifest.h"
#include "runtime/request/request.h"

namespace epikv {

// Of what a request leaves out.
struct RequestDefaults {
  int64_t max_output_tokens = 1024;
  std::string policy;  // may be empty
  bool equal_protection = false;
};

struct AdmissionLimits {
  int64_t kv_capacity_bytes = 0;
  int64_t tier_capacity_bytes = 0;     // below it; 0: there is no tier
  KvDType kv_dtype = KvDType::kModel;  // K and V are cached as
  int64_t prefill_chunk_tokens = 256;
  int64_t max_running_requests = 256;  // completions count
  // Most pairs of tokens, over all lanes, that a policy may compare in one round of a completion:
  // about 5 ns each (PolicyTraits::compares_all_pairs, pairs_per_token).
  int64_t max_round_pairs = 4'000'000'000;
  // Keys are turned at every step for those who ask: not on a device.
  bool turns_keys = true;
  bool drafts = false;  // there is a draft model
  // Several ranks serve the model, each with a part of its KV heads.
  bool by_ranks = false;
  RequestDefaults defaults;
};

// Turns what a client asks for into a request that can run: fills defaults, finds every violation
// at once and computes the exact peak. Immutable but for the defaults and the shared policy
// objects; thread-safe.
class Admission {
 public:
  // shape: the manifest's (ShapeOf), artefacts added.
  Admission(const Manifest& manifest, ModelShape shape, PolicyCatalog catalog,
            AdmissionLimits limits);
  Admission(const Manifest& manifest, PolicyCatalog catalog, AdmissionLimits limits);

  std::variant<Request, Rejection> Resolve(RequestOptions options) const;
  // Of a request that asked for so many, or did not say: less where the context leaves less.
  int64_t MaxOutputTokens(std::optional<int64_t> asked, int64_t prompt_tokens) const;

  const Manifest& manifest() const { return manifest_; }
  const ModelShape& shape() const { return shape_; }
  PolicyCatalog catalog() const { return catalog_; }
  const AdmissionLimits& limits() const { return limits_; }  // but for the defaults
  RequestDefaults defaults() const;
  // Of requests from now on. The policy, if there is one, is in the catalog.
  void SetDefaults(RequestDefaults defaults);
  // Name used when a request gives a budget and no policy; empty: such a request is refused.
  std::string DefaultPolicy() const;
  KvFormat kv_format() const { return {manifest_.dtype, limits_.kv_dtype}; }
  // Of the packet that a resolved request can leave, at most.
  int64_t MostPacketBytes(const Request& request) const;
  // Bytes of K and V of one token over all layers.
  int64_t kv_bytes_per_token() const;

 private:
  std::shared_ptr<const Policy> Share(const PolicySpec& spec, const Params& params) const;

  const Manifest manifest_;
  const ModelShape shape_;
  const PolicyCatalog catalog_;
  const AdmissionLimits limits_;
  mutable absl::Mutex mu_;
  RequestDefaults defaults_ ABSL_GUARDED_BY(mu_);
  // Live policy objects by name and parameters: requests that share one are called in one batch.
  mutable std::map<std::pair<std::string, std::map<std::string, ParamValue, std::less<>>>,
                   std::weak_ptr<const Policy>>
      shared_ ABSL_GUARDED_BY(mu_);
};

// A share of so many tokens, rounded up to whole ones.
int64_t TokensOf(double ratio, int64_t tokens);

// Reads keys or queries, and so cannot do with positions that change (PositionMode::kCache).
bool ReadsRows(const PolicyTraits& traits);

}  // namespace epikv
