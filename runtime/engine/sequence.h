#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "runtime/constraints/constraint.h"
#include "runtime/engine/guess_plan.h"
#include "runtime/engine/observer.h"
#include "runtime/request/request.h"
#include "runtime/request/sequence_id.h"
#include "runtime/step/step_executor.h"
#include "runtime/text/chat/answer_reader.h"
#include "runtime/text/chat/thinking_finder.h"
#include "runtime/text/text_stream.h"

namespace epikv {

struct CompletionGroup;

// A request in the engine. Its tokens are the prompt, then what was sampled (or forced).
struct Sequence {
  // `tokenizer` outlives it.
  Sequence(SequenceId id, Request request, std::shared_ptr<RequestSink> sink,
           const Tokenizer& tokenizer);

  bool scores() const { return !request.forced.empty(); }

  const SequenceId id;
  const Request request;
  const std::shared_ptr<RequestSink> sink;
  std::vector<int32_t> tokens;  // known so far; [0, cached) are in the cache
  int64_t cached = 0;
  int64_t from_prefix = 0;  // of those cached, copied from the prefix cache
  int64_t num_outputs = 0;
  int64_t last_step = 0;  // the engine's number of the last step that it was in, or came after
  const std::vector<int32_t> ends;  // tokens that end the output
  TextStream text;
  std::optional<AnswerReader> answer;
  std::optional<ThinkingFinder> thinking;
  std::optional<ConstraintState> constraint;
  std::optional<int32_t> unread;  // its newest token, until the constraint has read it
  std::optional<StopMatch> stop;
  // The outputs that there are and behind them guesses at those to come, while a step runs them.
  std::vector<int32_t> guessed;
  int64_t guesses_run = 0, guesses_accepted = 0;  // of the step that runs
  bool guesses_hold = false;  // what was run ahead is what running it alone would be
  int64_t looks_rest = 0;     // steps without guesses: to look at what may follow them is dear
  GuessRecord guess_record;
  std::optional<bool> drafts;  // Drafter has it open; absent: it was not asked yet
  int64_t guessed_tokens = 0, accepted_tokens = 0;  // that ran ahead, and came true
  bool open = false;                                // holds KV
  bool finished = false;
  // A scratch pass over the prompt, or what is cached of it: tokens that run now, and how many of
  // them have. Empty: none.
  std::vector<int32_t> pass;
  int64_t pass_done = 0;
  absl::Time pass_begin;
  absl::Duration pass_time;
  int64_t rounds = 0, evicted_entries = 0, trace_victims = 0;
  std::vector<RoundTime> first_rounds;
  bool trace_truncated = false;
  absl::Time admitted, first_token, last_token;
  bool waited_for_reader = false;  // since its last token
  absl::Duration eviction_time;

  int64_t completion = 0;
  std::shared_ptr<CompletionGroup> group;  // of several completions; null: it is the only one
  // It has ended, before its group has forked; or, of one that leaves a packet, before its cache
  // was settled.
  std::optional<FinishReason> ended_early;
  bool settled = true;  // what the last step cached

  // That it stands for: all, until they fork.
  int64_t completions() const;
  // Its share of a step that caches its next `count` tokens. Points into the sequence.
  WorkItem NextWork(int64_t count, int64_t prefill_chunk_tokens) const;
  // Of its guesses, `ahead` from 1 on. Points into the sequence.
  WorkItem GuessedWork(int64_t ahead) const;
  // Adds text that has come to what is told.
  void Tell(const std::string& piece, Delta& delta);
  // Why its output stops here. Requires: `stop`.
  FinishReason StopReason() const;
  // For people who look; what of the pool it holds or waits for is the engine's to add.
  RequestFacts Facts() const;
};

}  // namespace epikv
