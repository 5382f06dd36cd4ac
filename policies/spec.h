#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "policies/safetensors.h"

// What a policy is called, which parameters it takes and what it needs from the runtime. Without
// torch: services describe policies from it and admission computes their peak from it.

namespace epikv {

class Policy;

// What a policy may read. The runtime computes a signal only for the requests that declared it.
enum class Signal : uint32_t {
  kResidualStep = 1u << 0,  // pushed: |h^l_t - h^l_{t-1}|_2 of every decode token, at chosen layers
  kAttentionRow = 1u << 1,  // pushed: the decode query's attention over the cache
  kKeys = 1u << 2,          // pulled: cached K rows
  kValues = 1u << 3,        // pulled: cached V rows
  kPromptAttention = 1u << 4,   // pushed: what a prefill chunk's queries gave each token, summed
  kQueries = 1u << 5,           // pulled: the newest queries
  kOutputProjection = 1u << 6,  // pulled: the model's W_O
  kQueryMoments = 1u << 7,      // pulled: mean and covariance of all queries before RoPE
  kLogitEntropy = 1u << 8,      // pushed: of the next-token distribution at every token
  kResidualDistance = 1u << 9,  // pushed: 1 - cos(h^l, h^L) of every token, after every block
  kResidual = 1u << 10,         // pushed: h^l of every decode token, at chosen layers
  kGate = 1u << 11,             // pushed: what the policy's own gate says of every token
  kFinalHidden = 1u << 12,      // pushed: every token's hidden state after the final norm
};
absl::string_view SignalName(Signal signal);

class SignalSet {
 public:
  constexpr SignalSet() = default;
  constexpr SignalSet(Signal signal)
      : bits_(static_cast<uint32_t>(signal)) {}  // NOLINT: a set of one
  constexpr bool Has(Signal signal) const { return bits_ & static_cast<uint32_t>(signal); }
  constexpr SignalSet operator|(SignalSet other) const { return SignalSet(bits_ | other.bits_); }
  constexpr SignalSet Without(SignalSet other) const { return SignalSet(bits_ & ~other.bits_); }
  std::vector<absl::string_view> Names() const;

 private:
  explicit constexpr SignalSet(uint32_t bits) : bits_(bits) {}
  uint32_t bits_ = 0;
};
constexpr SignalSet operator|(Signal a, Signal b) { return SignalSet(a) | SignalSet(b); }

// The set of lanes that share one keep decision, and hence one slot order.
enum class Granularity { kToken, kLayer, kHead };
absl::string_view GranularityName(Granularity granularity);

// The set of lanes that share one budget: within it they may hold unequally many tokens, as many
// on average as the request's budget.
enum class Pool { kLane, kLayer, kModel };

// What a policy does with a prompt that does not fit its budget.
enum class PromptEviction {
  kRefuses,  // it cannot rank prompt tokens: such a request is refused
  kByChunk,  // evicts at fixed multiples of the prefill chunk
  kAtEnd,    // sees the whole prompt cached once, then evicts to its budget
};
absl::string_view PromptEvictionName(PromptEviction eviction);

// Parameters: typed values by name.
enum class ParamType { kBool, kInt, kFloat, kChoice, kIntList, kChoiceList };
absl::string_view ParamTypeName(ParamType type);
using ParamValue = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>,
                                std::vector<std::string>>;

struct ParamSpec {
  absl::string_view name;
  ParamType type = ParamType::kInt;
  // Absent: the default depends on the model (see `help`).
  std::optional<ParamValue> fallback;
  double min = 0, max = 0;                           // of numbers, inclusive
  absl::Span<const absl::string_view> choices = {};  // of kChoice and kChoiceList
  absl::string_view help;
};

// The parameter of every policy that evicts: how far a lane may outgrow its budget between rounds.
constexpr ParamSpec SlackParam(int64_t fallback) {
  return {.name = "slack",
          .type = ParamType::kInt,
          .fallback = fallback,
          .max = 65536,
          .help = "entries over the budget that a lane may hold before a round"};
}

// A resolved set of parameters. Precondition of the getters: the spec declares the name and type.
class Params {
 public:
  bool Has(absl::string_view name) const { return values_.contains(name); }
  bool Bool(absl::string_view name) const { return std::get<bool>(At(name)); }
  int64_t Int(absl::string_view name) const { return std::get<int64_t>(At(name)); }
  double Float(absl::string_view name) const { return std::get<double>(At(name)); }
  const std::string& Choice(absl::string_view name) const {
    return std::get<std::string>(At(name));
  }
  const std::vector<int64_t>& IntList(absl::string_view name) const {
    return std::get<std::vector<int64_t>>(At(name));
  }
  const std::vector<std::string>& ChoiceList(absl::string_view name) const {
    return std::get<std::vector<std::string>>(At(name));
  }
  void Set(absl::string_view name, ParamValue value) {
    values_[std::string(name)] = std::move(value);
  }
  const std::map<std::string, ParamValue, std::less<>>& values() const { return values_; }
  bool operator==(const Params&) const = default;

