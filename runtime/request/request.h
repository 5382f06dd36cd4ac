#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "policies/protection.h"
#include "policies/soft_tokens.h"
#include "policies/spec.h"
#include "policies/steering.h"
#include "runtime/kernels/tier_format.h"
#include "runtime/request/packet.h"
#include "runtime/sampling/sampler.h"
#include "runtime/text/chat/answer_reader.h"

// What goes into the engine and what comes out of it. Without torch and without protobuf.

namespace epikv {

enum class PositionMode {
  kAbsolute,  // a token keeps its true index for life
  kCompact,   // a new token's position is the number of tokens retained before it
  kCache,     // a token's position is its rank among the tokens cached, at every step anew
};

// Where tokens go that are evicted. 0: nowhere.
struct TierOptions {
  int64_t tokens = 0;  // that it holds, of each keep decision
  int64_t fetch = 0;   // of these, that each new token attends to besides the lanes, at most
  // Not 0: those decoded tokens alone of whose next token the entropy is above so many nats. A step
  // that finds it so runs a second time. The prompt's last token, which gives the first of the
  // output, never does.
  double doubt = 0;
  std::optional<GuardRule> guard;  // what is asked for comes back to the lanes
  TierDType dtype = TierDType::kPool;
};

struct KvOptions {
  std::string policy;  // empty: see Admission
  // Tokens, or a share of prompt + max output; neither: the whole cache is kept.
  std::variant<std::monostate, int64_t, double> budget;
  std::map<std::string, ParamValue> params;
  ProtectionOptions protection;
  PositionMode positions = PositionMode::kAbsolute;
  int64_t read_tokens = 0;  // of a lane by a decode step; 0: all, or by the policy
  TierOptions tier;
  bool evict_thinking = false;  // of the answer, once it has ended; beside what is protected of it
  // Prompts share cached prefixes with those of the same salt alone; or with none.
  std::string prefix_salt;
  bool bypass_prefix_cache = false;
};

struct StopOptions {
  std::optional<int64_t> max_output_tokens;
  std::vector<std::string> strings;
  std::vector<int32_t> tokens;  // beside the model's end-of-sequence tokens
  bool include = false;         // leave the match in the text
  int64_t min_output_tokens = 0;
  bool ignore_end = false;  // the model's end-of-sequence tokens
};

struct OutputOptions {
  bool text = true;
  bool logprobs = false;
  int64_t top_logprobs = 0;      // likeliest tokens told of at each place
  bool prompt_logprobs = false;  // before the first delta
  bool progress = false;         // of prompts that are cached in several chunks
  bool kv_trace = false;         // victims of every round
  bool residual_steps = false;   // of every cached output token, after every block
  bool kept = false;             // indexes held at the end
  bool packet = false;           // what is cached at the end (Finished::packet)
};

enum class Priority { kLow, kNormal, kHigh };
inline constexpr int kNumPriorities = 3;

// Who is served first while requests wait: see RequestQueue.
struct SchedulingOptions {
  Priority priority = Priority::kNormal;
  std::string tenant;  // empty: the default tenant
};

// Where an answer thinks.
struct ThinkingMarks {
  ThinkingTags tags;
  bool begun = false;                // the prompt ends within it
  std::vector<int32_t> markup = {};  // special tokens that are a part of answers, as text
};

// Of RequestOptions::guess_tokens: with the token that they follow, what one forward of
// deterministic mode has room for.
inline constexpr int64_t kMostGuesses = 15;

// Where guesses come from: from what prompt and output have said before (LookUpPrompt), or from a
// smaller model (Drafter).
enum class GuessSource { kPrompt, kDraft };

// What a client asks for.
struct RequestOptions {
  std::string id;
  std::vector<int32_t> prompt;
  bool chat = false;  // the prompt is a conversation; told in series, means nothing here
  // Cached tokens that the prompt goes on from, in this order.
  std::vector<std::shared_ptr<const Packet>> packets;
  bool wrap = false;  // the prompt is read between the model's soft tokens
  SamplingParams sampling;
  std::optional<SteeringOptions> steering;  // absent: it is not steered
  // Of the one prompt; the i-th draws as a request of seed + i would.
  int64_t completions = 1;
  StopOptions stop;
  OutputOptions output;
  std::optional<AnswerFormat> answer;     // its parts are told; absent: they are not
  std::optional<ThinkingMarks> thinking;  // absent: it does not, or nobody knows
  KvOptions kv;
  SchedulingOptions scheduling;
  std::string arm = "none";  // of experiments; told in series, means nothing here
  // Scoring: these tokens are forced instead of sampled, and their log-probabilities returned.
  std::vector<int32_t> forced;
  // Tokens that are guessed, and run in one step with the newest, at most. 0: none. It changes when
  // tokens come, not which.
  int64_t guess_tokens = 0;
  GuessSource guess_source = GuessSource::kPrompt;
  bool force_in_chunks =
      false;  // with the prompt, in prefill chunks; only where nothing is evicted
  absl::Time arrival = absl::InfinitePast();
  absl::Time deadline = absl::InfiniteFuture();
};

// Slots of lanes, over decode steps of a request that reads a part: those that were read, and all
// that there were.
struct ReadSlots {
  int64_t read = 0, cached = 0;
};

// What went through a request's tier, in entries: one token in one layer and KV head.
struct TierUsage {
  int64_t bytes = 0;  // that it held room for
  int64_t demoted = 0, recalled = 0, forgotten = 0, fetched = 0;
  int64_t doubted_steps = 0;  // that ran a second time: TierOptions::doubt
  bool failed = false;        // then tokens were evicted for good
  absl::Duration time;        // of demoting and recalling
  void Add(const TierUsage& other) {
    bytes += other.bytes;
    demoted += other.demoted;
    recalled += other.recalled;
    forgotten += other.forgotten;
    fetched += other.fetched;
    doubted_steps += other.doubted_steps;
    failed |= other.failed;
    time += other.time;
  }
};

// What a decode step reads of each lane at most.
struct ReadLimit {
  int64_t tokens = 0;  // 0: all
  ReadRule rule;
};

// The most KV memory a request can hold, computed from lengths alone (Admission). Tokens per lane;
// lanes are [layers x kv_heads], heads inner.
struct KvDemand {
  std::vector<int64_t> budget;   // a lane over budget + slack has a round, down to the budget
  std::vector<int64_t> prefill;  // capacity until the prompt is cached and settled
  std::vector<int64_t> decode;   // capacity from then on
  std::vector<int64_t> draft;    // of the copy over which tokens are told ahead; empty: none
  bool passes = false;           // the prompt is over the budget, and its policy has a scratch pass
  int64_t prefill_bytes = 0;     // K, V, slot columns and policy state
  int64_t decode_bytes = 0;      // of each completion
  // Pairs of tokens that a round may compare: in the prompt, and in the decode of one completion.
  int64_t prefill_round_pairs = 0, decode_round_pairs = 0;
  int64_t tier_bytes = 0;   // of each completion, below its lanes
  int64_t completions = 1;  // they share the prompt until it is cached and settled
  int64_t peak_tier_bytes() const { return completions * tier_bytes; }
  int64_t peak_bytes() const { return std::max(prefill_bytes, completions * decode_bytes); }
};

// What a policy measures of a prompt while the model reads it.
bool MeasuresPrompt(const PolicyTraits& traits);

// A request with every default filled in and every limit checked. Immutable.
struct Request {
  std::string id;
  // The packets' tokens, and behind them what was asked, between `soft` if there is any.
  std::vector<int32_t> prompt;
  std::vector<std::shared_ptr<const Packet>> packets;
  int64_t packet_tokens = 0;
  std::shared_ptr<const SoftTokens> soft;
  std::vector<int32_t> forced;
  bool force_in_chunks = false;
  SamplingParams sampling;
  std::optional<Steering> steering;
  int64_t max_output_tokens = 0;
  std::vector<std::string> stop_strings;
  std::vector<int32_t> stop_tokens;
  std::vector<int32_t> end_tokens;  // the model's; none if they are ignored
  bool include_stop = false;
  int64_t min_output_tokens = 0;  // none of these ends the request
  bool ignore_end = false;
  int64_t guess_tokens = 0;
  GuessSource guess_source = GuessSource::kPrompt;
  OutputOptions output;
  std::optional<AnswerFormat> answer;
  std::optional<ThinkingMarks> thinking;
  bool evict_thinking = false;
  SchedulingOptions scheduling;
  std::string arm;
  bool chat = false;

