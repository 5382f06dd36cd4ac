#include "runtime/attention/kernel_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace epikv {
namespace kernel_choice_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

enum class Kernel { kFirst, kSecond, kThird };

absl::string_view NameOf(Kernel kernel) {
  const absl::string_view names[] = {"first", "second", "third"};
  return names[static_cast<int>(kernel)];
}

// Of a machine on which the last of three is the fastest, and the first cannot run or is the
// slowest.
const std::vector<KernelTiming<Kernel>> kAll = {
    {Kernel::kThird, 10}, {Kernel::kSecond, 20}, {Kernel::kFirst, 30}};
const std::vector<KernelTiming<Kernel>> kSome = {{Kernel::kThird, 10}, {Kernel::kSecond, 20}};

absl::StatusOr<Kernel> Choose(absl::string_view asked, bool deterministic,
                              const std::vector<KernelTiming<Kernel>>& timings = kAll) {
  std::vector<std::string> description;
  return ChooseKernel("kernel", asked, deterministic, "times", timings, NameOf, description);
}

TEST(ChooseKernel, TakesTheFastest) { EXPECT_EQ(*Choose("auto", false), Kernel::kThird); }

TEST(ChooseKernel, TakesTheOneThatIsAskedFor) {
  EXPECT_EQ(*Choose("second", false), Kernel::kSecond);
  EXPECT_EQ(*Choose("second", true), Kernel::kSecond);
}

// However fast they were this time.
TEST(ChooseKernel, DeterminismPinsTheFirstThatThereIs) {
  EXPECT_EQ(*Choose("auto", true), Kernel::kFirst);
  EXPECT_EQ(*Choose("auto", true, kSome), Kernel::kSecond);
  EXPECT_EQ(*Choose("auto", true, {kSome.rbegin(), kSome.rend()}), Kernel::kSecond);
}

TEST(ChooseKernel, SaysWhatThereIs) {
  const absl::Status status = Choose("first", true, kSome).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("kernel 'first' is not available on this processor and model; these are: "
                        "auto, third, second"));
}

TEST(ChooseKernel, DescribesItself) {
  std::vector<std::string> description;
  ASSERT_TRUE(ChooseKernel("kernel", "auto", true, "times", kAll, NameOf, description).ok());
  ASSERT_TRUE(ChooseKernel("kernel", "auto", false, "times", kAll, NameOf, description).ok());
  EXPECT_THAT(
      description,
      ElementsAre("times: third 10 second 20 first 30; using first, pinned by deterministic",
                  "times: third 10 second 20 first 30; using third"));
}

}  // namespace kernel_choice_test
}  // namespace epikv