 private:
  const ParamValue& At(absl::string_view name) const { return values_.find(name)->second; }
  std::map<std::string, ParamValue, std::less<>> values_;
};

// Rotary embedding of a layer: the angle of pair i at position p is p * inv_freq[i]; cosines and
// sines are multiplied by attention_factor.
struct RopeShape {
  bool interleaved = false;  // pairs are channels (2i, 2i + 1) instead of (i, i + size)
  std::vector<double> inv_freq;
  double attention_factor = 1;
};

// What the file of an artefact has for the policy that it is of (artefact.h).
struct ArtefactData {
  absl::string_view json;
  const NamedArrays& arrays;  // of the file of arrays that it names; none: empty
};

// What the artefact of a policy holds beside parameters: statistics of one model.
class PolicyData {
 public:
  virtual ~PolicyData() = default;
};

// What a policy may know of the model when its parameters are resolved.
struct ModelShape {
  int64_t vocab_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t key_width = 0, value_width = 0;  // channels
  int64_t hidden_size = 0;
  std::vector<RopeShape> ropes;  // by layer
  bool final_norm = false;       // its file says which norm is the last: Signal::kFinalHidden
  // Tokens with which a line or a paragraph ends, ascending.
  std::vector<int32_t> sentence_ends;
  // How a model is asked to repeat a text: all of it, or a part whose beginning follows. `suffix`
  // comes last.
  struct RepeatPhrases {
    std::vector<int32_t> whole, part, suffix;
  } repeat;
  // Parameter values a confirmed or unconfirmed calibration of this model gives, by policy name.
  std::map<std::string, std::map<std::string, ParamValue>> calibrated;
  // Artefacts that were loaded, by policy name. Null: of parameters alone, which are above.
  std::map<std::string, std::shared_ptr<const PolicyData>, std::less<>> artefacts;
};

// What the published policy keeps by itself. A request may override it; equal protection does.
struct PublishedProtection {
  bool prompt = true;  // where it fits, by the runtime's rule
  int64_t sinks = 0;
  std::optional<int64_t> recent;       // tokens, less where the budget has no room; absent: by the
                                       // runtime's rule
  std::optional<double> recent_share;  // of the budget, instead
};

// Before the round at the end of a prompt that is over the budget, or before each round in a prompt
// (PromptEviction::kByChunk): tokens that the model runs for the policy. They are no part of the
// sequence, and leave nothing but what the policy was shown of them. Of granularity kHead alone,
// and tokens are told ahead at a prompt's end alone.
struct ScratchPass {
  // So many are told ahead: the one that was sampled, and greedy ones behind it. The round finds
  // their queries in CacheView::lookahead.
  int64_t lookahead = 0;
  bool drafts = false;  // over what Policy::Draft leaves of the prompt; else over all of it
  // Or they are Policy::PassSegments, one after another, each over all of the prompt, and
  // Policy::ObservePass is shown them. Of a prompt of n tokens one has min(n, chunk) + more at
  // most.
  int64_t chunk = 0, more = 0;

