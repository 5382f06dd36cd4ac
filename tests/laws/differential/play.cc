#include "tests/laws/differential/play.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/fake_recorder.h"
#include "tests/fixtures/law_cases.h"

namespace epikv {
namespace {

constexpr int64_t kMostSteps = 20000;
constexpr int64_t kPlainPoolBytes = 64 << 20;

// One thing that happens to a request, in order: a token, a round, the end if it ended well.
struct Event {
  enum class Kind { kToken, kRound, kEnd };
  int64_t at = 0;  // index of the newest cached token
  Kind kind = Kind::kToken;
  int64_t what = 0;                                                  // token, or how it ended
  std::map<std::pair<int64_t, int64_t>, std::set<int32_t>> victims;  // by layer and head, -1: all

  bool operator==(const Event&) const = default;
  std::string ToString() const {
    if (kind == Kind::kToken) return absl::StrCat("token ", what, " after ", at);
    if (kind == Kind::kEnd) return absl::StrCat("end ", what);
    std::string text = absl::StrCat("round at ", at, ":");
    for (const auto& [lane, indexes] : victims) {
      absl::StrAppend(&text, " (", lane.first, ", ", lane.second, ") ",
                      absl::StrJoin(indexes, " "));
    }
    return text;
  }
};

std::vector<Event> EventsOf(const Transcript& t, int64_t prompt, bool with_rounds) {
  std::vector<Event> events;
  for (size_t i = 0; i < t.tokens.size(); ++i) {
    events.push_back({.at = prompt - 1 + static_cast<int64_t>(i), .what = t.tokens[i]});
  }
  for (const EvictionTrace& trace : t.evictions) {
    if (!with_rounds) break;
    Event round = {.at = trace.at_token, .kind = Event::Kind::kRound};
    for (const EvictionTrace::Victims& v : trace.victims) {
      round.victims[{v.layer.value_or(-1), v.head.value_or(-1)}].insert(v.index.begin(),
                                                                        v.index.end());
    }
    events.push_back(std::move(round));
  }
  std::stable_sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return std::tie(a.at, a.kind) < std::tie(b.at, b.kind);
  });
  if (t.ok()) {
    events.push_back({.kind = Event::Kind::kEnd, .what = static_cast<int64_t>(t.finished->reason)});
  }
  return events;
}

size_t CommonLength(const std::vector<Event>& a, const std::vector<Event>& b) {
  const size_t most = std::min(a.size(), b.size());
  size_t i = 0;
  while (i < most && a[i] == b[i]) ++i;
  return i;
}

std::string At(const std::vector<Event>& events, size_t i) {
  return i < events.size() ? events[i].ToString() : "nothing";
}

// How far figures of two runs may differ, and the noise that stands for their difference.
struct Rounding {
  double logprob = 0;   // absolute
  double residual = 0;  // relative
  double noise = 0;  // relative, of queries, keys and values; 0: none tells which choices are ties
};

Rounding RoundingOf(DType dtype, KvDType stored) {
  if (dtype != DType::kFloat32) return {.logprob = 0.3, .residual = 0.1};
  if (stored == KvDType::kInt8) return {.logprob = 0.1, .residual = 0.05, .noise = 5e-7};
  return {.logprob = 1e-3, .residual = 1e-3, .noise = 5e-7};
}

// An engine of the trial, and the plain one beside it.
class Pair {
 public:
  Pair(const EngineSetup& setup, std::function<absl::Time()> now)
      : setup_(setup),
        plain_(ModelPath(setup.model), PlainOptions(setup)),
        tested_(ModelPath(setup.model), TestedOptions(setup, plain_, std::move(now))),
        constraints_(plain_.tokenizer(), plain_.manifest().vocab_size),
        rounding_(RoundingOf(plain_.manifest().dtype, setup.kv_dtype)) {}

  const EngineSetup& setup() const { return setup_; }
  EngineHarness& tested() { return tested_; }
  EngineHarness& plain() { return plain_; }
  ConstraintCompiler& constraints() { return constraints_; }
  const Rounding& rounding() const { return rounding_; }

