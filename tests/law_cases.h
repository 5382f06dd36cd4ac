#pragma once

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "policies/registry.h"
#include "tests/engine_harness.h"

// What the laws of DESIGN section 8 are tried on: models, policies, texts.

namespace epikv {

std::string ModelPath(const std::string& name);

// Every policy of the build, one whose lanes differ, and one that compares its signals.
PolicyCatalog LawPolicies();

struct PolicyCase {
  std::string label;  // of the test
  std::string policy;
  std::map<std::string, ParamValue> params;
};

void PrintTo(const PolicyCase& c, std::ostream* out);

// "snapkv" -> "Snapkv", "head_pool" -> "HeadPool".
std::string Camel(absl::string_view name);

// A policy's parameters, as small as the laws' sequences.
std::map<std::string, ParamValue> SmallParams(const PolicySpec& spec);

// Every policy that evicts, as it is by default.
std::vector<PolicyCase> EvictingPolicies();

// Every other value of each of their choices and switches; slack where there is none, or none where
// there is; a reserve.
std::vector<PolicyCase> PolicyVariants();

// What the EpiKV authors' classes did to four of the sample model's problems.
const nlohmann::json& AuthorsRuns();

// Text for a model: the sample model's own, for it says little of value on any other; else random
// tokens, no two alike: at a cut the keys of equal ones would differ by rounding alone.
std::vector<int32_t> Text(const Manifest& manifest, int64_t count, uint64_t seed);

RequestOptions Scoring(const Manifest& manifest, int64_t prompt, int64_t forced, uint64_t seed);

RequestOptions WithPolicy(RequestOptions options, const PolicyCase& c, int64_t budget);

// Of a scored request: everything but the last token, which is never cached.
std::vector<int32_t> CachedTokens(const RequestOptions& options);

float LargestDifference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

bool SameBits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

// A run in which a law could have been broken: 50 tokens dropped, in five rounds.
testing::AssertionResult Evicted(const Transcript& transcript, const Manifest& manifest);

// (model, policy). "gqa_int8": the model "gqa", K and V cached as int8.
class EveryPolicy : public ::testing::TestWithParam<std::tuple<std::string, PolicyCase>> {
 protected:
  std::string model() const {
    return std::string(absl::StripSuffix(std::get<0>(GetParam()), kInt8Suffix));
  }
  KvDType kv_dtype() const {
    return absl::EndsWith(std::get<0>(GetParam()), kInt8Suffix) ? KvDType::kInt8 : KvDType::kModel;
  }
  const PolicyCase& policy() const { return std::get<1>(GetParam()); }
  EngineHarness Harness(HarnessOptions options = {}) const {
    options.policies = LawPolicies();
    options.kv_dtype = kv_dtype();
    return EngineHarness(ModelPath(model()), std::move(options));
  }

 private:
  static constexpr absl::string_view kInt8Suffix = "_int8";
};

std::string CaseName(const ::testing::TestParamInfo<std::tuple<std::string, PolicyCase>>& info);

}  // namespace epikv
