#include "runtime/forward/varlen_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace epikv {
namespace {

constexpr int64_t kMost = int64_t{1} << 24;  // of keys and of logits, held at once in fp32

// Which of `used` slots m queries do not see, the i-th query being begin + i of `rows`. [m, used]
at::Tensor Future(int64_t begin, int64_t m, int64_t rows, int64_t used, at::Device device) {
  const auto options = at::dtype(at::kLong).device(device);
  const at::Tensor newest = at::arange(used - rows + begin, used - rows + begin + m, options);
  return at::arange(used, options).unsqueeze(0) > newest.unsqueeze(1);
}

constexpr double kNever = -std::numeric_limits<double>::infinity();

// By definition, in fp32.
at::Tensor PlainVarlen(const VarlenCall& call) {
  at::Tensor out = at::empty_like(call.q);
  const int32_t* const query_starts = call.query_starts.const_data_ptr<int32_t>();
  const int32_t* const starts = call.starts.const_data_ptr<int32_t>();
  const int32_t* const lengths = call.lengths.const_data_ptr<int32_t>();
  for (int64_t lane = 0; lane < call.lengths.size(0); ++lane) {
    const int64_t first = query_starts[lane], count = query_starts[lane + 1] - first;
    const at::Tensor keys = call.keys.narrow(0, starts[lane], lengths[lane]).to(at::kFloat);
    const at::Tensor values = call.values.narrow(0, starts[lane], lengths[lane]).to(at::kFloat);
    const at::Tensor q = call.q.narrow(0, first, count).transpose(0, 1).to(at::kFloat);
    at::Tensor logits = at::matmul(q, keys.t()).mul_(call.scale);  // [group, count, length]
    if (call.causal) {
      logits.masked_fill_(Future(0, count, count, lengths[lane], logits.device()), kNever);
    }
    out.narrow(0, first, count).copy_(at::matmul(logits.softmax(-1), values).transpose(0, 1));
  }
  return out;
}

}  // namespace

at::Tensor VarlenAttention(const VarlenCall& call) {
  if (call.q.is_cpu()) return PlainVarlen(call);
  return std::get<0>(at::_flash_attention_forward(
      call.q, call.keys.unsqueeze(1), call.values.unsqueeze(1), call.query_starts, call.starts,
      call.max_queries, call.max_length, /*dropout_p=*/0.0, call.causal,
      /*return_debug_mask=*/false, call.scale, /*window_size_left=*/std::nullopt,
      /*window_size_right=*/std::nullopt, call.lengths));
}

at::Tensor AttentionMass(const at::Tensor& q, const at::Tensor& keys, int64_t first, int64_t heads,
                         int64_t capacity, int64_t used, double scale) {
  const int64_t rows = q.size(0), width = q.size(2), group = q.size(1) / heads;
  if (heads > 1 && heads * used * width > kMost) {
    std::vector<at::Tensor> each;
    for (int64_t head = 0; head < heads; ++head) {
      each.push_back(AttentionMass(q.narrow(1, head * group, group), keys, first + head * capacity,
                                   1, capacity, used, scale));
    }
    return at::cat(each);
  }
  const at::Tensor lanes = keys.as_strided({heads, used, width}, {capacity * width, width, 1},
                                           keys.storage_offset() + first * width)
                               .to(at::kFloat)
                               .transpose(1, 2);
  const int64_t block = std::clamp<int64_t>(kMost / (heads * group * used), 1, rows);
  at::Tensor mass = at::zeros({heads, used}, lanes.options());
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    const at::Tensor queries = q.narrow(0, begin, count)
                                   .to(at::kFloat)
                                   .reshape({count, heads, group, width})
                                   .permute({1, 2, 0, 3})
                                   .reshape({heads, group * count, width});
    at::Tensor logits = at::bmm(queries, lanes).mul_(scale).view({heads, group, count, used});
    if (rows > 1) logits.masked_fill_(Future(begin, count, rows, used, q.device()), kNever);
    mass += logits.softmax(-1).sum({1, 2});
  }
  return mass.div_(static_cast<double>(group));
}

int64_t LanesAtOnce(int64_t longest, int64_t width) {
  return std::max<int64_t>(kMost / (longest * width), 1);
}

at::Tensor LaneMasses(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& starts,
                      const at::Tensor& lengths, int64_t longest) {
  const int64_t lanes = queries.size(0), width = queries.size(2);
  const at::Tensor slots = at::arange(longest, starts.options()).unsqueeze(0);  // [1, longest]
  const at::Tensor ends = lengths.unsqueeze(1);
  // Behind its end a lane's last row stands in.
  const at::Tensor rows = starts.unsqueeze(1) + at::minimum(slots, ends - 1);
  const at::Tensor gathered =
      keys.index_select(0, rows.flatten()).view({lanes, longest, width}).to(at::kFloat);
  const at::Tensor logits = at::bmm(queries, gathered.transpose(1, 2));  // [b, group, longest]
  logits.masked_fill_((slots >= ends).unsqueeze(1), kNever);
  return logits.softmax(-1).mean(1);
}

}  // namespace epikv
