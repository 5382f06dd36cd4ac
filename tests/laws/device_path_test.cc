// The path for devices, run on the CPU, against the path for the CPU: whole engines, policy by
// policy. On a device the same code runs but for the attention kernel, whose place a plain loop
// over the same arguments takes here.

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "runtime/forward/device.h"
#include "runtime/forward/recorded_steps.h"
#include "runtime/forward/varlen_attention.h"
#include "runtime/kv/kv_pool.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/fake_recorder.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace device_path_test {

// What a run gave.
struct Outcome {
  Transcript transcript;
  std::vector<at::Tensor> logits;
};

Outcome RunOn(bool device, const std::string& model, const RequestOptions& request,
              HarnessOptions options = {}) {
  options.policies = LawPolicies();
  options.device_path = device;
  EngineHarness harness(ModelPath(model), options);
  Outcome outcome{.transcript = harness.Run(request)};
  outcome.logits = harness.model().TakeLogits();
  return outcome;
}

// Victims of every round, in order of their lanes.
std::vector<std::vector<int32_t>> Victims(const Transcript& transcript) {
  std::vector<std::vector<int32_t>> victims;
  for (const EvictionTrace& trace : transcript.evictions) {
    for (const EvictionTrace::Victims& of : trace.victims) {
      victims.push_back(of.index);
      std::sort(victims.back().begin(), victims.back().end());
    }
  }
  return victims;
}

void ExpectAlike(const Outcome& device, const Outcome& cpu) {
  ASSERT_TRUE(cpu.transcript.ok()) << cpu.transcript.finished->status;
  ASSERT_TRUE(device.transcript.ok()) << device.transcript.finished->status;
  EXPECT_EQ(Victims(device.transcript), Victims(cpu.transcript));
  EXPECT_EQ(device.transcript.finished->kv.kept, cpu.transcript.finished->kv.kept);
  EXPECT_LT(LargestDifference(device.logits, cpu.logits), 1e-4);
}

void ExpectSameSteps(const Transcript& device, const Transcript& cpu) {
  ASSERT_EQ(device.residual_steps.size(), cpu.residual_steps.size());
  for (size_t i = 0; i < cpu.residual_steps.size(); ++i) {
    ASSERT_EQ(device.residual_steps[i].size(), cpu.residual_steps[i].size());
    for (size_t l = 0; l < cpu.residual_steps[i].size(); ++l) {
      const float expected = cpu.residual_steps[i][l];
      EXPECT_NEAR(device.residual_steps[i][l], expected, 1e-4 * expected) << i << " " << l;
    }
  }
}

class DevicePath : public EveryPolicy {};

// A prompt that fits, several rounds while it decodes.
TEST_P(DevicePath, GivesWhatTheCpuGives) {
  EngineHarness harness = Harness();
  RequestOptions options = WithPolicy(Scoring(harness.manifest(), 24, 120, 13), policy(), 64);
  options.output.residual_steps = true;
  const Outcome cpu = RunOn(false, model(), options), device = RunOn(true, model(), options);
  ExpectAlike(device, cpu);
  EXPECT_GT(cpu.transcript.finished->kv.evicted_entries, 0);
  ExpectSameSteps(device.transcript, cpu.transcript);
}

// The prompt itself is evicted from, at the ends of its chunks, in steps that cut them.
TEST_P(DevicePath, EvictsPromptsAsTheCpuDoes) {
  const HarnessOptions how = {.max_step_tokens = 19, .prefill_chunk_tokens = 32};
  EngineHarness harness = Harness(how);
  const RequestOptions options = WithPolicy(Scoring(harness.manifest(), 200, 40, 37), policy(), 64);
  if (std::holds_alternative<Rejection>(harness.admission().Resolve(options))) {
    GTEST_SKIP() << "this policy takes no prompt over its budget";
  }
  ExpectAlike(RunOn(true, model(), options, how), RunOn(false, model(), options, how));
}

