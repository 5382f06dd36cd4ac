#include "runtime/executor/executor.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "absl/container/fixed_array.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "policies/policy.h"
#include "runtime/kernels/kernels.h"
#include "runtime/model/model_contract.h"
#include "runtime/base/reason.h"
#include "runtime/sampling/sampler.h"
#include "runtime/base/scalar_type.h"
#include "runtime/step/step_item.h"

namespace epikv {
namespace {

// One row in the model's dtype, in bytes.
using RowScratch = absl::FixedArray<char, 1024>;

// Charges the time of a scope to one stage.
class StageTimer {
 public:
  StageTimer(StepStats& step, Stage stage) : step_(step), stage_(static_cast<int>(stage)) {}
  ~StageTimer() {
    step_.wall[stage_] += absl::Now() - wall_;
    step_.cpu[stage_] += Cpu() - cpu_;
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  static absl::Duration Cpu() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return absl::DurationFromTimespec(now);
  }
  StepStats& step_;
  const int stage_;
  const absl::Time wall_ = absl::Now();
  const absl::Duration cpu_ = Cpu();
};

// W_O of a layer, by query head. [num_heads, value_width, hidden]
at::Tensor ByHead(const at::Tensor& output_projection, int64_t num_heads) {
  return output_projection.t().unflatten(0, {num_heads, -1});
}

std::vector<float> Floats(const at::Tensor& tensor) {
  const at::Tensor rows = tensor.contiguous();
  return {rows.const_data_ptr<float>(), rows.const_data_ptr<float>() + rows.numel()};
}

std::vector<at::Tensor> OutputGrams(const Model& model) {
  const Manifest& manifest = model.manifest();
  std::vector<at::Tensor> grams;
  for (int64_t layer = 0; layer < manifest.num_layers(); ++layer) {
    const at::Tensor by_head =
        ByHead(model.output_projection(layer), manifest.num_heads).to(at::kFloat);
    grams.push_back(at::matmul(by_head, by_head.transpose(1, 2)).cpu());
  }
  return grams;
}

// A sequence's cache as its policy sees it.
class View final : public CacheView {
 public:
  View(OpenSequence& sequence, const KvPool& pool, const Model& model,
       const std::vector<at::Tensor>& output_grams)
      : sequence_(sequence),
        pool_(pool),
        model_(model),
        manifest_(model.manifest()),
        output_grams_(output_grams) {}

  int64_t num_layers() const override { return sequence_.cache.num_layers(); }
  int64_t num_kv_heads() const override { return sequence_.cache.num_kv_heads(); }
  int64_t num_heads() const override { return manifest_.num_heads; }
  int64_t prompt_tokens() const override {
    return static_cast<int64_t>(sequence_.request.prompt.size());
  }
  int64_t newest() const override { return sequence_.cache.newest(); }
  int64_t next_position(int64_t layer, int64_t head) const override {
    return sequence_.cache.NextPosition(sequence_.cache.TableOf(layer, head), newest() + 1);
  }
  const Protection& protection() const override { return sequence_.request.protection; }
  uint64_t seed() const override { return sequence_.request.sampling.seed; }
  int64_t excess(int64_t layer, int64_t head) const override {
    return sequence_.cache.Excess(sequence_.cache.TableOf(layer, head));
  }
  absl::Span<const int32_t> index(int64_t layer, int64_t head) const override {
    return Table(layer, head).index();
  }
  absl::Span<float> column(int64_t place, int64_t layer, int64_t head) override {
    return Table(layer, head).column(place);
  }
  at::Tensor keys(int64_t layer, int64_t head) const override {
    const LaneRows lane = sequence_.cache.Lane(layer, head);
    if (pool_.format().stored == KvDType::kModel) return Rows(pool_.keys(), lane, layer, head);
    return ReadRows(lane.keys, Table(layer, head).used(), manifest_.layers[layer].key_width,
                    pool_.format());
  }
  at::Tensor values(int64_t layer, int64_t head) const override {
    const LaneRows lane = sequence_.cache.Lane(layer, head);
    if (pool_.format().stored == KvDType::kModel) return Rows(pool_.values(), lane, layer, head);
    return ReadRows(lane.values, Table(layer, head).used(), manifest_.layers[layer].value_width,
                    pool_.format());
  }
  at::Tensor keys_of(absl::Span<const int64_t> slots) const override {
    return ByLane(pool_.ReadKeys(RowsOf(slots)));
  }
  at::Tensor values_of(absl::Span<const int64_t> slots) const override {
    return ByLane(pool_.ReadValues(RowsOf(slots)));
  }
  at::Tensor queries(int64_t layer) const override {
    at::Tensor queries = at::empty(
        {sequence_.queries.size(), manifest_.num_heads, manifest_.layers[layer].key_width},
        ScalarTypeOf(manifest_.dtype));
    sequence_.queries.Read(layer, static_cast<char*>(queries.mutable_data_ptr()));
    return queries;
  }
  AttentionFacts attention(int64_t layer) const override {
    const LayerFacts& facts = manifest_.layers[layer];
    return {.scale = facts.scale, .soft_cap = facts.soft_cap, .window = facts.window};
  }
  QueryMoments query_moments(int64_t layer) const override {
    const QueryMoments moments = sequence_.moments.Read(layer);
    return {
        .count = moments.count, .mean = moments.mean.cpu(), .covariance = moments.covariance.cpu()};
  }
  at::Tensor output_projection(int64_t layer) const override {
    return ByHead(model_.output_projection(layer).cpu(), manifest_.num_heads);
  }
  at::Tensor output_gram(int64_t layer) const override { return output_grams_[layer]; }

