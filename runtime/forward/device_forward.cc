#include "runtime/forward/device_forward.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "runtime/forward/varlen_attention.h"
#include "runtime/step/step_item.h"

namespace epikv {
namespace {

// Logits that are drawn from at once: their running sums take 128 MiB.
constexpr int64_t kDrawnLogits = 1 << 24;

// Rotates the first channels of x [m, heads, width] in fp32. cos_sin [m, 1, 2 x half]. Kernels that
// widen and narrow by themselves are fewer, but each takes three times as long.
at::Tensor Rotated(const at::Tensor& x, const at::Tensor& cos_sin, bool interleaved) {
  const int64_t half = cos_sin.size(2) / 2, rest = x.size(2) - 2 * half;
  if (half == 0) return x;
  const auto first_of = [&](const at::Tensor& of) {
    return interleaved ? of.slice(2, 0, 2 * half, 2) : of.narrow(2, 0, half);
  };
  const auto second_of = [&](const at::Tensor& of) {
    return interleaved ? of.slice(2, 1, 2 * half, 2) : of.narrow(2, half, half);
  };
  const at::Tensor cos = cos_sin.narrow(2, 0, half), sin = cos_sin.narrow(2, half, half);
  const at::Tensor wide = x.to(at::kFloat), a = first_of(wide), b = second_of(wide);
  at::Tensor turned = at::empty_like(wide), first = first_of(turned), second = second_of(turned);
  at::addcmul_out(first, a * cos, b, sin, -1);
  at::addcmul_out(second, b * cos, a, sin);
  if (rest > 0) turned.narrow(2, 2 * half, rest).copy_(wide.narrow(2, 2 * half, rest));
  return turned.to(x.scalar_type());
}

void CopyTo(absl::Span<float> to, const at::Tensor& from) {
  TORCH_CHECK(static_cast<size_t>(from.numel()) == to.size(), "a signal has another size");
  std::copy_n(from.const_data_ptr<float>(), to.size(), to.begin());
}

absl::Span<const float> Floats(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

// What tokens weigh, of rows of logits: exp((logit - highest) / temperature). fp32 [rows, vocab]
at::Tensor WeightsOf(const at::Tensor& logits, const at::Tensor& highest, const at::Tensor& draws) {
  const at::Tensor rows = draws[0].to(at::kLong);
  const at::Tensor below =
      logits.index_select(0, rows) - highest.index_select(0, rows).unsqueeze(1);
  return (below / draws[1].to(at::kFloat).unsqueeze(1)).exp();
}

// head: the bits of logits, tokens, and of the row's total. Leaves nothing found where they do not
// tell the token.
void DrawFrom(absl::Span<const int32_t> head, bool whole, StepItem& item) {
  const size_t count = head.size() / 2 - 1;
  LogitsHead of = {.whole = whole};
  for (size_t i = 0; i < count; ++i) {
    of.likeliest.push_back({.token = head[count + i], .weight = std::bit_cast<float>(head[i])});
  }
  std::memcpy(&of.total, &head[2 * count], sizeof(of.total));
  StepItem::Found& found = item.found[0];
  if (!std::isfinite(found.highest)) return;  // that is what is told of it
  const std::optional<int32_t> token = DrawFromHead(std::move(of), item.sequence->request.sampling,
                                                    static_cast<uint64_t>(item.work->draw));
  if (token.has_value()) {
    found.token = *token;
  } else {
    item.found.clear();
  }
}

}  // namespace

absl::Status DeviceForward::Supports(const Manifest& manifest) {
  for (size_t l = 0; l < manifest.layers.size(); ++l) {
    const LayerFacts& layer = manifest.layers[l];
    if (layer.soft_cap.has_value()) {
      return absl::UnimplementedError(absl::StrCat(
          "layer ", l, " has a soft cap, which works on the CPU only: use --device=cpu"));
    }
    if (layer.window.has_value() && *layer.window < manifest.context_length) {
      return absl::UnimplementedError(absl::StrCat(
          "layer ", l, " has a window of ", *layer.window, " tokens, smaller than the context of ",
          manifest.context_length, ", which works on the CPU only: use --device=cpu"));
    }
  }
  return absl::OkStatus();
}

DeviceForward::DeviceForward(const Model& model, const ModelShape& shape,
                             absl::Span<const RopeTable> ropes, KvPool& pool,
                             LaneRowsOfStep& mass_rows, std::shared_ptr<GraphRecorder> recorder,
                             int64_t head_tokens)
    : model_(model),
      shape_(shape),
      pool_(pool),
      mass_rows_(mass_rows),
      recorder_(model.writes_in_place() ? nullptr : std::move(recorder)),
      group_(shape.num_heads / shape.num_kv_heads),
      head_tokens_(head_tokens) {
  TORCH_CHECK(pool.num_rows() <= std::numeric_limits<int32_t>::max(), "the KV pool has ",
              pool.num_rows(),
              " rows, more than the GPU kernel can address: lower --kv_pool_bytes");
  for (const RopeTable& rope : ropes) {
    const at::Tensor table =
        at::from_blob(const_cast<float*>(rope.at(0)),  // only read
                      {model.manifest().context_length, 2 * rope.half()}, at::kFloat);
    ropes_.push_back({.interleaved = rope.interleaved(), .table = table.to(model.device())});
  }
  std::vector<float> scales;
  for (const LayerFacts& layer : model.manifest().layers) {
    scales.push_back(static_cast<float>(layer.scale));
  }
  scales_ = at::tensor(scales).view({-1, 1, 1, 1}).to(model.device());
}

// Calls `use` with the items as plans know them.
template <class Use>
auto DeviceForward::WithPlanned(Use use) const {
  std::vector<DeviceItem> planned;
  std::vector<std::vector<int64_t>> lanes(items_.size());
  for (size_t i = 0; i < items_.size(); ++i) {
    const StepItem& item = items_[i];
    TORCH_CHECK(!item.turns_keys(), "cache positions work on the CPU only");
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        lanes[i].push_back(item.sequence->cache.Lane(layer, head).first_row);
      }
    }
    planned.push_back({.row = item.row,
                       .decode = item.work->decode,
                       .tokens = item.work->tokens,
                       .lanes = lanes[i],
                       .slots = item.slots,
                       .positions = item.positions,
                       .used = item.used,
                       .num_logits = item.num_logits(),
                       .taps = item.sequence->tap.layers()});
  }
  return use(planned);
}

