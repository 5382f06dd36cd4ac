#include "runtime/executor/outputs.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

namespace epikv {
namespace {

// One of the rows whose logits an item asked for. [vocab]
absl::Span<const float> LogitsOf(const StepItem& item, int64_t row) {
  const int64_t vocab = item.logits.size(1);
  return {item.logits.const_data_ptr<float>() + row * vocab, static_cast<size_t>(vocab)};
}

// The i-th output token that an item gives: sampled, or forced.
absl::StatusOr<OutputToken> TakeOutput(const StepItem& item, int64_t i,
                                       const SamplingParams& sampling) {
  const WorkItem& work = *item.work;
  const Request& request = item.sequence->request;
  if (!item.found.empty()) {
    const StepItem::Found& found = item.found[i];
    const absl::StatusOr<int32_t> likeliest = CheckedArgmax(found.highest, found.likeliest);
    if (!likeliest.ok()) return likeliest.status();
    return OutputToken{.token = found.token};
  }
  const bool forced = !work.forced.empty();
  const absl::Span<const float> logits = LogitsOf(item, item.logits.size(0) - work.num_outputs + i);
  const absl::StatusOr<int32_t> chosen =
      forced ? Argmax(logits)
             : Sample(logits, sampling,
                      {.index = static_cast<uint64_t>(work.draw + i),
                       .prompt = request.prompt,
                       .outputs = work.outputs,
                       .masked = work.masked,
                       .allowed = work.allowed});
  if (!chosen.ok()) return chosen.status();
  OutputToken output{.token = forced ? work.forced[i] : *chosen};
  output.greedy = forced && output.token == *chosen;
  if (forced || request.output.logprobs || request.output.top_logprobs > 0) {
    absl::StatusOr<Logprobs> logprobs =
        LogprobsOf(logits, output.token, request.output.top_logprobs);
    if (!logprobs.ok()) return logprobs.status();
    output.logprob = logprobs->of_token;
    output.top = std::move(logprobs->top);
  }
  return output;
}

void TakeAll(StepItem& item) {
  const WorkItem& work = *item.work;
  const SamplingParams& sampling = item.sequence->request.sampling;
  for (int64_t i = 0; i < work.num_outputs; ++i) {
    item.outputs.push_back(TakeOutput(item, i, sampling));
  }
  for (int64_t completion = 1; completion < work.completions; ++completion) {
    item.outputs.push_back(
        TakeOutput(item, work.num_outputs - 1, SamplingOf(sampling, completion)));
  }
}

}  // namespace

void TakeOutputs(absl::Span<StepItem> items) {
  constexpr int64_t kGrain = 65536;  // logits that are worth a thread
  int64_t logits = 0;
  for (const StepItem& item : items) logits += item.logits.defined() ? item.logits.numel() : 0;
  const int64_t of_one = std::max<int64_t>(logits / std::max<int64_t>(std::ssize(items), 1), 1);
  at::parallel_for(0, std::ssize(items), std::max<int64_t>(kGrain / of_one, 1),
                   [&](int64_t begin, int64_t end) {
                     for (StepItem& item : items.subspan(begin, end - begin)) {
                       if (item.work->pass) continue;
                       try {
                         TakeAll(item);
                       } catch (const std::exception&) {
                         item.sampling_failed = std::current_exception();
                       }
                     }
                   });
}

absl::StatusOr<PromptLogprobs> TakePromptLogprobs(const StepItem& item) {
  const Request& request = item.sequence->request;
  PromptLogprobs prompt{.first = item.work->first + 1};  // row 0 predicts it
  const int64_t count = std::clamp<int64_t>(
      static_cast<int64_t>(request.prompt.size()) - prompt.first, 0, item.num_rows());
  std::vector<absl::StatusOr<Logprobs>> rows(count);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      rows[row] = LogprobsOf(LogitsOf(item, row), request.prompt[prompt.first + row],
                             request.output.top_logprobs);
    }
  });
  for (int64_t row = 0; row < count; ++row) {
    if (!rows[row].ok()) return rows[row].status();
    prompt.tokens.push_back(request.prompt[prompt.first + row]);
    prompt.logprobs.push_back(rows[row]->of_token);
    if (request.output.top_logprobs > 0) prompt.top.push_back(std::move(rows[row]->top));
  }
  return prompt;
}

}  // namespace epikv
