#include "tests/artefacts.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "policies/random.h"

namespace epikv {
namespace {

using nlohmann::json;

json QueryStatistics(const ModelShape& shape) {
  json data;
  uint64_t stream = 0;
  for (const char* name : {"q_mean_real", "q_mean_imag", "q_abs_mean"}) {
    const double least = name[2] == 'a' ? 1 : -1;  // a mean of lengths is no less than that of all
    for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
      json heads = json::array();
      for (int64_t head = 0; head < shape.num_heads; ++head) {
        const CounterRng rng(1, stream++);
        json pairs = json::array();
        for (size_t pair = 0; pair < shape.ropes[layer].inv_freq.size(); ++pair) {
          pairs.push_back(least + rng.Uniform(pair));
        }
        heads.push_back(pairs);
      }
      data[name].push_back(heads);
    }
  }
  return data;
}

json Probe(const ModelShape& shape) {
  json weights = json::array();
  for (int64_t c = 0; c < shape.hidden_size; ++c) {
    weights.push_back(CounterRng(2, 0).Uniform(c) - 0.5);
  }
  return {{"layer", shape.num_layers / 2}, {"weights", weights}};
}

}  // namespace

std::string ArtefactData(const PolicySpec& spec, const ModelShape& shape) {
  if (spec.name == "triattention") return QueryStatistics(shape).dump();
  if (spec.name == "epikv_probe") return Probe(shape).dump();
  ADD_FAILURE() << "what would the artefact of " << spec.name << " hold?";
  return "";
}

ModelShape WithArtefacts(ModelShape shape, PolicyCatalog catalog) {
  for (const PolicySpec* spec : catalog) {
    if (spec->read_data == nullptr || shape.artefacts.contains(spec->name)) continue;
    auto data = spec->read_data(ArtefactData(*spec, shape), shape);
    EXPECT_TRUE(data.ok()) << data.status();
    if (data.ok()) shape.artefacts[std::string(spec->name)] = *std::move(data);
  }
  return shape;
}

}  // namespace epikv
