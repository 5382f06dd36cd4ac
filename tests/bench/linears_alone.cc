// The linears of a model and nothing else, packed and multiplied as the daemon does: what its steps
// cannot be faster than. For the bound of `epikv bench peers`.
//
//   linears_alone [--cpu=NAME] THREADS DTYPE LAYERS IN,OUT ...
//
// --cpu: as of epikvd.
// The last is the output head. Prints whose kernels they are; then, for each line "ROWS WANTED",
// runs all layers over so many rows, the head over those wanted, and prints a line.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "runtime/base/processor.h"
#include "runtime/model/packed_linear.h"

namespace epikv {
namespace {

constexpr int64_t kMostRows = 512;  // of a step

class Linear {
 public:
  Linear(int64_t in, int64_t out, at::ScalarType dtype) {
    auto graph = std::make_shared<torch::jit::Graph>();
    torch::jit::Value* const x = graph->addInput();
    torch::jit::Value* const weight = graph->insertConstant(at::randn({out, in}).to(dtype));
    torch::jit::Value* const bias = graph->insertConstant(c10::IValue());
    graph->registerOutput(graph->insert(c10::aten::linear, {x, weight, bias}));
    const PackedLinears packed = PackLinears(*graph, /*prepack=*/true);
    kernels_ = packed.packed == 1 ? packed.packed_for : "ATen";
    code_.emplace(graph, "linear");
  }

  absl::string_view kernels() const { return kernels_; }

  void Run(const at::Tensor& x) const {
    torch::jit::Stack stack = {x};
    torch::jit::InterpreterState(*code_).run(stack);
  }

 private:
  absl::string_view kernels_;
  std::optional<torch::jit::Code> code_;
};

struct Sizes {
  int64_t in = 0, out = 0;
};

std::optional<Sizes> ParseSizes(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(text, ',');
  Sizes sizes;
  const bool good =
      absl::SimpleAtoi(parts.first, &sizes.in) && absl::SimpleAtoi(parts.second, &sizes.out);
  return good && sizes.in > 0 && sizes.out > 0 ? std::optional(sizes) : std::nullopt;
}

int Main(int argc, char** argv) {
  if (absl::string_view cpu = argc > 1 ? argv[1] : ""; absl::ConsumePrefix(&cpu, "--cpu=")) {
    const std::optional<ProcessorLimit> limit = ProcessorLimitOf(cpu);
    if (!limit.has_value() || !LimitProcessor(*limit).ok()) {
      std::cerr << "this processor has no " << cpu << "\n";
      return 2;
    }
    --argc;
    ++argv;
  }
  int threads = 0;
  int64_t layers = 0;
  std::vector<Sizes> sizes;
  for (int i = 4; i < argc; ++i) {
    const std::optional<Sizes> parsed = ParseSizes(argv[i]);
    if (!parsed.has_value()) break;
    sizes.push_back(*parsed);
  }
  const absl::string_view type = argc > 2 ? argv[2] : "";
  const bool is_bfloat16 = type == "bfloat16";
  if (argc < 5 || !absl::SimpleAtoi(argv[1], &threads) || threads < 1 ||
      !(is_bfloat16 || type == "float32") || !absl::SimpleAtoi(argv[3], &layers) ||
      sizes.size() != static_cast<size_t>(argc - 4)) {
    std::cerr << "linears_alone [--cpu=NAME] THREADS bfloat16|float32 LAYERS IN,OUT ...\n";
    return 2;
  }
  const at::ScalarType dtype = is_bfloat16 ? at::kBFloat16 : at::kFloat;
  at::set_num_threads(threads);
  const c10::InferenceMode inference;

  std::vector<std::pair<Linear, at::Tensor>> linears;  // each with its input
  std::map<int64_t, at::Tensor> inputs;
  auto add = [&](const Sizes& of) {
    at::Tensor& x = inputs[of.in];
    if (!x.defined()) x = at::randn({kMostRows, of.in}).to(dtype);
    linears.emplace_back(Linear(of.in, of.out, dtype), x);
  };
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (size_t i = 0; i + 1 < sizes.size(); ++i) add(sizes[i]);
  }
  add(sizes.back());
  std::cout << linears.back().first.kernels() << std::endl;

  int64_t rows = 0, wanted = 0;
  while (std::cin >> rows >> wanted) {
    if (rows < 1 || rows > kMostRows || wanted < 0 || wanted > kMostRows) return 2;
    for (size_t i = 0; i + 1 < linears.size(); ++i) {
      linears[i].first.Run(linears[i].second.narrow(0, 0, rows));
    }
    if (wanted > 0) linears.back().first.Run(linears.back().second.narrow(0, 0, wanted));
    std::cout << std::endl;
  }
  return 0;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) { return epikv::Main(argc, argv); }
