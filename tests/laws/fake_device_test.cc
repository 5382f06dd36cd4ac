// The path for devices on a device whose memory the host cannot touch: what it gives is what the
// CPU gives, and how much it copies.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/fake_device.h"
#include "tests/fixtures/fake_recorder.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace fake_device_test {

EngineHarness DeviceHarness(const std::string& name, HarnessOptions options = {}) {
  options.policies = LawPolicies();
  options.device_path = true;
  return EngineHarness(LoadOnce(ModelPath(name), FakeDevice()), options);
}

class OnADevice : public EveryPolicy {};

TEST_P(OnADevice, GivesWhatTheCpuGives) {
  EngineHarness cpu = Harness(), device = DeviceHarness(model());
  const RequestOptions options = WithPolicy(Scoring(cpu.manifest(), 24, 80, 13), policy(), 64);
  const Transcript expected = cpu.Run(options), got = device.Run(options);
  ASSERT_TRUE(expected.ok()) << expected.finished->status;
  ASSERT_TRUE(got.ok()) << got.finished->status;
  EXPECT_GT(got.finished->kv.evicted_entries, 0);
  EXPECT_EQ(got.finished->kv.kept, expected.finished->kv.kept);
  EXPECT_LT(LargestDifference(device.model().TakeLogits(), cpu.model().TakeLogits()), 1e-4);
}