void DeviceForward::Run(absl::Span<StepItem> items) {
  items_ = items;
  copy_.Drop();
  arrivals_.clear();
  finds_.clear();
  tapped_.clear();
  kept_.assign(items.size(), {});
  latest_ = {};
  drawn_.clear();
  const at::Tensor logits = recorder_ != nullptr && CanBeRecorded() ? RunRecorded() : RunOnce();
  int64_t row = 0;
  for (StepItem& item : items) {
    TakeLogits(item, logits, row);
    row += item.num_logits();
  }
  TORCH_CHECK(row == logits.size(0), "logits rows do not match the batch");
  TakeDrawn(logits);
  TakeSteps();
  for (StepItem& item : items) {
    if (!item.wants(Signal::kGate)) continue;
    Bring(at::stack(item.gates), [&item](const at::Tensor& rows) { item.gate = rows; });
    item.gates.clear();
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (kept_[i].empty()) continue;
    Bring(at::stack(kept_[i]), [&to = items[i].last_residuals](const at::Tensor& residuals) {
      CopyTo(absl::MakeSpan(to), residuals);
    });
  }
  copy_.Run();
  // Sequences change last, when nothing more can fail.
  for (const std::function<void()>& find : finds_) find();
  FetchUntold(logits);
  for (const std::function<void()>& arrival : arrivals_) arrival();
  finds_.clear();
  arrivals_.clear();
  items_ = {};
}

// The rows whose heads did not tell, by a second copy.
void DeviceForward::FetchUntold(const at::Tensor& logits) {
  std::vector<at::Tensor> rows;
  std::vector<StepItem*> of;
  for (const Drawn& drawn : drawn_) {
    if (!drawn.item->found.empty()) continue;
    rows.push_back(logits.narrow(0, drawn.row, 1));
    of.push_back(drawn.item);
  }
  if (rows.empty()) return;
  const at::Tensor fetched = at::cat(rows).to(at::kCPU);
  ++second_copies_;
  for (size_t i = 0; i < of.size(); ++i) of[i]->logits = fetched.narrow(0, i, 1);
}

