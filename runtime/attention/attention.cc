#include "runtime/attention/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/algorithm/container.h"
#include "runtime/base/parallel_for.h"
#include "runtime/base/scalar_type.h"
#include "runtime/base/steady_time.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kv/kv_pool.h"

namespace epikv {
namespace {

LaneShape KernelShape(const AttentionShape& shape) {
  return {.group = shape.group(),
          .key_width = shape.key_width,
          .value_width = shape.value_width,
          .scale = static_cast<float>(shape.scale),
          .soft_cap = static_cast<float>(shape.soft_cap.value_or(0)),
          .dtype = DTypeOf(shape.dtype),
          .stored = shape.stored};
}

KvFormat FormatOf(const AttentionShape& shape) { return {DTypeOf(shape.dtype), shape.stored}; }

// Rows [begin, end) of `heads` lanes from `head` on as one tensor, [1, heads, end - begin, width].
// Precondition: their capacities are equal; they are of the model's dtype.
at::Tensor View(char* first, int64_t capacity, int64_t heads, int64_t begin, int64_t end,
                int64_t width, at::ScalarType dtype) {
  char* const data = first + begin * width * static_cast<int64_t>(c10::elementSize(dtype));
  return at::from_blob(data, {1, heads, end - begin, width},
                       {heads * capacity * width, capacity * width, width, 1},
                       at::TensorOptions().dtype(dtype));
}

struct Partial {
  at::Tensor out;  // [1, heads, rows, value_width]
  at::Tensor lse;  // [1, heads, rows], fp32
};

Partial Flash(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
              double scale, const std::optional<at::Tensor>& mask = std::nullopt) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0.0,
                                                                    causal, mask, scale);
  return {std::move(out), std::move(lse)};
}

// Logits q k^T as a soft cap leaves them. In fp32, in place.
void Cap(at::Tensor& logits, const std::optional<double>& cap) {
  if (cap.has_value()) logits.div_(*cap).tanh_().mul_(*cap);
}

// Attention with capped logits, a few rows at a time, in fp32. mask [rows, keys]: added to them.
Partial Capped(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const at::Tensor& mask, const AttentionShape& shape) {
  constexpr int64_t kMostLogits = int64_t{1} << 20;
  const int64_t heads = k.size(1), group = q.size(1) / heads, rows = q.size(2), keys = k.size(2);
  const Partial result = {at::empty({1, q.size(1), rows, v.size(3)}, q.options()),
                          at::empty({1, q.size(1), rows}, at::kFloat)};
  const int64_t block = std::clamp<int64_t>(kMostLogits / (group * keys), 1, rows);
  for (int64_t head = 0; head < heads; ++head) {
    const at::Tensor wide_k = k[0][head].to(at::kFloat).t(), wide_v = v[0][head].to(at::kFloat);
    for (int64_t begin = 0; begin < rows; begin += block) {
      const int64_t count = std::min(block, rows - begin);
      auto of_block = [&](const at::Tensor& of_rows) {
        return of_rows[0].narrow(0, head * group, group).narrow(1, begin, count);
      };
      at::Tensor logits = at::matmul(of_block(q).to(at::kFloat), wide_k).mul_(shape.scale);
      Cap(logits, shape.soft_cap);
      logits.add_(mask.narrow(0, begin, count));
      const at::Tensor lse = logits.logsumexp(-1);  // [group, count]
      of_block(result.lse).copy_(lse);
      of_block(result.out).copy_(at::matmul(logits.sub_(lse.unsqueeze(-1)).exp_(), wide_v));
    }
  }
  return result;
}

// Attention over two disjoint sets of keys from the attention over each.
at::Tensor Join(const Partial& a, const Partial& b) {
  const at::Tensor top = at::maximum(a.lse, b.lse);
  const at::Tensor wa = at::exp(a.lse - top).unsqueeze(-1);
  const at::Tensor wb = at::exp(b.lse - top).unsqueeze(-1);
  return (a.out.to(at::kFloat) * wa + b.out.to(at::kFloat) * wb) / (wa + wb);
}

