#include "runtime/runtime.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <torch/version.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <thread>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "policies/artefact.h"
#include "policies/mlp_gate.h"
#include "policies/registry.h"
#include "runtime/admission/admission.h"
#include "runtime/attention/attention.h"
#include "runtime/base/allocation_meter.h"
#include "runtime/base/machine.h"
#include "runtime/base/scalar_type.h"
#include "runtime/engine/scheduler.h"
#include "runtime/executor/executor.h"
#include "runtime/executor/model_drafter.h"
#include "runtime/executor/ranked_executor.h"
#include "runtime/forward/device.h"
#include "runtime/forward/device_forward.h"
#include "runtime/kv/tier_store.h"
#include "runtime/model/embedding.h"
#include "runtime/model/model.h"
#include "runtime/model/model_shape.h"
#include "runtime/ranks/ranks.h"
#include "runtime/text/phrases.h"
#include "runtime/text/tokenizer.h"

namespace epikv {
namespace {

// Stands in for lanes and taps where only the model itself is to run.
class NullHooks final : public ForwardHooks {
 public:
  at::Tensor Block(const at::Tensor& residual, int64_t) override { return residual; }
  at::Tensor Attention(const at::Tensor& q, const at::Tensor&, const at::Tensor& v,
                       const at::Tensor&, int64_t) override {
    return at::zeros({q.size(0), q.size(1), v.size(2)}, q.options());
  }
};

// Bytes of the model's own tensors in a forward of so many rows, all with logits. A device's stay
// with its allocator; the CPU's are freed.
int64_t MeasureScratch(const Model& model, int64_t rows) {
  const AllocationMeter meter(model.device().type());
  NullHooks hooks;
  const at::Tensor ids = at::zeros({rows}, at::kLong);
  model.Forward(ids, ids, ids, hooks);
  return meter.peak_bytes();
}

absl::Status CheckSupported(const Manifest& manifest) {
  for (size_t l = 0; l < manifest.layers.size(); ++l) {
    const LayerFacts& layer = manifest.layers[l];
    if (layer.key_width != layer.value_width) {
      return absl::UnimplementedError(
          absl::StrCat("manifest.layers[", l, "]: value_width must equal key_width"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadWhole(const std::filesystem::path& path) {
  std::error_code error;
  std::ifstream file(path, std::ios::binary);
  if (!std::filesystem::is_regular_file(path, error)) file.setstate(std::ios::failbit);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path.string()));
  return bytes;
}

// What a policy may know of the model: of its manifest, and of the artefacts in a folder.
absl::StatusOr<ModelShape> ShapeWithArtefacts(const Manifest& manifest, PolicyCatalog catalog,
                                              const std::string& directory,
                                              std::vector<std::string>& description) {
  namespace fs = std::filesystem;
  ModelShape shape = ShapeOf(manifest);
  if (directory.empty()) return shape;
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (entry->path().extension() == ".json") files.push_back(entry->path());
  }
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("artefact_dir: cannot read '", directory, "': ", error.message()));
  }
  std::sort(files.begin(), files.end());
  for (const fs::path& path : files) {
    const absl::StatusOr<std::string> text = ReadWhole(path);
    if (!text.ok()) return text.status();
    const ReadBeside read = [&path](const std::string& name) {
      return ReadWhole(path.parent_path() / name);
    };
    if (absl::Status status = AddArtefact(*text, catalog, manifest.weights, read, shape);
        !status.ok()) {
      return absl::Status(status.code(), absl::StrCat(path.string(), ": ", status.message()));
    }
    description.push_back(absl::StrCat("artefact ", path.filename().string()));
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat("artefact_dir: no *.json in '", directory, "'"));
  }
  return shape;
}

// Runs `size` sequences through prefill, one by one, and one decode step together.
absl::Status RunOnce(Executor& executor, const Request& request, int64_t size) {
  const std::vector<int32_t> token = {0};
  std::vector<WorkItem> decode;
  for (int64_t s = 0; s < size; ++s) {
    const SequenceId id{-1 - s};
    if (auto opened = executor.Open(id, request, /*prefix_bytes=*/0); !opened.ok()) {
      return opened.status();
    }
    const WorkItem prefill{.id = id,
                           .request = &request,
                           .tokens = request.prompt,
                           .ends_prefill = true,
                           .evicts_prefill = true,
                           .num_outputs = 1};
    if (auto outcome = executor.Forward({&prefill, 1}); !outcome.ok()) return outcome.status();
    executor.Settle({&prefill, 1});
    decode.push_back({.id = id,
                      .request = &request,
                      .tokens = token,
                      .first = static_cast<int64_t>(request.prompt.size()),
                      .decode = true,
                      .num_outputs = 1});
  }
  if (auto outcome = executor.Forward(decode); !outcome.ok()) return outcome.status();
  executor.Settle(decode);
  for (const WorkItem& item : decode) executor.Close(item.id);
  return absl::OkStatus();
}

// Runs a full prompt chunk and every batch size once, so that no request pays for first calls.
absl::Status WarmUp(Executor& executor, const Admission& admission, const RuntimeOptions& options) {
  const int64_t capacity = admission.limits().kv_capacity_bytes;
  auto resolve = [&](int64_t prompt) {  // under `full`; no client sent it
    RequestOptions asked;
    asked.prompt.assign(std::max<int64_t>(1, prompt), 0);
    asked.stop.max_output_tokens = 2;
    return admission.Resolve(std::move(asked));
  };
  const auto least = resolve(1);
  if (const auto* rejection = std::get_if<Rejection>(&least)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the KV pool is too small to run any request: raise --kv_pool_bytes or --kv_memory_share (",
        rejection->message, ")"));
  }
  const int64_t fits = capacity / std::get<Request>(least).demand.peak_bytes();
  const int64_t largest = std::min({fits, options.max_running_requests, int64_t{64}});
  const int times = executor.device() != nullptr ? 2 : 1;  // the second is recorded
  for (int64_t size = 1; size <= largest; size *= 2) {
    for (int i = 0; i < times; ++i) {
      absl::Status status = RunOnce(executor, std::get<Request>(least), size);
      if (!status.ok()) return status;
    }
  }
  const int64_t chunk = options.deterministic ? kDeterministicRows : options.prefill_chunk_tokens;
  const auto longest = resolve(std::min(chunk, admission.manifest().context_length - 2));
  if (!std::holds_alternative<Request>(longest)) return absl::OkStatus();  // a small pool
  return RunOnce(executor, std::get<Request>(longest), 1);
}

