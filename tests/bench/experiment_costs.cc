// What experiments cost a request: microseconds of CPU time to deal it, by how many run. Prints a
// JSON object of samples for `epikv bench experiment`.
#include <time.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/experiments/definition/assignment.h"
#include "server/experiments/definition/definition.h"
#include "server/experiments/live_experiments.h"

namespace epikv {
namespace {

constexpr int kSamples = 20, kRequests = 20'000;  // of a sample
constexpr int kMany = 20;
constexpr int kLayers = 3;  // as many as there are options that arms of several may set

// Of all requests in its layer's `slice`-th part of `slices`.
v1::Experiment Running(int number, const std::string& layer, int slice, int slices) {
  v1::Experiment experiment;
  experiment.set_name(absl::StrCat("experiment-", number));
  experiment.set_layer(layer);
  experiment.set_bucket_version(1);
  experiment.set_traffic_permille(1000u / static_cast<uint32_t>(slices));
  experiment.set_first_bucket(kNumBuckets * static_cast<uint32_t>(slice) /
                              static_cast<uint32_t>(slices));
  for (const char* name : {"full", "lean"}) {
    v1::Arm& arm = *experiment.add_arms();
    arm.set_name(name);
    arm.set_weight_permille(500);
    arm.mutable_kv()->set_policy("sliding");
    arm.mutable_kv()->set_max_tokens(64);
  }
  return WithDefaults(std::move(experiment));
}

double ThreadMicros() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

// Microseconds a request, of each sample.
std::vector<double> Deal(std::vector<v1::Experiment> running) {
  LiveExperiments live;
  live.Set(std::move(running));
  std::vector<v1::GenerateRequest> requests(1000);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].mutable_experiment()->set_unit_id(absl::StrCat("user-", i));
    requests[i].mutable_kv()->set_policy("full");
  }
  std::vector<double> samples;
  size_t parts = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    const double begin = ThreadMicros();
    for (int i = 0; i < kRequests; ++i) {
      const Subject subject{.request = requests[static_cast<size_t>(i) % requests.size()],
                            .request_id = "request",
                            .model = "model",
                            .prompt_tokens = 100,
                            .max_output_tokens = 100};
      parts += live.Assign(subject)->parts.size();
    }
    samples.push_back((ThreadMicros() - begin) / kRequests);
  }
  if (parts == 0) return {};  // nobody took part: nothing was measured
  return samples;
}

int Run() {
  std::vector<v1::Experiment> of_one_layer, of_layers;
  for (int i = 0; i < kMany; ++i) of_one_layer.push_back(Running(i, "default", i, kMany));
  for (int i = 0; i < kLayers; ++i) {
    of_layers.push_back(Running(i, absl::StrCat("layer-", i), 0, 1));
  }
  const std::vector<std::pair<std::string, std::vector<double>>> found = {
      {"1", Deal({Running(0, "default", 0, 1)})},
      {absl::StrCat(kMany), Deal(of_one_layer)},
      {absl::StrCat(kLayers, " layers"), Deal(of_layers)}};
  const auto samples = [](std::string* out, const auto& of) {
    absl::StrAppend(out, "\"", of.first, "\": [", absl::StrJoin(of.second, ", "), "]");
  };
  printf("{%s}\n", absl::StrJoin(found, ", ", samples).c_str());
  return 0;
}

}  // namespace
}  // namespace epikv

int main() { return epikv::Run(); }
