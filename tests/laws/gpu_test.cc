// The path for devices on a GPU: the kernel alone, and whole engines against what the definition
// gives, policy by policy. Needs a GPU; tests/gpu.sh runs it.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/forward/device.h"
#include "runtime/forward/device_forward.h"
#include "runtime/forward/varlen_attention.h"
#include "runtime/kv/kv_pool.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace gpu_test {

// Opened before any test, for that comes before any other use of torch.
const absl::StatusOr<at::Device> gpu = OpenDevice("cuda");

at::Device Gpu() {
  if (!gpu.ok()) throw std::runtime_error(std::string(gpu.status().message()));
  return *gpu;
}

EngineHarness GpuHarness(const std::string& name, HarnessOptions options = {}) {
  options.policies = LawPolicies();
  options.device_path = true;
  options.recorder = *NewGpuRecorder();
  return EngineHarness(LoadOnce(ModelPath(name), Gpu()), options);
}

// Root mean square difference of a transcript's log-probabilities, of the given tokens and of the
// likeliest ones, from what the reference's logits say.
double Error(const Transcript& got, const RequestOptions& options,
             const std::vector<MaskedReference::Step>& expected) {
  double squares = 0;
  int64_t count = 0;
  for (size_t i = 0; i < options.forced.size(); ++i) {
    const at::Tensor wanted =
        expected[options.prompt.size() - 1 + i].logits.to(at::kFloat).log_softmax(0);
    std::vector<TokenLogprob> said = got.top_logprobs[i];
    said.push_back({options.forced[i], got.logprobs[i]});
    for (const TokenLogprob& each : said) {
      squares += std::pow(each.logprob - wanted[each.token].item<double>(), 2);
      ++count;
    }
  }
  return std::sqrt(squares / static_cast<double>(count));
}

// Lanes of a pool whose other rows are NaN: a kernel that reads one of them gives NaN.
struct Lanes {
  int64_t group = 1, width = 64;
  bool causal = false;
  at::ScalarType dtype = at::kBFloat16;
};

void PrintTo(const Lanes& lanes, std::ostream* out) {
  *out << lanes.group << " queries of " << lanes.width << (lanes.causal ? ", causal" : "");
}

VarlenCall CallOver(const Lanes& lanes, uint64_t seed) {
  std::mt19937 rng(seed);
  at::manual_seed(seed);
  constexpr int64_t kRows = 20000, kLongest = 3000;
  const at::Tensor nothing =
      at::full({kRows, lanes.width}, std::numeric_limits<float>::quiet_NaN()).to(lanes.dtype);
  VarlenCall call{.keys = nothing, .values = nothing.clone(), .causal = lanes.causal};
  std::vector<int32_t> query_starts = {0}, starts, lengths;
  int64_t row = 5;
  for (int64_t lane = 0; lane < 9; ++lane) {
    const int64_t queries = lanes.causal ? 1 + rng() % 150 : 1;
    const int64_t longest = lane == 4 ? kLongest : 400;  // one that is split, beside short ones
    const int64_t length = queries + rng() % (longest - queries);
    call.keys.narrow(0, row, length).copy_(at::randn({length, lanes.width}));
    call.values.narrow(0, row, length).copy_(at::randn({length, lanes.width}));
    query_starts.push_back(query_starts.back() + static_cast<int32_t>(queries));
    starts.push_back(static_cast<int32_t>(row));
    lengths.push_back(static_cast<int32_t>(length));
    call.max_queries = std::max(call.max_queries, queries);
    call.max_length = std::max(call.max_length, length);
    row += length + 1 + static_cast<int64_t>(rng() % 70);
  }
  starts.push_back(starts.back() + lengths.back());
  call.q = at::randn({query_starts.back(), lanes.group, lanes.width}).to(lanes.dtype);
  call.query_starts = at::tensor(query_starts, at::kInt);
  call.starts = at::tensor(starts, at::kInt);
  call.lengths = at::tensor(lengths, at::kInt);
  call.scale = 1 / std::sqrt(static_cast<double>(lanes.width));
  return call;
}

VarlenCall Moved(VarlenCall call, at::Device device) {
  for (at::Tensor* tensor :
       {&call.q, &call.keys, &call.values, &call.query_starts, &call.starts, &call.lengths}) {
    *tensor = tensor->to(device);
  }
  return call;
}