  const PolicySpec* spec = nullptr;
  Params params;
  PolicyTraits traits;
  std::shared_ptr<const Policy> policy;  // shared by all requests with the same name and parameters
  int64_t budget = 0;                    // tokens
  Protection protection;
  PositionMode positions = PositionMode::kAbsolute;
  ReadLimit read;
  TierOptions tier;
  std::string prefix_salt;
  bool bypass_prefix_cache = false;
  // Blocks whose residual is looked at for each decode token, ascending: the policy's and,
  // where the request asks for residual steps, all.
  std::vector<int64_t> tap_layers;
  KvDemand demand;

  absl::Time arrival = absl::InfinitePast();
  absl::Time deadline = absl::InfiniteFuture();

  int64_t completions() const { return demand.completions; }
  // The most it can take: what queues and shares are counted in.
  int64_t most_tokens() const {
    return static_cast<int64_t>(prompt.size()) + completions() * max_output_tokens;
  }
  // Tokens that are prefilled: the prompt, and what is scored in chunks with it.
  int64_t prefill_tokens() const {
    return static_cast<int64_t>(prompt.size() + (force_in_chunks ? forced.size() - 1 : 0));
  }
  // Of them, those that a forward has to run.
  int64_t computed_tokens() const { return prefill_tokens() - packet_tokens; }
  // Of the packets' tokens, those that a lane does not get.
  int64_t MissingOf(int64_t lane) const {
    int64_t missing = 0;
    for (const auto& packet : packets) {
      missing += packet->num_tokens() - packet->TableOf(lane).rows();
    }
    return missing;
  }
};

// kEnd: an end-of-sequence token, or a constraint that leaves nothing but the end.
enum class FinishReason { kLength, kEnd, kStopToken, kStopString, kCancelled, kDeadline, kError };

struct EvictionTrace {
  int64_t completion = 0;
  struct Victims {
    std::optional<int64_t> layer, head;  // absent: of all
    std::vector<int32_t> index;
    std::vector<int32_t> recalled;  // tokens of the tier that came back
  };
  int64_t at_token = 0;  // index of the newest token
  std::vector<Victims> victims;
};

struct RoundTime {
  absl::Duration end;  // since the request's arrival
  absl::Duration time;
  int64_t entries = 0;  // evicted
};

struct KvUsage {
  int64_t peak_entries = 0;
  int64_t final_entries = 0;
  int64_t evicted_entries = 0;
  int64_t rounds = 0;
  std::vector<RoundTime> first_rounds;  // of the first completion
  int64_t peak_bytes = 0;
  int64_t packed_bytes = 0;  // of a policy that rounds rows: what is held at the end, packed
  ReadSlots reads;
  TierUsage tier;
  std::vector<int32_t> kept;  // on request
};

struct Timings {
  absl::Duration queue, prefill, time_to_first_token, decode, eviction;
  // The policy's scratch passes: at the prompt's end a part of `decode`, before it of `prefill`.
  absl::Duration pass;
};

struct Finished {
  FinishReason reason = FinishReason::kLength;
  absl::Status status;  // not OK: kCancelled, kDeadline, kError
  std::string stop_string;
  std::optional<int32_t> stop_token;
  std::shared_ptr<const Packet> packet;  // if asked for; null: there was no memory for it
  int64_t prompt_tokens = 0;
  int64_t cached_prompt_tokens = 0;  // of them, those that were copied from the prefix cache
  int64_t packet_tokens = 0;         // of them, those that packets had
  int64_t output_tokens = 0;
  int64_t thinking_tokens = 0;                      // of them
  int64_t guessed_tokens = 0, accepted_tokens = 0;  // that ran ahead, and came true
  KvUsage kv;
  Timings timings;
  bool kv_trace_truncated = false;
};

// Of consecutive prompt tokens, each given all before it. The first token has none.
struct PromptLogprobs {
  int64_t first = 0;  // place in the prompt of the first of these
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<std::vector<TokenLogprob>> top;  // if asked for
};

struct PromptProgress {
  int64_t done = 0, total = 0;  // tokens
  int64_t cached = 0;           // of those done, from the prefix cache
};

struct Delta {
  int64_t completion = 0;  // whose
  std::string text;        // whole code points; may lag behind the tokens
  AnswerDelta answer;      // its parts, if asked for
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;  // if asked for
  std::vector<bool> greedy;     // of forced tokens: whether it was the most likely one
  std::vector<std::vector<TokenLogprob>> top_logprobs;  // if asked for
  // [tokens cached][layers], if asked for: the i-th of the whole stream belongs to output token i.
  std::vector<std::vector<float>> residual_steps;
  std::vector<EvictionTrace> evictions;  // if asked for
  // If asked for; before the first token.
  std::optional<PromptProgress> progress;
  PromptLogprobs prompt;
  // Of several completions, this one has ended, and how. The request ends with the last one.
  std::optional<Finished> ended;
};

// Receives one request's output. Called on the engine thread, which it must not block; OnFinished
// is the last call, exactly one for each submitted request, however it ended.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  // False while its outbox is full: the engine pauses the request. Any thread.
  virtual bool Ready() const = 0;
  virtual void OnDelta(Delta delta) = 0;
  virtual void OnFinished(Finished finished) = 0;
};

}  // namespace epikv