 private:
  // A lane's rows, [used, width], where policies compute: a copy if the pool is elsewhere.
  at::Tensor Rows(const at::Tensor& pool, const LaneRows& lane, int64_t layer, int64_t head) const {
    return pool.narrow(0, lane.first_row, Table(layer, head).used()).cpu();
  }
  // These slots of every lane, as rows of the pool. [lanes x slots]
  std::vector<int64_t> RowsOf(absl::Span<const int64_t> slots) const {
    std::vector<int64_t> rows;
    rows.reserve(num_layers() * num_kv_heads() * slots.size());
    for (int64_t layer = 0; layer < num_layers(); ++layer) {
      for (int64_t head = 0; head < num_kv_heads(); ++head) {
        const int64_t first = sequence_.cache.Lane(layer, head).first_row;
        for (const int64_t slot : slots) rows.push_back(first + slot);
      }
    }
    return rows;
  }
  at::Tensor ByLane(const at::Tensor& rows) const {
    return rows.view({num_layers(), num_kv_heads(), -1, rows.size(1)});
  }
  SlotTable& Table(int64_t layer, int64_t head) const {
    return sequence_.cache.table(sequence_.cache.TableOf(layer, head));
  }
  OpenSequence& sequence_;
  const KvPool& pool_;
  const Model& model_;
  const Manifest& manifest_;
  const std::vector<at::Tensor>& output_grams_;
};

EvictionTrace TraceOf(const std::vector<std::vector<int32_t>>& victims, const SequenceCache& cache,
                      Granularity granularity) {
  EvictionTrace trace{.at_token = cache.newest()};
  for (size_t t = 0; t < victims.size(); ++t) {
    if (victims[t].empty()) continue;
    EvictionTrace::Victims of{.index = victims[t]};
    const int64_t table = static_cast<int64_t>(t);
    if (granularity == Granularity::kLayer) of.layer = table;
    if (granularity == Granularity::kHead) {
      of.layer = table / cache.num_kv_heads();
      of.head = table % cache.num_kv_heads();
    }
    trace.victims.push_back(std::move(of));
  }
  return trace;
}

// The share of attention that what lies in `slots` has, on average over lanes. rows: over each
// lane's slots.
double MassOf(const SequenceCache::Slots& slots, const SequenceCache& cache,
              const LaneRowsOfStep& rows) {
  double mass = 0;
  for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
    for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
      const absl::Span<const float> row = rows.at(layer, head);
      for (int64_t slot : slots[cache.TableOf(layer, head)]) mass += row[slot];
    }
  }
  return mass / static_cast<double>(cache.num_layers() * cache.num_kv_heads());
}

// TorchScript's tracebacks end with what went wrong; CUDA's errors begin with it.
std::string WhyItFailed(const std::exception& e) {
  const auto* const error = dynamic_cast<const c10::Error*>(&e);
  const absl::string_view what = error == nullptr ? e.what() : error->what_without_backtrace();
  return absl::StartsWith(what, "CUDA") ? std::string(what.substr(0, what.find('\n')))
                                        : LastLine(what);
}

// INTERNAL, whatever the policy says: nothing was wrong with the request.
absl::Status PolicyFailure(const Request& request, absl::string_view kind, absl::string_view why) {
  absl::Status status =
      absl::InternalError(absl::StrCat("policy '", request.spec->name, "' failed: ", why));
  return WithReason(WithPolicyError(std::move(status), kind), kPolicyFailed);
}

// Runs a policy's own code: whatever it throws is its failure.
template <class Call>
absl::Status AskPolicy(const Request& request, Call call) {
  try {
    call();
    return absl::OkStatus();
  } catch (const std::exception& e) {
    return PolicyFailure(request, kPolicyThrew, e.what());
  } catch (...) {
    return PolicyFailure(request, kPolicyThrew, kNoException);
  }
}

const absl::Status& NoMemory() {
  static const auto& status = *new absl::Status(absl::InternalError("there is no memory"));
  return status;
}