struct Kernels {
  DecodeKernel decode = DecodeKernel::kBatch;
  PrefillKernel prefill = PrefillKernel::kBatch;
};

// The CPU's.
absl::StatusOr<Kernels> ChooseKernels(const AttentionShape& shape, const RuntimeOptions& options,
                                      std::vector<std::string>& description) {
  const absl::StatusOr<DecodeKernel> decode =
      ChooseKernel("decode_kernel", options.decode_kernel, options.deterministic,
                   "decode kernels, microseconds a layer for 8 sequences of 512 tokens",
                   MeasureDecodeKernels(shape), DecodeKernelName, description);
  if (!decode.ok()) return decode.status();
  const absl::StatusOr<PrefillKernel> prefill =
      ChooseKernel("prefill_kernel", options.prefill_kernel, options.deterministic,
                   "prefill kernels, microseconds a layer for 256 tokens after 256 cached ones",
                   MeasurePrefillKernels(shape), PrefillKernelName, description);
  if (!prefill.ok()) return prefill.status();
  return Kernels{.decode = *decode, .prefill = *prefill};
}

// After the warm-up.
std::string DescribeRecording(const Executor& executor, const absl::Status& recorder) {
  if (executor.device()->replays() > 0) return "decode steps are recorded as CUDA graphs";
  const std::string why = !recorder.ok() ? std::string(recorder.message())
                          : executor.model().writes_in_place()
                              ? "the model's code writes in place"
                              : executor.device()->recording_failed();
  return absl::StrCat("decode steps are not recorded: ", why);
}

// Of K and V.
int64_t TokenBytes(const Manifest& manifest, PolicyCatalog catalog, KvDType stored) {
  return Admission(manifest, catalog, {.kv_dtype = stored}).kv_bytes_per_token();
}

std::string Megabytes(int64_t bytes) { return absl::StrFormat("%.1f MB", bytes / 1e6); }

AttentionShape AttentionOf(const Manifest& manifest, KvDType stored) {
  const ModelShape shape = ShapeOf(manifest);
  return {.num_heads = shape.num_heads,
          .num_kv_heads = shape.num_kv_heads,
          .key_width = shape.key_width,
          .value_width = shape.value_width,
          .scale = manifest.layers.front().scale,
          .dtype = ScalarTypeOf(manifest.dtype),
          .stored = stored};
}