at::Tensor DeviceForward::RunOnce() {
  plan_ = WithPlanned([&](const auto& planned) { return PlanDevice(planned, shape_); });
  numbers_ = Pinned(plan_.numbers).to(model_.device(), /*non_blocking=*/true);
  index_ = numbers_.to(at::kLong);
  return model_.Forward(Index(plan_.tokens), Index(plan_.positions), Index(plan_.last), *this);
}

bool DeviceForward::CanBeRecorded() const {
  return std::all_of(items_.begin(), items_.end(), [](const StepItem& item) {
    return item.work->decode && !item.work->pass && item.num_rows() == 1 &&
           !item.sequence->steering.has_value();
  });
}

at::Tensor DeviceForward::RunRecorded() {
  int64_t longest = 0;
  for (const StepItem& item : items_) {
    longest = std::max(longest, *std::max_element(item.used.begin(), item.used.end()));
  }
  PaddedLayout layout = {.rows = RecordedSteps::Rows(std::ssize(items_)),
                         .max_length = RecordedSteps::Length(longest)};
  if (layout.rows == 0) return RunOnce();
  plan_ = WithPlanned(
      [&](const auto& planned) { return PlanPadded(planned, pool_.spare_row(), shape_, layout); });
  RecordedStep& step = recorded_.Find(layout);
  if (step.refused) return RunOnce();
  if (!step.numbers.defined()) {
    const int64_t taps = 2 * layout.rows * shape_.num_layers;  // which rows, and their order
    step.numbers =
        at::empty({plan_.read_by_forward + taps}, at::dtype(at::kInt).device(model_.device()));
  }
  const at::Tensor now = Pinned(plan_.numbers);
  step.numbers.narrow(0, 0, now.size(0)).copy_(now, /*non_blocking=*/true);

  if (step.graph == nullptr && step.ran) Record(step);
  if (step.refused) return RunOnce();
  SeenStep seen;
  if (step.graph != nullptr) {
    step.graph->Replay();
    seen = SeenStep::Of(step.graph->made());
    ++replays_;
  } else {
    step.plan = plan_;
    seen = RunPlanned(step);
    step.ran = true;
  }
  numbers_ = step.numbers;
  index_ = seen.index;
  for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
    TakeAttention(seen.layers[layer], layer);
    TakeTaps(seen.layers[layer].residual, layer + 1);
  }
  MeasureSeen(seen.layers);
  return seen.logits.narrow(0, 0, std::ssize(items_));
}

// The forward of a step's own plan, which is what is recorded: it sees nobody's items.
SeenStep DeviceForward::RunPlanned(const RecordedStep& step) {
  SeenStep seen;
  const absl::Span<StepItem> items = std::exchange(items_, {});
  DevicePlan plan = std::exchange(plan_, step.plan);
  const absl::Cleanup back = [&] {
    items_ = items;
    plan_ = std::move(plan);
    seen_ = nullptr;
    latest_ = {};
  };
  seen_ = &seen.layers;
  numbers_ = step.numbers;
  index_ = seen.index = numbers_.to(at::kLong);
  seen.logits =
      model_.Forward(Index(plan_.tokens), Index(plan_.positions), Index(plan_.last), *this);
  return seen;
}

void DeviceForward::Record(RecordedStep& step) {
  try {
    step.plan = plan_;
    step.graph = recorder_->Record([this, &step] { return RunPlanned(step).Tensors(); });
  } catch (const std::exception& error) {
    const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
    const std::string why = of_torch ? of_torch->what_without_backtrace() : error.what();
    recording_failed_ = why.substr(0, why.find('\n'));
    step.refused = true;
  }
}

