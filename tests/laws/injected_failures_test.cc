// Memory that runs out at every allocation in turn, of C++ objects and of tensors, in whatever the
// executor does for its sequences outside of the model: of those that run one at most fails, the
// others' bits are those of a run in which nothing failed, and the pool is whole in the end. On the
// path for the CPU, where rows are copied as bytes, and on that for devices, where they are
// gathered.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/admission/queue.h"
#include "runtime/base/reason.h"
#include "runtime/kv/kv_pool.h"
#include "tests/fixtures/engine_harness.h"
#include "tests/fixtures/forwarding_executor.h"
#include "tests/fixtures/law_cases.h"
#include "tests/fixtures/law_model.h"

namespace epikv {
namespace {

enum class Memory { kObjects, kTensors };

// Which allocation of this thread fails, while it is armed.
struct Failure {
  bool armed = false;
  Memory of = Memory::kObjects;
  int64_t left = 0;   // allocations before the one that fails
  int64_t times = 1;  // that fail from there on
  int64_t failed = 0;
};
thread_local Failure failure;

bool Fails(Memory of) {
  if (!failure.armed || failure.of != of || failure.times == 0 || failure.left-- > 0) return false;
  --failure.times;
  failure.left = 0;
  ++failure.failed;
  return true;
}

// As c10's own, but that it may have nothing left.
class ScarceTensors final : public at::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!Fails(Memory::kTensors), "no memory for ", bytes, " bytes");
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace
}  // namespace epikv