// softmax(scale q k^T) v, with the softmax in fp32.
at::Tensor Matmul(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  const int64_t heads = q.size(1), kv_heads = k.size(1), rows = q.size(2);
  // Queries of a group become rows of one product: [kv_heads, group x rows, width].
  const at::Tensor grouped = q.reshape({kv_heads, heads / kv_heads * rows, q.size(3)});
  std::vector<at::Tensor> out;
  for (int64_t head = 0; head < kv_heads; ++head) {  // one product of all would copy strided lanes
    const at::Tensor logits = at::mm(grouped[head], k[0][head].t()).to(at::kFloat).mul_(scale);
    out.push_back(at::mm(at::softmax(logits, -1).to(v.scalar_type()), v[0][head]));
  }
  return at::stack(out).reshape({1, heads, rows, v.size(3)});
}

LaneRows LaneOf(const AttentionItem& item, int64_t layer, int64_t head) {
  LaneRows lane = item.cache->Lane(layer, head);
  if (!item.keys.empty()) lane.keys = item.keys[head];
  return lane;
}

// The lanes of KV heads [head, head + heads) of one item.
struct LaneGroup {
  int64_t head = 0, heads = 0, used = 0;
};

std::vector<LaneGroup> GroupsOf(const AttentionItem& item, int64_t layer, int64_t kv_heads) {
  if (item.cache->Uniform(layer)) return {{.head = 0, .heads = kv_heads, .used = item.used[0]}};
  std::vector<LaneGroup> groups;
  for (int64_t h = 0; h < kv_heads; ++h) {
    groups.push_back({.head = h, .heads = 1, .used = item.used[h]});
  }
  return groups;
}

// [1, query heads of the group, rows, width] of a packed [n, heads, width] tensor.
at::Tensor Rows(const at::Tensor& packed, const AttentionItem& item, const LaneGroup& group,
                int64_t per_kv_head) {
  return packed.narrow(0, item.row, item.num_rows)
      .narrow(1, group.head * per_kv_head, group.heads * per_kv_head)
      .transpose(0, 1)
      .unsqueeze(0);
}

// What a prefill item's rows do not see of a lane's slots [begin, end): the younger ones and what
// the window hides. [rows, end - begin] booleans
at::Tensor Unseen(const AttentionItem& item, int64_t head, int64_t begin, int64_t end,
                  const AttentionShape& shape) {
  const int64_t used = item.used[head];
  const at::Tensor row = at::arange(used - item.num_rows, used, at::kLong).unsqueeze(1);
  at::Tensor unseen = at::arange(begin, end, at::kLong).unsqueeze(0) > row;
  if (item.positions.empty()) return unseen;
  const LanePositions& lane = item.positions[head];
  const at::Tensor slots = at::from_blob(const_cast<int64_t*>(lane.of_slots) + begin, {end - begin},
                                         at::kLong);  // only read
  const at::Tensor first_seen =
      at::arange(item.num_rows, at::kLong).add_(lane.of_first_row - *shape.window + 1);
  return unseen.logical_or_(slots.unsqueeze(0) < first_seen.unsqueeze(1));
}

// The first slot of a lane that a prefill item's rows see.
int64_t FirstSeen(const AttentionItem& item, int64_t head, const AttentionShape& shape) {
  if (item.positions.empty()) return 0;
  const LanePositions& lane = item.positions[head];
  const int64_t first = lane.of_first_row - *shape.window + 1;
  return std::find_if(lane.of_slots, lane.of_slots + item.used[head],
                      [&](int64_t position) { return position >= first; }) -
         lane.of_slots;
}

// Whether rows see the same slots of two lanes: lanes that share a keep decision do.
bool SeesAlike(const AttentionItem& item, int64_t a, int64_t b) {
  return item.used[a] == item.used[b] &&
         (item.positions.empty() || item.positions[a].of_slots == item.positions[b].of_slots);
}

// Prefill where logits are capped or slots hidden: lane by lane, past and new keys in one call.
void BentPrefill(const at::Tensor& q, at::Tensor& out, int64_t layer, const AttentionItem& item,
                 const AttentionShape& shape) {
  at::Tensor mask;
  int64_t begin = 0;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const LaneGroup group = {.head = head, .heads = 1, .used = item.used[head]};
    const LaneRows lane = LaneOf(item, layer, head);
    if (head == 0 || !SeesAlike(item, head - 1, head)) {
      begin = FirstSeen(item, head, shape);
      mask = at::zeros({item.num_rows, group.used - begin},
                       shape.soft_cap.has_value() ? at::kFloat : shape.dtype)
                 .masked_fill_(Unseen(item, head, begin, group.used, shape),
                               -std::numeric_limits<float>::infinity());
    }
    const at::Tensor k =
        View(lane.keys, lane.capacity, 1, begin, group.used, shape.key_width, shape.dtype);
    const at::Tensor v =
        View(lane.values, lane.capacity, 1, begin, group.used, shape.value_width, shape.dtype);
    const at::Tensor rows = Rows(q, item, group, shape.group());
    const Partial result = shape.soft_cap.has_value() ? Capped(rows, k, v, mask, shape)
                                                      : Flash(rows, k, v, false, shape.scale, mask);
    Rows(out, item, group, shape.group()).copy_(result.out);
    if (item.log_sum_exp == nullptr) continue;
    item.log_sum_exp->narrow(0, head * shape.group(), shape.group()).copy_(result.lse[0]);
  }
}

