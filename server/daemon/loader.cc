#include "server/daemon/loader.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "runtime/base/machine.h"
#include "runtime/base/steady_time.h"
#include "runtime/runtime.h"
#include "server/daemon/freed_memory.h"
#include "server/models/model_files.h"

namespace epikv {

int64_t EngineCores(const Config& config) {
  int64_t cores = std::max({int64_t{1}, CpuQuota() - 1, config.runtime.threads});
  for (const ModelSource& source : config.models) cores = std::max(cores, source.threads);
  return cores;
}

namespace {

// What LoadModel is given, and the files that it names.
struct Input {
  RuntimeOptions options;
  std::vector<ModelFile> files;
};

absl::StatusOr<Input> InputOf(const ModelSource& source, const Config& config) {
  const absl::StatusOr<ModelFile> file = ModelFile::Check(source.path, config.model_files);
  if (!file.ok()) return file.status();
  const absl::StatusOr<std::string> artefacts =
      source.artefact_dir.empty() ? "" : ResolveIn(config.model_files.root, source.artefact_dir);
  if (!artefacts.ok()) return artefacts.status();
  absl::StatusOr<ModelFile> draft = ModelFile();
  if (!source.draft_model.empty()) {
    draft = ModelFile::Check(source.draft_model, config.model_files);
    if (!draft.ok()) return draft.status();
  }
  Input input{.options = config.runtime, .files = {*file, *draft}};
  input.options.model_path = file->path();
  input.options.draft_model = draft->path();
  input.options.artefact_dir = *artefacts;
  if (source.kv_pool_bytes > 0) input.options.kv_pool_bytes = source.kv_pool_bytes;
  if (source.threads > 0) input.options.threads = source.threads;
  return input;
}

// Of the files that were loaded.
absl::Status CheckUnchanged(absl::Span<const ModelFile> files) {
  for (const ModelFile& file : files) {
    if (file.path().empty()) continue;
    if (absl::Status status = file.CheckUnchanged(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ServeAsRank(const Config& config, std::shared_ptr<Ranks> ranks) {
  absl::StatusOr<Input> input = InputOf(config.models.front(), config);
  if (!input.ok()) return input.status();  // rank 0 says the same
  input->options.ranks = std::move(ranks);
  return ServeRank(input->options, [] { ReturnFreedMemory(kFreedAfter); });
}

absl::StatusOr<ModelPtr> Loader::Load(const ModelSource& source) const {
  const absl::Time begin = SteadyNow();
  const Config config = settings_.config();
  if (ranks_ != nullptr && ranks_serve_.exchange(true)) {
    return absl::FailedPreconditionError(
        "several processes serve one model (--tensor_parallel), and no other");
  }
  absl::StatusOr<Input> input = InputOf(source, config);
  if (!input.ok()) return input.status();
  RuntimeOptions& options = input->options;
  options.ranks = ranks_;
  options.progress = [this](absl::string_view stage) { log_.Info(stage); };
  absl::StatusOr<LoadedModel> loaded = LoadModel(options);
  if (!loaded.ok()) return loaded.status();
  if (absl::Status status = CheckUnchanged(input->files); !status.ok()) return status;
  for (const std::string& line : loaded->description) log_.Info(line);
  return MakeServedModel(*std::move(loaded), source, config.serving, SteadyNow() - begin, cores_,
                         metrics_);
}

absl::Status Loader::LoadAll(const std::vector<ModelSource>& sources, Settings& settings,
                             Models& models) const {
  // Before the minutes that loading takes.
  if (absl::Status status = CheckDefaults(settings.config().serving.defaults, BuiltPolicies());
      !status.ok()) {
    return status;
  }
  for (const ModelSource& source : sources) {
    absl::StatusOr<ModelPtr> model = Load(source);
    if (!model.ok()) return model.status();
    if (absl::Status status = PutInService(*model, /*replace=*/false, settings, models);
        !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(source.path, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace epikv