// A sequence of ours failed, which none of the others need know. Throws nothing.
absl::Status OwnFailure(absl::string_view what, const std::exception& e) {
  try {
    return absl::InternalError(absl::StrCat(what, ": ", WhyItFailed(e)));
  } catch (const std::exception&) {
    return NoMemory();
  }
}

}  // namespace

Executor::Executor(std::unique_ptr<Model> model, ExecutorOptions options)
    : model_(std::move(model)),
      options_(options),
      shape_(ShapeOf(model_->manifest())),
      output_grams_(OutputGrams(*model_)),
      attention_(options.decode_kernel, options.prefill_kernel),
      pool_(options.pool_rows, shape_.key_width, shape_.value_width,
            {model_->manifest().dtype, options.kv_dtype},
            {.device = model_->device(), .by_gather = options.device_path}),
      prefixes_(pool_, shape_.num_layers * shape_.num_kv_heads, options.prefix_block_tokens,
                shape_.num_layers * shape_.hidden_size),
      taps_(shape_.num_layers),
      mass_rows_({}, shape_.num_kv_heads) {
  NoMemory();  // made while there is some
  const Manifest& manifest = model_->manifest();
  for (const Rope& rope : manifest.ropes) ropes_.emplace_back(rope, manifest.context_length);
  if (options.device_path) {
    device_ = std::make_unique<DeviceForward>(*model_, shape_, ropes_, pool_, mass_rows_);
  }
}

Executor::~Executor() = default;

absl::StatusOr<int64_t> Executor::Open(SequenceId id, const Request& request,
                                       int64_t prefix_bytes) {
  constexpr absl::string_view kWhat = "the request could not be opened";
  try {
    if (pool_.lost() && open_.empty()) {
      prefixes_.Clear();
      pool_.StartAnew();
    }
    std::vector<PrefixCache::Block> blocks = prefixes_.Match(request);  // now the last to go
    prefixes_.Limit(prefix_bytes);
    std::erase_if(blocks, [this](PrefixCache::Block block) { return !prefixes_.Contains(block); });
    auto sequence = std::make_unique<OpenSequence>(pool_, id, request, shape_);
    if (request.traits.evicts) {
      absl::Status asked = AskPolicy(request, [&] {
        sequence->state =
            request.policy->NewState({.prompt_tokens = static_cast<int64_t>(request.prompt.size()),
                                      .budget = request.budget,
                                      .protection = request.protection});
      });
      if (!asked.ok()) return asked;
    }
    const absl::StatusOr<int64_t> cached = LoadPrefix(*sequence, blocks);
    if (cached.ok()) open_.emplace(id, std::move(sequence));
    return cached;
  } catch (const std::exception& e) {
    return OwnFailure(kWhat, e);
  }
}

// Caches a prompt's first tokens as if it had run them: its policy observes them, too.
absl::StatusOr<int64_t> Executor::LoadPrefix(OpenSequence& sequence,
                                             absl::Span<const PrefixCache::Block> blocks) {
  const Request& request = sequence.request;
  const int64_t count = prefixes_.block_tokens();
  int64_t cached = 0;
  for (const PrefixCache::Block block : blocks) {
    prefixes_.Load(block, sequence.cache);
    sequence.cache.Append(cached, count);
    if (request.traits.evicts) {
      View view(sequence, pool_, *model_, output_grams_);
      SequenceStep step{.state = sequence.state.get(),
                        .cache = view,
                        .phase = Phase::kPrefill,
                        .first = cached,
                        .count = count,
                        .signals = {}};
      absl::Status asked = AskPolicy(request, [&] { request.policy->Observe({&step, 1}); });
      if (!asked.ok()) return asked;
    }
    cached += count;
  }
  if (!blocks.empty()) {
    sequence.prefix = {.last = blocks.back(), .tokens = cached};
    sequence.tap.Restore(prefixes_.residuals(blocks.back()));
  }
  return cached;
}

// Whether this step ends in a round whose victims' attention is to be measured.
bool Executor::MassDue(const OpenSequence& sequence, const WorkItem& work) const {
  const PolicyTraits& traits = sequence.request.traits;
  if (options_.mass_interval == 0 || !work.decode || !traits.evicts) return false;
  if (sequence.mass_at.has_value() && work.first - *sequence.mass_at < options_.mass_interval) {
    return false;
  }
  return sequence.cache.OverBudget(traits.slack, /*coming=*/1);
}

