// Products of a linear by each of our paths that this processor has, beside LibTorch's and
// oneDNN's.
//
//   product_paths [OUTPUTS INPUTS]
//
// Prints microseconds of x weight^T on one thread, of 1 to 512 rows: the least of 24 runs, over
// weights that the caches do not hold. With ONEDNN_MAX_CPU_ISA=AVX2, MKL_ENABLE_INSTRUCTIONS=AVX2
// and ATEN_CPU_CAPABILITY=avx2 LibTorch's are those of a processor without AVX-512.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "runtime/base/scalar_type.h"
#include "runtime/base/steady_time.h"
#include "runtime/kernels/dense_matmul.h"
#include "runtime/kernels/quantized_matmul.h"
#include "runtime/model/one_dnn_weight.h"

namespace epikv {
namespace {

constexpr int64_t kRows[] = {1, 2, 4, 8, 16, 32, 96, 512};
constexpr int kRuns = 24;
constexpr int64_t kWeightBytes = 64 << 20;  // of all that are multiplied in turn
constexpr int64_t kReadAhead = 64 << 10;    // what products fetch behind a weight

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeDeleter>;

Memory Aligned(int64_t bytes) { return Memory(std::aligned_alloc(64, (bytes + 63) / 64 * 64)); }

// work(weight's number).
void Print(const std::string& name, int64_t weights, int64_t rows,
           const std::function<void(int64_t)>& work, int runs = kRuns) {
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < runs; ++run) {
    const absl::Time begin = SteadyNow();
    work(run % weights);
    least = std::min(least, absl::ToDoubleMicroseconds(SteadyNow() - begin));
  }
  std::printf("%-28s %3lld rows %9.0f\n", name.c_str(), static_cast<long long>(rows), least);
}

int64_t WeightsOf(int64_t bytes) { return std::max<int64_t>(2, kWeightBytes / bytes); }

void OfDense(DType dtype, int64_t outputs, int64_t inputs) {
  const DenseShape shape = {.outputs = outputs, .inputs = inputs, .dtype = dtype};
  const at::ScalarType scalar = ScalarTypeOf(dtype);
  const std::string of = std::string(at::toString(scalar)) + ", ";
  const int64_t count = WeightsOf(PackedDenseBytes(shape));
  std::vector<Memory> packed;
  std::vector<at::Tensor> plain;
  std::vector<c10::intrusive_ptr<OneDnnWeight>> one_dnn;
  for (int64_t i = 0; i < count; ++i) {
    plain.push_back(at::randn({outputs, inputs}).to(scalar));
    packed.push_back(Aligned(PackedDenseBytes(shape) + kReadAhead));
    PackDense(plain.back().const_data_ptr(), shape, packed.back().get());
    if (OneDnnWeight::Supports(scalar)) {
      one_dnn.push_back(c10::make_intrusive<OneDnnWeight>(plain.back()));
    }
  }
  for (const int64_t rows : kRows) {
    const at::Tensor x = at::randn({rows, inputs}).to(scalar);
    Print(of + "LibTorch", count, rows, [&](int64_t i) { at::linear(x, plain[i]); });
    if (!one_dnn.empty()) {
      Print(of + "oneDNN", count, rows, [&](int64_t i) { one_dnn[i]->Apply(x, std::nullopt); });
    }
    for (const DensePath path : DensePaths(dtype)) {
      const int64_t row_bytes = DenseRowBytes(path, shape);
      const Memory prepared = Aligned(rows * row_bytes);
      std::vector<float> sums(rows * kDenseBlock);
      Print(absl::StrCat(of, DensePathName(path)), count, rows, [&](int64_t i) {
        for (int64_t r = 0; r < rows; ++r) {
          PrepareDense(path, x[r].const_data_ptr(), shape,
                       static_cast<char*>(prepared.get()) + r * row_bytes);
        }
        for (int64_t block = 0; block < DenseBlocks(shape); ++block) {
          for (int64_t first = 0; first < rows; first += kDenseRows) {
            MultiplyDense(path, static_cast<char*>(prepared.get()) + first * row_bytes,
                          std::min(kDenseRows, rows - first), packed[i].get(), shape, block,
                          sums.data() + first * kDenseBlock);
          }
        }
      });
    }
  }
}

void OfIntegers(int64_t bits, int64_t outputs, int64_t inputs) {
  const QuantizedShape shape = {
      .outputs = outputs, .inputs = inputs, .group = bits == 8 ? 128 : 32, .bits = bits};
  const int64_t count = WeightsOf(PackedWeightBytes(shape));
  const std::vector<uint8_t> integers(outputs * inputs * bits / 8, 0x35);
  const std::vector<uint16_t> scales(outputs * shape.groups(), 0x3f80);
  std::vector<Memory> packed;
  for (int64_t i = 0; i < count; ++i) {
    packed.push_back(Aligned(PackedWeightBytes(shape) + kReadAhead));
    PackWeight(integers.data(), scales.data(), shape, packed.back().get());
  }
  const at::Tensor x = at::randn({kRows[std::size(kRows) - 1], inputs});
  for (const int64_t rows : kRows) {
    std::vector<int8_t> values(rows * inputs);
    std::vector<float> of_groups(rows * shape.groups()), sums(rows * kQuantizedBlock);
    std::vector<int32_t> integer_sums(rows * shape.groups());
    const QuantizedRows prepared = {.rows = rows,
                                    .values = values.data(),
                                    .scales = of_groups.data(),
                                    .sums = integer_sums.data()};
    for (const QuantizedPath path : QuantizedPaths()) {
      Print(
          absl::StrCat("int", bits, ", ", QuantizedPathName(path)), count, rows,
          [&](int64_t i) {
            for (int64_t r = 0; r < rows; ++r) {
              QuantizeRow(path, x.const_data_ptr<float>() + r * inputs, shape, r, prepared);
            }
            for (int64_t block = 0; block < QuantizedBlocks(shape); ++block) {
              MultiplyBlock(path, prepared, packed[i].get(), shape, block, sums.data());
            }
          },
          path == QuantizedPath::kAnywhere ? 1 : kRuns);
    }
  }
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  int64_t outputs = 4864, inputs = 896;
  const bool told = argc == 3 && absl::SimpleAtoi(argv[1], &outputs) &&
                    absl::SimpleAtoi(argv[2], &inputs) && outputs > 0 && inputs % 128 == 0;
  if (argc != 1 && !told) {
    std::fprintf(stderr, "usage: %s [OUTPUTS INPUTS], of inputs a multiple of 128\n", argv[0]);
    return 2;
  }
  at::set_num_threads(1);
  for (const epikv::DType dtype :
       {epikv::DType::kFloat32, epikv::DType::kBFloat16, epikv::DType::kFloat16}) {
    epikv::OfDense(dtype, outputs, inputs);
  }
  for (const int64_t bits : {8, 4}) epikv::OfIntegers(bits, outputs, inputs);
  return 0;
}
