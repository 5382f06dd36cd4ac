#include "runtime/attention/attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "runtime/base/scalar_type.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/kv_format.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/kv/sequence_cache.h"
#include "runtime/request/request.h"
#include "runtime/signals/signals.h"

namespace epikv {
namespace attention_test {

// One layer of one sequence whose lanes are filled with random rows.
class OneLayer {
 public:
  OneLayer(int64_t heads, int64_t kv_heads, at::ScalarType dtype, KvDType stored,
           std::optional<double> soft_cap = std::nullopt,
           std::optional<int64_t> window = std::nullopt, int64_t tokens = kTokens)
      : tokens_(tokens),
        shape_{.num_heads = heads,
               .num_kv_heads = kv_heads,
               .key_width = 16,
               .value_width = 16,
               .scale = 0.3,
               .soft_cap = soft_cap,
               .window = window,
               .dtype = dtype,
               .stored = stored},
        model_{.num_layers = 1,
               .num_heads = heads,
               .num_kv_heads = kv_heads,
               .key_width = 16,
               .value_width = 16},
        pool_(tokens * kv_heads, 16, 16, {DTypeOf(dtype), stored}) {
    request_.demand.budget.assign(kv_heads, tokens);
    request_.demand.prefill = request_.demand.decode = request_.demand.budget;
    cache_ = std::make_unique<SequenceCache>(pool_, SequenceId(0), request_, model_);
    for (int64_t head = 0; head < kv_heads; ++head) {
      Fill(cache_->Lane(0, head).keys);
      Fill(cache_->Lane(0, head).values);
    }
  }

  // What the rows are worth. [kTokens, 16], fp64
  at::Tensor Keys(int64_t head) const { return Worth(cache_->Lane(0, head).keys); }
  at::Tensor Values(int64_t head) const { return Worth(cache_->Lane(0, head).values); }
  const AttentionShape& shape() const { return shape_; }
  const SequenceCache& cache() const { return *cache_; }

  static constexpr int64_t kTokens = 1100;  // of more than two blocks

 private:
  void Fill(char* rows) const {
    const at::Tensor noise = at::randn({tokens_, 16}).to(shape_.dtype);
    const char* const in = static_cast<const char*>(noise.const_data_ptr());
    for (int64_t i = 0; i < tokens_; ++i) {
      WriteRow(in + i * 16 * noise.element_size(), rows + i * pool_.key_bytes(), 16,
               pool_.format());
    }
  }
  at::Tensor Worth(char* rows) const {
    if (shape_.stored == KvDType::kModel) {
      return at::from_blob(rows, {tokens_, 16}, shape_.dtype).to(at::kDouble);
    }
    const at::Tensor bytes = at::from_blob(rows, {tokens_, 16 + 4}, at::kChar);
    const at::Tensor scales =
        bytes.narrow(1, 16, 4).contiguous().view(at::kFloat).to(at::kDouble);  // [kTokens, 1]
    return bytes.narrow(1, 0, 16).to(at::kDouble) * scales;
  }