std::vector<StepItem> Executor::Prepare(absl::Span<const WorkItem> items) {
  mass_of_.reset();
  std::vector<StepItem> step;
  step.reserve(items.size());
  for (const WorkItem& work : items) {
    StepItem item{.work = &work, .sequence = open_.at(work.id).get()};
    const SequenceCache& cache = item.sequence->cache;
    for (int64_t t = 0; t < cache.num_tables(); ++t) {
      item.slots.push_back(cache.table(t).NextSlot());
      item.positions.push_back(cache.NextPosition(t, work.first));
    }
    for (int64_t layer = 0; layer < shape_.num_layers; ++layer) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        item.used.push_back(cache.table(cache.TableOf(layer, head)).UsedAfter(item.num_rows()));
      }
    }
    if (item.wants_attention_rows()) {
      item.sequence->attention_rows.Resize(item.used);
    }
    // Decoding and reading the same tokens, bits may differ.
    if (!(work.decode && options_.deterministic) &&
        prefixes_.Wants(item.sequence->prefix, item.sequence->request, cache,
                        work.first + item.num_rows())) {
      item.last_residuals.resize(shape_.num_layers * shape_.hidden_size);
    }
    if (!mass_of_.has_value() && MassDue(*item.sequence, work)) {
      mass_of_ = work.id;
      mass_rows_.Resize(item.used);
      item.measures_mass = true;
    }
    step.push_back(std::move(item));
  }
  return step;
}

absl::StatusOr<std::vector<ForwardOutcome>> Executor::Forward(absl::Span<const WorkItem> items) {
  times_ = StepStats();
  if (pool_.lost()) return absl::InternalError("rows of the KV pool were lost in a failed move");
  std::vector<StepItem> step;
  std::vector<ForwardOutcome> outcomes;
  try {
    outcomes.reserve(items.size());
    step = Prepare(items);
    // Without --deterministic one forward holds all rows.
    size_t begin = 0;
    while (begin < step.size()) {
      size_t end = begin;
      int64_t rows = 0;
      while (end < step.size() &&
             (!options_.deterministic || rows + step[end].num_rows() <= kDeterministicRows)) {
        step[end].row = rows;
        rows += step[end++].num_rows();
      }
      RunModel(absl::MakeSpan(step).subspan(begin, end - begin));
      begin = end;
    }
  } catch (const std::exception& e) {
    running_ = {};
    return absl::InternalError(WhyItFailed(e));
  }
  const StageTimer timer(times_, Stage::kSample);
  for (StepItem& item : step) {
    try {
      outcomes.push_back(Finish(item));
      if (outcomes.back().status.ok()) KeepPrefix(item);
    } catch (const std::exception& e) {  // its own alone: the others have committed
      outcomes.resize(&item - step.data());
      outcomes.push_back({.status = OwnFailure("sampling", e)});
    }
  }
  return outcomes;
}

// Remembers what was cached for prompts that begin alike. One for which there is no memory is not
// kept, as one for which there is no room: the request itself has lost nothing.
void Executor::KeepPrefix(const StepItem& item) {
  OpenSequence& sequence = *item.sequence;
  try {
    prefixes_.OnCached(sequence.prefix, item.work->tokens);
    if (item.last_residuals.empty()) return;
    prefixes_.Keep(sequence.prefix, sequence.request, sequence.cache, item.last_residuals);
  } catch (const std::exception&) {
  }
}

void Executor::RunModel(absl::Span<StepItem> items) {
  if (device_ != nullptr) return device_->Run(items);
  std::vector<int64_t> tokens, positions, last;
  for (const StepItem& item : items) {
    for (int64_t i = 0; i < item.num_rows(); ++i) {
      tokens.push_back(item.work->tokens[i]);
      positions.push_back(item.positions.front() + i);
    }
    for (int64_t i = item.num_logits(); i > 0; --i) {
      last.push_back(item.row + item.num_rows() - i);
    }
  }
  const size_t num_last = last.size();
  if (options_.deterministic) {  // a product's bits depend on its number of rows
    tokens.resize(kDeterministicRows);
    positions.resize(kDeterministicRows);
    last.resize(kDeterministicRows);
  }
  for (std::vector<Tap>& taps : taps_) taps.clear();
  for (StepItem& item : items) {
    const std::vector<int64_t>& layers = item.sequence->tap.layers();
    for (size_t place = 0; place < layers.size(); ++place) {
      taps_[layers[place]].push_back({&item, static_cast<int64_t>(place)});
    }
  }
  running_ = items;
  const at::Tensor logits =
      model_->Forward(at::tensor(tokens, at::kLong), at::tensor(positions, at::kLong),
                      at::tensor(last, at::kLong), *this);
  running_ = {};
  int64_t row = 0;
  for (StepItem& item : items) {
    item.logits = logits.narrow(0, row, item.num_logits()).contiguous();
    if (item.wants(Signal::kLogitEntropy)) item.entropies = EntropiesOf(item.logits);
    row += item.num_logits();
  }
  TORCH_CHECK(row == static_cast<int64_t>(num_last), "logits rows do not match the batch");
}