// What decoded tokens' queries give the slots of their lanes: of all layers and items together, the
// longest lanes first.
void DeviceForward::MeasureSeen(absl::Span<const SeenLayer> layers) {
  struct Measured {
    int64_t query, start, used, layer, head;
    LaneRowsOfStep* rows;
  };
  std::vector<Measured> lanes;
  const int64_t heads = shape_.num_kv_heads, forward_rows = layers.front().q.size(0);
  auto add = [&](const StepItem& item, LaneRowsOfStep& rows) {
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int64_t head = 0; rows.Has(layer) && head < heads; ++head) {
        lanes.push_back({.query = (layer * forward_rows + item.row) * heads + head,
                         .start = item.sequence->cache.Lane(layer, head).first_row,
                         .used = item.used[layer * heads + head],
                         .layer = layer,
                         .head = head,
                         .rows = &rows});
      }
    }
  };
  for (const StepItem& item : items_) {
    if (item.wants_attention_rows()) add(item, item.sequence->attention_rows);
    if (item.measures_mass) add(item, mass_rows_);
  }
  if (lanes.empty()) return;
  std::stable_sort(lanes.begin(), lanes.end(),
                   [](const Measured& a, const Measured& b) { return a.used > b.used; });

  std::vector<int64_t> numbers;
  for (const auto member : {&Measured::query, &Measured::start, &Measured::used}) {
    for (const Measured& lane : lanes) numbers.push_back(lane.*member);
  }
  const auto count = std::ssize(lanes);
  const at::Tensor up = Pinned(numbers).to(model_.device(), /*non_blocking=*/true).view({3, count});
  std::vector<at::Tensor> rotated;
  for (const SeenLayer& layer : layers) rotated.push_back(layer.rotated);
  const at::Tensor queries = (at::stack(rotated).to(at::kFloat) * scales_)
                                 .view({-1, group_, shape_.key_width})
                                 .index_select(0, up[0]);
  int64_t end = 0;
  for (int64_t begin = 0; begin < count; begin = end) {
    const int64_t longest = lanes[begin].used;
    end = std::min(count, begin + LanesAtOnce(longest, shape_.key_width));
    const auto some = [&](const at::Tensor& of) { return of.narrow(0, begin, end - begin); };
    const at::Tensor masses =
        LaneMasses(some(queries), pool_.keys(), some(up[1]), some(up[2]), longest);
    Bring(masses,
          [of = std::vector(lanes.begin() + begin, lanes.begin() + end)](const at::Tensor& rows) {
            const float* row = rows.const_data_ptr<float>();
            for (const Measured& lane : of) {
              std::copy_n(row, lane.used, lane.rows->lane(lane.layer, lane.head).begin());
              row += rows.size(1);
            }
          });
  }
}

void DeviceForward::Bring(const at::Tensor& tensor,
                          std::function<void(const at::Tensor&)> arrived) {
  arrivals_.push_back([this, place = copy_.Add(tensor), arrived = std::move(arrived)] {
    arrived(copy_.Get(place));
  });
}

void DeviceForward::Find(const at::Tensor& tensor, std::function<void(const at::Tensor&)> arrived) {
  finds_.push_back([this, place = copy_.Add(tensor), arrived = std::move(arrived)] {
    arrived(copy_.Get(place));
  });
}

// In memory that the device reads by itself, where there is a device.
template <class Number>
at::Tensor DeviceForward::Pinned(const std::vector<Number>& numbers) const {
  const auto type = c10::CppTypeToScalarType<Number>::value;
  at::Tensor host =
      at::empty({std::ssize(numbers)}, at::dtype(type).pinned_memory(model_.device().is_cuda()));
  std::copy(numbers.begin(), numbers.end(), host.mutable_data_ptr<Number>());
  return host;
}

at::Tensor DeviceForward::Index(DevicePlan::Section section) const {
  return index_.narrow(0, section.begin, section.size);
}

at::Tensor DeviceForward::Numbers(DevicePlan::Section section) const {
  return numbers_.narrow(0, section.begin, section.size);
}

// Only what the host reads. The item's logits are those of all from `row` on.
void DeviceForward::TakeLogits(StepItem& item, const at::Tensor& all, int64_t row) {
  const at::Tensor logits = all.narrow(0, row, item.num_logits());
  const int64_t wanted = item.wants_prompt_logprobs() ? item.num_rows() : item.num_read_logits();
  const int64_t first = row + item.num_logits() - wanted;
  const RowNeed need = RowNeedOf(item);
  if (wanted > 0 && need != RowNeed::kRow) {
    drawn_.push_back({.item = &item, .row = first, .need = need});
  } else {
    Bring(all.narrow(0, first, wanted), [&item](const at::Tensor& rows) { item.logits = rows; });
  }
  if (!item.wants(Signal::kLogitEntropy)) return;
  Bring(EntropiesOf(logits), [&item](const at::Tensor& rows) { item.entropies = rows; });
}