  static constexpr int64_t kStepTokens = 256;  // the most of one PassStep
  bool any() const { return lookahead > 0 || chunk > 0; }
};

// How a decode step reads a part of a lane: the pages whose keys may give its queries the largest
// products, and the one that holds the newest token (Quest, arXiv 2406.10774).
struct ReadRule {
  int64_t page = 16;         // tokens
  int64_t dense_layers = 2;  // the first ones read all
};

// What the runtime must provide for one (policy, parameters).
struct PolicyTraits {
  bool evicts = true;  // false: the whole cache is kept, or the budget refused
  Granularity granularity = Granularity::kToken;
  Pool pool = Pool::kLane;  // kLayer and kModel: of granularity kHead alone
  // Lanes that share a keep decision have it by averages over their heads alone
  // (CacheView::AverageOverRanks).
  bool averages_heads = false;
  // A head's own decision looks at other heads besides.
  bool compares_heads = false;
  SignalSet signals;
  // Of kResidualStep and kResidual: block numbers, 0-based, ascending.
  std::vector<int64_t> residual_layers;
  // Of kAttentionRow and kPromptAttention: the layers that are measured, ascending; empty: all.
  std::vector<int64_t> attention_layers;
  int64_t window = 0;        // of kQueries: how many of the newest queries are kept
  int64_t gate_numbers = 1;  // of kGate: Gate::numbers
  // Names of the policy's per-slot fp32 columns; they travel with K and V.
  std::vector<absl::string_view> columns;
  // It rounds decoded tokens' rows (CacheView::RoundRows), and its first column has to how many
  // bits: 0 of a row that is as it was cached.
  bool rounds_rows = false;
  PromptEviction prompt = PromptEviction::kRefuses;
  // A round happens when a lane holds more than budget + slack entries, and ends at the budget.
  int64_t slack = 0;
  // If not 0, a round happens at the prompt's end besides, and at every so many tokens from then
  // on, whatever lanes hold: of a policy that drops what it has no use for.
  int64_t rounds_every = 0;
  // What a round takes beside a few looks at each token of a lane of n: pairs of tokens that it
  // compares, about n x n / 2 in the first and about pairs_per_token x n in any; and fp32 numbers
  // that it holds at once for each token and query head of the lane, such as logits of a window.
  bool compares_all_pairs = false;
  int64_t pairs_per_token = 0;
  int64_t floats_per_token = 0;
  ScratchPass pass;
  // Its budget is of what a decode step reads of the cache, all of which is kept: such a policy
  // does not evict.
  std::optional<ReadRule> reads;
  // Its lanes hold equally many tokens of each stretch of text: none may go beside its rounds
  // (Policy::Forget).
  bool plans_all_lanes = false;
  // It looks at what it has dropped, and takes some of it back (AddGuard).
  bool recalls = false;
  PublishedProtection published;
  // Bytes of the policy's own state: per cached token of a sequence, and fixed.
  int64_t state_bytes_per_token = 0;
  int64_t state_bytes = 0;
  // The parameters came from no measurement on this model (flagged in the summary).
  bool uncalibrated = false;
};

// Around a policy that scores tokens: those that it dropped and that attention asks for come back.
struct GuardRule {
  int64_t asked = 32;       // a query asks for so many tokens, those that it gives most
  bool follow = false;      // who comes back takes the place that the scores say, not one by chance
  int64_t relax_times = 0;  // GuardOptions
  double relax_prob = 0;
};

// What it needs beside what the policy does.
void AddGuard(const ModelShape& shape, PolicyTraits& traits);

struct PolicySpec {
  absl::string_view name;
  absl::string_view summary;
  absl::string_view paper;  // arXiv number and section, or where it comes from
  // What shows that it does what was published: "golden: ..." (the code its runs in tests/golden
  // were made with) or "cases: ..." (a file of tests/).
  absl::string_view evidence;
  absl::Span<const ParamSpec> params = {};
  bool evaluation_only = false;  // needs knowledge that no production caller has
  bool scores = false;           // it gives every token of a lane a number: a ScoredPolicy

  // Reads the data of the policy's artefact, without which a request for it is refused. Null: it
  // needs none.
  absl::StatusOr<std::shared_ptr<const PolicyData>> (*read_data)(const ArtefactData&,
                                                                 const ModelShape&) = nullptr;

  // Its parameters without a default have one on a model that it was calibrated for: by the
  // manifest, or by an artefact. They are `ModelShape::calibrated[name]`.
  bool calibrated = false;

  // Fills the parameters whose default depends on the model; checks those that do. May be null.
  absl::Status (*complete)(Params&, const ModelShape&) = nullptr;
  PolicyTraits (*traits)(const Params&, const ModelShape&) = nullptr;
  // Budgets of the lanes in tokens, [layers x kv_heads], summing to budget x layers x kv_heads.
  // Null: every lane has the request's budget.
  std::vector<int64_t> (*lane_budgets)(const Params&, const ModelShape&, int64_t budget) = nullptr;
  std::shared_ptr<const Policy> (*make)(const Params&, const ModelShape&) = nullptr;
};

using PolicyCatalog = absl::Span<const PolicySpec* const>;  // sorted by name

// Null if there is none.
const PolicySpec* FindPolicy(PolicyCatalog catalog, absl::string_view name);

// Whether processes that have a part of the KV heads each (tensor parallel) decide as one that has
// all of them: by a head's own, by what is the same in all, or by averages.
bool DecidesByParts(const PolicySpec& spec, const PolicyTraits& traits);

struct ParamViolation {
  std::string param;
  std::string description;
};

struct ResolvedParams {
  Params params;
  std::vector<ParamViolation> violations;  // all of them; `params` is usable only if empty
};

// Checks names, types, ranges and choices of `given`, fills defaults, and lets the spec complete
// what depends on the model. Numbers are accepted as int or float where the value is whole.
ResolvedParams ResolveParams(const PolicySpec& spec, const std::map<std::string, ParamValue>& given,
                             const ModelShape& shape);

}  // namespace epikv