// The draft of RuntimeOptions::draft_model; null: none is asked for.
absl::StatusOr<std::unique_ptr<Model>> LoadDraft(const RuntimeOptions& options,
                                                 const Model& model) {
  if (options.draft_model.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<Model>> draft =
      LoadModelFile(options.draft_model, {.trusts_code = options.trusts_code});
  absl::Status status = draft.ok() ? CheckSupported((*draft)->manifest()) : draft.status();
  if (status.ok() && (*draft)->tokenizer_json() != model.tokenizer_json()) {
    status = absl::FailedPreconditionError("its tokenizer is not the model's");
  }
  if (status.ok()) return draft;
  return absl::Status(status.code(),
                      absl::StrCat("draft model ", options.draft_model, ": ", status.message()));
}

// With a KV pool of so many tokens. Runs it once, so that no request pays for first calls.
absl::StatusOr<std::unique_ptr<Drafter>> NewDrafter(std::unique_ptr<Model> draft, int64_t tokens,
                                                    const RuntimeOptions& options,
                                                    int64_t vocab_size,
                                                    std::vector<std::string>& description) {
  constexpr int64_t kFirstPrompt = 8;
  const Manifest& manifest = draft->manifest();
  const ModelShape shape = ShapeOf(manifest);
  std::vector<std::string> measured;
  const auto kernels =
      ChooseKernels(AttentionOf(manifest, KvDType::kModel), RuntimeOptions(), measured);
  if (!kernels.ok()) return kernels.status();
  description.push_back(absl::StrCat("draft model ", manifest.name, ", weights ",
                                     Megabytes(draft->weight_bytes()), ", KV cache of ", tokens,
                                     " tokens"));
  auto drafter = std::make_unique<ModelDrafter>(
      std::move(draft),
      ModelDrafterOptions{.pool_rows = tokens * shape.num_layers * shape.num_kv_heads,
                          .vocab_size = vocab_size,
                          .decode_kernel = kernels->decode,
                          .prefill_kernel = kernels->prefill});
  const SequenceId first{-1};
  const std::vector<int32_t> prompt(kFirstPrompt);
  if (drafter->Open(first, prompt, 2 * kFirstPrompt)) {
    const DraftItem item{.id = first, .tokens = prompt, .most = kFirstPrompt};
    drafter->Guess({&item, 1}, kFirstPrompt);
    drafter->Close(first);
  }
  return drafter;
}

}  // namespace

void BoundKernelCaches() {
  for (const char* name : {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}) {
    setenv(name, "64", /*overwrite=*/0);
  }
}

std::string TorchVersion() { return TORCH_VERSION; }

PolicyCatalog BuiltPolicies() { return AllPolicies(); }

