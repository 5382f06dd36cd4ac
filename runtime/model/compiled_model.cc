#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <semaphore>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "runtime/base/huge_pages.h"
#include "runtime/base/processor.h"
#include "runtime/base/scalar_type.h"
#include "runtime/model/compiled_operators.h"
#include "runtime/model/loaders.h"
#include "runtime/model/model.h"
#include "runtime/model/model_contract.h"
#include "runtime/model/model_file.h"
#include "runtime/model/packed_linear.h"

namespace epikv {
namespace {

using nlohmann::json;
using torch::inductor::AOTIModelPackageLoader;

constexpr char kIndex[] = "compiled.json";  // written by tools/epikv/export/compiled.py

// Forwards at a time: the engine's, and one that looks at embeddings.
constexpr int kRunners = 2;

// Thrown where the file is not as its writer makes it.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Constants = std::unordered_map<std::string, at::Tensor>;  // by their names

class CompiledModel final : public FileModel {
 public:
  CompiledModel(ModelFacts facts, NamedWeights named, std::unique_ptr<AOTIModelPackageLoader> code,
                Constants constants, std::vector<Linears> linears)
      : FileModel(std::move(facts), std::move(named)),
        constants_(std::move(constants)),
        linears_(std::move(linears)),
        code_(std::move(code)) {}

  at::Tensor Forward(const at::Tensor& token_ids, const at::Tensor& positions,
                     const at::Tensor& last, ForwardHooks& hooks) const override {
    const c10::InferenceMode inference;
    const HooksScope scope(hooks);
    CompiledForward forward(linears_);
    Turn turn(turns_);
    try {
      return code_->run({token_ids.contiguous(), positions.contiguous(), last.contiguous()}).at(0);
    } catch (...) {
      forward.Rethrow();
      throw;
    }
  }

 private:
  // The code has a runner for each of so many callers. One that finds none waits here, not in the
  // code: that forgets to wake who waits there for a run that throws.
  using Turns = std::counting_semaphore<kRunners>;
  struct Turn {
    explicit Turn(Turns& turns) : turns(turns) { turns.acquire(); }
    ~Turn() { turns.release(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    Turns& turns;
  };

  mutable Turns turns_{kRunners};
  const Constants constants_;  // of the code, which points to them
  const std::vector<Linears> linears_;
  const std::unique_ptr<AOTIModelPackageLoader> code_;
};

at::ScalarType TypeOf(const std::string& name) {
  static const auto& types = *new absl::flat_hash_map<std::string, at::ScalarType>{
      {"float64", at::kDouble}, {"float32", at::kFloat}, {"bfloat16", at::kBFloat16},
      {"float16", at::kHalf},   {"int64", at::kLong},    {"int32", at::kInt},
      {"int16", at::kShort},    {"int8", at::kChar},     {"uint8", at::kByte},
      {"bool", at::kBool}};
  const auto found = types.find(name);
  if (found == types.end()) throw Malformed("a weight is of the type '" + name + "'");
  return found->second;
}

// The weights of an archive, by their names. One that is read is kept where Keep was called of it.
class WeightReader {
 public:
  WeightReader(caffe2::serialize::PyTorchStreamReader& archive, const json& weights)
      : archive_(archive) {
    for (const json& of : weights) {
      const auto record = absl::StrCat("weights/", records_.size());
      records_.push_back({TypeOf(of.at("dtype")), of.at("shape").get<std::vector<int64_t>>()});
      CheckSize(records_.back(), record);
      for (const std::string name : of.at("names")) {
        names_.emplace(name, records_.size() - 1);
        if (of.at("parameter")) parameters_.push_back(name);
      }
    }
  }

  at::Tensor Read(const std::string& name) const {
    const auto found = names_.find(name);
    if (found == names_.end()) throw Malformed("it has no weight '" + name + "'");
    if (const auto kept = kept_.find(found->second); kept != kept_.end()) return kept->second;
    const Record& record = records_[found->second];
    auto [data, size] = archive_.getRecord(absl::StrCat("weights/", found->second));
    const auto owner = std::make_shared<at::DataPtr>(std::move(data));
    return at::from_blob(
        owner->get(), record.shape, [owner](void*) {}, at::TensorOptions(record.type));
  }
  // Nothing where the index names none.
  std::optional<at::Tensor> ReadIf(const json& name) const {
    if (name.is_null()) return std::nullopt;
    return Read(name);
  }
  at::Tensor Keep(const std::string& name) {
    at::Tensor weight = Read(name);
    kept_.emplace(names_.at(name), weight);
    return weight;
  }

  // Their shapes and types.
  std::map<std::string, at::Tensor> parameters() const {
    std::map<std::string, at::Tensor> all;
    for (const std::string& name : parameters_) {
      const Record& record = records_[names_.at(name)];
      all.emplace(name, at::empty(record.shape, at::TensorOptions(record.type).device(at::kMeta)));
    }
    return all;
  }

