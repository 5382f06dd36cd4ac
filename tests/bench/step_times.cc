// Where the time of decode steps goes: by stage on the engine's thread and, of a GPU, by kernel.
//
//   step_times MODEL DEVICE CACHED STREAMS,.. POLICY,.. [STEPS]
//
// STREAMS decode together, each with CACHED tokens in its cache or, under `full`, some tokens more.
// A POLICY may say how tokens are drawn, NAME:TEMPERATURE or NAME:TEMPERATURE:TOP_P; else they are
// the likeliest.
// Prints a line for each number of streams and policy; of a GPU also what LibTorch's profiler saw
// of eight more steps.
#include <ATen/Context.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "runtime/admission/admission.h"
#include "runtime/base/steady_time.h"
#include "runtime/engine/engine.h"
#include "runtime/runtime.h"

namespace epikv {
namespace {

constexpr int64_t kWarmSteps = 20, kProfiledSteps = 8;
constexpr size_t kKernelsShown = 10;

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "step_times: %s\n", why.c_str());
  std::exit(2);
}

class Sums final : public EngineObserver {
 public:
  void OnStep(const StepStats& step) override {
    last = step;
    for (int stage = 0; stage < kNumStages; ++stage) wall[stage] += step.wall[stage];
    total += step.total_wall;
  }
  StepStats last;
  absl::Duration wall[kNumStages], total;
};

class Counter final : public RequestSink {
 public:
  bool Ready() const override { return true; }
  void OnDelta(Delta delta) override { tokens += std::ssize(delta.tokens); }
  void OnFinished(Finished finished) override { ended = finished.status; }
  int64_t tokens = 0;
  absl::Status ended;
};

double Milliseconds(absl::Duration time) { return absl::ToDoubleMilliseconds(time); }

struct Kernel {
  int64_t calls = 0;
  double milliseconds = 0;
};

// POLICY of the command line.
struct Asked {
  std::string text, policy;
  SamplingParams sampling;
};

Asked AskedBy(absl::string_view text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  Asked asked = {.text = std::string(text), .policy = parts[0], .sampling = {.temperature = 0.0f}};
  for (size_t i = 1; i < parts.size(); ++i) {
    float number = 0;
    if (i > 2 || !absl::SimpleAtof(parts[i], &number)) Die("POLICY is NAME[:TEMPERATURE[:TOP_P]]");
    (i == 1 ? asked.sampling.temperature : asked.sampling.top_p) = number;
  }
  return asked;
}

class Bench {
 public:
  explicit Bench(const RuntimeOptions& options) {
    absl::StatusOr<LoadedModel> loaded = LoadModel(options);
    if (!loaded.ok()) Die(std::string(loaded.status().message()));
    for (const std::string& line : loaded->description) std::printf("# %s\n", line.c_str());
    on_gpu_ = loaded->device != "cpu";
    tokenizer_ = *Tokenizer::FromJson(loaded->tokenizer_json);
    admission_ = std::make_unique<Admission>(
        loaded->manifest, loaded->shape, loaded->policies,
        AdmissionLimits{.kv_capacity_bytes = loaded->kv_capacity_bytes,
                        .prefill_chunk_tokens = options.prefill_chunk_tokens,
                        .max_running_requests = options.max_running_requests,
                        .turns_keys = !on_gpu_});
    loaded->on_engine_thread_start();
    engine_ = std::make_unique<Engine>(
        EngineOptions{.scheduler = {.max_step_tokens = options.max_step_tokens,
                                    .prefill_chunk_tokens = options.prefill_chunk_tokens},
                      .kv_capacity_bytes = loaded->kv_capacity_bytes,
                      .max_running_requests = options.max_running_requests},
        std::move(loaded->executor), *tokenizer_, sums_);
  }

  void Run(int64_t streams, const Asked& asked, int64_t cached, int64_t steps) {
    const absl::Time begin = SteadyNow();
    std::vector<std::shared_ptr<Counter>> sinks;
    for (int64_t i = 0; i < streams; ++i) sinks.push_back(Submit(i, asked, cached));
    do {
      Step(sinks);
    } while (sums_.last.prefill_tokens > 0 || sums_.last.decode_tokens < streams);
    const double prefill = Milliseconds(SteadyNow() - begin);
    for (int64_t i = 0; i < kWarmSteps; ++i) Step(sinks);
    sums_ = Sums();
    for (int64_t i = 0; i < steps; ++i) Step(sinks);
    auto of = [&](Stage stage) {
      return Milliseconds(sums_.wall[static_cast<int>(stage)]) / static_cast<double>(steps);
    };
    const double step = Milliseconds(sums_.total) / static_cast<double>(steps);
    std::printf(
        "%4ld streams of %ld, %-18s %8.2f ms a step = %8.0f tokens/s; schedule %.2f, forward %.2f, "
        "sample %.2f, deliver %.2f, observe %.2f, evict %.2f; prompts %.0f tokens/s\n",
        streams, cached, asked.text.c_str(), step, 1e3 * static_cast<double>(streams) / step,
        of(Stage::kSchedule), of(Stage::kForward), of(Stage::kSample), of(Stage::kDeliver),
        of(Stage::kObserve), of(Stage::kEvict),
        1e3 * static_cast<double>(streams * cached) / prefill);
    if (on_gpu_) Profile(sinks);
    std::fflush(stdout);
    engine_->CancelAll(absl::CancelledError("measured"));
    while (engine_->Step()) {
    }
  }