void* operator new(size_t bytes) {
  if (epikv::Fails(epikv::Memory::kObjects)) throw std::bad_alloc();
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return epikv::Fails(epikv::Memory::kObjects) ? nullptr : std::malloc(bytes);
}
void* operator new[](size_t bytes, const std::nothrow_t& may_fail) noexcept {
  return operator new(bytes, may_fail);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace epikv {
namespace {

// Armed in calls of one kind, from when it is told to; of those that come with every step in the
// first ones, which keep a prefix, have rounds, and end a prompt. What the model itself does is
// not: a forward that throws has tests of its own.
enum Calls { kOpen, kFork, kForward, kSettle };

class ScarceExecutor final : public ForwardingExecutor {
 public:
  ScarceExecutor(std::unique_ptr<StepExecutor> executor, Calls calls, const bool& scarce)
      : ForwardingExecutor(std::move(executor)), calls_(calls), scarce_(scarce) {}

  template <class Call>
  auto In(Calls calls, Call call) {
    const int most = calls == kForward ? 1 : 3;
    failure.armed = scarce_ && calls == calls_ && (calls <= kFork || steps_++ < most);
    auto result = call();
    failure.armed = false;
    return result;
  }

  absl::StatusOr<int64_t> Open(SequenceId id, const Request& request, int64_t bytes) override {
    return In(kOpen, [&] { return ForwardingExecutor::Open(id, request, bytes); });
  }
  absl::StatusOr<std::vector<ForwardOutcome>> Forward(absl::Span<const WorkItem> items) override {
    return In(kForward, [&] { return ForwardingExecutor::Forward(items); });
  }
  std::vector<SettleOutcome> Settle(absl::Span<const WorkItem> items) override {
    return In(kSettle, [&] { return ForwardingExecutor::Settle(items); });
  }
  absl::Status Fork(SequenceId parent, SequenceId child, const Request& request) override {
    return In(kFork, [&] { return ForwardingExecutor::Fork(parent, child, request); });
  }

 private:
  const Calls calls_;
  const bool& scarce_;
  int steps_ = 0;
};

// Memory is plenty while the model runs.
class PlentyModel final : public Model {
 public:
  explicit PlentyModel(std::shared_ptr<const Model> model)
      : Model({.manifest = model->manifest(),
               .tokenizer_json = model->tokenizer_json(),
               .device = model->device()}),
        model_(std::move(model)) {}
  at::Tensor Forward(const at::Tensor& tokens, const at::Tensor& positions, const at::Tensor& last,
                     ForwardHooks& hooks) const override {
    const bool armed = std::exchange(failure.armed, false);
    at::Tensor logits = model_->Forward(tokens, positions, last, hooks);
    failure.armed = armed;
    return logits;
  }
  at::Tensor output_projection(int64_t layer) const override {
    return model_->output_projection(layer);
  }
  at::Tensor FinalNormed(const at::Tensor& residual) const override {
    return model_->FinalNormed(residual);
  }

 private:
  const std::shared_ptr<const Model> model_;
};

std::shared_ptr<const Model> PlentyGqa() {
  static const auto& model = *new std::shared_ptr<const Model>([] {
    at::set_num_threads(1);
    return std::make_shared<PlentyModel>(*LoadModelFile(ModelPath("gqa")));
  }());
  return model;
}

RequestOptions Ask(const Manifest& manifest, int64_t prompt, uint64_t text, int64_t outputs) {
  RequestOptions options;
  options.prompt = Text(manifest, prompt, text);
  options.stop = {.max_output_tokens = outputs, .ignore_end = true};
  options.output.logprobs = options.output.kept = true;
  return options;
}

// (path for devices, what is scarce, in which calls)
class ScarceMemory : public ::testing::TestWithParam<std::tuple<bool, Memory, Calls>> {
 protected:
  ScarceMemory() { at::SetCPUAllocator(&tensors_, /*priority=*/100); }
  ~ScarceMemory() override { at::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 100); }

  bool device() const { return std::get<0>(GetParam()); }

  struct Run {
    std::vector<Transcript> neighbours;
    Transcript newcomer, after, alike;
    int64_t rows_moved = 0, failed = 0;
  };

  // Three run; the first ends. The newcomer begins as the first did, and fits only once others have
  // moved; or, of two completions, the second does. `after` comes when all have ended.
  Run RunWithout(int64_t allocation, int64_t times = 1) {
    failure = {.of = std::get<1>(GetParam()), .left = allocation, .times = times};
    constexpr int64_t kTokenBytes = 3 * 2 * 2 * 16 * 4;  // layers, KV heads, K and V, channels
    const bool alone = std::get<2>(GetParam()) == kOpen;
    bool scarce = false;
    EngineHarness harness(
        PlentyGqa(),
        {.kv_pool_bytes = (alone ? 200 : 250) * kTokenBytes,
         .prefill_chunk_tokens = 16,
         .deterministic = !device(),
         .device_path = device(),
         .max_prefix_bytes = 60 * kTokenBytes,
         .wrap = [&](std::unique_ptr<StepExecutor> executor) -> std::unique_ptr<StepExecutor> {
           return std::make_unique<ScarceExecutor>(std::move(executor), std::get<2>(GetParam()),
                                                   scarce);
         }});
    const Manifest& manifest = harness.manifest();
    const auto first = harness.Submit(Ask(manifest, 40, 1, 1));
    RequestOptions evicting = Ask(manifest, 20, 3, 28);
    evicting.kv = {.policy = "h2o", .budget = int64_t{40}};  // of 47
    RequestOptions whole = Ask(manifest, 20, 2, 28);
    whole.output.residual_steps = true;
    evicting.kv.bypass_prefix_cache = whole.kv.bypass_prefix_cache = true;
    const std::vector neighbours = {harness.Submit(whole), harness.Submit(evicting)};
    while (!first->finished.has_value()) harness.engine().Step();
    RequestOptions newcoming = Ask(manifest, 48, 1, 12);
    newcoming.completions = alone ? 1 : 2;
    newcoming.sampling = {.temperature = 1.0f, .seed = 7};
    // Of a policy that computes tensors, most objects would be theirs.
    const bool objects = std::get<1>(GetParam()) == Memory::kObjects;
    newcoming.kv = {.policy = objects ? "sliding" : "keydiff",
                    .budget = int64_t{47},
                    .params = {{"slack", int64_t{1}}}};
    newcoming.output.kv_trace = true;
    const auto newcomer = harness.Submit(newcoming);
    scarce = true;
    harness.RunAll();
    scarce = false;

    Run run = {.newcomer = *newcomer, .failed = failure.failed};
    for (const auto& neighbour : neighbours) run.neighbours.push_back(*neighbour);
    run.rows_moved = harness.executor().pool().rows_moved();
    run.after = harness.Run(Ask(manifest, 30, 4, 4));
    run.alike =
        harness.Run(Ask(manifest, 50, 1, 4));  // from cached prefixes, whatever they are now
    EXPECT_EQ(harness.engine().ledger().reserved(), 0);
    EXPECT_EQ(harness.executor().used_bytes(), 0);
    harness.engine().DropPrefixes();
    EXPECT_EQ(harness.executor().pool().free_rows(), harness.executor().pool().num_rows());
    return run;
  }

  // In other batches a device's bits may differ.
  void ExpectSame(const Transcript& got, const Transcript& wanted) const {
    EXPECT_TRUE(got.ok()) << got.finished->status;
    EXPECT_EQ(got.tokens, wanted.tokens);
    EXPECT_EQ(got.finished->kv.kept, wanted.finished->kv.kept);
    EXPECT_TRUE(device() || got.logprobs == wanted.logprobs);
    ASSERT_EQ(got.logprobs.size(), wanted.logprobs.size());
    for (size_t i = 0; i < got.logprobs.size(); ++i) {
      EXPECT_NEAR(got.logprobs[i], wanted.logprobs[i], 1e-4);
    }
    ASSERT_EQ(got.residual_steps.size(), wanted.residual_steps.size());
    for (size_t i = 0; i < got.residual_steps.size(); ++i) {
      EXPECT_THAT(got.residual_steps[i],
                  ::testing::Pointwise(::testing::FloatNear(1e-3), wanted.residual_steps[i]));
    }
  }

 private:
  ScarceTensors tensors_;
};

TEST_P(ScarceMemory, EndsOneRequestAtMost) {
  const Run whole = RunWithout(/*allocation=*/0, /*times=*/0);
  ASSERT_TRUE(whole.newcomer.ok()) << whole.newcomer.finished->status;
  ASSERT_GT(whole.rows_moved, 0);
  ASSERT_GT(whole.newcomer.finished->cached_prompt_tokens, 0);
  ASSERT_GT(whole.newcomer.finished->kv.rounds, 1);
  int64_t allocation = 0, ended = 0;
  for (;; ++allocation) {
    SCOPED_TRACE(absl::StrCat("allocation ", allocation));
    const Run run = RunWithout(allocation);
    if (run.failed == 0) break;
    int64_t failed = 0;
    auto check = [&](const Transcript& got, const Transcript& wanted) {
      ASSERT_TRUE(got.finished.has_value());
      if (got.ok()) return ExpectSame(got, wanted);
      ++failed;
      EXPECT_EQ(got.finished->status.code(), absl::StatusCode::kInternal) << got.finished->status;
    };
    for (size_t i = 0; i < run.neighbours.size(); ++i) {
      check(run.neighbours[i], whole.neighbours[i]);
    }
    if (!run.newcomer.ok()) ++failed;
    ExpectSame(run.after, whole.after);
    ExpectSame(run.alike, whole.alike);
    EXPECT_LE(failed, 1);
    const bool opening = std::get<2>(GetParam()) <= kFork;
    EXPECT_TRUE(!opening || failed == 0 || !run.newcomer.ok()) << "another's memory was short";
    ended += failed;
    if (HasFailure()) break;
  }
  std::printf("%lld allocations failed in turn, %lld of them ended a request\n",
              static_cast<long long>(allocation), static_cast<long long>(ended));
}

// Memory that stays short lets nobody put back what a failed move has moved: then nobody's rows are
// known, all that run are told, and the next request finds a pool that is whole.
// Who waits, in the order in which they are admitted. Some rise a class at the second time.
class Waiting {
 public:
  Waiting() {
    for (const char* tenant : {"a", "a", "b", "c"}) Push(tenant, Priority::kLow, 0);
    Push("d", Priority::kNormal, 0);
  }
  void Push(const std::string& tenant, Priority priority, int seconds) {
    Request request{.prompt = {1, 2, 3}, .max_output_tokens = 97};
    request.scheduling = {.priority = priority, .tenant = tenant};
    queue_.Push(SequenceId{next_}, request, At(seconds));
    ++next_;
  }
  void Look(int seconds) { queue_.Head(At(seconds)); }
  // Empties the queue.
  std::vector<int64_t> Order(int seconds) {
    std::vector<int64_t> order;
    while (const std::optional<SequenceId> head = queue_.Head(At(seconds))) {
      order.push_back(static_cast<int64_t>(*head));
      queue_.PopHead();
    }
    EXPECT_EQ(queue_.size(), 0);
    return order;
  }

 private:
  static absl::Time At(int seconds) { return absl::FromUnixSeconds(seconds); }
  RequestQueue queue_{{.ageing = absl::Seconds(10), .quantum_tokens = 100}};
  int64_t next_ = 0;
};

// Does something with a queue, without memory for one allocation after another: what failed can
// be done again, and the order is that of a queue in which nothing failed.
void ExpectWholeQueue(const std::function<void(Waiting&)>& work, bool again) {
  Waiting without, with;
  work(with);
  const std::vector<int64_t> expected = (again ? with : without).Order(20);
  for (int64_t left = 0;; ++left) {
    Waiting waiting;
    failure = {.armed = true, .left = left};
    try {
      work(waiting);
    } catch (const std::bad_alloc&) {
    }
    failure.armed = false;
    if (failure.failed == 0) {
      EXPECT_GT(left, 4);
      return;
    }
    if (again) work(waiting);
    EXPECT_EQ(waiting.Order(20), expected) << "allocation " << left;
  }
}

TEST(ScarceMemoryForTheQueue, LeavesOutWhoCouldNotEnter) {
  const auto push = [](Waiting& waiting) { waiting.Push("e", Priority::kLow, 5); };
  ExpectWholeQueue(push, /*again=*/true);
  ExpectWholeQueue(push, /*again=*/false);
}

TEST(ScarceMemoryForTheQueue, LosesNobodyWhoRises) {
  ExpectWholeQueue([](Waiting& waiting) { waiting.Look(15); }, /*again=*/true);
}

class LostPool : public ScarceMemory {};

TEST_P(LostPool, EndsAllThatRunAndStartsAnew) {
  const Run whole = RunWithout(/*allocation=*/0, /*times=*/0);
  int64_t lost = 0;
  for (int64_t allocation = 0;; ++allocation) {
    SCOPED_TRACE(absl::StrCat("allocation ", allocation));
    const Run run = RunWithout(allocation, /*times=*/1000);
    if (run.failed == 0) break;
    EXPECT_EQ(run.newcomer.finished->status.code(), absl::StatusCode::kInternal);
    ExpectSame(run.after, whole.after);
    if (run.neighbours[0].ok()) {
      ExpectSame(run.neighbours[0], whole.neighbours[0]);
      ExpectSame(run.neighbours[1], whole.neighbours[1]);
      continue;
    }
    ++lost;
    for (const Transcript& neighbour : run.neighbours) {
      EXPECT_EQ(neighbour.finished->status.message(),
                "the KV cache was lost: moving its rows failed, and they could not be put back");
    }
  }
  EXPECT_GT(lost, 0);
}

INSTANTIATE_TEST_SUITE_P(Failures, LostPool,
                         ::testing::Values(std::tuple(true, Memory::kTensors, kOpen)));

std::string NameOf(const ::testing::TestParamInfo<std::tuple<bool, Memory, Calls>>& info) {
  const auto [device, memory, calls] = info.param;
  const char* const names[] = {"Open", "Fork", "Forward", "Settle"};
  return absl::StrCat(device ? "Device" : "Cpu", memory == Memory::kObjects ? "Objects" : "Tensors",
                      names[calls]);
}

INSTANTIATE_TEST_SUITE_P(Failures, ScarceMemory,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Memory::kObjects, Memory::kTensors),
                                            ::testing::Values(kOpen, kFork, kForward, kSettle)),
                         NameOf);

}  // namespace
}  // namespace epikv