// The same where decode steps are recorded, and run again with other numbers.
TEST_P(DevicePath, ReplaysGiveWhatTheCpuGives) {
  EngineHarness cpu = Harness();
  RequestOptions options = WithPolicy(Scoring(cpu.manifest(), 24, 120, 13), policy(), 64);
  options.output.residual_steps = true;
  options.output.top_logprobs = 5;
  const auto recorder = std::make_shared<FakeRecorder>();
  EngineHarness device = Harness({.device_path = true, .recorder = recorder});
  const Transcript expected = cpu.Run(options), got = device.Run(options);
  ASSERT_TRUE(expected.ok()) << expected.finished->status;
  ASSERT_TRUE(got.ok()) << got.finished->status;
  EXPECT_EQ(recorder->recorded, 1);
  EXPECT_EQ(device.executor().device()->replays(), 118);  // of 119: all but the first
  EXPECT_EQ(Victims(got), Victims(expected));
  EXPECT_EQ(got.finished->kv.kept, expected.finished->kv.kept);
  ExpectSameSteps(got, expected);
  ASSERT_EQ(got.logprobs.size(), expected.logprobs.size());
  for (size_t i = 0; i < expected.logprobs.size(); ++i) {
    EXPECT_NEAR(got.logprobs[i], expected.logprobs[i], 1e-4) << i;
    EXPECT_NEAR(got.top_logprobs[i][4].logprob, expected.top_logprobs[i][4].logprob, 1e-4) << i;
  }
}

// And the one variant that writes rows.
std::vector<PolicyCase> OfDevices() {
  std::vector<PolicyCase> cases = EvictingPolicies();
  for (const PolicyCase& variant : PolicyVariants()) {
    if (RoundsRows(variant)) cases.push_back(variant);
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Device, DevicePath,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(OfDevices())),
                         CaseName);