 private:
  std::shared_ptr<Counter> Submit(int64_t seed, const Asked& asked, int64_t cached) {
    std::mt19937 rng(seed);
    RequestOptions options;
    options.id = absl::StrCat(asked.policy, "-", next_id_++);
    for (int64_t i = 0; i < cached - 16; ++i) {
      options.prompt.push_back(static_cast<int32_t>(rng() % admission_->manifest().vocab_size));
    }
    options.stop.ignore_end = true;
    options.sampling = asked.sampling;
    options.sampling.seed = seed;
    options.output.text = false;
    options.kv.policy = asked.policy;
    options.kv.bypass_prefix_cache = true;
    options.stop.max_output_tokens = 1000;
    if (asked.policy != "full") {
      options.kv.budget = cached;
      options.kv.protection.prompt = false;
    }
    auto request = admission_->Resolve(std::move(options));
    if (const auto* refused = std::get_if<Rejection>(&request)) Die(refused->message);
    auto sink = std::make_shared<Counter>();
    engine_->Submit(std::get<Request>(std::move(request)), sink);
    return sink;
  }

  void Step(const std::vector<std::shared_ptr<Counter>>& sinks) {
    if (!engine_->Step()) Die("nothing could run: more streams than the KV pool holds?");
    for (const auto& sink : sinks) {
      if (!sink->ended.ok()) Die(std::string(sink->ended.message()));
    }
  }

  void Profile(const std::vector<std::shared_ptr<Counter>>& sinks) {
    using torch::profiler::impl::ActivityType;
    using torch::profiler::impl::ProfilerConfig;
    using torch::profiler::impl::ProfilerState;
    const std::set<ActivityType> activities = {ActivityType::CPU, ActivityType::CUDA};
    const ProfilerConfig config(ProfilerState::KINETO);
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
    const absl::Time begin = SteadyNow();
    for (int64_t i = 0; i < kProfiledSteps; ++i) Step(sinks);
    const double wall = Milliseconds(SteadyNow() - begin);
    const auto result = torch::autograd::profiler::disableProfiler();
    std::map<std::string, Kernel> kernels;
    Kernel all;
    int64_t operators = 0;
    for (const auto& event : result->events()) {
      operators += event.deviceType() == at::kCPU && event.name().starts_with("aten::");
      if (event.deviceType() != at::kCUDA) continue;
      for (Kernel* kernel : {&kernels[event.name().substr(0, 100)], &all}) {
        ++kernel->calls;
        kernel->milliseconds += static_cast<double>(event.durationNs()) / 1e6;
      }
    }
    std::vector<std::pair<std::string, Kernel>> order(kernels.begin(), kernels.end());
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return a.second.milliseconds > b.second.milliseconds;
    });
    std::printf(
        "     a step under the profiler: %.2f ms, of which %.2f on the device, in %ld kernels "
        "and copies; %ld ATen operators\n",
        wall / kProfiledSteps, all.milliseconds / kProfiledSteps, all.calls / kProfiledSteps,
        operators / kProfiledSteps);
    for (size_t i = 0; i < std::min(order.size(), kKernelsShown); ++i) {
      std::printf("     %8.3f ms in %5ld calls  %s\n",
                  order[i].second.milliseconds / kProfiledSteps,
                  order[i].second.calls / kProfiledSteps, order[i].first.c_str());
    }
  }

  Sums sums_;
  bool on_gpu_ = false;
  int64_t next_id_ = 0;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<Engine> engine_;
};

int Main(int argc, char** argv) {
  if (argc < 6) Die("see the head of step_times.cc for its arguments");
  int64_t cached = 0, steps = 32;
  if (!absl::SimpleAtoi(argv[3], &cached)) Die("CACHED is no number");
  if (argc > 6 && !absl::SimpleAtoi(argv[6], &steps)) Die("STEPS is no number");
  Bench bench({.model_path = argv[1],
               .device = argv[2],
               .max_step_tokens = 2048,
               .prefill_chunk_tokens = 512});
  for (const absl::string_view streams : absl::StrSplit(argv[4], ',')) {
    int64_t count = 0;
    if (!absl::SimpleAtoi(streams, &count)) Die("STREAMS are no numbers");
    for (const absl::string_view policy : absl::StrSplit(argv[5], ',')) {
      bench.Run(count, AskedBy(policy), cached, steps);
    }
  }
  return 0;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) { return epikv::Main(argc, argv); }
