#include "tests/engine_harness.h"

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace epikv {
namespace {

class TranscriptSink final : public RequestSink {
 public:
  explicit TranscriptSink(std::shared_ptr<Transcript> transcript)
      : transcript_(std::move(transcript)) {}

  bool Ready() const override { return true; }
  void OnDelta(Delta delta) override {
    auto append = [](auto& to, auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(transcript_->tokens, delta.tokens);
    append(transcript_->logprobs, delta.logprobs);
    append(transcript_->greedy, delta.greedy);
    append(transcript_->residual_steps, delta.residual_steps);
    append(transcript_->evictions, delta.evictions);
    transcript_->text += delta.text;
  }
  void OnFinished(Finished finished) override { transcript_->finished = std::move(finished); }

 private:
  const std::shared_ptr<Transcript> transcript_;
};

[[noreturn]] void Die(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::abort();
}

}  // namespace

EngineHarness::EngineHarness(const std::string& model_path, Options options) {
  auto loaded = LoadModel({.model_path = model_path,
                           .threads = 1,
                           .kv_pool_bytes = options.kv_pool_bytes,
                           .max_step_tokens = options.max_step_tokens,
                           .prefill_chunk_tokens = options.prefill_chunk_tokens,
                           .deterministic = options.deterministic,
                           .decode_kernel = options.decode_kernel});
  if (!loaded.ok()) Die(absl::StrCat(model_path, ": ", loaded.status().ToString()));
  manifest_ = loaded->manifest;
  auto tokenizer = Tokenizer::FromJson(loaded->tokenizer_json);
  if (!tokenizer.ok()) Die(tokenizer.status().ToString());
  tokenizer_ = *std::move(tokenizer);
  admission_ = std::make_unique<Admission>(
      manifest_, options.policies.empty() ? loaded->policies : options.policies,
      AdmissionLimits{.kv_capacity_bytes = loaded->kv_capacity_bytes,
                      .prefill_chunk_tokens = options.prefill_chunk_tokens});
  engine_ = std::make_unique<Engine>(
      EngineOptions{.scheduler = {.max_step_tokens = options.max_step_tokens,
                                  .prefill_chunk_tokens = options.prefill_chunk_tokens,
                                  .fixed_chunk_tokens = options.deterministic ? 16 : 0},
                    .kv_capacity_bytes = loaded->kv_capacity_bytes},
      std::move(loaded->executor), *tokenizer_, observer_);
}

std::shared_ptr<Transcript> EngineHarness::Submit(RequestOptions options) {
  if (options.id.empty()) options.id = absl::StrCat("request-", next_id_++);
  auto resolved = admission_->Resolve(std::move(options));
  if (const auto* rejection = std::get_if<Rejection>(&resolved)) Die(rejection->message);
  auto transcript = std::make_shared<Transcript>();
  engine_->Submit(std::get<Request>(std::move(resolved)),
                  std::make_shared<TranscriptSink>(transcript));
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
