#include "server/models/served_model.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "runtime/admission/unknown_policy.h"
#include "runtime/text/phrases.h"
#include "server/messages/chat_prompt.h"

namespace epikv {
namespace {

EngineFacts FactsOf(const ServedModel& model, const ServingOptions& options,
                    const LoadedModel& loaded, absl::Duration load) {
  const Manifest& manifest = model.admission->manifest();
  return {.architecture = manifest.architecture,
          .dtype = std::string(DTypeName(manifest.dtype)),
          .decode_kernel = model.decode_kernel,
          .weights = manifest.weights,
          .kv = {.lanes = model.lanes(), .bytes_per_token = model.admission->kv_bytes_per_token()},
          .kv_capacity_bytes = model.kv_capacity_bytes,
          .tier_capacity_bytes = loaded.tier_capacity_bytes,
          .weight_bytes = loaded.weight_bytes,
          .scratch_bytes = loaded.scratch_bytes,
          .constraint_bytes = model.constraints->live_bytes(),
          .max_running_requests = options.max_running_requests,
          .threads = model.threads,
          .load = load};
}

}  // namespace

bool IsModelName(absl::string_view name) {
  return !name.empty() && name.size() <= 128 && std::none_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_iscntrl(static_cast<unsigned char>(c)) || c == '"' || c == '\\';
  });
}

absl::Status CheckDefaults(const RequestDefaults& defaults, PolicyCatalog catalog) {
  if (defaults.policy.empty() || FindPolicy(catalog, defaults.policy) != nullptr) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--default_policy: ", UnknownPolicy(catalog, defaults.policy)));
}

absl::Status Apply(const ServingOptions& options, const ServedModel& model) {
  absl::Status status = CheckDefaults(options.defaults, model.admission->catalog());
  if (!status.ok()) return status;
  model.admission->SetDefaults(options.defaults);
  model.engine->SetLimits(options.queue);
  return absl::OkStatus();
}

absl::StatusOr<ModelPtr> MakeServedModel(LoadedModel loaded, ModelSource source,
                                         const ServingOptions& options, absl::Duration load,
                                         CoreBudget& cores, Metrics& metrics) {
  if (absl::Status status = CheckDefaults(options.defaults, loaded.policies); !status.ok()) {
    return status;
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::FromJson(loaded.tokenizer_json);
  if (!tokenizer.ok()) return tokenizer.status();

  auto model = std::make_shared<ServedModel>();
  model->name = source.name.empty() ? loaded.manifest.name : source.name;
  if (!IsModelName(model->name)) {
    return absl::InvalidArgumentError(absl::StrCat("the name in the model file must ",
                                                   kModelNameRule,
                                                   "; give it another name (--model_name)"));
  }
  model->source = std::move(source);
  model->tokenizer = *std::move(tokenizer);
  AddPhrases(*model->tokenizer, loaded.shape);
  if (!loaded.chat_json.empty()) {
    absl::StatusOr<ChatFormats> chat = ChatFormats::FromJson(loaded.chat_json);
    if (!chat.ok()) return chat.status();
    model->chat = *std::move(chat);
  }
  model->chat_template_json = std::move(loaded.chat_template_json);
  model->constraints = std::make_unique<ConstraintCompiler>(
      *model->tokenizer, loaded.manifest.vocab_size, ConstraintLimits(),
      AnswerMarkup(model->chat, *model->tokenizer));
  model->admission = std::make_unique<Admission>(
      loaded.manifest, std::move(loaded.shape), loaded.policies,
      AdmissionLimits{.kv_capacity_bytes = loaded.kv_capacity_bytes,
                      .tier_capacity_bytes = loaded.tier_capacity_bytes,
                      .kv_dtype = loaded.kv_dtype,
                      .prefill_chunk_tokens = options.scheduler.prefill_chunk_tokens,
                      .max_running_requests = options.max_running_requests,
                      .max_round_pairs = options.scheduler.max_round_pairs,
                      .turns_keys = loaded.device == "cpu",
                      .drafts = loaded.drafter != nullptr,
                      .by_ranks = loaded.ranks > 1,
                      .defaults = options.defaults});
  model->embed = std::move(loaded.embed);
  model->kv_capacity_bytes = loaded.kv_capacity_bytes;
  model->threads = loaded.threads;
  model->ranks = loaded.ranks;
  model->device = loaded.device;
  model->draft_model = loaded.draft_model;
  model->decode_kernel = loaded.decode_kernel;
  model->prefill_kernel = loaded.prefill_kernel;
  model->deterministic = options.deterministic;
  absl::StatusOr<std::shared_ptr<ModelMetrics>> series = metrics.OfModel(model->name);
  if (!series.ok()) return series.status();
  model->metrics = *std::move(series);
  model->observer =
      std::make_unique<EngineMetrics>(model->metrics, FactsOf(*model, options, loaded, load));
  model->engine = std::make_unique<EngineThread>(
      std::make_unique<Engine>(
          EngineOptions{.scheduler = options.scheduler,
                        .queue = options.queue_rule,
                        .refuse_infeasible_deadlines = options.refuse_infeasible_deadlines,
                        .kv_capacity_bytes = loaded.kv_capacity_bytes,
                        .tier_capacity_bytes = loaded.tier_capacity_bytes,
                        .max_prefix_bytes =
                            static_cast<int64_t>(options.prefix_cache_share *
                                                 static_cast<double>(loaded.kv_capacity_bytes)),
                        .max_running_requests = options.max_running_requests},
          std::move(loaded.executor), *model->tokenizer, *model->observer, SteadyNow,
          std::move(loaded.drafter)),
      options.queue, loaded.on_engine_thread_start,
      CoreShare{.budget = &cores, .threads = loaded.threads});
  return model;
}

}  // namespace epikv
