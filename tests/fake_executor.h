#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/step_executor.h"

namespace epikv {

// What a FakeExecutor does and what it has done. A test keeps it beside the engine that owns the
// executor. Hooks are set before the engine runs and called on its thread; they may block.
struct FakeScript {
  // The model: the token after `token`.
  std::function<int32_t(int32_t token)> next = [](int32_t token) { return (token + 1) % 64; };

  // Before a forward. Not OK: it fails as a whole.
  std::function<absl::Status(absl::Span<const WorkItem>)> on_forward;
  // Not OK: this sequence alone fails, in Open, Forward or Settle.
  std::function<absl::Status(const Request&)> on_open;
  std::function<absl::Status(const WorkItem&)> on_item;
  std::function<absl::Status(const WorkItem&)> on_settle;

  // Tokens of a prompt that are known when its request begins; null: none.
  std::function<int64_t(const Request&)> prefix;

  // Read from any thread.
  std::atomic<int64_t> used_bytes{0};
  std::atomic<int64_t> open_sequences{0};
  std::atomic<int64_t> forwards{0};           // that succeeded
  std::atomic<int64_t> room_for_prefixes{0};  // as the last Open was told
  std::atomic<int64_t> prefix_bytes{0};       // that it says it holds
  std::atomic<bool> lost{false};              // until nothing is open
};

// A StepExecutor without tensors: the next token is a function of the last one, and eviction drops
// the oldest unprotected tokens of all lanes down to the budget.
class FakeExecutor final : public StepExecutor {
 public:
  // bytes_per_token: of K and V of one token over all lanes.
  FakeExecutor(std::shared_ptr<FakeScript> script, int64_t bytes_per_token)
      : script_(std::move(script)), bytes_per_token_(bytes_per_token) {}

  absl::StatusOr<int64_t> Open(SequenceId id, const Request& request,
                               int64_t prefix_bytes) override {
    if (sequences_.empty()) script_->lost = false;
    Held& held = sequences_[id] = {.request = &request};
    ++script_->open_sequences;
    if (script_->lost) return absl::InternalError("rows were lost");
    if (script_->on_open) {
      if (absl::Status status = script_->on_open(request); !status.ok()) return status;
    }
    script_->room_for_prefixes = prefix_bytes;
    const int64_t cached = script_->prefix ? script_->prefix(request) : 0;
    for (int64_t i = 0; i < cached; ++i) held.tokens.push_back(static_cast<int32_t>(i));
    held.peak_tokens = cached;
    script_->used_bytes += cached * bytes_per_token_;
    return cached;
  }

  absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) override {
    if (script_->on_forward) {
      if (absl::Status status = script_->on_forward(items); !status.ok()) return status;
    }
    std::vector<ForwardOutcome> outcomes;
    for (const WorkItem& item : items) outcomes.push_back(Run(item));
    for (size_t i = 0; i < items.size(); ++i) {
      if (outcomes[i].status.ok()) Cache(items[i]);
    }
    ++script_->forwards;
    return outcomes;
  }

