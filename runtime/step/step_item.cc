#include "runtime/step/step_item.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "policies/steering.h"

namespace epikv {
namespace {

// Null: it wants none.
const Gate* GateOf(const StepItem& item) {
  return item.wants(Signal::kGate) ? item.work->request->policy->gate() : nullptr;
}

}  // namespace

void Place(StepItem& item, const ModelShape& shape, int64_t context_length) {
  const SequenceCache& cache = item.sequence->cache;
  const int64_t ahead = item.work->ahead;
  for (int64_t t = 0; t < cache.num_tables(); ++t) {
    item.slots.push_back(cache.NextSlot(t, ahead));
    item.positions.push_back(cache.NextPosition(t) + ahead);
    if (item.positions.back() + item.num_rows() > context_length) {
      throw std::logic_error("a token lies beyond the context");
    }
  }
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      item.used.push_back(cache.UsedAfter(cache.TableOf(layer, head), ahead + item.num_rows()));
      if (item.used.back() > cache.capacity(layer, head)) {
        throw std::logic_error("a lane has no room for its next token");
      }
    }
  }
}

RowNeed RowNeedOf(const StepItem& item) {
  const OutputOptions& output = item.sequence->request.output;
  const WorkItem& work = *item.work;
  const bool reads_more = work.pass || !work.forced.empty() || output.logprobs ||
                          output.top_logprobs > 0 || item.wants_prompt_logprobs();
  const RowNeed need =
      RowNeedOf(item.sequence->request.sampling, {.masked = work.masked, .allowed = work.allowed});
  // Completions draw for themselves, and so do outputs behind guesses.
  const bool draws_often =
      need != RowNeed::kHighest && (work.completions > 1 || work.num_outputs > 1);
  return reads_more || draws_often ? RowNeed::kRow : need;
}

bool WantsGate(absl::Span<const StepItem> items) {
  return std::any_of(items.begin(), items.end(),
                     [](const StepItem& item) { return item.wants(Signal::kGate); });
}

void TakeGates(absl::Span<StepItem> items, const at::Tensor& input, int64_t layer, bool together) {
  size_t end = 0;
  for (size_t begin = 0; begin < items.size(); begin = end) {
    // Items of one gate in a row.
    const Gate* const gate = GateOf(items[begin]);
    end = begin + 1;
    while (end < items.size() && GateOf(items[end]) == gate) ++end;
    if (gate == nullptr) continue;
    const int64_t first = together ? 0 : items[begin].row;
    const int64_t rows =
        together ? input.size(0) : items[end - 1].row + items[end - 1].num_rows() - first;
    const at::Tensor said = gate->Apply(layer, input.narrow(0, first, rows));
    for (StepItem& item : items.subspan(begin, end - begin)) {
      item.gates.push_back(said.narrow(0, item.row - first, item.num_rows()));
    }
  }
}

at::Tensor TakeFinalHidden(const StepItem& item, const at::Tensor& residual, const Model& model) {
  const at::Tensor rows = residual.narrow(0, item.row, item.num_rows());
  return model.FinalNormed(rows).to(at::kFloat);
}

at::Tensor Steered(absl::Span<const StepItem> items, const at::Tensor& residual, int64_t layer) {
  at::Tensor steered;  // undefined: nothing is
  for (const StepItem& item : items) {
    const std::optional<SteeringState>& state = item.sequence->steering;
    if (!state.has_value() || state->vector().layer != layer) continue;
    if (!item.work->decode || item.pass != nullptr) continue;
    const float amount = state->AmountAt(item.work->tokens.front());
    if (amount == 0) continue;
    if (!steered.defined()) steered = residual.clone();
    const std::vector<float>& values = state->vector().values;
    const at::Tensor direction = at::tensor(values, at::kFloat).to(residual.device());
    at::Tensor row = steered[item.row];
    row.copy_(row.to(at::kFloat) + amount * direction);
  }
  return steered.defined() ? steered : residual;
}

at::Tensor WithSoftTokens(absl::Span<const StepItem> items, const at::Tensor& residual) {
  at::Tensor changed;  // undefined: nothing is
  auto put = [&](int64_t row, const float* values) {
    if (!changed.defined()) changed = residual.clone();
    changed[row].copy_(at::from_blob(const_cast<float*>(values), {residual.size(1)}));
  };
  for (const StepItem& item : items) {
    const SoftTokens* const soft = item.sequence->request.soft.get();
    if (soft == nullptr || item.work->decode || item.work->pass) continue;
    const int64_t width = residual.size(1);
    const auto trailer = std::ssize(item.sequence->request.prompt) - soft->trailer;
    for (int64_t i = 0; i < item.num_rows(); ++i) {
      // Its place in what was asked for: packets come before.
      const int64_t token = item.work->first + i;
      const int64_t place = token - item.sequence->request.packet_tokens;
      if (place < soft->header) {
        put(item.row + i, soft->header_rows.data() + place * width);
      } else if (token >= trailer && token < trailer + soft->trailer) {
        put(item.row + i, soft->trailer_rows.data() + (token - trailer) * width);
      }
    }
  }
  return changed.defined() ? changed : residual;
}

at::Tensor EntropiesOf(const at::Tensor& logits) {
  const int64_t count = std::min(Signals::kEntropyTokens, logits.size(1));
  const at::Tensor log_p = std::get<0>(logits.topk(count, -1)).log_softmax(-1);
  return -(log_p.exp() * log_p).sum(-1);
}

at::Tensor DistancesOf(const std::vector<at::Tensor>& residuals) {
  const at::Tensor last = residuals.back().to(at::kFloat);
  std::vector<at::Tensor> distances;
  distances.reserve(residuals.size());
  for (const at::Tensor& residual : residuals) {
    distances.push_back(1 - at::cosine_similarity(residual.to(at::kFloat), last, 1));
  }
  return at::stack(distances);
}

}  // namespace epikv