at::Tensor Executor::Block(const at::Tensor& residual, int64_t layer) {
  // Entering block `layer` is the residual after block layer - 1.
  if (layer == 0) return residual;
  TakeResiduals(residual, layer);
  if (taps_[layer - 1].empty()) return residual;
  const StageTimer timer(times_, Stage::kTaps);
  const at::Tensor rows = residual.contiguous();
  const DType dtype = DTypeOf(rows.scalar_type());
  const char* const data = static_cast<const char*>(rows.const_data_ptr());
  const int64_t row_bytes = shape_.hidden_size * static_cast<int64_t>(rows.element_size());
  for (const Tap& tap : taps_[layer - 1]) {
    const int64_t row = tap.item->row + tap.item->num_rows() - 1;
    tap.item->sequence->tap.Take(tap.place, data + row * row_bytes, dtype);
  }
  return residual;
}

// A distance to the last block's residual needs all of them: they are held for this one forward, of
// the rows of those who ask.
void Executor::TakeResiduals(const at::Tensor& residual, int64_t layer) {
  for (StepItem& item : running_) {
    if (!item.last_residuals.empty()) {
      at::from_blob(item.last_residuals.data() + (layer - 1) * shape_.hidden_size,
                    {shape_.hidden_size})
          .copy_(residual[item.row + item.num_rows() - 1]);
    }
    if (!item.wants(Signal::kResidualDistance)) continue;
    const StageTimer timer(times_, Stage::kTaps);
    item.residuals.push_back(residual.narrow(0, item.row, item.num_rows()).clone());
    if (layer < shape_.num_layers) continue;
    item.distances = DistancesOf(item.residuals);
    item.residuals.clear();
  }
}

at::Tensor Executor::Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& normed, int64_t layer) {
  const LayerFacts& facts = model_->manifest().layers[layer];
  const AttentionShape shape{.num_heads = shape_.num_heads,
                             .num_kv_heads = shape_.num_kv_heads,
                             .key_width = shape_.key_width,
                             .value_width = shape_.value_width,
                             .scale = facts.scale,
                             .soft_cap = facts.soft_cap,
                             .window = facts.window,
                             .dtype = ScalarTypeOf(pool_.format().model),
                             .stored = pool_.format().stored};
  // Padding rows of deterministic mode stay zero and are attended by nobody.
  at::Tensor rotated = options_.deterministic ? at::zeros_like(q, at::MemoryFormat::Contiguous)
                                              : at::empty_like(q, at::MemoryFormat::Contiguous);
  const absl::Time begin = absl::Now();
  Append(running_, q.contiguous(), k.contiguous(), v.contiguous(), layer, rotated);

  std::vector<AttentionItem> items;
  items.reserve(running_.size());
  for (StepItem& item : running_) {
    if (item.turns_keys()) TurnKeys(item, layer);
    FindHidden(item, layer);
    const bool measures = item.wants_attention_rows(layer);
    std::vector<float>* const logits = measures             ? &item.sequence->decode_logits
                                       : item.measures_mass ? &mass_logits_
                                                            : nullptr;
    items.push_back({.cache = &item.sequence->cache,
                     .row = item.row,
                     .num_rows = item.num_rows(),
                     .decode = item.work->decode,
                     .used = absl::MakeConstSpan(item.used).subspan(layer * shape_.num_kv_heads,
                                                                    shape_.num_kv_heads),
                     .keys = item.turned_keys,
                     .positions = item.lane_positions,
                     .logits = item.work->decode ? logits : nullptr,
                     .log_sum_exp = measures && !item.work->decode ? &item.log_sum_exp : nullptr});
  }
  at::Tensor out = attention_.Run(rotated, layer, items, shape);
  times_.wall[static_cast<int>(Stage::kAttention)] += absl::Now() - begin;
  for (size_t i = 0; i < items.size(); ++i) {
    const StepItem& item = running_[i];
    const bool moments = item.wants(Signal::kQueryMoments);
    if (!item.wants_queries() && !moments && !item.wants_attention_rows(layer) &&
        !item.measures_mass) {
      continue;
    }
    OpenSequence& sequence = *item.sequence;
    const StageTimer taps(times_, Stage::kTaps);
    if (item.wants_queries()) {
      const int64_t row_bytes = shape_.num_heads * shape_.key_width * rotated.element_size();
      sequence.queries.Take(
          layer, static_cast<const char*>(rotated.const_data_ptr()) + items[i].row * row_bytes,
          items[i].num_rows);
    }
    if (moments) {
      sequence.moments.Take(layer, q.narrow(0, items[i].row, items[i].num_rows), item.work->first);
    }
    if (item.measures_mass) {
      attention_.Rows(rotated, layer, items[i], shape, mass_rows_.layer(layer));
    }
    if (!item.wants_attention_rows(layer)) continue;
    const absl::Span<float> rows = sequence.attention_rows.layer(layer);
    if (items[i].decode) {
      attention_.Rows(rotated, layer, items[i], shape, rows);
    } else {
      attention_.ColumnSums(rotated, layer, items[i], shape, rows);
    }
  }
  return out;
}