  std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) override {
    std::vector<SettleOutcome> outcomes;
    for (const WorkItem& item : items) outcomes.push_back(SettleOne(item));
    return outcomes;
  }

  absl::Status Fork(SequenceId parent, SequenceId child, const Request& request) override {
    if (script_->on_open) {
      if (absl::Status status = script_->on_open(request); !status.ok()) return status;
    }
    Held copy = sequences_.at(parent);
    copy.request = &request;
    copy.peak_tokens = static_cast<int64_t>(copy.tokens.size());
    sequences_.at(parent).peak_tokens = copy.peak_tokens;
    script_->used_bytes += copy.peak_tokens * bytes_per_token_;
    ++script_->open_sequences;
    sequences_[child] = std::move(copy);
    return absl::OkStatus();
  }

  CacheFacts Facts(SequenceId id) const override {
    if (!sequences_.contains(id)) return {};  // it could not be begun
    const Held& held = sequences_.at(id);
    const int64_t lanes = static_cast<int64_t>(held.request->demand.budget.size());
    const int64_t tokens = static_cast<int64_t>(held.tokens.size());
    return {.entries = tokens * lanes,
            .peak_entries = held.peak_tokens * lanes,
            .bytes = tokens * bytes_per_token_,
            .peak_bytes = held.peak_tokens * bytes_per_token_,
            .kept = held.request->output.kept ? held.tokens : std::vector<int32_t>()};
  }

  void Close(SequenceId id) override {
    if (!sequences_.contains(id)) return;
    script_->used_bytes -= static_cast<int64_t>(sequences_.at(id).tokens.size()) * bytes_per_token_;
    sequences_.erase(id);
    --script_->open_sequences;
  }

  int64_t used_bytes() const override { return script_->used_bytes; }
  bool lost() const override { return script_->lost; }
  int64_t prefix_bytes() const override { return script_->prefix_bytes; }
  void DropPrefixes() override { script_->prefix_bytes = 0; }
  void AddStageTimes(StepStats& step) const override {}

 private:
  struct Held {
    const Request* request = nullptr;
    std::vector<int32_t> tokens;  // by index, ascending
    int64_t peak_tokens = 0;
  };

  static bool Allows(const WorkItem& item, int32_t token) {
    return item.allowed.empty() || (item.allowed[token / 32] >> (token % 32) & 1) != 0;
  }
  static int32_t LowestAllowed(const WorkItem& item) {
    int32_t token = 0;
    while (!Allows(item, token)) ++token;
    return token;
  }

  ForwardOutcome Run(const WorkItem& item) const {
    ForwardOutcome outcome;
    if (script_->on_item) outcome.status = script_->on_item(item);
    if (!outcome.status.ok()) return outcome;
    const int64_t first_row = static_cast<int64_t>(item.tokens.size()) - item.num_outputs;
    for (int64_t i = 0; i < item.num_outputs; ++i) {
      int32_t likeliest = script_->next(item.tokens[first_row + i]);
      const auto is_masked = [&] {
        return std::find(item.masked.begin(), item.masked.end(), likeliest) != item.masked.end();
      };
      while (is_masked()) likeliest = script_->next(likeliest);
      if (!Allows(item, likeliest)) likeliest = LowestAllowed(item);
      const int32_t token = item.forced.empty() ? likeliest : item.forced[i];
      outcome.outputs.push_back({.token = token,
                                 .logprob = token == likeliest ? -0.125f : -4.0f,
                                 .greedy = token == likeliest,
                                 .top = Top(item, likeliest)});
    }
    // Completion i begins i tokens further.
    for (int64_t i = 1; i < item.completions; ++i) {
      outcome.siblings.push_back(outcome.outputs.back());
      for (int64_t j = 0; j < i; ++j) {
        outcome.siblings.back().token = script_->next(outcome.siblings.back().token);
      }
      if (!Allows(item, outcome.siblings.back().token)) {
        outcome.siblings.back().token = LowestAllowed(item);
      }
    }
    if (!item.decode && item.request->output.prompt_logprobs) outcome.prompt = OfPrompt(item);
    if (item.decode && item.request->output.residual_steps) {
      outcome.residual_steps = {static_cast<float>(item.tokens.front()), 1.0f};
    }
    return outcome;
  }

  // The likeliest token, and those after it in the vocabulary.
  static std::vector<TokenLogprob> Top(const WorkItem& item, int32_t likeliest) {
    std::vector<TokenLogprob> top;
    for (int32_t i = 0; i < item.request->output.top_logprobs; ++i) {
      top.push_back({.token = likeliest + i, .logprob = -0.125f - static_cast<float>(i)});
    }
    return top;
  }

  PromptLogprobs OfPrompt(const WorkItem& item) const {
    PromptLogprobs prompt{.first = item.first + 1};
    for (size_t i = 0; i < item.tokens.size(); ++i) {
      const size_t place = static_cast<size_t>(item.first) + i + 1;
      if (place >= item.request->prompt.size()) break;
      const int32_t likeliest = script_->next(item.tokens[i]);
      prompt.tokens.push_back(item.request->prompt[place]);
      prompt.logprobs.push_back(prompt.tokens.back() == likeliest ? -0.125f : -4.0f);
      if (item.request->output.top_logprobs > 0) prompt.top.push_back(Top(item, likeliest));
    }
    return prompt;
  }

  void Cache(const WorkItem& item) {
    Held& held = sequences_.at(item.id);
    const int64_t count = static_cast<int64_t>(item.tokens.size());
    for (int64_t i = 0; i < count; ++i) {
      held.tokens.push_back(static_cast<int32_t>(item.first + i));
    }
    held.peak_tokens = std::max(held.peak_tokens, static_cast<int64_t>(held.tokens.size()));
    script_->used_bytes += count * bytes_per_token_;
  }

  SettleOutcome SettleOne(const WorkItem& item) {
    SettleOutcome outcome;
    if (script_->on_settle) outcome.status = script_->on_settle(item);
    Held& held = sequences_.at(item.id);
    const Request& request = *held.request;
    const int64_t lanes = static_cast<int64_t>(request.demand.budget.size());
    const int64_t budget = request.demand.budget.front();
    const int64_t slack = item.decode ? request.traits.slack : 0;
    const bool due =
        item.decode || (item.evicts_prefill &&
                        (request.traits.prompt != PromptEviction::kAtEnd || item.ends_prefill));
    if (!outcome.status.ok() || !due) return outcome;
    if (static_cast<int64_t>(held.tokens.size()) <= budget + slack) return outcome;

    const std::vector<int32_t> victims = Evict(held, budget);
    outcome.evicted_entries = static_cast<int64_t>(victims.size()) * lanes;
    if (request.output.kv_trace) {
      outcome.trace = {.at_token = held.tokens.back(), .victims = {{.index = victims}}};
    }
    return outcome;
  }

  std::vector<int32_t> Evict(Held& held, int64_t budget) {
    const int64_t newest = held.tokens.back();
    int64_t excess = static_cast<int64_t>(held.tokens.size()) - budget;
    std::vector<int32_t> victims, kept;
    for (int32_t index : held.tokens) {
      if (excess > 0 && !held.request->protection.Covers(index, newest)) {
        victims.push_back(index);
        --excess;
      } else {
        kept.push_back(index);
      }
    }
    held.tokens = std::move(kept);
    script_->used_bytes -= static_cast<int64_t>(victims.size()) * bytes_per_token_;
    return victims;
  }

  const std::shared_ptr<FakeScript> script_;
  const int64_t bytes_per_token_;
  std::map<SequenceId, Held> sequences_;
};

}  // namespace epikv
