#include "tests/engine_harness.h"

#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "absl/strings/str_cat.h"
#include "tests/artefacts.h"

namespace epikv {
namespace {

void Append(const Delta& delta, Transcript& to) {
  auto append = [](auto& all, const auto& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  append(to.tokens, delta.tokens);
  append(to.logprobs, delta.logprobs);
  append(to.greedy, delta.greedy);
  append(to.top_logprobs, delta.top_logprobs);
  if (to.prompt.tokens.empty()) to.prompt.first = delta.prompt.first;
  append(to.prompt.tokens, delta.prompt.tokens);
  append(to.prompt.logprobs, delta.prompt.logprobs);
  append(to.prompt.top, delta.prompt.top);
  append(to.residual_steps, delta.residual_steps);
  append(to.evictions, delta.evictions);
  to.text += delta.text;
}

class TranscriptSink final : public RequestSink {
 public:
  TranscriptSink(std::shared_ptr<Transcript> transcript, int64_t completions,
                 std::function<bool()> ready)
      : transcript_(std::move(transcript)), ready_(std::move(ready)) {
    if (completions > 1) transcript_->completions.resize(completions);
  }

  bool Ready() const override { return ready_ == nullptr || ready_(); }
  void OnDelta(Delta delta) override {
    Append(delta, *transcript_);
    if (transcript_->completions.empty()) return;
    Transcript& one = transcript_->completions.at(delta.completion);
    Append(delta, one);
    if (delta.ended.has_value()) one.finished = std::move(delta.ended);
  }
  void OnFinished(Finished finished) override { transcript_->finished = std::move(finished); }

 private:
  const std::shared_ptr<Transcript> transcript_;
  const std::function<bool()> ready_;
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::abort();
}

std::shared_ptr<const Model> LoadOnce(const std::string& path) {
  static auto& models = *new std::map<std::string, std::shared_ptr<const Model>>;
  std::shared_ptr<const Model>& model = models[path];
  if (model == nullptr) {
    at::set_num_threads(1);
    auto loaded = LoadTorchScript(path);
    if (!loaded.ok()) Die(absl::StrCat(path, ": ", loaded.status().ToString()));
    model = *std::move(loaded);
  }
  return model;
}

}  // namespace

EngineHarness::EngineHarness(const std::string& model_path, HarnessOptions options)
    : EngineHarness(LoadOnce(model_path), std::move(options)) {}

EngineHarness::EngineHarness(std::shared_ptr<const Model> model, HarnessOptions options) {
  auto law_model = std::make_unique<LawModel>(std::move(model));
  model_ = law_model.get();
  auto tokenizer = Tokenizer::FromJson(model_->tokenizer_json());
  if (!tokenizer.ok()) Die(tokenizer.status().ToString());
  tokenizer_ = *std::move(tokenizer);
  Manifest admitted = manifest();
  if (!options.end_tokens) admitted.eos_tokens.clear();
  admission_ = std::make_unique<Admission>(
      admitted, WithArtefacts(ShapeOf(admitted), options.policies), options.policies,
      AdmissionLimits{.kv_capacity_bytes = options.kv_pool_bytes,
                      .kv_dtype = options.kv_dtype,
                      .prefill_chunk_tokens = options.prefill_chunk_tokens,
                      .max_running_requests = options.max_running_requests,
                      .turns_keys = !options.device_path});
  const ModelShape& shape = admission_->shape();
  const int64_t lanes = shape.num_layers * shape.num_kv_heads;
  auto executor = std::make_unique<Executor>(
      std::move(law_model),
      ExecutorOptions{
          .pool_rows = options.kv_pool_bytes / (admission_->kv_bytes_per_token() / lanes),
          .decode_kernel = options.decode_kernel,
          .prefill_kernel = options.prefill_kernel,
          .kv_dtype = options.kv_dtype,
          .device_path = options.device_path,
          .deterministic = options.deterministic,
          .prefix_block_tokens =
              options.deterministic ? kDeterministicRows : options.prefill_chunk_tokens,
          .mass_interval = options.mass_interval});
  executor_ = executor.get();
  std::unique_ptr<StepExecutor> steps = std::move(executor);
  if (options.wrap) steps = options.wrap(std::move(steps));
  engine_ = std::make_unique<Engine>(
      EngineOptions{
          .scheduler = {.max_step_tokens = options.max_step_tokens,
                        .prefill_chunk_tokens = options.prefill_chunk_tokens,
                        .fixed_chunk_tokens = options.deterministic ? kDeterministicRows : 0},
          .kv_capacity_bytes = options.kv_pool_bytes,
          .max_prefix_bytes = options.max_prefix_bytes,
          .max_running_requests = options.max_running_requests},
      std::move(steps), *tokenizer_, observer_, std::move(options.now));
}

std::shared_ptr<Transcript> EngineHarness::Submit(RequestOptions options) {
  if (options.id.empty()) options.id = absl::StrCat("request-", next_id_++);
  auto resolved = admission_->Resolve(std::move(options));
  if (const auto* rejection = std::get_if<Rejection>(&resolved)) Die(rejection->message);
  return Submit(std::get<Request>(std::move(resolved)));
}

std::shared_ptr<Transcript> EngineHarness::Submit(Request request, std::function<bool()> ready,
                                                  bool idle) {
  auto transcript = std::make_shared<Transcript>();
  auto sink = std::make_shared<TranscriptSink>(transcript, request.completions(), std::move(ready));
  if (idle) {
    engine_->SubmitIdle(std::move(request), std::move(sink));
  } else {
    engine_->Submit(std::move(request), std::move(sink));
  }
  return transcript;
}

Rejection EngineHarness::Refusal(RequestOptions options) const {
  auto resolved = admission_->Resolve(std::move(options));
  if (std::holds_alternative<Request>(resolved)) Die("the request was not refused");
  return std::get<Rejection>(std::move(resolved));
}

void EngineHarness::RunAll() {
  while (engine_->Step()) {
    if (on_step_) on_step_();
  }
}

Transcript EngineHarness::Run(RequestOptions options) {
  const std::shared_ptr<Transcript> transcript = Submit(std::move(options));
  RunAll();
  return *transcript;
}

}  // namespace epikv