// In place of rows: the highest of all at once, whoever reads them, and what tells the tokens of
// those that are drawn from.
void DeviceForward::TakeDrawn(const at::Tensor& logits) {
  if (drawn_.empty()) return;
  const auto [highest, likeliest] = at::max(logits, 1);
  const at::Tensor both = at::stack({highest, likeliest.to(at::kInt).view(at::kFloat)});
  Find(both, [this](const at::Tensor& rows) {
    const float* const logit = rows.const_data_ptr<float>();
    const auto* const token = reinterpret_cast<const int32_t*>(logit + rows.size(1));
    for (const Drawn& drawn : drawn_) {
      for (int64_t i = drawn.row; i < drawn.row + drawn.item->num_read_logits(); ++i) {
        drawn.item->found.push_back(
            {.highest = logit[i], .likeliest = token[i], .token = token[i]});
      }
    }
  });
  const int64_t at_once = std::max<int64_t>(kDrawnLogits / logits.size(1), 1);
  for (const RowNeed need : {RowNeed::kDrawn, RowNeed::kHead}) {
    std::vector<Drawn> of;
    std::copy_if(drawn_.begin(), drawn_.end(), std::back_inserter(of),
                 [need](const Drawn& drawn) { return drawn.need == need; });
    for (int64_t begin = 0; begin < std::ssize(of); begin += at_once) {
      const auto some = absl::MakeConstSpan(of).subspan(begin, at_once);
      need == RowNeed::kHead ? TakeHeads(logits, highest, some)
                             : DrawByShare(logits, highest, some);
    }
  }
}

// Row, temperature and share of each: fp64 [3, rows].
at::Tensor DeviceForward::DrawsOf(absl::Span<const Drawn> rows) const {
  std::vector<double> numbers;
  for (const Drawn& drawn : rows) numbers.push_back(static_cast<double>(drawn.row));
  for (const Drawn& drawn : rows) {
    numbers.push_back(*drawn.item->sequence->request.sampling.temperature);
  }
  for (const Drawn& drawn : rows) {
    const StepItem& item = *drawn.item;
    numbers.push_back(ShareOf(item.sequence->request.sampling, item.work->draw));
  }
  return Pinned(numbers).to(model_.device(), /*non_blocking=*/true).view({3, std::ssize(rows)});
}

// As Sample does: where the running sum of a row's weights passes the draw's share of all. Of a row
// that holds a NaN or an infinity, anything.
void DeviceForward::DrawByShare(const at::Tensor& logits, const at::Tensor& highest,
                                absl::Span<const Drawn> rows) {
  const at::Tensor draws = DrawsOf(rows);
  const at::Tensor sums = WeightsOf(logits, highest, draws).cumsum(1, at::kDouble);
  const at::Tensor total = sums.narrow(1, sums.size(1) - 1, 1).contiguous();
  const at::Tensor share = total * draws[2].unsqueeze(1);
  // Rounding may leave the share at the very end: then the last token of any weight.
  const at::Tensor token =
      at::minimum(at::searchsorted(sums, share, /*out_int32=*/true, /*right=*/true),
                  at::searchsorted(sums, total, /*out_int32=*/true, /*right=*/false));
  Find(token, [of = std::vector(rows.begin(), rows.end())](const at::Tensor& tokens) {
    for (size_t i = 0; i < of.size(); ++i) {
      of[i].item->found[0].token = tokens.const_data_ptr<int32_t>()[i];
    }
  });
}

// The likeliest tokens, from which the host draws; where they do not tell, nothing is found.
void DeviceForward::TakeHeads(const at::Tensor& logits, const at::Tensor& highest,
                              absl::Span<const Drawn> rows) {
  const at::Tensor draws = DrawsOf(rows);
  const at::Tensor total =
      WeightsOf(logits, highest, draws).sum(at::IntArrayRef{1}, /*keepdim=*/true, at::kDouble);
  const int64_t vocab = logits.size(1), count = std::min(vocab, head_tokens_);
  const auto [weights, tokens] = logits.index_select(0, draws[0].to(at::kLong)).topk(count, 1);
  Find(at::cat({weights.view(at::kInt), tokens.to(at::kInt), total.view(at::kInt)}, 1),
       [of = std::vector(rows.begin(), rows.end()), count, vocab](const at::Tensor& heads) {
         at::parallel_for(0, std::ssize(of), 1, [&](int64_t begin, int64_t end) {
           for (int64_t i = begin; i < end; ++i) {
             const auto* const head = heads.const_data_ptr<int32_t>() + i * heads.size(1);
             DrawFrom({head, static_cast<size_t>(heads.size(1))}, count == vocab, *of[i].item);
           }
         });
       });
}