 private:
  struct Record {
    at::ScalarType type;
    std::vector<int64_t> shape;
  };

  void CheckSize(const Record& of, const std::string& record) const {
    auto bytes = static_cast<int64_t>(c10::elementSize(of.type));
    for (const int64_t count : of.shape) {
      if (count < 0 || __builtin_mul_overflow(bytes, count, &bytes)) {
        throw Malformed(record + " has an impossible shape");
      }
    }
    const auto size = static_cast<int64_t>(archive_.getRecordSize(record));
    if (bytes != size) throw Malformed(absl::StrCat(record, " has ", size, " bytes, not ", bytes));
  }

  caffe2::serialize::PyTorchStreamReader& archive_;
  std::vector<Record> records_;
  absl::flat_hash_map<std::string, size_t> names_;  // to records: some share one
  std::vector<std::string> parameters_;             // those that are no buffers
  absl::flat_hash_map<size_t, at::Tensor> kept_;
};

// Packs linears. In memory are those of one product beside what is packed.
class LinearPacker {
 public:
  LinearPacker(const WeightReader& weights, bool prepack) : weights_(weights), prepack_(prepack) {}

  void Pack(const json& siblings) {
    std::vector<at::Tensor> parts, scales;
    std::vector<std::optional<at::Tensor>> biases;
    for (const json& linear : siblings) {
      parts.push_back(weights_.Read(linear.at("weight")));
      biases.push_back(weights_.ReadIf(linear.at("bias")));
      if (const auto scale = weights_.ReadIf(linear.at("scale"))) scales.push_back(*scale);
    }
    const bool integers = !scales.empty();
    if (parts.empty() || (integers && scales.size() != parts.size())) {
      throw Malformed("linears of one product are not of one kind");
    }
    for (const at::Tensor& part : parts) {
      if (part.dim() != 2) throw Malformed("a linear's weight is no matrix");
    }
    const auto count = static_cast<int64_t>(parts.size());
    if (!integers) result_.linears += count;
    if (const auto same = made_.find(siblings.dump()); same != made_.end()) {  // of another input
      linears_.push_back(linears_[same->second]);
      if (linears_.back().packed != nullptr)
        (integers ? result_.quantized : result_.packed) += count;
      return;
    }
    made_.emplace(siblings.dump(), linears_.size());
    Linears& made = linears_.emplace_back();
    if (ArePacked(parts, integers, prepack_)) {
      made.packed = PackTogether(parts, scales, arena_);
      made.bias = BiasTogether(parts, biases, made.packed->bias_dtype());
      (integers ? result_.quantized : result_.packed) += count;
      (integers ? result_.quantized_for : result_.packed_for) = made.packed->kernels();
      result_.bytes += made.packed->bytes();
    }
    int64_t begin = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t outputs = parts[i].size(0);
      MakeDense& dense = dense_[siblings[i].at("weight")];
      if (made.packed == nullptr) {
        made.apart.push_back({parts[i], biases[i]});
        dense = [weight = parts[i]](at::ScalarType) { return weight; };
      } else {
        dense = [packed = made.packed, begin, outputs](at::ScalarType dtype) {
          return packed->Dense(dtype).narrow(0, begin, outputs);
        };
      }
      begin += outputs;
    }
  }

  std::vector<Linears> TakeLinears() { return std::move(linears_); }
  const PackedLinears& result() const { return result_; }

  // A weight as it was before it was packed.
  std::function<at::Tensor()> DenseOf(const std::string& name, at::ScalarType dtype) const {
    if (const auto found = dense_.find(name); found != dense_.end()) {
      return [make = found->second, dtype] { return make(dtype); };
    }
    return [weight = weights_.Read(name)] { return weight; };
  }

 private:
  using MakeDense = std::function<at::Tensor(at::ScalarType)>;