// Rotates queries into `rotated`, and writes rotated keys and values into the slots the step takes,
// as the pool's format has them.
void Executor::Append(absl::Span<const StepItem> items, const at::Tensor& q, const at::Tensor& k,
                      const at::Tensor& v, int64_t layer, at::Tensor& rotated) {
  const RopeTable& rope = ropes_[model_->manifest().layers[layer].rope];
  const KvFormat& format = pool_.format();
  const int64_t kv_heads = shape_.num_kv_heads, group = shape_.num_heads / kv_heads;
  const int64_t key_bytes = shape_.key_width * q.element_size();
  const int64_t value_bytes = shape_.value_width * v.element_size();
  const char* const q_data = static_cast<const char*>(q.const_data_ptr());
  const char* const k_data = static_cast<const char*>(k.const_data_ptr());
  const char* const v_data = static_cast<const char*>(v.const_data_ptr());
  char* const out_data = static_cast<char*>(rotated.mutable_data_ptr());
  auto rotate = [&](const char* in, char* out, const float* cos_sin) {
    Rotate(in, out, shape_.key_width, rope.half(), rope.interleaved(), cos_sin, format.model);
  };
  for (const StepItem& item : items) {
    const SequenceCache& cache = item.sequence->cache;
    at::parallel_for(0, item.num_rows(), 16, [&](int64_t begin, int64_t end) {
      RowScratch turned(key_bytes);
      for (int64_t head = 0; head < kv_heads; ++head) {
        const int64_t table = cache.TableOf(layer, head);
        const LaneRows lane = cache.Lane(layer, head);
        for (int64_t i = begin; i < end; ++i) {
          const float* const cos_sin = rope.at(item.positions[table] + i);
          const int64_t slot = item.slots[table] + i;
          const int64_t kv_row = (item.row + i) * kv_heads + head;
          const char* key = k_data + kv_row * key_bytes;
          if (!item.turns_keys()) {
            rotate(key, turned.data(), cos_sin);
            key = turned.data();
          }
          WriteRow(key, lane.keys + slot * pool_.key_bytes(), shape_.key_width, format);
          WriteRow(v_data + kv_row * value_bytes, lane.values + slot * pool_.value_bytes(),
                   shape_.value_width, format);
          const int64_t q_row = (item.row + i) * shape_.num_heads + head * group;
          for (int64_t g = 0; g < group; ++g) {
            rotate(q_data + (q_row + g) * key_bytes, out_data + (q_row + g) * key_bytes, cos_sin);
          }
        }
      }
    });
  }
}

// Where the tokens are, if the layer's window hides one from some row: none while there are not
// more tokens than it is wide.
void Executor::FindHidden(StepItem& item, int64_t layer) {
  item.lane_positions.clear();
  const std::optional<int64_t> window = model_->manifest().layers[layer].window;
  if (!window.has_value()) return;
  const SequenceCache& cache = item.sequence->cache;
  bool hides = false;
  for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
    hides |= item.positions[cache.TableOf(layer, head)] + item.num_rows() > *window;
  }
  for (int64_t head = 0; hides && head < shape_.num_kv_heads; ++head) {
    const int64_t table = cache.TableOf(layer, head);
    item.lane_positions.push_back(
        {.of_slots = item.PositionsOf(table).data(), .of_first_row = item.positions[table]});
  }
}

// Rotates a layer's keys at their ranks, in lanes laid out, and of a format, as those of the cache.
void Executor::TurnKeys(StepItem& item, int64_t layer) {
  const RopeTable& rope = ropes_[model_->manifest().layers[layer].rope];
  const KvFormat& format = pool_.format();
  const SequenceCache& cache = item.sequence->cache;
  const int64_t key_bytes = pool_.key_bytes();
  std::vector<int64_t> starts;
  int64_t rows = 0;
  for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
    starts.push_back(rows);
    rows += cache.Lane(layer, head).capacity;
  }
  at::Tensor& scratch = item.sequence->turned;
  if (!scratch.defined() || scratch.size(0) < rows) {
    scratch = at::empty({rows, key_bytes}, at::kByte);
  }
  char* const turned = static_cast<char*>(scratch.mutable_data_ptr());
  item.turned_keys.clear();
  for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
    char* const out = turned + starts[head] * key_bytes;
    const char* const in = cache.Lane(layer, head).keys;
    const std::vector<int64_t>& ranks = item.PositionsOf(cache.TableOf(layer, head));
    at::parallel_for(0, std::ssize(ranks), 64, [&](int64_t begin, int64_t end) {
      RowScratch key(shape_.key_width * ElementBytes(format.model));
      for (int64_t slot = begin; slot < end; ++slot) {
        ReadRow(in + slot * key_bytes, key.data(), shape_.key_width, format);
        Rotate(key.data(), key.data(), shape_.key_width, rope.half(), rope.interleaved(),
               rope.at(ranks[slot]), format.model);
        WriteRow(key.data(), out + slot * key_bytes, shape_.key_width, format);
      }
    });
    item.turned_keys.push_back(out);
  }
}

