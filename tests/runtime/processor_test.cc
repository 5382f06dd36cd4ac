#include "runtime/base/processor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "runtime/kernels/dense_matmul.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/quantized_matmul.h"

namespace epikv {
namespace processor_test {

TEST(ProcessorTest, LimitsHaveNames) {
  EXPECT_EQ(ProcessorLimitOf("auto"), ProcessorLimit::kNone);
  EXPECT_EQ(ProcessorLimitOf("avx512"), ProcessorLimit::kAvx512);
  EXPECT_EQ(ProcessorLimitOf("avx2"), ProcessorLimit::kAvx2);
  EXPECT_EQ(ProcessorLimitOf("plain"), ProcessorLimit::kPlain);
  EXPECT_EQ(ProcessorLimitOf("sse2"), std::nullopt);
  EXPECT_EQ(ProcessorLimitOf(""), std::nullopt);
}

// The fastest paths of this processor under a limit, a name each.
std::string PathsUnder(ProcessorLimit limit) {
  if (!LimitProcessor(limit).ok()) return "has less";
  const LaneShape lane = {.key_width = 64, .value_width = 64, .dtype = DType::kBFloat16};
  std::string names(AttentionPathName(FastestAttentionPath(lane)));
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const std::optional<DensePath> path = FastestDensePath(dtype);
    names += path.has_value() ? "; " + std::string(DensePathName(*path)) : "; none";
  }
  return names + "; " + std::string(QuantizedPathName(FastestQuantizedPath()));
}

// In a process of its own: a limit is for good.
void ExpectPaths(ProcessorLimit limit, const std::string& names) {
  EXPECT_EXIT(
      {
        std::fputs(PathsUnder(limit).c_str(), stderr);
        std::exit(0);
      },
      testing::ExitedWithCode(0), "^" + names + "$");
}

TEST(ProcessorDeathTest, KernelsUseNoMoreThanTheLimit) {
  ExpectPaths(ProcessorLimit::kPlain, "any processor; none; none; plain");
  ExpectPaths(ProcessorLimit::kAvx2, ThisProcessor().avx2 ? "AVX2; AVX2; AVX2; AVX2" : "has less");
  ExpectPaths(ProcessorLimit::kAvx512,
              ThisProcessor().avx512 ? "AVX-512; AVX-512; AVX-512; AVX2" : "has less");
}

TEST(ProcessorDeathTest, LibrariesAreHeldToTheLimitToo) {
  if (!ThisProcessor().avx2) GTEST_SKIP() << "of x86 alone";
  const auto limit = [] {
    if (!LimitProcessor(ProcessorLimit::kAvx2).ok()) std::exit(1);
    for (const char* name :
         {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"}) {
      std::fprintf(stderr, "%s ", std::getenv(name));
    }
    std::exit(0);
  };
  EXPECT_EXIT(limit(), testing::ExitedWithCode(0), "^avx2 AVX2 AVX2 $");
}

}  // namespace processor_test
}  // namespace epikv