// The steps of all items by one reduction.
void DeviceForward::TakeSteps() {
  if (tapped_.empty()) return;
  const at::Tensor now = at::cat(tapped_).index_select(0, Index(plan_.tap_order)).to(at::kFloat);
  std::vector<at::Tensor> before;
  for (const StepItem& item : items_) {
    const ResidualTap& tap = item.sequence->tap;
    if (tap.layers().empty()) continue;
    at::Tensor tapped = item.sequence->tapped;
    if (!tapped.defined()) {                                           // its first step
      tapped = at::from_blob(const_cast<float*>(tap.before().data()),  // only read
                             {std::ssize(tap.layers()), shape_.hidden_size}, at::kFloat)
                   .to(now.device());
    }
    before.push_back(std::move(tapped));
  }
  const at::Tensor steps = at::linalg_vector_norm(now - at::cat(before), 2, at::IntArrayRef{1});
  int64_t first = 0;
  for (StepItem& item : items_) {
    ResidualTap& tap = item.sequence->tap;
    const auto count = std::ssize(tap.layers());
    if (count == 0) continue;
    item.tapped = now.narrow(0, first, count);
    Bring(steps.narrow(0, first, count),
          [&tap](const at::Tensor& rows) { tap.PutSteps(Floats(rows)); });
    if (item.wants(Signal::kResidual)) {
      Bring(item.tapped, [&tap](const at::Tensor& rows) { tap.PutResiduals(Floats(rows)); });
    }
    first += count;
  }
}

at::Tensor DeviceForward::Block(const at::Tensor& residual, int64_t layer) {
  // Entering block `layer` is the residual after block layer - 1.
  if (layer > 0 && seen_ != nullptr) {
    seen_->back().residual = residual;
  } else if (layer > 0) {
    TakeTaps(residual, layer);
  }
  return Steered(items_, residual, layer);
}

void DeviceForward::TakeTaps(const at::Tensor& residual, int64_t layer) {
  const DevicePlan::Section tapped = plan_.taps[layer - 1];
  if (tapped.size > 0) tapped_.push_back(residual.index_select(0, Index(tapped)));
  for (size_t i = 0; i < items_.size(); ++i) {
    StepItem& item = items_[i];
    if (!item.last_residuals.empty()) {
      const at::Tensor last = residual[item.row + item.num_rows() - 1];
      kept_[i].push_back(last.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true));
    }
    if (layer == shape_.num_layers && item.wants(Signal::kFinalHidden)) {
      Bring(TakeFinalHidden(item, residual, model_),
            [&item](const at::Tensor& rows) { item.final_hidden = rows; });
    }
    if (!item.wants(Signal::kResidualDistance)) continue;
    item.residuals.push_back(residual.narrow(0, item.row, item.num_rows()).clone());
    if (layer < shape_.num_layers) continue;
    Bring(DistancesOf(item.residuals), [&item](const at::Tensor& rows) { item.distances = rows; });
    item.residuals.clear();
  }
}

at::Tensor DeviceForward::Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& normed, int64_t layer) {
  const int64_t n = q.size(0), pairs = n * shape_.num_kv_heads;  // (row, KV head)
  const at::Tensor& angles = AnglesOf(layer);
  const bool interleaved = ropes_[model_.manifest().layers[layer].rope].interleaved;
  // A KV head's queries and key turn together: a GPU minds the number of operations.
  const at::Tensor together =
      at::cat({q.view({n, shape_.num_kv_heads, group_, shape_.key_width}), k.unsqueeze(2)}, 2);
  const at::Tensor turned =
      Rotated(together.view({pairs, group_ + 1, shape_.key_width}), angles, interleaved);
  pool_.Write(Index(plan_.written[layer]), turned.select(1, group_),
              v.reshape({pairs, shape_.value_width}));
  const at::Tensor queries = turned.narrow(1, 0, group_).contiguous();
  const at::Tensor out = Attend(queries, layer);

  SeenLayer seen = {
      .normed = normed, .q = q, .rotated = queries.view({n, shape_.num_heads, shape_.key_width})};
  if (seen_ != nullptr) {
    seen_->push_back(std::move(seen));
  } else {
    TakeAttention(seen, layer);
    for (const StepItem& item : items_) {
      if (item.wants_attention_rows(layer)) {
        Measure(item, seen.rotated, layer, item.sequence->attention_rows);
      }
      if (item.measures_mass) Measure(item, seen.rotated, layer, mass_rows_);
    }
  }
  return out.view({n, shape_.num_heads, shape_.value_width});
}