void Prefill(const at::Tensor& q, at::Tensor& out, int64_t layer, const AttentionItem& item,
             const AttentionShape& shape) {
  if (item.log_sum_exp != nullptr) {
    *item.log_sum_exp = at::empty({shape.num_heads, item.num_rows}, at::kFloat);
  }
  if (shape.soft_cap.has_value() || !item.positions.empty()) {
    return BentPrefill(q, out, layer, item, shape);
  }
  for (const LaneGroup& group : GroupsOf(item, layer, shape.num_kv_heads)) {
    const LaneRows lane = LaneOf(item, layer, group.head);
    const int64_t past = group.used - item.num_rows;
    auto keys = [&](int64_t begin, int64_t end) {
      return View(lane.keys, lane.capacity, group.heads, begin, end, shape.key_width, shape.dtype);
    };
    auto values = [&](int64_t begin, int64_t end) {
      return View(lane.values, lane.capacity, group.heads, begin, end, shape.value_width,
                  shape.dtype);
    };
    const at::Tensor rows = Rows(q, item, group, shape.group());
    const Partial self =
        Flash(rows, keys(past, group.used), values(past, group.used), true, shape.scale);
    at::Tensor result = self.out, log_sum_exp = self.lse;
    if (past > 0) {
      const Partial before = Flash(rows, keys(0, past), values(0, past), false, shape.scale);
      result = Join(before, self);
      if (item.log_sum_exp != nullptr) log_sum_exp = at::logaddexp(before.lse, self.lse);
    }
    if (item.log_sum_exp != nullptr) {
      item.log_sum_exp->narrow(0, group.head * shape.group(), group.heads * shape.group())
          .copy_(log_sum_exp[0]);
    }
    Rows(out, item, group, shape.group()).copy_(result);
  }
}

void DecodeAlone(DecodeKernel kernel, const at::Tensor& q, at::Tensor& out, int64_t layer,
                 const AttentionItem& item, const AttentionShape& shape) {
  for (const LaneGroup& group : GroupsOf(item, layer, shape.num_kv_heads)) {
    const LaneRows lane = LaneOf(item, layer, group.head);
    const at::Tensor k =
        View(lane.keys, lane.capacity, group.heads, 0, group.used, shape.key_width, shape.dtype);
    const at::Tensor v = View(lane.values, lane.capacity, group.heads, 0, group.used,
                              shape.value_width, shape.dtype);
    const at::Tensor rows = Rows(q, item, group, shape.group());
    Rows(out, item, group, shape.group())
        .copy_(kernel == DecodeKernel::kFlash ? Flash(rows, k, v, false, shape.scale).out
                                              : Matmul(rows, k, v, shape.scale));
  }
}

DecodeLane DecodeLaneOf(const at::Tensor& q, at::Tensor* out, int64_t layer, int64_t head,
                        const AttentionItem& item, const AttentionShape& shape) {
  const LaneRows lane = LaneOf(item, layer, head);
  const int64_t element = static_cast<int64_t>(c10::elementSize(shape.dtype));
  const int64_t place = item.row * shape.num_heads + head * shape.group();
  DecodeLane result = {
      .q = static_cast<const char*>(q.const_data_ptr()) + place * shape.key_width * element,
      .keys = lane.keys,
      .values = lane.values,
      .used = item.used[head],
      .out = out == nullptr ? nullptr
                            : static_cast<char*>(out->mutable_data_ptr()) +
                                  place * shape.value_width * element};
  if (!item.positions.empty()) {
    result.positions = item.positions[head].of_slots;
    result.first_seen = item.positions[head].of_first_row - *shape.window + 1;
  }
  if (!item.reads.empty()) result.reads = item.reads[head];
  return result;
}