// One of the rows whose logits an item asked for. [vocab]
absl::Span<const float> Executor::LogitsOf(const StepItem& item, int64_t row) {
  const int64_t vocab = item.logits.size(1);
  return {item.logits.const_data_ptr<float>() + row * vocab, static_cast<size_t>(vocab)};
}

// The i-th output token that an item gives.
absl::StatusOr<OutputToken> Executor::TakeOutput(const StepItem& item, int64_t i,
                                                 const SamplingParams& sampling) {
  const WorkItem& work = *item.work;
  const Request& request = item.sequence->request;
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

// Of the prompt tokens that an item's rows predict.
absl::StatusOr<PromptLogprobs> Executor::TakePromptLogprobs(const StepItem& item) {
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

// Commits one item and takes its output tokens.
ForwardOutcome Executor::Finish(StepItem& item) {
  const WorkItem& work = *item.work;
  OpenSequence& sequence = *item.sequence;
  sequence.cache.Append(work.first, item.num_rows());
  sequence.tap.Commit(work.decode);
  if (item.wants_queries()) sequence.queries.Commit(item.num_rows());
  if (item.wants(Signal::kQueryMoments)) sequence.moments.Commit();
  if (item.tapped.defined()) sequence.tapped = item.tapped;
  if (item.wants(Signal::kLogitEntropy)) sequence.logit_entropy = Floats(item.entropies);
  if (item.wants(Signal::kResidualDistance)) sequence.residual_distance = Floats(item.distances);

  ForwardOutcome outcome;
  if (sequence.request.output.residual_steps) {
    const absl::Span<const float> steps = sequence.tap.steps();
    outcome.residual_steps.assign(steps.begin(), steps.end());
  }
  if (item.wants_prompt_logprobs()) {
    absl::StatusOr<PromptLogprobs> prompt = TakePromptLogprobs(item);
    if (!prompt.ok()) return {.status = prompt.status()};
    outcome.prompt = *std::move(prompt);
  }
  for (int64_t i = 0; i < work.num_outputs; ++i) {
    absl::StatusOr<OutputToken> output = TakeOutput(item, i, sequence.request.sampling);
    if (!output.ok()) {
      outcome.status = output.status();
      return outcome;
    }
    outcome.outputs.push_back(*std::move(output));
  }
  for (int64_t completion = 1; completion < work.completions; ++completion) {
    absl::StatusOr<OutputToken> output =
        TakeOutput(item, work.num_outputs - 1, SamplingOf(sequence.request.sampling, completion));
    if (!output.ok()) {
      outcome.status = output.status();
      return outcome;
    }
    outcome.siblings.push_back(*std::move(output));
  }
  return outcome;
}

std::vector<SettleOutcome> Executor::Settle(absl::Span<const WorkItem> items) {
  std::vector<SettleOutcome> outcomes(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    // One policy call a sequence: whatever it throws has exactly one owner.
    try {
      outcomes[i] = SettleOne(*open_.at(items[i].id), items[i]);
    } catch (const std::exception& e) {
      outcomes[i].status = OwnFailure("its cache could not be settled", e);
    }
  }
  return outcomes;
}

SettleOutcome Executor::SettleOne(OpenSequence& sequence, const WorkItem& item) {
  const PolicyTraits& traits = sequence.request.traits;
  SettleOutcome outcome;
  if (traits.evicts) {
    View view(sequence, pool_, *model_, output_grams_);
    outcome.status = Observe(sequence, item, view);
    // Rounds in prefill are at fixed places and end at the budget; at decode they allow slack.
    const bool in_prefill =
        item.evicts_prefill && (traits.prompt != PromptEviction::kAtEnd || item.ends_prefill);
    const int64_t slack = item.decode ? traits.slack : 0;
    if (outcome.status.ok() && (item.decode || in_prefill) && sequence.cache.OverBudget(slack)) {
      outcome.status = RunRound(sequence, item, view, outcome);
    }
    if (!outcome.status.ok()) return outcome;
  }
  if (item.ends_prefill) {
    sequence.cache.ShrinkToDecode();
    sequence.turned = at::Tensor();  // of a whole prompt
  }
  return outcome;
}

// Tells the policy what was cached.
absl::Status Executor::Observe(OpenSequence& sequence, const WorkItem& item, CacheView& view) {
  const StageTimer timer(times_, Stage::kObserve);
  const PolicyTraits& traits = sequence.request.traits;
  std::vector<float> steps;
  std::vector<absl::Span<const float>> residuals;
  if (traits.signals.Has(Signal::kResidualStep)) {
    steps = sequence.tap.StepsOf(traits.residual_layers);
  }
  if (traits.signals.Has(Signal::kResidual)) {
    residuals = sequence.tap.ResidualsOf(traits.residual_layers);
  }
  SequenceStep step{.state = sequence.state.get(),
                    .cache = view,
                    .phase = item.decode ? Phase::kDecode : Phase::kPrefill,
                    .first = item.first,
                    .count = static_cast<int64_t>(item.tokens.size()),
                    .signals = {.residual_step = steps,
                                .residual = residuals,
                                .logit_entropy = sequence.logit_entropy,
                                .residual_distance = sequence.residual_distance}};
  if (traits.signals.Has(item.decode ? Signal::kAttentionRow : Signal::kPromptAttention)) {
    step.signals.attention = &sequence.attention_rows;
  }
  return AskPolicy(sequence.request, [&] { sequence.request.policy->Observe({&step, 1}); });
}

// Asks the policy what goes, and drops it.
absl::Status Executor::RunRound(OpenSequence& sequence, const WorkItem& item, CacheView& view,
                                SettleOutcome& outcome) {
  const Request& request = sequence.request;
  const absl::Time begin = absl::Now();
  EvictionTask task{.state = sequence.state.get(), .cache = view};
  std::vector<Eviction> answers;
  absl::Status asked = AskPolicy(request, [&] { answers = request.policy->Evict({&task, 1}); });
  if (!asked.ok()) return asked;
  auto invalid = [](absl::Status status) {
    return WithReason(WithPolicyError(std::move(status), kPolicyInvalidSet), kPolicyFailed);
  };
  if (answers.size() != 1) {
    return invalid(absl::InternalError(
        absl::StrCat("the policy gave ", answers.size(), " answers to one task")));
  }
  const Eviction& eviction = answers.front();
  if (!eviction.status.ok()) {
    return PolicyFailure(request, kPolicyStatus, eviction.status.message());
  }
  const absl::StatusOr<SequenceCache::Slots> slots = sequence.cache.SlotsOf(eviction.victims);
  if (!slots.ok()) return invalid(slots.status());
  if (mass_of_ == item.id) {
    outcome.attention_mass = MassOf(*slots, sequence.cache, mass_rows_);
    sequence.mass_at = item.first;
  }
  outcome.evicted_entries = sequence.cache.Evict(*slots, item.decode);
  outcome.eviction_time = absl::Now() - begin;
  if (request.output.kv_trace) {
    outcome.trace = TraceOf(eviction.victims, sequence.cache, request.traits.granularity);
  }
  return absl::OkStatus();
}

absl::Status Executor::Fork(SequenceId parent, SequenceId child, const Request& request) {
  OpenSequence& from = *open_.at(parent);
  try {
    auto sequence = std::make_unique<OpenSequence>(child, request, from);
    if (from.state != nullptr) {
      absl::Status asked = AskPolicy(request, [&] { sequence->state = from.state->Clone(); });
      if (!asked.ok()) return asked;
    }
    open_.emplace(child, std::move(sequence));
  } catch (const std::exception& e) {
    return OwnFailure("a completion could not be begun", e);
  }
  from.cache.ForgetPeak();
  return absl::OkStatus();
}

CacheFacts Executor::Facts(SequenceId id) const {
  const auto found = open_.find(id);
  if (found == open_.end()) return {};  // Open failed
  const SequenceCache& cache = found->second->cache;
  CacheFacts facts{.entries = cache.entries(),
                   .peak_entries = cache.peak_entries(),
                   .bytes = cache.bytes(),
                   .peak_bytes = cache.peak_bytes()};
  if (found->second->request.output.kept) facts.kept = cache.KeptIndexes();
  return facts;
}

void Executor::Close(SequenceId id) { open_.erase(id); }

int64_t Executor::used_bytes() const {
  int64_t bytes = 0;
  for (const auto& [id, sequence] : open_) bytes += sequence->cache.bytes();
  return bytes;
}

void Executor::AddMoves(StepStats& step) const {
  step.kv_rows_moved = pool_.rows_moved();
  step.kv_longest_move = pool_.longest_move();
}

void Executor::AddStageTimes(StepStats& step) const {
  auto charge = [&](Stage part, std::optional<Stage> whole) {
    const int p = static_cast<int>(part);
    step.wall[p] += times_.wall[p];
    step.cpu[p] += times_.cpu[p];
    if (!whole.has_value()) return;
    const int w = static_cast<int>(*whole);
    step.wall[w] -= times_.wall[p];
    step.cpu[w] -= times_.cpu[p];
  };
  charge(Stage::kAttention, std::nullopt);
  charge(Stage::kTaps, std::nullopt);
  charge(Stage::kSample, Stage::kForward);
  charge(Stage::kObserve, Stage::kEvict);
}

}  // namespace epikv