void DeviceForward::TakeAttention(const SeenLayer& seen, int64_t layer) {
  for (const StepItem& item : items_) {
    TakeQueries(item, seen.q, seen.rotated, layer);
  }
  TakeGates(items_, seen.normed, layer, /*together=*/false);
}

// Cosines and sines at the rows' positions. Most layers share them.
const at::Tensor& DeviceForward::AnglesOf(int64_t layer) {
  const int64_t rope = model_.manifest().layers[layer].rope;
  const DevicePlan::Section positions = plan_.rope_positions[layer];
  if (!latest_.angles.defined() || latest_.rope != rope || latest_.positions != positions.begin) {
    latest_ = {.rope = rope,
               .positions = positions.begin,
               .angles = ropes_[rope].table.index_select(0, Index(positions)).unsqueeze(1)};
  }
  return latest_.angles;
}

// queries [n x kv_heads, group, width], rotated, contiguous -> the same
at::Tensor DeviceForward::Attend(const at::Tensor& queries, int64_t layer) const {
  at::Tensor out;
  for (const DevicePlan::Call& call : plan_.calls) {
    const at::Tensor rows = Index(call.query_rows);
    const at::Tensor attended =
        VarlenAttention({.q = call.in_order ? queries : queries.index_select(0, rows),
                         .keys = pool_.keys(),
                         .values = pool_.values(),
                         .query_starts = Numbers(call.query_starts),
                         .starts = Numbers(call.starts[layer]),
                         .lengths = Numbers(call.lengths[layer]),
                         .max_queries = call.max_queries,
                         .max_length = call.max_length[layer],
                         .causal = call.causal,
                         .scale = model_.manifest().layers[layer].scale});
    if (call.in_order) return attended;
    if (!out.defined()) out = at::empty_like(queries);
    out.index_copy_(0, rows, attended);
  }
  return out;
}

void DeviceForward::TakeQueries(const StepItem& item, const at::Tensor& q,
                                const at::Tensor& rotated, int64_t layer) {
  OpenSequence& sequence = *item.sequence;
  if (item.wants(Signal::kQueryMoments)) {
    sequence.moments.Take(layer, q.narrow(0, item.row, item.num_rows()), item.work->first);
  }
  if (!item.wants_queries()) return;
  const int64_t kept = std::min(item.num_rows(), item.queries->capacity());
  Bring(rotated.narrow(0, item.row + item.num_rows() - kept, kept),
        [&queries = *item.queries, layer, kept](const at::Tensor& rows) {
          queries.Take(layer, static_cast<const char*>(rows.const_data_ptr()), kept);
        });
}

// What the item's queries give each slot of its lanes at a layer.
void DeviceForward::Measure(const StepItem& item, const at::Tensor& rotated, int64_t layer,
                            LaneRowsOfStep& rows) {
  const SequenceCache& cache = item.sequence->cache;
  const int64_t heads = cache.Uniform(layer) ? shape_.num_kv_heads : 1;  // at once
  const at::Tensor q = rotated.narrow(0, item.row, item.num_rows());
  std::vector<at::Tensor> masses;
  for (int64_t head = 0; head < shape_.num_kv_heads; head += heads) {
    const LaneRows lane = cache.Lane(layer, head);
    masses.push_back(AttentionMass(q.narrow(1, head * group_, heads * group_), pool_.keys(),
                                   lane.first_row, heads, lane.capacity,
                                   item.used[layer * shape_.num_kv_heads + head],
                                   model_.manifest().layers[layer].scale)
                         .flatten());
  }
  Bring(at::cat(masses),
        [&rows, layer](const at::Tensor& mass) { CopyTo(rows.layer(layer), mass); });
}

}  // namespace epikv