// Where a head's logits begin, in AttentionItem::logits. [kv_heads], and the end
std::vector<int64_t> LogitStarts(const AttentionItem& item, const LaneShape& shape) {
  std::vector<int64_t> starts = {0};
  for (int64_t used : item.used) starts.push_back(starts.back() + LogitFloats(shape, used));
  return starts;
}

// Slots of an item's lanes, all together.
int64_t SlotsOf(const AttentionItem& item) {
  return std::accumulate(item.used.begin(), item.used.end(), int64_t{0});
}

// How many of `tasks` tasks, which are `products` multiplications together, a thread needs to be
// worth waking. Waking one takes about as long as kProducts.
int64_t TasksOfThread(int64_t tasks, int64_t products) {
  constexpr int64_t kProducts = int64_t{1} << 18;
  return std::max<int64_t>(1, products == 0 ? tasks : tasks * kProducts / products);
}

// A lane, or one part of it.
struct DecodeTask {
  int64_t item = 0, head = 0, slots = 0;
  int64_t part = -1, place = 0;  // which, and its place among those of all lanes; -1: the lane
};

// Where lanes are parted, which are those of more than half a thread's share of all slots: all
// lanes and parts, the dearest first. Empty: none is, and each lane is a task.
std::vector<DecodeTask> PartedTasks(absl::Span<const AttentionItem* const> items,
                                    AttentionPath path) {
  const int64_t threads = at::get_num_threads();
  if (path == AttentionPath::kAnywhere || threads == 1) return {};
  int64_t slots = 0, longest = 0;
  for (const AttentionItem* item : items) {
    for (const int64_t used : item->used) {
      slots += used;
      longest = std::max(longest, used);
    }
  }
  const auto is_parted = [&](int64_t used) {
    return used > kKeysOfPart && 2 * threads * used > slots;
  };
  if (!is_parted(longest)) return {};
  std::vector<DecodeTask> tasks;
  int64_t num_parts = 0;
  for (int64_t item = 0; item < std::ssize(items); ++item) {
    for (int64_t head = 0; head < std::ssize(items[item]->used); ++head) {
      const int64_t used = items[item]->used[head];
      if (!is_parted(used)) {
        tasks.push_back({.item = item, .head = head, .slots = used});
        continue;
      }
      for (int64_t part = 0; part < PartsOf(used); ++part) {
        const int64_t of_part = std::min(kKeysOfPart, used - part * kKeysOfPart);
        tasks.push_back({item, head, of_part, part, num_parts++});
      }
    }
  }
  absl::c_stable_sort(tasks, [](const auto& a, const auto& b) { return a.slots > b.slots; });
  return tasks;
}

void DecodeTogether(const at::Tensor& q, at::Tensor& out, int64_t layer,
                    absl::Span<const AttentionItem* const> items, const AttentionShape& shape) {
  const LaneShape kernel_shape = KernelShape(shape);
  std::vector<std::vector<int64_t>> starts(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i]->logits == nullptr) continue;
    starts[i] = LogitStarts(*items[i], kernel_shape);
    items[i]->logits->resize(starts[i].back());
  }
  const AttentionPath path = FastestAttentionPath(kernel_shape);
  const auto lane_of = [&](const DecodeTask& task) {
    const AttentionItem& item = *items[task.item];
    DecodeLane lane = DecodeLaneOf(q, &out, layer, task.head, item, shape);
    if (item.logits != nullptr) lane.logits = item.logits->data() + starts[task.item][task.head];
    return lane;
  };
  const std::vector<DecodeTask> tasks = PartedTasks(items, path);
  const int64_t lanes = std::ssize(items) * shape.num_kv_heads, floats = PartFloats(kernel_shape);
  const int64_t num_parts = absl::c_count_if(tasks, [](const auto& of) { return of.part >= 0; });
  std::vector<float> parts(num_parts * floats);
  int64_t slots = 0;
  for (const AttentionItem* item : items) slots += SlotsOf(*item);
  const int64_t products = slots * shape.group() * (shape.key_width + shape.value_width);
  const int64_t count = tasks.empty() ? lanes : std::ssize(tasks);
  ParallelFor(count, TasksOfThread(count, products), [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    scratch.resize(DecodeScratchFloats(kernel_shape));
    for (int64_t i = begin; i < end; ++i) {
      const DecodeTask task =
          tasks.empty() ? DecodeTask{.item = i / shape.num_kv_heads, .head = i % shape.num_kv_heads}
                        : tasks[i];
      if (task.part < 0) {
        DecodeAttention(path, lane_of(task), kernel_shape, scratch.data());
      } else {
        AttendPart(path, lane_of(task), kernel_shape, task.part, parts.data() + task.place * floats,
                   scratch.data());
      }
    }
  });
  std::vector<float> scratch(num_parts > 0 ? DecodeScratchFloats(kernel_shape) : 0);
  for (const DecodeTask& task : tasks) {
    if (task.part != 0) continue;
    JoinParts(path, lane_of(task), kernel_shape, parts.data() + task.place * floats,
              scratch.data());
  }
}