TEST(GpuKernel, ReadsItsLanesAndNothingElse) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t width : {8, 16, 24, 64, 80, 96, 128, 192, 256}) {
      for (const int64_t group : {1, 2, 3, 4, 5, 7, 8, 16}) {
        for (const bool causal : {false, true}) {
          const Lanes lanes{.group = group, .width = width, .causal = causal, .dtype = dtype};
          SCOPED_TRACE(::testing::PrintToString(lanes));
          const VarlenCall call = CallOver(lanes, 100 * width + group);
          const at::Tensor expected = VarlenAttention(call).to(at::kFloat);
          const at::Tensor got = VarlenAttention(Moved(call, Gpu())).to(at::kFloat).cpu();
          const double error =
              (got - expected).norm().item<double>() / expected.norm().item<double>();
          ASSERT_LT(error, dtype == at::kHalf ? 2e-3 : 1e-2);
        }
      }
    }
  }
}

TEST(GpuKernel, AttentionMassIsTheCpus) {
  constexpr int64_t kHeads = 2, kGroup = 3, kWidth = 64, kUsed = 3000, kCapacity = 3010;
  at::manual_seed(3);
  const at::Tensor keys = at::randn({7 + kHeads * kCapacity, kWidth}).to(at::kBFloat16);
  for (const int64_t rows : {1, 300}) {
    const at::Tensor q = at::randn({rows, kHeads * kGroup, kWidth}).to(at::kBFloat16);
    const at::Tensor cpu = AttentionMass(q, keys, 7, kHeads, kCapacity, kUsed, 0.125);
    const at::Tensor gpu =
        AttentionMass(q.to(Gpu()), keys.to(Gpu()), 7, kHeads, kCapacity, kUsed, 0.125).cpu();
    EXPECT_LT((gpu - cpu).norm().item<double>() / cpu.norm().item<double>(), 1e-3);
  }
}

// Pools of a GPU: each row goes where it is sent, whatever overlaps.
TEST(GpuPool, GathersAsItCopies) {
  constexpr int64_t kRows = 200000, kWidth = 2;
  const KvFormat format = {.model = DType::kBFloat16};
  KvPool cpu(kRows, kWidth, kWidth, format);
  KvPool gpu(kRows, kWidth, kWidth, format, {.device = Gpu(), .by_gather = true});
  cpu.keys().copy_(at::randn({kRows, kWidth}));
  cpu.values().copy_(-cpu.keys());
  const at::Tensor keys = gpu.keys().narrow(0, 0, kRows), values = gpu.values().narrow(0, 0, kRows);
  keys.copy_(cpu.keys());
  values.copy_(cpu.values());
  const std::vector<std::vector<RowMove>> batches = {
      {{.from = 40, .to = 3, .count = 100}, {.from = 170, .to = 103, .count = 30}},
      {{.from = 90000, .to = 110000, .count = 80000}},
      {{.from = 20011, .to = 10, .count = 150000}},
      {{.from = 9, .to = 100, .count = 1}, {.from = 8, .to = 107, .count = 1}}};
  for (const std::vector<RowMove>& batch : batches) {
    cpu.Copy(batch);
    gpu.Copy(batch);
    ASSERT_TRUE(at::equal(cpu.keys(), keys.cpu()));
    ASSERT_TRUE(at::equal(cpu.values(), values.cpu()));
  }
}

class OnAGpu : public EveryPolicy {};

// Law 5: after each round logits are those of plain attention under the mask of what is kept. Under
// no mask they would be far from it.
TEST_P(OnAGpu, EvictionIsTheMask) {
  if (RoundsRows(policy())) GTEST_SKIP() << "the mask is over rows as they were cached";
  EngineHarness cpu(ModelPath(model())), harness = GpuHarness(model());
  RequestOptions options = WithPolicy(Scoring(cpu.manifest(), 24, 120, 13), policy(), 64);
  options.output.top_logprobs = 20;
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(Evicted(transcript, harness.manifest()));
  const MaskedReference reference(cpu.model());
  const double error =
      Error(transcript, options,
            reference.Run(CachedTokens(options), DroppedBy(transcript, cpu.manifest())));
  RecordProperty("error", absl::StrCat(error));
  EXPECT_LT(error, 0.02);
  EXPECT_GT(Error(transcript, options, reference.Run(CachedTokens(options), {})), 5 * error);
  const DeviceForward& device = *harness.executor().device();
  EXPECT_EQ(device.recording_failed(), "");
  EXPECT_GT(device.replays(), 100);
}

// The prompt itself is evicted from, in steps that cut its chunks, and the run ends well.
TEST_P(OnAGpu, EvictsFromPrompts) {
  const HarnessOptions how = {.max_step_tokens = 19, .prefill_chunk_tokens = 32};
  EngineHarness harness = GpuHarness(model(), how);
  const RequestOptions options = WithPolicy(Scoring(harness.manifest(), 200, 40, 37), policy(), 64);
  if (std::holds_alternative<Rejection>(harness.admission().Resolve(options))) {
    GTEST_SKIP() << "this policy takes no prompt over its budget";
  }
  const Transcript transcript = harness.Run(options);
  ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
  EXPECT_GT(transcript.finished->kv.evicted_entries, 0);
  for (const float logprob : transcript.logprobs) ASSERT_TRUE(std::isfinite(logprob));
}