 private:
  static HarnessOptions PlainOptions(const EngineSetup& setup) {
    HarnessOptions options = {.kv_pool_bytes = kPlainPoolBytes,
                              .kv_tier_bytes = kPlainPoolBytes,
                              .prefill_chunk_tokens = setup.chunk_tokens,
                              .deterministic = setup.deterministic,
                              .kv_dtype = setup.kv_dtype};
    options.prefill_kernel = PrefillKernel::kFlash;
    if (setup.deterministic) {  // the bits are those of the kernels
      options.decode_kernel = setup.decode_kernel;
      options.prefill_kernel = setup.prefill_kernel;
    }
    return options;
  }

  static HarnessOptions TestedOptions(const EngineSetup& setup, const EngineHarness& plain,
                                      std::function<absl::Time()> now) {
    const int64_t pool = setup.pool_tokens * plain.admission().kv_bytes_per_token();
    return {
        .kv_pool_bytes = pool,
        .kv_tier_bytes = pool,
        .max_step_tokens = setup.max_step_tokens,
        .prefill_chunk_tokens = setup.chunk_tokens,
        .deterministic = setup.deterministic,
        .device_path = setup.device_path,
        .recorder = setup.recorded ? std::make_shared<FakeRecorder>() : nullptr,
        .max_prefix_bytes = static_cast<int64_t>(setup.prefix_share * static_cast<double>(pool)),
        .decode_kernel = setup.decode_kernel,
        .prefill_kernel = setup.prefill_kernel,
        .kv_dtype = setup.kv_dtype,
        .mass_interval = setup.mass_interval,
        .max_running_requests = setup.max_running,
        .constraint_work = setup.constraint_work,
        .max_round_pairs = setup.max_round_pairs,
        .now = std::move(now),
        // It is right wherever it may be, and has no room now and then.
        .draft = setup.device_path ? "" : ModelPath(setup.model),
        .draft_rows = 1 << 14};
  }

  const EngineSetup setup_;
  EngineHarness plain_, tested_;
  ConstraintCompiler constraints_;
  const Rounding rounding_;
};

// What became of an ask.
struct Told {
  enum class State { kWaits, kRefused, kLive };
  State state = State::kWaits;
  RequestOptions options;  // as submitted, with its prompt
  int64_t submitted = 0;   // step
  int64_t peak_bytes = 0;
  std::shared_ptr<Transcript> transcript;

  bool ended() const {
    return state == State::kRefused || (state == State::kLive && transcript->finished.has_value());
  }
};

class Play {
 public:
  explicit Play(const Trial& trial) : trial_(trial), told_(trial.asks.size()) {
    for (const EngineSetup& setup : trial.engines) {
      pairs_.push_back(std::make_unique<Pair>(setup, [this] { return Now(); }));
    }
  }

  Tally Run(std::vector<Answer>* answers) {
    RunTogether();
    for (size_t i = 0; i < told_.size(); ++i) {
      ++tally_.requests;
      if (told_[i].state == Told::State::kRefused) {
        ++tally_.refused;
        continue;
      }
      try {
        Compare(i, answers);
      } catch (const Finding& finding) {
        throw Finding(finding.kind(), absl::StrCat("ask ", i, ": ", finding.what()));
      }
    }
    return tally_;
  }

 private:
  absl::Time Now() { return absl::UnixEpoch() + absl::Microseconds(10) * ++ticks_; }

  void RunTogether() {
    for (step_ = 0; !AllEnded(); ++step_) {
      if (step_ > kMostSteps) throw Finding("hung", "some request never ends");
      ticks_ += 100;
      if (std::count(trial_.drops.begin(), trial_.drops.end(), step_) > 0) {
        for (auto& pair : pairs_) pair->tested().engine().DropPrefixes();
      }
      for (size_t i = 0; i < told_.size(); ++i) Act(i);
      for (auto& pair : pairs_) {
        pair->tested().engine().Step();
        CheckHeld(pair->tested());
      }
    }
    for (auto& pair : pairs_) CheckNothingHeld(pair->tested());
  }

  bool AllEnded() const {
    return std::all_of(told_.begin(), told_.end(), [](const Told& t) { return t.ended(); });
  }