// Our loop over the rows of prompts, where it is worth while: nobody else reads int8.
std::optional<AttentionPath> PrefillPath(const LaneShape& shape) {
  const AttentionPath path = FastestAttentionPath(shape);
  if (path == AttentionPath::kAnywhere && shape.stored == KvDType::kModel) return std::nullopt;
  return path;
}

// Rows of one lane that are computed together.
struct PrefillTask {
  const AttentionItem* item;
  int64_t head, first, num_rows;
};

// The dearest first.
std::vector<PrefillTask> PrefillTasks(absl::Span<const AttentionItem* const> items,
                                      const AttentionShape& shape, int64_t rows) {
  std::vector<PrefillTask> tasks;
  for (const AttentionItem* item : items) {
    for (int64_t first = 0; first < item->num_rows; first += rows) {
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        tasks.push_back({item, head, first, std::min(rows, item->num_rows - first)});
      }
    }
  }
  auto seen = [](const PrefillTask& task) {
    return task.item->used[task.head] - task.item->num_rows + task.first;
  };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&](const PrefillTask& a, const PrefillTask& b) { return seen(a) > seen(b); });
  return tasks;
}

PrefillLane PrefillLaneOf(const at::Tensor& q, at::Tensor& out, int64_t layer,
                          const PrefillTask& task, const AttentionShape& shape) {
  const AttentionItem& item = *task.item;
  const LaneRows lane = LaneOf(item, layer, task.head);
  const int64_t element = static_cast<int64_t>(c10::elementSize(shape.dtype));
  const int64_t place = (item.row + task.first) * shape.num_heads + task.head * shape.group();
  PrefillLane result = {
      .q = static_cast<const char*>(q.const_data_ptr()) + place * shape.key_width * element,
      .q_stride = shape.num_heads * shape.key_width,
      .keys = lane.keys,
      .values = lane.values,
      .rows = task.num_rows,
      .seen = item.used[task.head] - item.num_rows + task.first + 1,
      .out = static_cast<char*>(out.mutable_data_ptr()) + place * shape.value_width * element,
      .out_stride = shape.num_heads * shape.value_width};
  if (item.log_sum_exp != nullptr) {
    result.log_sum_exp = item.log_sum_exp->mutable_data_ptr<float>() +
                         task.head * shape.group() * item.num_rows + task.first;
    result.log_sum_exp_stride = item.num_rows;
  }
  if (!item.positions.empty()) {
    result.positions = item.positions[task.head].of_slots;
    result.first_seen = item.positions[task.head].of_first_row + task.first - *shape.window + 1;
  }
  if (item.decode && !item.reads.empty()) result.reads = item.reads[task.head];
  return result;
}

void PrefillTogether(AttentionPath path, const at::Tensor& q, at::Tensor& out, int64_t layer,
                     absl::Span<const AttentionItem* const> items, const AttentionShape& shape) {
  const LaneShape kernel_shape = KernelShape(shape);
  for (const AttentionItem* item : items) {
    if (item->log_sum_exp == nullptr) continue;
    *item->log_sum_exp = at::empty({shape.num_heads, item->num_rows}, at::kFloat);
  }
  const std::vector<PrefillTask> tasks = PrefillTasks(items, shape, PrefillRows(kernel_shape));
  ParallelFor(std::ssize(tasks), 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    scratch.resize(PrefillScratchFloats(kernel_shape));
    for (int64_t i = begin; i < end; ++i) {
      PrefillAttention(path, PrefillLaneOf(q, out, layer, tasks[i], shape), kernel_shape,
                       scratch.data());
    }
  });
}

