#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "runtime/constraints/constraint_memory.h"
#include "runtime/text/tokenizer.h"

// What a completion's text has to be: compiled once a text, on the thread of the call that asks for
// it, then walked token by token. By xgrammar; the only room that knows it.

namespace epikv {

// Thinking that stands before a text, and is free.
struct ThinkingBefore {
  std::string begin, end;
  bool begun = false;  // without `begin`, and not to be left out
};

// As asked for.
struct ConstraintText {
  // kStructuralTag: xgrammar's, with the regexes of its schemas behind it; made by
  // ConstraintOfCalls alone.
  enum class Kind { kRegex, kChoice, kJsonSchema, kGrammar, kStructuralTag };
  Kind kind = Kind::kRegex;
  std::vector<std::string> texts;          // of kChoice and kStructuralTag any number, else one
  std::optional<ThinkingBefore> thinking;  // absent: none
};

// Compiled for the tokens of one model. Immutable.
class Constraint {
 public:
  struct Compiled;  // constraint.cc
  // share: of the tenant who had it compiled; it has the bytes as long as this lives.
  Constraint(ConstraintText text, std::unique_ptr<const Compiled> compiled,
             std::shared_ptr<ConstraintMemory> memory,
             std::shared_ptr<ConstraintMemory::Share> share);
  ~Constraint();

  const ConstraintText& text() const { return text_; }
  int64_t bytes() const;

 private:
  friend class ConstraintState;
  const ConstraintText text_;
  const std::unique_ptr<const Compiled> compiled_;
  const std::shared_ptr<ConstraintMemory> memory_;
  const std::shared_ptr<ConstraintMemory::Share> share_;
};

// How far one completion has come. Not thread-safe.
class ConstraintState {
 public:
  // ends: tokens that end the completion, allowed exactly where the text may end. tenant: whose
  // completion it is.
  ConstraintState(std::shared_ptr<const Constraint> constraint, absl::Span<const int32_t> ends,
                  const std::string& tenant = "");
  ~ConstraintState();

  // The tokens that may come next, a bit each, from the lowest bit. [ceil(vocab / 32)]
  absl::Span<const uint32_t> allowed() const { return allowed_; }
  // The text so far is whole.
  bool may_end() const { return may_end_; }
  // And no token may follow.
  bool must_end() const { return may_end_ && !may_go_on_; }

  // What may come behind each of `tokens`, as long as each may come behind those before it, the
  // text goes on behind it, and finding that out takes no more than `work`, which shrinks: below 1
  // where that was the reason. Returns how many those are. Accept of them in their order then finds
  // nothing out again.
  int64_t LookAhead(absl::Span<const int32_t> tokens, int64_t& work);
  // The tokens that may come behind the first `count` of them.
  absl::Span<const uint32_t> allowed_behind(int64_t count) const {
    return ahead_[count - 1].allowed;
  }

  // Not OK, and the state is of no use any more: FAILED_PRECONDITION (kConstraintFailed) where no
  // token of the vocabulary continues the text, or finding those that do takes too much work.
  // Precondition: the token is allowed, and no end.
  absl::Status Accept(int32_t token);
  // What the last Accept took: 4 million units, the most, are about 200 ms.
  int64_t work() const { return work_; }

 private:
  struct Position;  // in the grammar
  void ForgetAhead();
  int64_t mask_bytes() const;  // of `allowed`
  // What a token that may come leads to.
  struct Behind {
    int32_t token = 0;
    std::vector<uint32_t> allowed;
    bool may_end = false;
  };
  const std::string& BytesOf(int32_t token, bool is_first) const;
  int64_t vocab_size() const;
  // Whether tokens that are no ends may come; ends may where the text may end.
  bool AllowEnds(std::vector<uint32_t>& allowed, bool may_end) const;
  void Hold(int64_t bytes);
  absl::Status GiveUp(absl::string_view why);

  const std::shared_ptr<const Constraint> constraint_;
  const std::shared_ptr<ConstraintMemory::Share> share_;
  const std::vector<int32_t> ends_;
  std::unique_ptr<Position> position_;
  std::vector<uint32_t> allowed_;
  std::deque<Behind> ahead_;  // of LookAhead
  bool may_end_ = false, may_go_on_ = true;
  bool first_ = true;  // no token yet
  int64_t work_ = 0;
  int64_t spare_work_;  // of what positions behind this one may take
  int64_t bytes_ = 0;   // of share_
};

// Bytes of one model's constraints.
struct ConstraintLimits {
  int64_t remembered = 64 << 20;
  // Remembered, some request's, or what completions keep of their texts (ConstraintMemory). For a
  // tenant whose share is full no more are compiled, and none of his completions may keep more than
  // its text allows. Beyond the limit completions of those who hold most end.
  int64_t live = 512 << 20;
};

// Makes the constraints of one model, and remembers the last ones. Thread-safe; one compilation at
// a time.
class ConstraintCompiler {
 public:
  // `tokenizer` outlives it and what it makes. vocab_size: the model's. markup: special tokens that
  // are text where a constraint is of an answer's parts: structural tags, and those with thinking.
  ConstraintCompiler(const Tokenizer& tokenizer, int64_t vocab_size, ConstraintLimits limits = {},
                     std::vector<int32_t> markup = {});
  ~ConstraintCompiler();

  // INVALID_ARGUMENT: the text is no constraint, or one of more than can be afforded; says why.
  // FAILED_PRECONDITION: this model's tokens cannot be constrained.
  // RESOURCE_EXHAUSTED: those of the tenant hold too much memory.
  using Result = absl::StatusOr<std::shared_ptr<const Constraint>>;
  Result Compile(const ConstraintText& text, const std::string& tenant = "");
  // What Compile would answer at once; absent: it takes its time, which may be seconds.
  std::optional<Result> Remembered(const ConstraintText& text);
  // Bytes of what it has made and still lives (ConstraintLimits::live). It may outlive this.
  std::shared_ptr<const std::atomic<int64_t>> live_bytes() const { return memory_->bytes(); }

  struct Vocabulary;  // constraint.cc

 private:
  struct Entry {
    std::string key;
    Result result;
    int64_t bytes;
  };

  absl::StatusOr<std::shared_ptr<const Vocabulary>> VocabularyFor(const ConstraintText& text)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(compile_mu_);
  std::optional<Result> Find(const std::string& key);
  void Remember(Entry entry);

  const Tokenizer& tokenizer_;
  const int64_t vocab_size_;
  const ConstraintLimits limits_;
  // Of what it has made and still lives, which may outlive it.
  const std::shared_ptr<ConstraintMemory> memory_;
  absl::Mutex compile_mu_ ABSL_ACQUIRED_BEFORE(mu_);
  const std::vector<int32_t> markup_;
  // Made by the first compilation: it takes a copy of the vocabulary, sorted. And with markup.
  std::shared_ptr<const Vocabulary> vocabulary_ ABSL_GUARDED_BY(compile_mu_);
  std::shared_ptr<const Vocabulary> marked_vocabulary_ ABSL_GUARDED_BY(compile_mu_);
  absl::Mutex mu_;
  std::list<Entry> recent_ ABSL_GUARDED_BY(mu_);  // latest first
  absl::flat_hash_map<absl::string_view, std::list<Entry>::iterator> by_key_ ABSL_GUARDED_BY(mu_);
  int64_t remembered_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace epikv