  // What the ask's client does before this step.
  void Act(size_t i) {
    const Ask& ask = trial_.asks[i];
    Told& told = told_[i];
    Engine& engine = pairs_[ask.engine]->tested().engine();
    if (told.state == Told::State::kWaits) {
      const bool turn = !ask.continues.has_value() || told_[*ask.continues].ended();
      const bool alone = engine.running() == 0 && engine.waiting() == 0 && !engine.idles();
      if (ask.at_step <= step_ && turn && (!ask.idle || alone)) Submit(i);
    }
    if (told.state == Told::State::kLive && !told.ended() && ask.cancel_after.has_value() &&
        step_ == told.submitted + *ask.cancel_after) {
      if (ask.idle) {
        engine.EndIdle(absl::CancelledError("it was not wanted any more"));
      } else {
        engine.Cancel(told.options.id, absl::CancelledError("the client has gone"));
      }
      if (!told.ended()) throw Finding("law", "it lives on after it was cancelled");
    }
  }

  void Submit(size_t i) {
    const Ask& ask = trial_.asks[i];
    Told& told = told_[i];
    Pair& pair = *pairs_[ask.engine];
    RequestOptions& options = told.options;
    told.submitted = step_;
    options = ask.options;
    options.id = absl::StrCat("ask-", i);
    const int64_t vocab_size = pair.plain().manifest().vocab_size;
    auto append = [&](std::vector<int32_t>& to, const std::vector<int32_t>& more) {
      to.insert(to.end(), more.begin(), more.end());
    };
    if (ask.continues.has_value()) {
      const Told& before = told_[*ask.continues];
      if (before.transcript != nullptr) {
        options.prompt = before.options.prompt;
        const auto& completions = before.transcript->completions;
        append(options.prompt,
               completions.empty() ? before.transcript->tokens : completions.front().tokens);
      }
    } else {
      options.prompt = TokensOfText(ask.shared_text, ask.shared, vocab_size);
      if (ask.packets > 0)
        options.packets = PacketsOf(pair.plain(), ask, std::exchange(options.prompt, {}));
    }
    append(options.prompt, TokensOfText(ask.text, ask.own, vocab_size));
    if (ask.forced > 0) options.forced = TokensOfText(ask.text + 1, ask.forced, vocab_size);
    told.state = Told::State::kRefused;
    if (ask.constraint.has_value()) {
      auto constraint = pair.constraints().Compile(*ask.constraint);
      if (!constraint.ok()) return;
      options.sampling.constraint = *std::move(constraint);
    }
    RequestOptions timed = options;
    timed.arrival = Now();
    if (ask.deadline_after.has_value()) {
      timed.deadline = timed.arrival + absl::Milliseconds(*ask.deadline_after);
    }
    auto resolved = pair.tested().admission().Resolve(std::move(timed));
    if (std::holds_alternative<Rejection>(resolved)) return;
    Request request = std::get<Request>(std::move(resolved));
    told.state = Told::State::kLive;
    told.peak_bytes = request.demand.peak_bytes();
    auto reads = [this, i] {
      const int64_t since = step_ - told_[i].submitted;
      const auto& pauses = trial_.asks[i].pauses;
      return std::none_of(pauses.begin(), pauses.end(), [&](const auto& pause) {
        return pause.first <= since && since < pause.second;
      });
    };
    told.transcript = pair.tested().Submit(std::move(request), reads, ask.idle);
  }

  // The shared part, each packet cached alone.
  static std::vector<std::shared_ptr<const Packet>> PacketsOf(EngineHarness& plain, const Ask& ask,
                                                              const std::vector<int32_t>& shared) {
    std::vector<std::shared_ptr<const Packet>> packets;
    const int64_t size = std::ssize(shared);
    for (int64_t p = 0; p < ask.packets; ++p) {
      RequestOptions options;
      options.prompt = {shared.begin() + size * p / ask.packets,
                        shared.begin() + size * (p + 1) / ask.packets};
      options.stop.max_output_tokens = 1;
      options.output.packet = true;
      if (ask.evicted_packets) {
        options.kv = {.policy = "knorm", .budget = 2 + std::ssize(options.prompt) / 2};
        options.kv.protection.prompt = false;
      }
      const Transcript made = plain.Run(options);
      plain.model().TakeLogits();
      if (!made.ok()) throw Finding("differs", "a packet could not be made");
      packets.push_back(made.finished->packet);
    }
    return packets;
  }

  // With what packets have.
  int64_t PromptTokens(size_t i) const {
    const RequestOptions& options = told_[i].options;
    int64_t tokens = std::ssize(options.prompt);
    for (const auto& packet : options.packets) tokens += packet->num_tokens();
    return tokens;
  }