  const int64_t tokens_;
  const AttentionShape shape_;
  const ModelShape model_;
  Request request_;
  KvPool pool_;
  std::unique_ptr<SequenceCache> cache_;
};

class ColumnSums
    : public ::testing::TestWithParam<
          std::tuple<std::pair<int64_t, int64_t>, at::ScalarType, KvDType, PrefillKernel>> {};

// What a chunk's queries give each token, against the whole matrix in fp64.
TEST_P(ColumnSums, EqualTheSoftmaxSummedOverQueries) {
  const auto [heads, dtype, stored, kernel] = GetParam();
  at::manual_seed(1);
  const OneLayer layer(heads.first, heads.second, dtype, stored);
  const int64_t group = heads.first / heads.second;
  // A first chunk, one in the middle of a block, one across blocks; behind a neighbour's rows.
  for (const auto& [used, rows] :
       std::vector<std::pair<int64_t, int64_t>>{{7, 7}, {300, 40}, {OneLayer::kTokens, 130}}) {
    constexpr int64_t kRow = 3;
    const at::Tensor q = at::randn({kRow + rows, heads.first, 16}).to(dtype);
    const std::vector<int64_t> slots(heads.second, used);
    at::Tensor log_sum_exp;
    const AttentionItem item{.cache = &layer.cache(),
                             .row = kRow,
                             .num_rows = rows,
                             .used = slots,
                             .log_sum_exp = &log_sum_exp};
    const Attention attention(DecodeKernel::kBatch, kernel);
    attention.Run(q, 0, {&item, 1}, layer.shape());
    std::vector<float> sums(heads.second * used, -1);
    attention.ColumnSums(q, 0, item, layer.shape(), absl::MakeSpan(sums));

    const at::Tensor future =
        at::arange(used).unsqueeze(0) > at::arange(used - rows, used).unsqueeze(1);  // [rows, used]
    for (int64_t head = 0; head < heads.second; ++head) {
      const at::Tensor keys = layer.Keys(head).narrow(0, 0, used);
      at::Tensor expected = at::zeros(used, at::kDouble);
      for (int64_t member = 0; member < group; ++member) {
        const at::Tensor logits = q.narrow(0, kRow, rows)
                                      .select(1, head * group + member)
                                      .to(at::kDouble)
                                      .matmul(keys.t()) *
                                  layer.shape().scale;
        expected += logits.masked_fill(future, -std::numeric_limits<double>::infinity())
                        .softmax(-1)
                        .sum(0) /
                    static_cast<double>(group);
      }
      const at::Tensor got = at::from_blob(sums.data() + head * used, {used}, at::kFloat);
      // In bfloat16 the log-sum-exp is the flash kernel's.
      const double bound = dtype == at::kFloat ? 1e-5 : 2e-2;
      EXPECT_LT(((got - expected).abs() / (expected + 1e-3)).max().item<double>(), bound)
          << used << " used, " << rows << " rows, head " << head;
      EXPECT_NEAR(got.sum().item<double>(), rows, rows * bound);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Attention, ColumnSums,
                         ::testing::Combine(::testing::Values(std::pair<int64_t, int64_t>{4, 4},
                                                              std::pair<int64_t, int64_t>{6, 2},
                                                              std::pair<int64_t, int64_t>{4, 1}),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                                            ::testing::Values(KvDType::kModel, KvDType::kInt8),
                                            ::testing::Values(PrefillKernel::kBatch,
                                                              PrefillKernel::kFlash)));

// A decode row is the same from the logits that attending left and made anew, and is the softmax.
TEST(DecodeRows, AreMadeOfTheLogitsThatRunLeaves) {
  at::manual_seed(2);
  for (const auto& [dtype, stored] :
       std::vector<std::pair<at::ScalarType, KvDType>>{{at::kFloat, KvDType::kModel},
                                                       {at::kBFloat16, KvDType::kModel},
                                                       {at::kHalf, KvDType::kModel},
                                                       {at::kFloat, KvDType::kInt8},
                                                       {at::kBFloat16, KvDType::kInt8},
                                                       {at::kHalf, KvDType::kInt8}}) {
    const OneLayer layer(6, 2, dtype, stored);
    const at::Tensor q = at::randn({2, 6, 16}).to(dtype);
    const std::vector<int64_t> used = {OneLayer::kTokens, OneLayer::kTokens};
    std::vector<float> logits;
    const AttentionItem item{.cache = &layer.cache(),
                             .row = 1,
                             .num_rows = 1,
                             .decode = true,
                             .used = used,
                             .logits = &logits};
    std::vector<float> anew(2 * OneLayer::kTokens), of_logits(2 * OneLayer::kTokens);
    const Attention attention(DecodeKernel::kBatch, PrefillKernel::kBatch);
    attention.NewestRows(q, 0, item, layer.shape(), absl::MakeSpan(anew));
    attention.Run(q, 0, {&item, 1}, layer.shape());
    ASSERT_FALSE(logits.empty());
    attention.NewestRows(q, 0, item, layer.shape(), absl::MakeSpan(of_logits));
    for (int64_t head = 0; head < 2; ++head) {
      const at::Tensor row = at::softmax(at::matmul(q[1].narrow(0, head * 3, 3).to(at::kDouble),
                                                    layer.Keys(head).t()) *
                                             layer.shape().scale,
                                         -1)
                                 .mean(0);
      for (int64_t i = 0; i < OneLayer::kTokens; ++i) {
        const int64_t at = head * OneLayer::kTokens + i;
        EXPECT_NEAR(of_logits[at], row[i].item<double>(), 1e-6);
        EXPECT_NEAR(anew[at], row[i].item<double>(), 1e-6);
      }
    }
  }
}

// A layer whose kernel leaves no logits is not given those of the layer before, or of a step in
// which the lanes were shorter.
TEST(DecodeRows, AreNeverMadeOfAnotherLayersLogits) {
  at::manual_seed(3);
  const OneLayer before(6, 2, at::kFloat, KvDType::kModel, std::nullopt, /*window=*/4000);
  const OneLayer layer(6, 2, at::kFloat, KvDType::kModel);
  const at::Tensor q = at::randn({1, 6, 16});
  const std::vector<int64_t> few = {500, 500}, all = {OneLayer::kTokens, OneLayer::kTokens};
  for (DecodeKernel kernel : {DecodeKernel::kFlash, DecodeKernel::kMatmul}) {
    const Attention attention(kernel, PrefillKernel::kBatch);
    std::vector<float> logits;
    auto item = [&](const OneLayer& of, const std::vector<int64_t>& used) {
      return AttentionItem{
          .cache = &of.cache(), .num_rows = 1, .decode = true, .used = used, .logits = &logits};
    };
    std::vector<float> row(2 * OneLayer::kTokens), anew = row;
    const AttentionItem first = item(before, few), second = item(layer, all);
    attention.Run(q, 0, {&first, 1}, before.shape());
    ASSERT_FALSE(logits.empty()) << "layers with windows run in our loop";
    attention.Run(q, 0, {&second, 1}, layer.shape());
    attention.NewestRows(q, 0, second, layer.shape(), absl::MakeSpan(row));
    logits.clear();
    attention.NewestRows(q, 0, second, layer.shape(), absl::MakeSpan(anew));
    EXPECT_EQ(row, anew) << DecodeKernelName(kernel);
  }
}

// A long lane is several threads' where there are few.
TEST(Attention, ThreadsThatShareALaneChangeNoBits) {
  const int threads = at::get_num_threads();
  at::manual_seed(3);
  constexpr int64_t kLong = 2 * kKeysOfPart + 100;
  for (const KvDType stored : {KvDType::kModel, KvDType::kInt8}) {
    const OneLayer layer(6, 2, at::kBFloat16, stored, std::nullopt, std::nullopt, kLong);
    const at::Tensor q = at::randn({1, 6, 16}).to(at::kBFloat16);
    const std::vector<int64_t> used = {kLong, kKeysOfPart - 1};  // one long, one short
    const auto run = [&](int count, std::vector<float>& logits) {
      at::set_num_threads(count);
      const AttentionItem item{.cache = &layer.cache(),
                               .row = 0,
                               .num_rows = 1,
                               .decode = true,
                               .used = used,
                               .logits = &logits};
      return Attention(DecodeKernel::kBatch, PrefillKernel::kBatch)
          .Run(q, 0, {&item, 1}, layer.shape());
    };
    std::vector<float> logits, others;
    const at::Tensor expected = run(1, logits);
    for (const int count : {2, 4}) {
      EXPECT_TRUE(run(count, others).equal(expected)) << count << " threads";
      EXPECT_EQ(others, logits) << count << " threads";
    }
  }
  at::set_num_threads(threads);
}

// Whatever lay in that memory before.
TEST(Attention, LeavesZeroInRowsThatAreNobodys) {
  const OneLayer layer(6, 2, at::kFloat, KvDType::kModel);
  const std::vector<int64_t> used = {300, 300};
  const AttentionItem item{.cache = &layer.cache(), .num_rows = 1, .decode = true, .used = used};
  for (DecodeKernel kernel : {DecodeKernel::kBatch, DecodeKernel::kFlash, DecodeKernel::kMatmul}) {
    at::full({16, 6, 16}, std::numeric_limits<float>::quiet_NaN());  // and given back
    const at::Tensor out = Attention(kernel, PrefillKernel::kBatch)
                               .Run(at::randn({16, 6, 16}), 0, {&item, 1}, layer.shape());
    EXPECT_TRUE(at::isfinite(out[0]).all().item<bool>());
    EXPECT_EQ(out.narrow(0, 1, 15).count_nonzero().item<int64_t>(), 0) << DecodeKernelName(kernel);
  }
}

// One attention item whose tokens lie anywhere, as after evictions: every lane's slots have
// positions of their own, out of order and with gaps; the rows' are the last slots of prefill, any
// of decode.
struct Scattered {
  Scattered(int64_t kv_heads, int64_t used, int64_t rows, bool decode) {
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t next = 2 * used + 7 * head;  // where the first row is
      at::Tensor of_slots = at::randperm(2 * used, at::kLong).narrow(0, 0, used).contiguous();
      const int64_t row_slot = decode ? used / 2 : used - rows;
      of_slots.narrow(0, row_slot, rows).copy_(at::arange(next, next + rows, at::kLong));
      slots.push_back(of_slots);
      positions.push_back({.of_slots = of_slots.const_data_ptr<int64_t>(), .of_first_row = next});
    }
  }
  std::vector<at::Tensor> slots;  // [kv_heads][used]
  std::vector<LanePositions> positions;
};

class BentAttention
    : public ::testing::TestWithParam<
          std::tuple<std::optional<double>, std::optional<int64_t>, at::ScalarType, KvDType>> {};

// Soft caps and windows, in prefill and decode, against softmax over the whole matrix in fp64; and
// what the taps measure of it.
TEST_P(BentAttention, EqualsTheNaiveReference) {
  const auto [soft_cap, window, dtype, stored] = GetParam();
  const bool narrow = dtype != at::kFloat;
  at::manual_seed(3);
  for (const auto& [decode_kernel, prefill_kernel] :
       {std::pair{DecodeKernel::kBatch, PrefillKernel::kBatch},
        std::pair{DecodeKernel::kFlash, PrefillKernel::kFlash}}) {
    const OneLayer layer(6, 2, dtype, stored, soft_cap, window);
    for (const auto& [used, rows] : std::vector<std::pair<int64_t, int64_t>>{
             {7, 7}, {300, 40}, {OneLayer::kTokens, 130}, {1, 1}, {300, 1}, {1000, 1}}) {
      constexpr int64_t kRow = 2, kHeads = 6, kKvHeads = 2, kGroup = 3;
      const bool decode = rows == 1;
      const Scattered scattered(kKvHeads, used, rows, decode);
      const at::Tensor q = at::randn({kRow + rows, kHeads, 16}).mul_(4).to(dtype);
      const std::vector<int64_t> slots(kKvHeads, used);
      at::Tensor log_sum_exp;
      std::vector<float> logits_left;
      AttentionItem item{.cache = &layer.cache(),
                         .row = kRow,
                         .num_rows = rows,
                         .decode = decode,
                         .used = slots,
                         .logits = decode ? &logits_left : nullptr,
                         .log_sum_exp = decode ? nullptr : &log_sum_exp};
      if (window.has_value()) item.positions = scattered.positions;
      const Attention attention(decode_kernel, prefill_kernel);
      std::vector<float> mass(kKvHeads * used, -1), anew(decode ? kKvHeads * used : 0);
      if (decode) {
        std::vector<float>* const left = std::exchange(item.logits, nullptr);
        attention.NewestRows(q, 0, item, layer.shape(), absl::MakeSpan(anew));
        item.logits = left;
      }
      const at::Tensor out = attention.Run(q, 0, {&item, 1}, layer.shape());
      if (decode) {
        attention.NewestRows(q, 0, item, layer.shape(), absl::MakeSpan(mass));
      } else {
        attention.ColumnSums(q, 0, item, layer.shape(), absl::MakeSpan(mass));
      }
      for (int64_t head = 0; head < kKvHeads; ++head) {
        const at::Tensor keys = layer.Keys(head).narrow(0, 0, used);
        const at::Tensor values = layer.Values(head).narrow(0, 0, used);
        const at::Tensor row = at::arange(rows).unsqueeze(1);
        at::Tensor hidden = decode ? at::zeros({1, used}, at::kBool)
                                   : at::arange(used).unsqueeze(0) > row + (used - rows);
        if (window.has_value()) {
          const at::Tensor age =
              scattered.positions[head].of_first_row + row - scattered.slots[head].unsqueeze(0);
          hidden = hidden.logical_or(age >= *window);
        }
        at::Tensor expected_mass = at::zeros(used, at::kDouble);
        for (int64_t member = 0; member < kGroup; ++member) {
          const at::Tensor queries =
              q.narrow(0, kRow, rows).select(1, head * kGroup + member).to(at::kDouble);
          at::Tensor logits = queries.matmul(keys.t()) * layer.shape().scale;
          if (soft_cap.has_value()) logits = *soft_cap * (logits / *soft_cap).tanh();
          const at::Tensor p =
              logits.masked_fill(hidden, -std::numeric_limits<double>::infinity()).softmax(-1);
          expected_mass += p.sum(0) / static_cast<double>(kGroup);
          const at::Tensor got = out.narrow(0, kRow, rows).select(1, head * kGroup + member);
          EXPECT_LT((got.to(at::kDouble) - p.matmul(values)).abs().max().item<double>(),
                    narrow ? 3e-2 : 2e-5)
              << used << " used, " << rows << " rows, head " << head;
        }
        const at::Tensor got = at::from_blob(mass.data() + head * used, {used}, at::kFloat);
        EXPECT_LT(((got - expected_mass).abs() / (expected_mass + 1e-3)).max().item<double>(),
                  narrow && !decode ? 3e-2 : 1e-4)
            << used << " used, " << rows << " rows, head " << head;
        if (!decode) continue;
        const at::Tensor again = at::from_blob(anew.data() + head * used, {used}, at::kFloat);
        EXPECT_LT((again - got).abs().max().item<double>(), 1e-6);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Attention, BentAttention,
    ::testing::Combine(::testing::Values(std::nullopt, 5.0),
                       // One that hides most slots, and whole blocks of them; one wider than all.
                       ::testing::Values(std::nullopt, 20, 700, 100000),
                       ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                       ::testing::Values(KvDType::kModel, KvDType::kInt8)));

// Rows of one byte, so that they can be read.
std::string Read(const QueryWindow& window, int64_t layer) {
  std::string rows(window.size(), '?');
  window.Read(layer, rows.data());
  return rows;
}

TEST(QueryWindow, KeepsTheNewestOldestFirst) {
  QueryWindow window(2, 4, 1);
  EXPECT_EQ(Read(window, 0), "");
  auto step = [&](const std::string& first, const std::string& second) {
    window.Take(0, first.data(), std::ssize(first));
    window.Take(1, second.data(), std::ssize(second));
    window.Commit(std::ssize(first));
  };
  step("abc", "ABC");
  EXPECT_EQ(Read(window, 0), "abc");
  step("d", "D");
  step("e", "E");
  EXPECT_EQ(Read(window, 0), "bcde");
  EXPECT_EQ(Read(window, 1), "BCDE");
  step("fghijk", "FGHIJK");  // a chunk longer than the window
  EXPECT_EQ(Read(window, 0), "hijk");
  step("lm", "LM");
  EXPECT_EQ(Read(window, 1), "JKLM");
}

TEST(QueryWindow, WhatIsTakenCountsWhenItIsCommitted) {
  QueryWindow window(1, 3, 1);
  window.Take(0, "ab", 2);
  window.Commit(2);
  window.Take(0, "x", 1);  // of a step that failed
  EXPECT_EQ(Read(window, 0), "ab");
  window.Take(0, "c", 1);
  window.Commit(1);
  EXPECT_EQ(Read(window, 0), "abc");
}

}  // namespace attention_test
}  // namespace epikv
