#include "runtime/engine/sequence.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "runtime/engine/completion_group.h"

namespace epikv {
namespace {

std::vector<int32_t> EndsOf(const Request& request) {
  std::vector<int32_t> tokens = request.stop_tokens;
  tokens.insert(tokens.end(), request.end_tokens.begin(), request.end_tokens.end());
  return tokens;
}

}  // namespace

Sequence::Sequence(SequenceId id, Request r, std::shared_ptr<RequestSink> s,
                   const Tokenizer& tokenizer)
    : id(id),
      request(std::move(r)),
      sink(std::move(s)),
      tokens(request.prompt),
      ends(EndsOf(request)),
      text(tokenizer,
           {.stop_strings = request.stop_strings,
            .stop_token_ids = ends,
            .include_stop = request.include_stop,
            .shown = request.answer.has_value() ? request.answer->markup : std::vector<int32_t>(),
            .min_tokens = request.min_output_tokens}) {
  if (request.answer.has_value() && !scores()) answer.emplace(*request.answer);
  const bool asks_of_thinking =
      request.answer.has_value() || request.evict_thinking || request.protection.thinking > 0;
  if (request.thinking.has_value() && asks_of_thinking && !scores()) {
    thinking.emplace(tokenizer, request.thinking->tags, request.thinking->markup,
                     request.thinking->begun, std::ssize(request.prompt));
  }
  if (request.sampling.constraint != nullptr && !scores()) {
    constraint.emplace(request.sampling.constraint, ends, request.scheduling.tenant);
  }
  // Work items point into the tokens while more are added.
  tokens.reserve(request.prompt.size() + request.max_output_tokens);
  if (request.force_in_chunks) {
    tokens.insert(tokens.end(), request.forced.begin(), request.forced.end() - 1);
  }
}

void Sequence::Tell(const std::string& piece, Delta& delta) {
  if (answer.has_value()) delta.answer.Append(answer->Append(piece));
  delta.text += piece;
}

int64_t Sequence::completions() const {
  return group != nullptr && !group->forked ? group->live : 1;
}

WorkItem Sequence::NextWork(int64_t count, int64_t prefill_chunk_tokens) const {
  if (!pass.empty()) {
    count = std::min(count, ScratchPass::kStepTokens);
    return {.id = id,
            .request = &request,
            .tokens = absl::MakeConstSpan(pass).subspan(pass_done, count),
            .first = cached + pass_done,
            .decode = pass.size() == 1,
            .pass = true,
            .completions = cached == request.prefill_tokens() ? request.completions() : 1};
  }
  const int64_t prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t prefill = request.prefill_tokens();
  const int64_t end = cached + count;
  WorkItem item{.id = id,
                .request = &request,
                .tokens = absl::MakeConstSpan(tokens).subspan(cached, count),
                .first = cached,
                .decode = cached >= prefill,
                .draw = num_outputs};
  if (thinking.has_value()) item.thinking = thinking->found();
  item.ends_prefill = !item.decode && end == prefill;
  item.evicts_prefill = !item.decode && (end % prefill_chunk_tokens == 0 || item.ends_prefill);
  // Row i predicts token first + i + 1: outputs begin with the prompt's last row.
  item.num_outputs = std::max<int64_t>(0, end - std::max(item.first, prompt - 1));
  if (item.ends_prefill) item.completions = request.completions();
  if (scores()) {
    item.forced = absl::MakeConstSpan(request.forced).subspan(num_outputs, item.num_outputs);
  } else {
    item.outputs = absl::MakeConstSpan(tokens).subspan(prompt);
    if (num_outputs < request.min_output_tokens) item.masked = ends;
    if (constraint.has_value()) item.allowed = constraint->allowed();
  }
  return item;
}

WorkItem Sequence::GuessedWork(int64_t ahead) const {
  const absl::Span<const int32_t> known = absl::MakeConstSpan(guessed).first(num_outputs + ahead);
  WorkItem item = {.id = id,
                   .request = &request,
                   .tokens = known.last(1),
                   .first = cached + ahead,
                   .decode = true,
                   .draw = num_outputs + ahead,
                   .outputs = known,
                   .num_outputs = 1,
                   .ahead = ahead};
  if (item.draw < request.min_output_tokens) item.masked = ends;
  if (constraint.has_value()) item.allowed = constraint->allowed_behind(ahead);
  return item;
}

FinishReason Sequence::StopReason() const {
  const auto* token = std::get_if<StopToken>(&*stop);
  if (token == nullptr) return FinishReason::kStopString;
  const auto& user = request.stop_tokens;
  const bool asked = std::find(user.begin(), user.end(), token->id) != user.end();
  return asked ? FinishReason::kStopToken : FinishReason::kEnd;
}

RequestFacts Sequence::Facts() const {
  return {.id = request.id,
          .completion = completion,
          .state = !open                               ? RequestState::kQueued
                   : cached < request.prefill_tokens() ? RequestState::kPrefill
                                                       : RequestState::kDecode,
          .policy = std::string(request.spec->name),
          .budget = request.budget,
          .prompt_tokens = static_cast<int64_t>(request.prompt.size()),
          .cached_tokens = cached,
          .output_tokens = num_outputs,
          .max_output_tokens = request.max_output_tokens,
          .arrival = request.arrival,
          .deadline = request.deadline};
}

}  // namespace epikv