  static void CheckPacket(const Told& told, int64_t prompt) {
    const Transcript& all = *told.transcript;
    if (!told.options.output.packet || !all.ok()) return;
    const Packet* const packet = all.finished->packet.get();
    if (packet == nullptr) throw Finding("law", "it left no packet");
    if (packet->rows() != all.finished->kv.final_entries ||
        packet->num_tokens() != prompt + all.finished->output_tokens - 1) {
      throw Finding(
          "law", absl::StrCat("its packet has ", packet->rows(), " rows of ", packet->num_tokens(),
                              " tokens; it held ", all.finished->kv.final_entries));
    }
  }

  static void CheckHeld(EngineHarness& harness) {
    const int64_t used = harness.executor().used_bytes();
    const int64_t reserved = harness.engine().ledger().reserved();
    const int64_t prefixes = harness.executor().prefix_bytes();
    const int64_t capacity = harness.engine().ledger().capacity();
    if (used > reserved) throw Finding("law", absl::StrCat(used, " used of ", reserved));
    if (reserved + prefixes > capacity) {
      throw Finding(
          "law", absl::StrCat(reserved, " reserved and ", prefixes, " in prefixes of ", capacity));
    }
  }

  static void CheckNothingHeld(EngineHarness& harness) {
    harness.engine().DropPrefixes();
    const KvPool& pool = harness.executor().pool();
    if (pool.free_rows() != pool.num_rows() || harness.executor().used_bytes() != 0 ||
        harness.engine().ledger().reserved() != 0) {
      throw Finding("law",
                    absl::StrCat(pool.num_rows() - pool.free_rows(), " rows are still held, ",
                                 harness.engine().ledger().reserved(), " bytes reserved"));
    }
  }

  // Alone, on the plain engine. noise: relative, of queries, keys and values; 0: none.
  Transcript RunPlain(size_t i, int64_t completion, double noise = 0, uint64_t seed = 0) {
    EngineHarness& plain = pairs_[trial_.asks[i].engine]->plain();
    RequestOptions options = told_[i].options;
    options.completions = 1;
    options.guess_tokens = 0;
    options.guess_source = GuessSource::kPrompt;
    options.sampling = SamplingOf(options.sampling, completion);
    options.output.kv_trace = options.output.kept = options.output.logprobs = true;
    LawModel::Meddle meddle;
    if (noise > 0) {
      at::manual_seed(seed);
      meddle = [noise](const at::Tensor&, at::Tensor& q, at::Tensor& k, at::Tensor& v, int64_t) {
        for (at::Tensor* x : {&q, &k, &v}) {
          *x = (x->to(at::kFloat) * (1 + noise * at::randn(x->sizes()))).to(x->scalar_type());
        }
      };
    }
    plain.model().SetMeddle(std::move(meddle));
    auto resolved = plain.admission().Resolve(options);
    if (const auto* rejection = std::get_if<Rejection>(&resolved)) {
      throw Finding("differs", absl::StrCat("alone it is refused: ", rejection->message));
    }
    const auto transcript = plain.Submit(std::get<Request>(std::move(resolved)));
    plain.RunAll();
    plain.model().TakeLogits();
    if (!transcript->finished.has_value()) throw Finding("hung", "alone it never ends");
    return *transcript;
  }

  void Compare(size_t i, std::vector<Answer>* answers) {
    const Told& told = told_[i];
    const Transcript& all = *told.transcript;
    if (all.finished->kv.peak_bytes > told.peak_bytes) {
      throw Finding("law", absl::StrCat("it held ", all.finished->kv.peak_bytes, " bytes of ",
                                        told.peak_bytes, " reserved"));
    }
    CheckPacket(told, PromptTokens(i));
    (all.ok() ? tally_.whole : IsCut(all) ? tally_.cut : tally_.failed) += 1;
    if (all.completions.empty()) return CompareOne(i, 0, all, IsCut(all), answers);
    bool fails_alone = false;
    for (size_t c = 0; c < all.completions.size(); ++c) {
      Transcript one = all.completions[c];
      one.prompt = all.prompt;
      if (!one.finished.has_value()) one.finished = all.finished;
      // What went of the prompt is told once, as the first completion's.
      std::vector<EvictionTrace> evictions;
      for (const EvictionTrace& trace : all.completions.front().evictions) {
        if (c > 0 && trace.at_token < PromptTokens(i)) evictions.push_back(trace);
      }
      one.evictions.insert(one.evictions.begin(), evictions.begin(), evictions.end());
      // One that fails ends the others.
      const auto completion = static_cast<int64_t>(c);
      CompareOne(i, completion, one, !one.ok(), answers);
      if (all.ok() || IsCut(all) || fails_alone) continue;
      fails_alone = RunPlain(i, completion).finished->status.code() == all.finished->status.code();
    }
    if (!all.ok() && !IsCut(all) && !fails_alone) {
      throw Finding("differs", absl::StrCat("it ended with ", all.finished->status.ToString(),
                                            "; alone no completion does"));
    }
  }