std::vector<PolicyCase> OfDevices() {
  std::vector<PolicyCase> cases = EvictingPolicies();
  for (const PolicyCase& variant : PolicyVariants()) cases.push_back(variant);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Bf16, OnAGpu,
                         ::testing::Combine(::testing::Values("gqa_bf16"),
                                            ::testing::ValuesIn(OfDevices())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(Wide, OnAGpu,
                         ::testing::Combine(::testing::Values("wide_bf16", "wide_fp16"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

constexpr int64_t kKeptTokens = 96;

// Requests at once, in steps that hold decoded rows and rows of prompts, with several completions,
// cached prefixes, and a pool so small that sequences are moved. What they keep does not depend on
// how a number is rounded, and their texts are given: a GPU's log-probabilities can be compared.
std::vector<Transcript> RunTogether(EngineHarness& harness) {
  std::vector<std::shared_ptr<Transcript>> running;
  uint64_t seed = 50;
  for (const char* policy : {"full", "sliding", "random", "full", "ragged", "sliding", "random",
                             "full", "random", "sliding"}) {
    RequestOptions options =
        Scoring(harness.manifest(), 70 + static_cast<int64_t>(seed % 7), 60 + seed % 5 * 9, 5);
    options.prompt.back() = static_cast<int32_t>(seed);
    options.output.residual_steps = true;
    options.output.kept = true;
    options.output.prompt_logprobs = seed == 58;
    options.kv.positions = seed % 2 == 0 ? PositionMode::kAbsolute : PositionMode::kCompact;
    if (policy != std::string("full")) {
      options.kv.policy = policy;
      options.kv.params = SmallParams(*FindPolicy(LawPolicies(), policy));
      options.kv.budget = kKeptTokens;
    }
    running.push_back(harness.Submit(std::move(options)));
    ++seed;
  }
  harness.RunAll();
  std::vector<Transcript> all;
  for (const auto& transcript : running) all.push_back(*transcript);
  return all;
}

TEST(GpuTogether, GivesWhatTheCpuGives) {
  int64_t evicted = 0, prefixes = 0, moved = 0, compared = 0;
  double squares = 0;
  for (const int64_t pool_bytes : {150'000, 175'000, 200'000, 225'000}) {
    const HarnessOptions how = {.kv_pool_bytes = pool_bytes,
                                .max_step_tokens = 37,
                                .prefill_chunk_tokens = 32,
                                .max_prefix_bytes = 100'000,
                                .policies = LawPolicies()};
    EngineHarness on_cpu(ModelPath("gqa_bf16"), how), on_gpu = GpuHarness("gqa_bf16", how);
    int64_t before = 0;
    on_gpu.OnStep([&] {
      const int64_t copies = on_gpu.executor().device()->host_copies();
      EXPECT_LE(copies - before, 1);
      before = copies;
    });
    const std::vector<Transcript> cpu = RunTogether(on_cpu), got = RunTogether(on_gpu);
    moved += on_gpu.executor().pool().rows_moved();
    for (size_t i = 0; i < cpu.size(); ++i) {
      ASSERT_TRUE(cpu[i].ok()) << i << cpu[i].finished->status;
      ASSERT_TRUE(got[i].ok()) << i << got[i].finished->status;
      EXPECT_EQ(got[i].finished->kv.kept, cpu[i].finished->kv.kept) << i;
      ASSERT_EQ(got[i].logprobs.size(), cpu[i].logprobs.size());
      for (size_t t = 0; t < cpu[i].logprobs.size(); ++t, ++compared) {
        squares += std::pow(got[i].logprobs[t] - cpu[i].logprobs[t], 2);
      }
      ASSERT_EQ(got[i].residual_steps.size(), cpu[i].residual_steps.size());
      for (size_t s = 0; s < cpu[i].residual_steps.size(); ++s) {
        for (size_t l = 0; l < cpu[i].residual_steps[s].size(); ++l) {
          const float expected = cpu[i].residual_steps[s][l];
          ASSERT_NEAR(got[i].residual_steps[s][l], expected, 0.05 * expected) << i << " " << s;
        }
      }
      evicted += cpu[i].finished->kv.evicted_entries;
      prefixes += got[i].finished->cached_prompt_tokens;
    }
  }
  EXPECT_LT(std::sqrt(squares / static_cast<double>(compared)), 0.03);
  EXPECT_GT(moved, 0);
  EXPECT_GT(evicted, 0);
  EXPECT_GT(prefixes, 0);
  EXPECT_GT(compared, 2000);
}

// Where nobody asks for more, the GPU itself looks for the likeliest token.
TEST(GpuTogether, GreedyTokensNeedNoLogits) {
  std::vector<std::vector<int32_t>> tokens;
  for (const bool logprobs : {false, true}) {
    EngineHarness harness = GpuHarness("wide_bf16", {.end_tokens = false});
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 40, 5);
    options.stop.max_output_tokens = 100;
    options.output.logprobs = logprobs;
    const Transcript transcript = harness.Run(options);
    ASSERT_TRUE(transcript.ok()) << transcript.finished->status;
    tokens.push_back(transcript.tokens);
  }
  EXPECT_EQ(tokens[0].size(), 100);
  EXPECT_EQ(tokens[0], tokens[1]);
}

// Every policy beside every other, sampled, several completions each: all end well, nothing is
// left.
TEST(GpuTogether, EveryPolicyEndsWell) {
  EngineHarness harness = GpuHarness("gqa_bf16", {.kv_pool_bytes = 1'000'000,
                                                  .max_step_tokens = 64,
                                                  .prefill_chunk_tokens = 32,
                                                  .max_prefix_bytes = 200'000,
                                                  .mass_interval = 4,
                                                  .end_tokens = false});
  std::vector<std::shared_ptr<Transcript>> running;
  uint64_t seed = 1;
  for (int round = 0; round < 2; ++round) {
    for (const PolicyCase& policy : OfDevices()) {
      RequestOptions options;
      options.prompt = Text(harness.manifest(), 40, 5 + seed % 3);
      options.stop.max_output_tokens = 80;
      options.sampling.temperature = 0.8f;
      options.sampling.seed = seed;
      options.completions = seed++ % 3 == 0 ? 2 : 1;
      running.push_back(harness.Submit(WithPolicy(std::move(options), policy, 64)));
    }
  }
  harness.RunAll();
  int64_t evicted = 0;
  for (size_t i = 0; i < running.size(); ++i) {
    ASSERT_TRUE(running[i]->ok()) << i << running[i]->finished->status;
    for (const Transcript& one : running[i]->completions) evicted += one.finished->kv.rounds;
    evicted += running[i]->finished->kv.rounds;
  }
  EXPECT_GT(evicted, 1000);
  EXPECT_EQ(harness.executor().used_bytes(), 0);
}

TEST(GpuTogether, AThousandCancelsLeaveNothing) {
  EngineHarness harness = GpuHarness("gqa_bf16", {.kv_pool_bytes = 600'000,
                                                  .max_step_tokens = 64,
                                                  .prefill_chunk_tokens = 32,
                                                  .max_prefix_bytes = 100'000,
                                                  .end_tokens = false});
  const RequestOptions alone = Scoring(harness.manifest(), 70, 60, 9);
  const Transcript before = harness.Run(alone);
  std::mt19937 rng(7);
  const std::vector<PolicyCase> policies = EvictingPolicies();
  std::vector<std::string> live;
  int cancelled = 0;
  for (int i = 0; cancelled < 1000; ++i) {
    RequestOptions options;
    options.id = absl::StrCat("to-cancel-", i);
    options.prompt = Text(harness.manifest(), 20 + rng() % 60, rng() % 4);
    options.stop.max_output_tokens = 100;
    options.completions = 1 + rng() % 2;
    live.push_back(options.id);
    const RequestOptions asked =
        WithPolicy(std::move(options), policies[rng() % policies.size()], 64);
    if (std::holds_alternative<Rejection>(harness.admission().Resolve(asked))) continue;
    harness.Submit(asked);
    for (uint32_t steps = rng() % 3; steps > 0; --steps) harness.engine().Step();
    if (live.size() < 12) continue;
    const size_t which = rng() % live.size();
    cancelled += harness.engine().Cancel(live[which], absl::CancelledError("enough"));
    live.erase(live.begin() + static_cast<int64_t>(which));
  }
  harness.engine().CancelAll(absl::CancelledError("enough"));
  while (harness.engine().Step()) {
  }
  EXPECT_EQ(harness.executor().used_bytes(), 0);
  EXPECT_EQ(harness.engine().ledger().reserved(), 0);
  const Transcript after = harness.Run(alone);
  ASSERT_TRUE(after.ok()) << after.finished->status;
  ASSERT_EQ(after.logprobs.size(), before.logprobs.size());
  for (size_t i = 0; i < after.logprobs.size(); ++i) {
    EXPECT_NEAR(after.logprobs[i], before.logprobs[i], 0.1) << i;
  }
}

}  // namespace gpu_test
}  // namespace epikv