// out = the attention over two disjoint sets of keys, of which it has one's. By query of the group.
void AddFar(const LaneShape& shape, const float* far_lse, const char* far, const float* near_lse,
            int64_t near_stride, char* out, float* scratch) {
  const int64_t width = shape.value_width, bytes = width * ElementBytes(shape.dtype);
  float* const near = scratch;
  float* const other = scratch + width;
  for (int64_t g = 0; g < shape.group; ++g) {
    const float share = 1 / (1 + std::exp(near_lse[g * near_stride] - far_lse[g]));
    ToFloat(out + g * bytes, near, width, shape.dtype);
    ToFloat(far + g * bytes, other, width, shape.dtype);
    for (int64_t i = 0; i < width; ++i) near[i] += share * (other[i] - near[i]);
    FromFloat(near, out + g * bytes, width, shape.dtype);
  }
}

// Adds to each row of items with a tier what it attends to there. After the lanes, with
// log_sum_exp.
void AttendFar(AttentionPath path, const at::Tensor& q, at::Tensor& out, int64_t layer,
               absl::Span<const AttentionItem* const> items, const AttentionShape& shape) {
  const LaneShape kernel_shape = KernelShape(shape);
  const std::vector<PrefillTask> tasks = PrefillTasks(items, shape, /*rows=*/1);
  ParallelFor(std::ssize(tasks), 1, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    thread_local FarRows rows;
    const int64_t group = shape.group(), floats = PrefillScratchFloats(kernel_shape);
    std::vector<char> far(group * shape.value_width * ElementBytes(kernel_shape.dtype));
    std::vector<float> lse(group);
    scratch.resize(std::max(floats, 2 * shape.value_width));
    for (int64_t i = begin; i < end; ++i) {
      const PrefillTask& task = tasks[i];
      const PrefillLane near = PrefillLaneOf(q, out, layer, task, shape);
      task.item->tier->Fetch(layer * shape.num_kv_heads + task.head, near.q, group,
                             task.item->far_tokens, rows);
      if (rows.count == 0) continue;
      PrefillAttention(path,
                       {.q = near.q,
                        .q_stride = near.q_stride,
                        .keys = rows.keys.data(),
                        .values = rows.values.data(),
                        .rows = 1,
                        .seen = rows.count,
                        .out = far.data(),
                        .out_stride = near.out_stride,
                        .log_sum_exp = lse.data(),
                        .log_sum_exp_stride = 1},
                       kernel_shape, scratch.data());
      AddFar(kernel_shape, lse.data(), far.data(), near.log_sum_exp, near.log_sum_exp_stride,
             static_cast<char*>(near.out), scratch.data());
    }
  });
}

}  // namespace

absl::string_view PrefillKernelName(PrefillKernel kernel) {
  switch (kernel) {
    case PrefillKernel::kBatch:
      return "batch";
    case PrefillKernel::kFlash:
      return "flash";
  }
  return "";
}

absl::string_view DecodeKernelName(DecodeKernel kernel) {
  switch (kernel) {
    case DecodeKernel::kBatch:
      return "batch";
    case DecodeKernel::kFlash:
      return "flash";
    case DecodeKernel::kMatmul:
      return "matmul";
  }
  return "";
}

at::Tensor Attention::Run(const at::Tensor& q, int64_t layer, absl::Span<const AttentionItem> items,
                          const AttentionShape& shape) const {
  at::Tensor out = at::empty({q.size(0), shape.num_heads, shape.value_width}, q.options());
  const bool ours = shape.stored == KvDType::kInt8;
  std::optional<AttentionPath> prefill;
  if (prefill_ == PrefillKernel::kBatch || ours) prefill = PrefillPath(KernelShape(shape));
  std::vector<const AttentionItem*> together, prompts, far;
  int64_t end = 0;  // of the items' rows
  for (const AttentionItem& item : items) {
    counts_.attended += item.num_rows * shape.num_kv_heads;
    end = std::max(end, item.row + item.num_rows);
    if (item.logits != nullptr) item.logits->clear();  // another layer's, or another step's
    if (item.tier != nullptr) {
      far.push_back(&item);
    } else if (!item.decode && prefill.has_value()) {
      prompts.push_back(&item);
    } else if (!item.decode) {
      Prefill(q, out, layer, item, shape);
    } else if (decode_ == DecodeKernel::kBatch || ours || shape.soft_cap.has_value() ||
               shape.window.has_value() || !item.reads.empty()) {
      together.push_back(&item);
    } else {
      DecodeAlone(decode_, q, out, layer, item, shape);
    }
  }
  if (end < q.size(0)) out.narrow(0, end, q.size(0) - end).zero_();  // padding
  if (!together.empty()) DecodeTogether(q, out, layer, together, shape);
  if (!prompts.empty()) PrefillTogether(*prefill, q, out, layer, prompts, shape);
  if (!far.empty()) {
    const AttentionPath path = FastestAttentionPath(KernelShape(shape));
    PrefillTogether(path, q, out, layer, far, shape);
    AttendFar(path, q, out, layer, far, shape);
  }
  return out;
}