  // Ended by its client, its deadline, or by what came when it ran at idle.
  static bool IsCut(const Transcript& t) {
    const absl::StatusCode code = t.finished->status.code();
    return code == absl::StatusCode::kCancelled || code == absl::StatusCode::kDeadlineExceeded ||
           code == absl::StatusCode::kResourceExhausted;
  }

  // cut: it may be no more than the beginning.
  void CompareOne(size_t i, int64_t completion, const Transcript& got, bool cut,
                  std::vector<Answer>* answers) {
    const Pair& pair = *pairs_[trial_.asks[i].engine];
    const Transcript plain = RunPlain(i, completion);
    const int64_t prompt = PromptTokens(i);
    const bool traced = told_[i].options.output.kv_trace && !got.finished->kv_trace_truncated;
    const std::vector<Event> events = EventsOf(got, prompt, traced);
    const std::vector<Event> wanted = EventsOf(plain, prompt, traced);
    const size_t common = CommonLength(events, wanted);
    const bool whole = got.ok();
    // What goes of a prompt that completions share goes by the first one's seed; and even where one
    // of them ends with its first token.
    auto of_prompt = [&](const std::vector<Event>& all) {
      return common < all.size() && all[common].at < prompt &&
             all[common].kind == Event::Kind::kRound;
    };
    if (told_[i].options.completions > 1 && (of_prompt(events) || of_prompt(wanted))) {
      ++tally_.ties;
      return;
    }
    const bool same = common == events.size() && (cut || common == wanted.size());
    // Also where nobody sees it: tokens may be the same, and figures not.
    if (!traced && completion > 0 && plain.finished->kv.rounds > 0 &&
        PromptRounds(i, completion, prompt) != PromptRounds(i, 0, prompt)) {
      ++tally_.ties;
      return;
    }
    if (same && !cut && got.finished->status.code() != plain.finished->status.code()) {
      throw Finding("differs", absl::StrCat("it ended with ", got.finished->status.ToString(),
                                            "; alone with ", plain.finished->status.ToString()));
    }
    if (!same && (pair.setup().deterministic ||
                  !RoundingExplains(i, completion, events, wanted, common, traced))) {
      throw Finding("differs",
                    absl::StrCat("completion ", completion, ", event ", common, ": ",
                                 At(events, common), "; alone: ", At(wanted, common),
                                 whole ? "" : "; ", whole ? "" : got.finished->status.ToString()));
    }
    const auto tokens = static_cast<size_t>(
        std::count_if(events.begin(), events.begin() + static_cast<int64_t>(common),
                      [](const Event& e) { return e.kind == Event::Kind::kToken; }));
    tally_.tokens += static_cast<int64_t>(tokens);
    tally_.rounds += static_cast<int64_t>(
        std::count_if(events.begin(), events.begin() + static_cast<int64_t>(common),
                      [](const Event& e) { return e.kind == Event::Kind::kRound; }));
    // Rounds that nobody sees may have gone another way.
    const bool seen = traced || plain.finished->kv.rounds == 0 || pair.setup().deterministic;
    if (seen) CompareFigures(pair, got, plain, tokens);
    if (same && seen && whole) CompareEnds(told_[i], got, plain);
    if (!same) ++tally_.ties;
    // By transformers with what was evicted hidden: nothing of it is attended to or comes back.
    const KvOptions& kv = told_[i].options.kv;
    const bool hides = kv.tier.fetch == 0 && !kv.tier.guard.has_value() && kv.read_tokens == 0 &&
                       kv.policy != "quest" && told_[i].options.packets.empty();
    const bool comparable = pair.rounding().noise > 0 && pair.setup().kv_dtype == KvDType::kModel &&
                            kv.positions == PositionMode::kAbsolute && hides;
    if (answers != nullptr && comparable && whole && traced && !got.logprobs.empty()) {
      answers->push_back(AnswerOf(pair, told_[i].options, got));
    }
  }