  const WeightReader& weights_;
  const bool prepack_;
  WeightArena arena_;
  PackedLinears result_;
  std::vector<Linears> linears_;
  absl::flat_hash_map<std::string, size_t> made_;  // by what the index says of them
  absl::flat_hash_map<std::string, MakeDense> dense_;
};

// Of all that is kept but for packed weights, which may be the same for several uses.
int64_t BytesOf(const Constants& constants, const std::vector<Linears>& linears) {
  std::map<const void*, int64_t> bytes;
  const auto add = [&](const at::Tensor& tensor) {
    bytes[tensor.const_data_ptr()] = static_cast<int64_t>(tensor.nbytes());
  };
  for (const auto& [name, constant] : constants) add(constant);
  for (const Linears& of : linears) {
    if (of.bias.has_value()) add(*of.bias);
    for (const Linears::Dense& linear : of.apart) {
      add(linear.weight);
      if (linear.bias.has_value()) add(*linear.bias);
    }
  }
  int64_t all = 0;
  for (const auto& [address, size] : bytes) all += size;
  return all;
}

std::string Machine() {
  utsname names;
  return uname(&names) == 0 ? names.machine : "an unknown processor";
}

// Why the file's code cannot run here; empty: it can.
std::string Unsuited(const json& index, const ModelOptions& options) {
  const std::string torch = index.at("torch"), machine = index.at("machine");
  if (torch != EPIKV_TORCH_VERSION) {
    return absl::StrCat("it was compiled by torch ", torch, ", and this is LibTorch ",
                        EPIKV_TORCH_VERSION);
  }
  if (machine != Machine()) {
    return absl::StrCat("it was compiled for ", machine, ", and this is ", Machine());
  }
  if (machine == "x86_64" && !ThisProcessor().avx2) {
    return "it was compiled for processors with AVX2";
  }
  if (!options.device.is_cpu()) return "compiled models are for the CPU";
  if (options.ranks != nullptr) return "a compiled model cannot be split (--tensor_parallel)";
  return "";
}

// Unpacks the code into a folder of its own, and loads it.
absl::StatusOr<std::unique_ptr<AOTIModelPackageLoader>> LoadCode(const std::string& path) {
  try {
    return std::make_unique<AOTIModelPackageLoader>(path, "model", /*run_single_threaded=*/false,
                                                    kRunners);
  } catch (const std::exception& error) {
    if (IsOutOfMemory(error)) return OutOfMemory(path);
    return absl::FailedPreconditionError(absl::StrCat(
        "the code of ", path, " cannot be loaded: ", FirstSentence(error.what()),
        ". It is unpacked below $TMPDIR, else /tmp, from where this process has to be allowed to "
        "write files and to run them"));
  }
}

absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& path, const ModelOptions& options) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  ModelTexts texts;
  std::vector<std::string> violations = ReadTexts(reader, texts);
  if (!violations.empty()) return Broken(path, violations);
  const json index = json::parse(*ReadExtra(reader, kIndex));
  if (const std::string why = Unsuited(index, options); !why.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " cannot be served: ", why, ". Export it again, without --compile if that is meant"));
  }
  WeightReader weights(reader, index.at("weights"));
  violations = ParameterViolations(weights.parameters(), texts.manifest);
  if (!violations.empty()) return Broken(path, violations);

  absl::StatusOr<std::unique_ptr<AOTIModelPackageLoader>> code = LoadCode(path);
  if (!code.ok()) return code.status();
  Constants constants;
  for (const std::string& name : (*code)->get_constant_fqns()) {
    constants.emplace(name, weights.Keep(name));
  }
  // It keeps a handle of each for ever: of a tensor that owns nothing.
  Constants given;
  for (const auto& [name, constant] : constants) {
    given.emplace(name,
                  at::from_blob(constant.mutable_data_ptr(), constant.sizes(), constant.options()));
  }
  (*code)->load_constants(given, /*use_inactive=*/false, /*check_full_update=*/true,
                          /*user_managed=*/true);

  LinearPacker packer(weights, options.prepack);
  for (const json& siblings : index.at("linears")) packer.Pack(siblings);
  std::vector<Linears> linears = packer.TakeLinears();
  const at::ScalarType dtype = ScalarTypeOf(texts.manifest.dtype);
  NamedWeights named;
  for (const LayerFacts& layer : texts.manifest.layers) {
    named.output_projections.push_back(packer.DenseOf(layer.output_projection, dtype));
  }
  if (texts.manifest.final_norm.has_value()) {
    named.final_norm = weights.Read(texts.manifest.final_norm->weight);
  }
  ModelFacts facts = FactsOf(std::move(texts));
  facts.weight_bytes = packer.result().bytes + BytesOf(constants, linears);
  facts.description =
      absl::StrCat("compiled by AOTInductor, ", DTypeName(facts.manifest.dtype),
                   Describe(packer.result(), facts.manifest.dtype, options.prepack));
  auto model = std::make_unique<CompiledModel>(std::move(facts), std::move(named), *std::move(code),
                                               std::move(constants), std::move(linears));
  violations = ProbeViolations(*model, /*counts_calls=*/true);
  if (!violations.empty()) return Broken(path, violations);
  return model;
}

}  // namespace

bool IsCompiled(caffe2::serialize::PyTorchStreamReader& reader) {
  return reader.hasRecord(absl::StrCat("extra/", kIndex));
}

absl::StatusOr<std::unique_ptr<Model>> LoadCompiled(const std::string& path,
                                                    const ModelOptions& options) {
  if (!options.trusts_code) {
    return absl::FailedPreconditionError(absl::StrCat(
        path,
        " is a compiled model, whose code runs as the daemon does: set trust_compiled_models "
        "if you trust who made it"));
  }
  try {
    return Load(path, options);
  } catch (const Malformed& why) {
    return Broken(path, {why.what()});
  } catch (const json::exception& why) {
    return Broken(
        path, {absl::StrCat("its ", kIndex, " is not as `epikv export` writes it: ", why.what())});
  } catch (const std::exception& error) {
    return CannotLoad(path, error);
  }
}

}  // namespace epikv