namespace {

absl::StatusOr<LoadedModel> Load(const RuntimeOptions& options) try {
  auto progress = [&](absl::string_view stage) {
    if (options.progress) options.progress(stage);
  };
  LoadedModel loaded;
  const absl::StatusOr<at::Device> device = OpenDevice(options.device);
  if (!device.ok()) return device.status();
  const bool on_gpu = !device->is_cpu();
  if (on_gpu && !options.draft_model.empty()) {
    return absl::InvalidArgumentError("a draft model works on the CPU only");
  }
  loaded.device = options.device;
  Ranks* const ranks = options.ranks.get();
  const int64_t processes = loaded.ranks = ranks == nullptr ? 1 : ranks->size();
  loaded.threads = options.threads > 0 ? options.threads : std::max<int64_t>(1, CpuQuota() - 1);
  at::set_num_threads(static_cast<int>(loaded.threads));

  progress("loading the model");
  std::error_code ignored;  // what is not there the loader says
  if (std::filesystem::exists(options.model_path, ignored) &&
      !std::filesystem::is_regular_file(options.model_path, ignored)) {
    const bool folder = std::filesystem::is_directory(options.model_path, ignored);
    return absl::InvalidArgumentError(absl::StrCat(
        "'", options.model_path, "' is not a regular file",
        folder ? ": `epikv serve` takes a Hugging Face directory, exports and serves it" : ""));
  }
  absl::StatusOr<std::unique_ptr<Model>> model = LoadModelFile(
      options.model_path,
      {.device = *device, .ranks = options.ranks, .trusts_code = options.trusts_code});
  if (!model.ok()) return model.status();
  loaded.manifest = (*model)->manifest();
  loaded.tokenizer_json = (*model)->tokenizer_json();
  loaded.chat_json = (*model)->chat_json();
  loaded.chat_template_json = (*model)->chat_template_json();
  loaded.policies = BuiltPolicies();
  loaded.weight_bytes = (*model)->weight_bytes();
  loaded.description.push_back(
      absl::StrCat((*model)->description(), ", weights ", Megabytes((*model)->weight_bytes())));
  if (absl::Status status = CheckSupported(loaded.manifest); !status.ok()) return status;
  if (absl::Status status = on_gpu ? CheckGpuServes(loaded.manifest) : absl::OkStatus();
      !status.ok()) {
    return status;
  }
  if (ranks != nullptr) {
    ranks->Agree(absl::HashOf(loaded.manifest.weights, loaded.tokenizer_json), "which model it is");
  }
  Manifest whole = loaded.manifest;
  whole.num_heads *= loaded.ranks;
  whole.num_kv_heads *= loaded.ranks;
  absl::StatusOr<ModelShape> known =
      ShapeWithArtefacts(whole, loaded.policies, options.artefact_dir, loaded.description);
  if (!known.ok()) return known.status();
  known->num_heads = loaded.manifest.num_heads;  // of the shard
  known->num_kv_heads = loaded.manifest.num_kv_heads;
  if (on_gpu) PlaceGatesOn(*device, *known);
  loaded.shape = *std::move(known);
  absl::StatusOr<std::unique_ptr<Model>> draft = LoadDraft(options, **model);
  if (!draft.ok()) return draft.status();
  int64_t draft_token_bytes = 0;
  if (*draft != nullptr) {
    loaded.draft_model = (*draft)->manifest().name;
    loaded.weight_bytes += (*draft)->weight_bytes();
    draft_token_bytes = TokenBytes((*draft)->manifest(), loaded.policies, KvDType::kModel);
  }

  progress("reserving memory");
  loaded.scratch_bytes = MeasureScratch(
      **model, options.deterministic ? kDeterministicRows
                                     : MostStepTokens({.max_step_tokens = options.max_step_tokens},
                                                      options.max_running_requests));
  if (*draft != nullptr) {  // the two run one after the other
    const int64_t rows = std::max(options.max_step_tokens, options.max_running_requests);
    loaded.scratch_bytes = std::max(loaded.scratch_bytes, MeasureScratch(**draft, rows));
  }
  loaded.tier_capacity_bytes = options.kv_tier_bytes;
  const int64_t tier_memory = options.kv_tier_dir.empty() ? options.kv_tier_bytes : 0;
  if (options.kv_tier_bytes > 0) {
    const auto usable = OpenTierStore(options.kv_tier_dir, /*bytes=*/1);
    if (!usable.ok()) return usable.status();
  }
  if (ranks != nullptr) ranks->Least(0);  // all have their weights
  const int64_t available =
      on_gpu ? FreeGpuBytes(*device)
             : std::max<int64_t>(
                   AvailableMemoryBytes() / processes - loaded.scratch_bytes - tier_memory, 0);
  const int64_t token_bytes = TokenBytes(loaded.manifest, loaded.policies, options.kv_dtype);
  // A draft has room for as many tokens.
  const double own_share =
      static_cast<double>(token_bytes) / static_cast<double>(token_bytes + draft_token_bytes);
  const auto most = static_cast<int64_t>(own_share * static_cast<double>(available));
  if (options.kv_pool_bytes > most) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--kv_pool_bytes is ", options.kv_pool_bytes, ", but only ", most,
        " bytes of memory are available", *draft == nullptr ? "" : " beside the draft's cache"));
  }
  loaded.kv_capacity_bytes =
      options.kv_pool_bytes > 0
          ? options.kv_pool_bytes
          : static_cast<int64_t>(options.kv_memory_share * static_cast<double>(most));
  if (ranks != nullptr) loaded.kv_capacity_bytes = ranks->Least(loaded.kv_capacity_bytes);
  loaded.kv_dtype = options.kv_dtype;
  const Admission admission(loaded.manifest, loaded.policies,
                            {.kv_capacity_bytes = loaded.kv_capacity_bytes,
                             .kv_dtype = options.kv_dtype,
                             .prefill_chunk_tokens = options.prefill_chunk_tokens});
  const int64_t lanes = admission.shape().num_layers * admission.shape().num_kv_heads;
  const int64_t pool_rows = loaded.kv_capacity_bytes / (token_bytes / lanes);
  loaded.description.push_back(
      absl::StrCat("KV pool ", Megabytes(loaded.kv_capacity_bytes), " of ", Megabytes(available),
                   " available = ", loaded.kv_capacity_bytes / token_bytes, " tokens of ",
                   token_bytes, " bytes, ", admission.kv_format().name()));

  if (!on_gpu) progress("measuring kernels");
  const AttentionShape attention = AttentionOf(loaded.manifest, options.kv_dtype);
  Kernels kernels;
  loaded.decode_kernel = loaded.prefill_kernel = "varlen";
  if (!on_gpu) {
    const auto chosen = ChooseKernels(attention, options, loaded.description);
    if (!chosen.ok()) return chosen.status();
    kernels = *chosen;
    loaded.decode_kernel = std::string(DecodeKernelName(kernels.decode));
    loaded.prefill_kernel = std::string(PrefillKernelName(kernels.prefill));
  }

  absl::StatusOr<std::unique_ptr<GraphRecorder>> recorder = nullptr;
  if (on_gpu) recorder = NewGpuRecorder();
  const absl::Status recording = recorder.status();

  progress("warming up");
  auto executor = std::make_unique<Executor>(
      *std::move(model),
      ExecutorOptions{.pool_rows = pool_rows,
                      .scratch_bytes = on_gpu ? 0 : loaded.scratch_bytes + tier_memory,
                      .decode_kernel = kernels.decode,
                      .prefill_kernel = kernels.prefill,
                      .kv_dtype = options.kv_dtype,
                      .device_path = on_gpu,
                      .recorder = recorder.ok() ? *std::move(recorder) : nullptr,
                      .deterministic = options.deterministic,
                      .prefix_block_tokens =
                          options.deterministic ? kDeterministicRows : options.prefill_chunk_tokens,
                      .prefill_chunk_tokens = options.prefill_chunk_tokens,
                      .mass_interval = options.mass_interval,
                      .samples = ranks == nullptr || ranks->rank() == 0,
                      .open_tier = TiersIn(options.kv_tier_dir)});
  if (absl::Status status = WarmUp(*executor, admission, options); !status.ok()) return status;
  if (*draft != nullptr) {
    auto drafter = NewDrafter(*std::move(draft), loaded.kv_capacity_bytes / token_bytes, options,
                              loaded.manifest.vocab_size, loaded.description);
    if (!drafter.ok()) return drafter.status();
    loaded.drafter = *std::move(drafter);
  }
  if (on_gpu) loaded.description.push_back(DescribeRecording(*executor, recording));
  if (ranks == nullptr) {
    loaded.embed = [&model = executor->model()](absl::Span<const int32_t> tokens) {
      return EmbeddingOf(model, tokens);
    };
    loaded.executor = std::move(executor);
  } else if (ranks->rank() == 0) {
    loaded.description.push_back(absl::StrCat(ranks->size(), " ranks, each with ",
                                              loaded.manifest.num_kv_heads, " KV heads a layer"));
    loaded.executor = std::make_unique<RankedExecutor>(std::move(executor), options.ranks);
  } else {
    loaded.executor = std::move(executor);
  }
  loaded.on_engine_thread_start = [threads = loaded.threads] {
    at::set_num_threads(static_cast<int>(threads));
    thread_local const c10::InferenceMode inference;  // as long as the thread
  };
  loaded.description.push_back(absl::StrCat("engine threads ", loaded.threads,
                                            options.deterministic ? ", deterministic" : ""));
  return loaded;
} catch (const std::exception& e) {
  return absl::InternalError(absl::StrCat("loading failed: ", e.what()));
}

}  // namespace

// On a thread that ends: OpenMP keeps a team for each that ever had one, and once it has more
// threads than there are CPUs, they sleep after every loop.
absl::StatusOr<LoadedModel> LoadModel(const RuntimeOptions& options) {
  absl::StatusOr<LoadedModel> loaded;
  std::thread([&] { loaded = Load(options); }).join();
  if (!loaded.ok() && options.ranks != nullptr) {
    options.ranks->Fail(
        absl::StrCat("rank ", options.ranks->rank(), ": ", loaded.status().message()));
  }
  return loaded;
}

absl::Status ServeRank(const RuntimeOptions& options, absl::FunctionRef<void()> on_loaded) {
  absl::StatusOr<LoadedModel> loaded = LoadModel(options);
  if (!loaded.ok()) return loaded.status();
  const auto tokenizer = Tokenizer::FromJson(loaded->tokenizer_json);
  if (!tokenizer.ok()) return tokenizer.status();  // rank 0 says the same
  AddPhrases(**tokenizer, loaded->shape);
  on_loaded();
  loaded->on_engine_thread_start();
  return ServeRank(static_cast<Executor&>(*loaded->executor), *options.ranks, loaded->policies,
                   loaded->shape);
}

}  // namespace epikv