void Attention::NewestRows(const at::Tensor& q, int64_t layer, const AttentionItem& item,
                           const AttentionShape& shape, absl::Span<float> rows) const {
  counts_.measured += shape.num_kv_heads;
  std::vector<int64_t> starts(shape.num_kv_heads);
  for (int64_t head = 1; head < shape.num_kv_heads; ++head) {
    starts[head] = starts[head - 1] + item.used[head - 1];
  }
  const LaneShape kernel_shape = KernelShape(shape);
  const bool left = item.logits != nullptr && !item.logits->empty();  // by Run, at this layer
  const std::vector<int64_t> logits =
      left ? LogitStarts(item, kernel_shape) : std::vector<int64_t>();
  const int64_t products = SlotsOf(item) * shape.group() * (left ? 1 : shape.key_width);
  const int64_t grain = TasksOfThread(shape.num_kv_heads, products);
  at::parallel_for(0, shape.num_kv_heads, grain, [&](int64_t begin, int64_t end) {
    thread_local std::vector<float> scratch;
    for (int64_t head = begin; head < end; ++head) {
      if (left) {
        RowOfLogits(item.logits->data() + logits[head], shape.group(), item.used[head],
                    rows.data() + starts[head]);
        continue;
      }
      scratch.resize(RowScratchFloats(kernel_shape, item.used[head]));
      AttentionRow(DecodeLaneOf(q, nullptr, layer, head, item, shape), kernel_shape,
                   rows.data() + starts[head], scratch.data());
    }
  });
}

void Attention::ColumnSums(const at::Tensor& q, int64_t layer, const AttentionItem& item,
                           const AttentionShape& shape, absl::Span<float> sums) const {
  counts_.measured += item.num_rows * shape.num_kv_heads;
  constexpr int64_t kBlock = 512;  // tokens
  const KvFormat format = FormatOf(shape);
  int64_t start = 0;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    const int64_t used = item.used[head], past = used - item.num_rows;
    const LaneRows lane = LaneOf(item, layer, head);
    const int64_t first = head * shape.group();
    const at::Tensor queries = q.narrow(0, item.row, item.num_rows)
                                   .narrow(1, first, shape.group())
                                   .transpose(0, 1)
                                   .to(at::kFloat);  // [group, rows, width]
    const at::Tensor log_sum_exp =
        item.log_sum_exp->narrow(0, first, shape.group()).unsqueeze(-1);  // [group, rows, 1]
    for (int64_t begin = 0; begin < used; begin += kBlock) {
      const int64_t end = std::min(used, begin + kBlock);
      const at::Tensor keys = ReadRows(lane.keys + begin * format.RowBytes(shape.key_width),
                                       end - begin, shape.key_width, format);
      at::Tensor logits = at::matmul(queries, keys.t()).mul_(shape.scale);
      Cap(logits, shape.soft_cap);
      at::Tensor mass = logits.sub_(log_sum_exp).exp_();
      if (end > past || !item.positions.empty()) {
        mass.masked_fill_(Unseen(item, head, begin, end, shape), 0);
      }
      at::from_blob(sums.data() + start + begin, {end - begin}, at::kFloat)
          .copy_(mass.sum(at::IntArrayRef{0, 1}).div_(static_cast<double>(shape.group())));
    }
    start += used;
  }
}

namespace {

constexpr int64_t kMeasuredTokens = 512;

// Sequences with kMeasuredTokens of noise in their one layer.
class MeasuredSequences {
 public:
  MeasuredSequences(int64_t count, const AttentionShape& shape)
      : request_(RequestOf(shape)),
        model_{.num_layers = 1,
               .num_heads = shape.num_heads,
               .num_kv_heads = shape.num_kv_heads,
               .key_width = shape.key_width,
               .value_width = shape.value_width},
        pool_(count * kCapacity * shape.num_kv_heads, shape.key_width, shape.value_width,
              FormatOf(shape)),
        used_(shape.num_kv_heads, kMeasuredTokens) {
    for (int64_t s = 0; s < count; ++s) {
      caches_.push_back(std::make_unique<SequenceCache>(pool_, SequenceId(s), request_, model_));
      for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
        const LaneRows lane = caches_.back()->Lane(0, head);
        Fill(lane.keys, shape.key_width, shape);
        Fill(lane.values, shape.value_width, shape);
      }
    }
  }