// Where decode steps are recorded, and run again with other numbers.
TEST_P(OnADevice, ReplaysGiveWhatTheCpuGives) {
  EngineHarness cpu = Harness(),
                device = DeviceHarness(model(), {.recorder = std::make_shared<FakeRecorder>()});
  const RequestOptions options = WithPolicy(Scoring(cpu.manifest(), 24, 80, 13), policy(), 64);
  const Transcript expected = cpu.Run(options), got = device.Run(options);
  ASSERT_TRUE(got.ok()) << got.finished->status;
  EXPECT_GT(device.executor().device()->replays(), 70);
  EXPECT_EQ(got.finished->kv.kept, expected.finished->kv.kept);
  for (size_t i = 0; i < expected.logprobs.size(); ++i) {
    EXPECT_NEAR(got.logprobs[i], expected.logprobs[i], 1e-4) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(FakeDevice, OnADevice,
                         ::testing::Combine(::testing::Values("gqa"),
                                            ::testing::ValuesIn(EvictingPolicies())),
                         CaseName);

// In narrow types, which alone the kernel takes, rounding differs; what goes where does not.
TEST(FakeDevice, ServesNarrowTypes) {
  for (const char* model : {"gqa_bf16", "gqa_fp16", "wide_bf16"}) {
    for (const char* policy : {"sliding", "epikv_flat", "h2o", "snapkv", "expected_attention"}) {
      EngineHarness cpu(ModelPath(model)), device = DeviceHarness(model);
      const PolicyCase c = {.policy = policy,
                            .params = SmallParams(*FindPolicy(LawPolicies(), policy))};
      const RequestOptions options = WithPolicy(Scoring(cpu.manifest(), 24, 60, 13), c, 64);
      const Transcript expected = cpu.Run(options), got = device.Run(options);
      ASSERT_TRUE(got.ok()) << model << " " << policy << got.finished->status;
      EXPECT_GT(got.finished->kv.evicted_entries, 0);
      if (policy != std::string("sliding")) continue;  // others may drop what scores alike
      EXPECT_EQ(got.finished->kv.kept, expected.finished->kv.kept);
      EXPECT_LT(LargestDifference(device.model().TakeLogits(), cpu.model().TakeLogits()), 0.1);
    }
  }
}

// Linears of one input are one product, whose weight lies on the device; weights are what they
// were.
TEST(FakeDevice, ComputesLinearsOfOneInputTogether) {
  const auto cpu = LoadOnce(ModelPath("gqa")), device = LoadOnce(ModelPath("gqa"), FakeDevice());
  const int64_t layers = cpu->manifest().num_layers();
  EXPECT_EQ(device->description(),
            absl::StrCat("TorchScript, float32, on ", FakeDevice().str(), ", ", 5 * layers, " of ",
                         7 * layers + 1, " linears prepacked for the device"));
  for (int64_t layer = 0; layer < layers; ++layer) {
    EXPECT_TRUE(device->output_projection(layer).cpu().equal(cpu->output_projection(layer)));
  }
}

// Tokens that are drawn there, or from what comes of a row: those of the CPU.
TEST(FakeDevice, DrawsAsTheCpuDoes) {
  const std::vector<SamplingParams> asked = {
      {.temperature = 1.0f}, {.temperature = 0.8f, .top_p = 0.95f}, {.temperature = 1, .top_k = 9}};
  for (const int64_t head : {16, 1024}) {
    for (const SamplingParams& sampling : asked) {
      EngineHarness cpu(ModelPath("gqa")), device = DeviceHarness("gqa", {.head_tokens = head});
      RequestOptions options;
      options.prompt = Text(cpu.manifest(), 24, 13);
      options.stop.max_output_tokens = 40;
      options.sampling = sampling;
      options.sampling.seed = 3;
      const Transcript expected = cpu.Run(options), got = device.Run(options);
      ASSERT_TRUE(got.ok()) << got.finished->status;
      EXPECT_EQ(got.tokens, expected.tokens);
    }
  }
}

// A step that fails where its results are fetched counts for nothing: each sequence runs it again,
// alone.
TEST(FakeDevice, AFailedCopyLeavesNoTrace) {
  EngineHarness cpu(ModelPath("gqa")), device = DeviceHarness("gqa");
  RequestOptions flat = Scoring(cpu.manifest(), 24, 60, 13);
  flat.output.residual_steps = true;
  flat.output.kept = true;
  flat.kv.policy = "epikv_flat";
  flat.kv.budget = 64;
  const RequestOptions full = Scoring(cpu.manifest(), 24, 70, 14);
  const auto expected = cpu.Submit(flat), got = device.Submit(flat);
  cpu.Submit(full);
  device.Submit(full);
  int64_t failed = 0, steps = 0;
  device.OnStep([&] {
    if (++steps % 5 != 0 || got->finished.has_value()) return;
    FailNextCopyFromFakeDevice();
    ++failed;
  });
  cpu.RunAll();
  device.RunAll();
  ASSERT_TRUE(got->ok()) << got->finished->status;
  EXPECT_GT(failed, 5);
  EXPECT_EQ(got->finished->kv.kept, expected->finished->kv.kept);
  ASSERT_EQ(got->residual_steps.size(), expected->residual_steps.size());
  for (size_t i = 0; i < expected->residual_steps.size(); ++i) {
    for (size_t l = 0; l < expected->residual_steps[i].size(); ++l) {
      const float step = expected->residual_steps[i][l];
      EXPECT_NEAR(got->residual_steps[i][l], step, 1e-4 * step) << i << " " << l;
    }
  }
}

// What went wrong, and not where in the program.
TEST(FakeDevice, AFailureIsNamed) {
  EngineHarness device = DeviceHarness("gqa");
  FailNextCopyFromFakeDevice();
  const Transcript got = device.Run(Scoring(device.manifest(), 24, 10, 13));
  EXPECT_EQ(got.finished->status.message(), "the forward failed: the device failed");
}

// Of policies that pull no keys, values or queries: theirs come besides, at their rounds.
TEST(FakeDevice, OneCopyComesToTheHostInAStep) {
  EngineHarness harness = DeviceHarness("gqa", {.max_step_tokens = 37, .prefill_chunk_tokens = 32});
  for (const char* policy : {"full", "sliding", "random", "epikv_flat", "h2o"}) {
    RequestOptions options;
    options.prompt = Text(harness.manifest(), 70, 5);
    options.stop.max_output_tokens = 60;
    options.output.residual_steps = true;
    if (policy != std::string("full")) {
      options.kv.policy = policy;
      options.kv.budget = 90;
    }
    harness.Submit(std::move(options));
  }
  int64_t steps = 0, before = CopiesFromFakeDevice(), calls = FlashCallsOnFakeDevice();
  harness.OnStep([&] {
    EXPECT_EQ(CopiesFromFakeDevice() - before, 1) << steps;
    before = CopiesFromFakeDevice();
    const int64_t layers = harness.manifest().num_layers();
    const int64_t flash = FlashCallsOnFakeDevice() - calls;
    EXPECT_TRUE(flash == layers || flash == 2 * layers) << "decoded rows, rows of prompts";
    calls += flash;
    ++steps;
  });
  harness.RunAll();
  EXPECT_GT(steps, 60);
}

}  // namespace fake_device_test
}  // namespace epikv