  // What goes of the prompt by a completion's own seed, alone.
  std::vector<Event> PromptRounds(size_t i, int64_t completion, int64_t prompt) {
    std::vector<Event> events = EventsOf(RunPlain(i, completion), prompt, /*with_rounds=*/true);
    std::erase_if(events,
                  [&](const Event& e) { return e.kind != Event::Kind::kRound || e.at >= prompt; });
    return events;
  }

  // Whether noise makes the plain run choose otherwise where `events` do.
  bool RoundingExplains(size_t i, int64_t completion, const std::vector<Event>& events,
                        const std::vector<Event>& wanted, size_t common, bool traced) {
    const double base = pairs_[trial_.asks[i].engine]->rounding().noise;
    if (base == 0) return true;
    const int64_t prompt = PromptTokens(i);
    const std::vector<Event> all = EventsOf(RunPlain(i, completion), prompt, true);
    const bool at_round = common < events.size() && common < wanted.size() &&
                          events[common].kind == Event::Kind::kRound &&
                          wanted[common].kind == Event::Kind::kRound &&
                          events[common].at == wanted[common].at;
    // Lanes whose victims are not the same in two runs.
    std::set<std::pair<int64_t, int64_t>> unstable, differ;
    auto add_difference = [](const Event& a, const Event& b, auto& to) {
      for (const auto& [x, y] : {std::pair(&a, &b), std::pair(&b, &a)}) {
        for (const auto& [lane, indexes] : x->victims) {
          const auto other = y->victims.find(lane);
          if (other == y->victims.end() || other->second != indexes) to.insert(lane);
        }
      }
    };
    if (at_round) add_difference(events[common], wanted[common], differ);
    // Of each noise. int8 makes a step of what lies on its edge, and few runs hit the one that
    // counts.
    const int runs = pairs_[trial_.asks[i].engine]->setup().kv_dtype == KvDType::kInt8 ? 32 : 8;
    int before = 0;  // runs of the least noise that part from the plain one even before
    for (int run = 0; run < 4 * runs; ++run) {
      const double noise = base * std::pow(8, run / runs);
      const Transcript noisy = RunPlain(i, completion, noise, 1 + run);
      const std::vector<Event> seen = EventsOf(noisy, prompt, traced);
      if (!traced) {  // what it saw may have changed before
        const std::vector<Event> in_full = EventsOf(noisy, prompt, true);
        const size_t at = CommonLength(in_full, all);
        if (at < all.size() && (common >= wanted.size() || all[at].at <= wanted[common].at)) {
          return true;
        }
      }
      if (CommonLength(seen, wanted) < common) {
        if (run < runs && ++before == runs / 2) return true;  // so far the plain run is no guide
        continue;
      }
      if (common >= seen.size()) continue;
      if (common >= wanted.size()) return true;
      if (common < events.size() && seen[common] == events[common]) return true;
      // A token is drawn from many: little noise that leads to a third one says as much.
      if (run < 2 * runs && !at_round && seen[common] != wanted[common]) return true;
      if (!at_round || seen[common].kind != Event::Kind::kRound) continue;
      add_difference(seen[common], wanted[common], unstable);
      if (std::includes(unstable.begin(), unstable.end(), differ.begin(), differ.end())) {
        return true;
      }
    }
    return false;
  }