INSTANTIATE_TEST_SUITE_P(NightlyDevice, DevicePath,
                         ::testing::Combine(::testing::Values("mha"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

constexpr int64_t kKeptTokens = 96;

int64_t rows_moved = 0;  // since the start, of all runs

// Requests of many policies at once, in steps that hold decoded rows and rows of prompts, with
// several completions, cached prefixes, and a pool so small that sequences are moved.
std::vector<Transcript> RunTogether(bool device, int64_t pool_bytes,
                                    std::function<void(EngineHarness&)> watch = nullptr,
                                    std::shared_ptr<GraphRecorder> recorder = nullptr) {
  EngineHarness harness(ModelPath("gqa"), {.kv_pool_bytes = pool_bytes,
                                           .max_step_tokens = 37,
                                           .prefill_chunk_tokens = 32,
                                           .device_path = device,
                                           .recorder = recorder,
                                           .max_prefix_bytes = 200000,
                                           .policies = LawPolicies(),
                                           .mass_interval = 4,
                                           .end_tokens = false});
  if (watch) watch(harness);
  std::vector<std::shared_ptr<Transcript>> running;
  uint64_t seed = 50;
  for (const char* policy : {"full", "sliding", "epikv_flat", "random", "h2o", "snapkv", "ragged",
                             "keydiff", "full", "epikv_flat"}) {
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 70 + static_cast<int64_t>(seed % 7), 5);
    options.prompt.back() = static_cast<int32_t>(seed);
    options.stop.max_output_tokens = 60 + static_cast<int64_t>(seed % 5) * 9;
    options.output.logprobs = true;
    options.output.residual_steps = true;
    options.output.kept = true;
    options.sampling.seed = seed;
    options.completions = seed % 3 == 0 ? 2 : 1;
    options.output.prompt_logprobs = seed == 58;
    if (options.completions > 1) options.sampling.temperature = 0.8f;
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
  rows_moved += harness.executor().pool().rows_moved();
  std::vector<Transcript> all;
  for (const auto& transcript : running) all.push_back(*transcript);
  return all;
}

// recorded: steps that only decode.
class DevicePathTogether : public ::testing::TestWithParam<bool> {};

TEST_P(DevicePathTogether, GivesWhatTheCpuGives) {
  int64_t evicted = 0, prefixes = 0, of_prompts = 0, moved = 0, replays = 0;
  for (int64_t pool_bytes : {300'000, 350'000, 400'000, 450'000}) {
    const std::vector<Transcript> cpu = RunTogether(false, pool_bytes);
    const int64_t before = rows_moved;
    const auto recorder = std::make_shared<FakeRecorder>();
    int64_t replayed = 0;
    const std::vector<Transcript> device = RunTogether(
        true, pool_bytes,
        [&](EngineHarness& harness) {
          harness.OnStep([&] { replayed = harness.executor().device()->replays(); });
        },
        GetParam() ? recorder : nullptr);
    replays += replayed;
    moved += rows_moved - before;
    ASSERT_EQ(cpu.size(), device.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
      ASSERT_TRUE(cpu[i].ok()) << i << cpu[i].finished->status;
      ASSERT_TRUE(device[i].ok()) << i << device[i].finished->status;
      EXPECT_EQ(device[i].tokens, cpu[i].tokens) << i;
      EXPECT_EQ(device[i].finished->kv.kept, cpu[i].finished->kv.kept) << i;
      ASSERT_EQ(device[i].logprobs.size(), cpu[i].logprobs.size());
      for (size_t t = 0; t < cpu[i].logprobs.size(); ++t) {
        EXPECT_NEAR(device[i].logprobs[t], cpu[i].logprobs[t], 1e-4) << i << " " << t;
      }
      ExpectSameSteps(device[i], cpu[i]);
      ASSERT_EQ(device[i].prompt.logprobs.size(), cpu[i].prompt.logprobs.size());
      for (size_t t = 0; t < cpu[i].prompt.logprobs.size(); ++t, ++of_prompts) {
        EXPECT_NEAR(device[i].prompt.logprobs[t], cpu[i].prompt.logprobs[t], 1e-4) << i << " " << t;
      }
      evicted += cpu[i].finished->kv.evicted_entries;
      prefixes += device[i].finished->cached_prompt_tokens;
    }
  }
  EXPECT_GT(moved, 0);
  EXPECT_GT(evicted, 0);
  EXPECT_GT(prefixes, 0);
  EXPECT_GT(of_prompts, 60);
  EXPECT_EQ(replays > 100, GetParam()) << replays;
}

INSTANTIATE_TEST_SUITE_P(Steps, DevicePathTogether, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Recorded" : "RunOnce"; });

// Where nobody asks for more, the device itself looks for the likeliest tokens.
TEST(DevicePathGreedy, TokensNeedNoLogits) {
  for (const char* model : {"gqa", "gqa_bf16"}) {
    std::vector<std::vector<int32_t>> tokens;
    for (const bool logprobs : {false, true}) {
      EngineHarness device(ModelPath(model), {.device_path = true, .end_tokens = false});
      std::vector<std::shared_ptr<Transcript>> running;
      for (uint64_t seed : {5, 6, 7}) {
        RequestOptions options;
        options.prompt = Text(device.manifest(), 40, seed);
        options.stop.max_output_tokens = 60;
        options.output.logprobs = logprobs && seed != 7;
        if (seed == 7) options.sampling.temperature = 1.0f;  // beside them
        running.push_back(device.Submit(std::move(options)));
      }
      device.RunAll();
      for (const auto& transcript : running) {
        ASSERT_TRUE(transcript->ok()) << transcript->finished->status;
        tokens.push_back(transcript->tokens);
      }
    }
    EXPECT_EQ(tokens[0], tokens[3]);
    EXPECT_EQ(tokens[1], tokens[4]);
    EXPECT_EQ(tokens[2], tokens[5]);
  }
}

// And the tokens that are drawn: by its running sums, or by the host from the likeliest of a row.
TEST(DevicePathSampling, TokensAreThoseOfTheCpu) {
  const std::vector<SamplingParams> asked = {
      {.temperature = 1.0f},
      {.temperature = 0.6f, .top_p = 0.9f},
      {.temperature = 1.3f, .top_k = 20},
      {.temperature = 1.0f, .top_k = 50, .typical_p = 0.8f},
      {.temperature = 0.9f, .min_p = 0.1f},
      {.temperature = 2.0f, .top_p = 0.99f, .min_p = 0.01f},
      {},
      {.temperature = 1.0f, .typical_p = 0.9f},
      {.temperature = 0.8f, .presence_penalty = 0.5f},
  };
  const auto run = [&](HarnessOptions how, int64_t* copies, int64_t* steps) {
    how.end_tokens = false;
    EngineHarness harness(ModelPath("gqa"), how);
    std::vector<std::shared_ptr<Transcript>> running;
    for (size_t i = 0; i < asked.size(); ++i) {
      RequestOptions options;
      options.prompt = Text(harness.manifest(), 30 + 3 * i, i);
      options.stop.max_output_tokens = 60;
      options.sampling = asked[i];
      options.sampling.seed = 11 * i;
      running.push_back(harness.Submit(std::move(options)));
    }
    if (steps != nullptr) harness.OnStep([steps] { ++*steps; });
    harness.RunAll();
    if (copies != nullptr) *copies = harness.executor().device()->host_copies();
    std::vector<std::vector<int32_t>> tokens;
    for (const auto& transcript : running) {
      EXPECT_TRUE(transcript->ok()) << transcript->finished->status;
      tokens.push_back(transcript->tokens);
    }
    return tokens;
  };
  const std::vector<std::vector<int32_t>> expected = run({}, nullptr, nullptr);
  for (const bool recorded : {false, true}) {
    // Heads that hold the whole vocabulary; and such that more is asked for, by a second copy.
    for (const int64_t head : {1024, 24}) {
      HarnessOptions how = {.device_path = true, .head_tokens = head};
      if (recorded) how.recorder = std::make_shared<FakeRecorder>();
      int64_t copies = 0, steps = 0;
      EXPECT_EQ(run(how, &copies, &steps), expected) << recorded << head;
      if (head == 1024) {
        EXPECT_EQ(copies, steps);
      } else {
        EXPECT_GT(copies, steps + 10);
      }
    }
  }
}

TEST(RecordedSteps, AreOfFewSizes) {
  std::vector<int64_t> rows;
  for (int64_t count : {1, 2, 3, 5, 8, 9, 13, 17, 25, 48, 49, 256, 512, 513}) {
    rows.push_back(RecordedSteps::Rows(count));
  }
  EXPECT_THAT(rows, ::testing::ElementsAre(1, 2, 4, 8, 8, 12, 16, 24, 32, 48, 64, 256, 512, 0));
  EXPECT_EQ(RecordedSteps::Length(1), 256);
  EXPECT_EQ(RecordedSteps::Length(256), 256);
  EXPECT_EQ(RecordedSteps::Length(257), 512);
}

TEST(RecordedSteps, ForgetTheOneThatWasNotUsedForLongest) {
  RecordedSteps steps;
  for (int64_t rows = 1; rows <= 64; ++rows) steps.Find({.rows = rows}).ran = true;
  EXPECT_TRUE(steps.Find({.rows = 1}).ran);
  EXPECT_FALSE(steps.Find({.rows = 65}).ran);
  EXPECT_EQ(steps.size(), 64);
  EXPECT_TRUE(steps.Find({.rows = 1}).ran);
  EXPECT_FALSE(steps.Find({.rows = 2}).ran);
}

// A device that can record nothing serves as one without a recorder does.
TEST(DevicePathRecorder, ThatFailsIsLeftAlone) {
  const auto recorder = std::make_shared<FakeRecorder>();
  recorder->fails = true;
  const std::vector<Transcript> expected = RunTogether(true, 400000);
  std::string why;
  const std::vector<Transcript> got = RunTogether(
      true, 400000,
      [&](EngineHarness& harness) {
        harness.OnStep([&] { why = harness.executor().device()->recording_failed(); });
      },
      recorder);
  EXPECT_EQ(recorder->recorded, 3);  // each size once
  EXPECT_EQ(why, "nothing can be recorded here");
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(got[i].ok()) << got[i].finished->status;
    EXPECT_EQ(got[i].tokens, expected[i].tokens) << i;
  }
}

// What such a model gave a hook is no longer what it was when the forward has ended.
TEST(DevicePathRecorder, IsNotForModelsThatWriteInPlace) {
  const auto recorder = std::make_shared<FakeRecorder>();
  EngineHarness cpu(ModelPath("broken/in_place"));
  EngineHarness device(ModelPath("broken/in_place"), {.device_path = true, .recorder = recorder});
  EXPECT_TRUE(device.model().writes_in_place());
  EXPECT_FALSE(EngineHarness(ModelPath("gqa")).model().writes_in_place());
  RequestOptions options;
  options.prompt = {1, 2, 3};
  options.forced = {4, 3, 2, 1, 0, 1, 2, 3, 4, 4, 1};
  options.output.residual_steps = true;
  const Transcript expected = cpu.Run(options), got = device.Run(options);
  ASSERT_TRUE(got.ok()) << got.finished->status;
  EXPECT_EQ(recorder->recorded, 0);
  ExpectSameSteps(got, expected);
}

// What a step gives the host, whoever asks for how much of it, comes in one copy.
TEST(DevicePathCopies, ToTheHostAreOneAStep) {
  int64_t steps = 0, before = 0;
  RunTogether(true, 400000, [&](EngineHarness& harness) {
    harness.OnStep([&] {
      const int64_t copies = harness.executor().device()->host_copies();
      EXPECT_LE(copies - before, 1);
      before = copies;
      ++steps;
    });
  });
  EXPECT_EQ(before, steps);
  EXPECT_GT(steps, 60);
}

TEST(DevicePathRefuses, PositionsInTheCache) {
  EngineHarness harness(ModelPath("gqa"), {.device_path = true});
  RequestOptions options;
  options.prompt = {1, 2, 3};
  options.kv.positions = PositionMode::kCache;
  const Rejection rejection = harness.Refusal(options);
  ASSERT_EQ(rejection.violations.size(), 1);
  EXPECT_EQ(rejection.violations.front().field, "kv.positions");
}

TEST(DevicePathRefuses, ModelsThatTheKernelCannotServe) {
  const Manifest good = EngineHarness(ModelPath("gqa_bf16")).manifest();
  EXPECT_TRUE(CheckGpuServes(good).ok()) << CheckGpuServes(good);
  auto refusal = [&](const std::function<void(Manifest&)>& change) {
    Manifest manifest = good;
    change(manifest);
    const absl::Status status = CheckGpuServes(manifest);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    return std::string(status.message());
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal([](Manifest& m) { m.dtype = DType::kFloat32; }), HasSubstr("is float32"));
  EXPECT_THAT(refusal([](Manifest& m) { m.layers[1].key_width = 264; }), HasSubstr("have 264"));
  EXPECT_THAT(refusal([](Manifest& m) { m.layers[1].key_width = 20; }), HasSubstr("have 20"));
  EXPECT_THAT(refusal([](Manifest& m) { m.layers[1].soft_cap = 50; }),
              HasSubstr("layer 1 has a soft cap"));
  EXPECT_THAT(refusal([](Manifest& m) { m.layers[1].window = m.context_length - 1; }),
              HasSubstr("layer 1 has a window"));
  Manifest wide = good;  // hides nothing
  wide.layers[1].window = wide.context_length;
  EXPECT_TRUE(CheckGpuServes(wide).ok());
}

TEST(OpenDevice, SaysWhatIsMissing) {
  EXPECT_TRUE(OpenDevice("cpu")->is_cpu());
  const absl::StatusOr<at::Device> cuda = OpenDevice("cuda");
  if (cuda.ok()) GTEST_SKIP() << "there is a GPU";
  EXPECT_EQ(cuda.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(cuda.status().message(), ::testing::HasSubstr("serve with --device=cpu"));
}

// Each row goes where raw copies put it, whatever overlaps.
TEST(KvPool, GathersAsItCopies) {
  constexpr int64_t kRows = 200000, kWidth = 2;  // more than are gathered at once
  KvPool raw(kRows, kWidth, kWidth, KvFormat());
  KvPool gathered(kRows, kWidth, kWidth, KvFormat(), {.by_gather = true});
  for (KvPool* pool : {&raw, &gathered}) {
    pool->keys().narrow(0, 0, kRows).copy_(at::arange(kRows * kWidth).view({kRows, kWidth}));
    pool->values().copy_(-pool->keys());
  }
  const std::vector<std::vector<RowMove>> batches = {
      {{.from = 40, .to = 3, .count = 100}, {.from = 170, .to = 103, .count = 30}},  // down
      {{.from = 90000, .to = 110000, .count = 80000}},                               // up
      {{.from = 20011, .to = 10, .count = 150000}},                                  // down, far
      {{.from = 9, .to = 100, .count = 1}, {.from = 8, .to = 107, .count = 1}},
      {{.from = 500, .to = 700, .count = 20}, {.from = 300, .to = 400, .count = 150}},
      {}};
  for (const std::vector<RowMove>& batch : batches) {
    raw.Copy(batch);
    gathered.Copy(batch);
    ASSERT_TRUE(at::equal(raw.keys(), gathered.keys().narrow(0, 0, kRows)));
    ASSERT_TRUE(at::equal(raw.values(), gathered.values().narrow(0, 0, kRows)));
  }
}

// In chunks as at once: prompts are long, and their masses are made a block of queries at a time.
TEST(AttentionMass, OfManyQueriesIsTheSumOfEachOnes) {
  constexpr int64_t kHeads = 2, kGroup = 3, kWidth = 8, kUsed = 3000, kCapacity = 3010;
  at::manual_seed(3);
  const at::Tensor keys = at::randn({7 + kHeads * kCapacity, kWidth});
  const at::Tensor q = at::randn({1200, kHeads * kGroup, kWidth});
  const at::Tensor all = AttentionMass(q, keys, 7, kHeads, kCapacity, kUsed, 0.5);
  at::Tensor sum = at::zeros_like(all);
  for (int64_t row = 0; row < q.size(0); ++row) {
    const int64_t seen = kUsed - q.size(0) + row + 1;
    sum.narrow(1, 0, seen) +=
        AttentionMass(q.narrow(0, row, 1), keys, 7, kHeads, kCapacity, seen, 0.5);
  }
  EXPECT_LT((all - sum).abs().max().item<float>(), 1e-4);
}

}  // namespace device_path_test
}  // namespace epikv