  // Each sequence's newest rows.
  std::vector<AttentionItem> Items(int64_t num_rows) const {
    std::vector<AttentionItem> items;
    for (size_t s = 0; s < caches_.size(); ++s) {
      items.push_back({.cache = caches_[s].get(),
                       .row = static_cast<int64_t>(s) * num_rows,
                       .num_rows = num_rows,
                       .decode = num_rows == 1,
                       .used = used_});
    }
    return items;
  }

 private:
  static constexpr int64_t kCapacity =
      kMeasuredTokens + 16;  // lanes are rarely full: nor are these

  static void Fill(char* rows, int64_t width, const AttentionShape& shape) {
    const KvFormat format = FormatOf(shape);
    const at::Tensor noise = at::randn({kMeasuredTokens, width}).to(shape.dtype);
    const char* const in = static_cast<const char*>(noise.const_data_ptr());
    for (int64_t i = 0; i < kMeasuredTokens; ++i) {
      WriteRow(in + i * width * noise.element_size(), rows + i * format.RowBytes(width), width,
               format);
    }
  }

  static Request RequestOf(const AttentionShape& shape) {
    Request request;
    request.demand.budget.assign(shape.num_kv_heads, kCapacity);
    request.demand.prefill = request.demand.decode = request.demand.budget;
    return request;
  }

  const Request request_;
  const ModelShape model_;
  KvPool pool_;
  const std::vector<int64_t> used_;
  std::vector<std::unique_ptr<SequenceCache>> caches_;
};

double LeastMicroseconds(const Attention& attention, const at::Tensor& q,
                         const std::vector<AttentionItem>& items, const AttentionShape& shape) {
  constexpr int kRuns = 5;
  absl::Duration least = absl::InfiniteDuration();
  for (int run = 0; run < kRuns; ++run) {
    const absl::Time begin = SteadyNow();
    attention.Run(q, 0, items, shape);
    least = std::min(least, SteadyNow() - begin);
  }
  return absl::ToDoubleMicroseconds(least);
}

template <class Kernel>
std::vector<KernelTiming<Kernel>> FastestFirst(std::vector<KernelTiming<Kernel>> timings) {
  std::sort(timings.begin(), timings.end(),
            [](const auto& a, const auto& b) { return a.microseconds < b.microseconds; });
  return timings;
}

}  // namespace

std::vector<KernelTiming<DecodeKernel>> MeasureDecodeKernels(const AttentionShape& shape) {
  const MeasuredSequences sequences(8, shape);
  const std::vector<AttentionItem> items = sequences.Items(1);
  const at::Tensor q = at::randn({8, shape.num_heads, shape.key_width}).to(shape.dtype);
  std::vector<KernelTiming<DecodeKernel>> timings;
  for (DecodeKernel kernel : {DecodeKernel::kBatch, DecodeKernel::kFlash, DecodeKernel::kMatmul}) {
    if (kernel != DecodeKernel::kBatch && shape.stored == KvDType::kInt8) continue;
    // Flash takes V as wide as K.
    if (kernel == DecodeKernel::kFlash && shape.key_width != shape.value_width) continue;
    timings.push_back(
        {kernel, LeastMicroseconds(Attention(kernel, PrefillKernel::kFlash), q, items, shape)});
  }
  return FastestFirst(std::move(timings));
}

std::vector<KernelTiming<PrefillKernel>> MeasurePrefillKernels(const AttentionShape& shape) {
  constexpr int64_t kRows = kMeasuredTokens / 2;
  const MeasuredSequences sequences(1, shape);
  const std::vector<AttentionItem> items = sequences.Items(kRows);
  const at::Tensor q = at::randn({kRows, shape.num_heads, shape.key_width}).to(shape.dtype);
  std::vector<KernelTiming<PrefillKernel>> timings;
  for (PrefillKernel kernel : {PrefillKernel::kBatch, PrefillKernel::kFlash}) {
    if (kernel == PrefillKernel::kBatch && !PrefillPath(KernelShape(shape)).has_value()) continue;
    if (kernel == PrefillKernel::kFlash && shape.stored == KvDType::kInt8) continue;
    timings.push_back(
        {kernel, LeastMicroseconds(Attention(DecodeKernel::kBatch, kernel), q, items, shape)});
  }
  return FastestFirst(std::move(timings));
}

}  // namespace epikv