  static void CompareFigures(const Pair& pair, const Transcript& got, const Transcript& plain,
                             size_t tokens) {
    const Rounding& rounding = pair.rounding();
    const bool bits = pair.setup().deterministic;
    auto near = [&](const char* what, size_t at, double a, double b, double limit) {
      if (bits ? a == b : std::abs(a - b) <= limit) return;
      throw Finding("differs", absl::StrCat(what, " ", at, ": ", a, "; alone: ", b));
    };
    for (size_t t = 0; t < std::min(tokens, got.logprobs.size()); ++t) {
      near("log-probability", t, got.logprobs[t], plain.logprobs.at(t), rounding.logprob);
    }
    for (size_t t = 0; t < std::min(tokens, got.top_logprobs.size()); ++t) {
      for (size_t k = 0; k < got.top_logprobs[t].size(); ++k) {
        near("likeliest token's log-probability", t, got.top_logprobs[t][k].logprob,
             plain.top_logprobs.at(t).at(k).logprob, rounding.logprob);
      }
    }
    for (size_t t = 0; t < got.prompt.logprobs.size(); ++t) {
      near("prompt's log-probability", t, got.prompt.logprobs[t], plain.prompt.logprobs.at(t),
           rounding.logprob);
    }
    // Of token t once it is cached, in the step that gives the next one.
    for (size_t t = 0; t + 1 < tokens && t < got.residual_steps.size(); ++t) {
      for (size_t layer = 0; layer < got.residual_steps[t].size(); ++layer) {
        const double wanted = plain.residual_steps.at(t).at(layer);
        near("residual step", t, got.residual_steps[t][layer], wanted,
             rounding.residual * std::max(wanted, 1.0));
      }
    }
  }

  static void CompareEnds(const Told& told, const Transcript& got, const Transcript& plain) {
    auto same = [](const char* what, const auto& a, const auto& b) {
      if (a != b) throw Finding("differs", absl::StrCat("not the same ", what, " as alone"));
    };
    auto same_number = [](const char* what, int64_t a, int64_t b) {
      if (a != b) throw Finding("differs", absl::StrCat(what, " ", a, "; alone: ", b));
    };
    const Finished &end = *got.finished, &wanted = *plain.finished;
    same("text", got.text, plain.text);
    same("stop string", end.stop_string, wanted.stop_string);
    same("stop token", end.stop_token, wanted.stop_token);
    same_number("output tokens", end.output_tokens, wanted.output_tokens);
    if (told.options.completions > 1 && end.output_tokens == 1) return;  // the prompt settled
    same_number("rounds", end.kv.rounds, wanted.kv.rounds);
    same_number("evicted entries", end.kv.evicted_entries, wanted.kv.evicted_entries);
    same_number("final entries", end.kv.final_entries, wanted.kv.final_entries);
    same_number("peak entries", end.kv.peak_entries, wanted.kv.peak_entries);
    if (told.options.output.kept) same("kept tokens", end.kv.kept, wanted.kv.kept);
  }

  static Answer AnswerOf(const Pair& pair, const RequestOptions& options, const Transcript& got) {
    Answer answer = {.model = pair.setup().model,
                     .prompt = options.prompt,
                     .tokens = got.tokens,
                     .logprobs = got.logprobs,
                     .evictions = nlohmann::json::array()};
    for (const EvictionTrace& trace : got.evictions) {
      for (const EvictionTrace::Victims& v : trace.victims) {
        answer.evictions.push_back({{"at", trace.at_token},
                                    {"layer", v.layer.value_or(-1)},
                                    {"head", v.head.value_or(-1)},
                                    {"index", v.index}});
      }
    }
    return answer;
  }

  const Trial& trial_;
  std::vector<Told> told_;
  std::vector<std::unique_ptr<Pair>> pairs_;
  int64_t step_ = 0, ticks_ = 0;
  Tally tally_;
};

}  // namespace

void Tally::Add(const Tally& other) {
  requests += other.requests;
  refused += other.refused;
  whole += other.whole;
  cut += other.cut;
  failed += other.failed;
  tokens += other.tokens;
  rounds += other.rounds;
  ties += other.ties;
}

std::string Tally::ToString() const {
  return absl::StrCat(requests, " requests: ", whole, " whole, ", cut, " cut short, ", failed,
                      " failed as they do alone, ", refused, " refused; ", tokens, " tokens and ",
                      rounds, " rounds compared; ", ties, " answers up to a tie");
}

void WarmUpModels() {
  for (const std::string& model : TrialModels()) {
    EngineHarness harness(ModelPath(model));
    RequestOptions options;
    options.prompt = TokensOfText(1, 40, harness.manifest().vocab_size);
    options.stop = {.max_output_tokens = 4, .ignore_end = true};
    for (int run = 0; run < 3; ++run) harness.Run(options);
  }
}

Tally PlayTrial(const Trial& trial, std::vector<Answer>* answers) {
  return Play(trial).Run(answers);
}

}  // namespace epikv
