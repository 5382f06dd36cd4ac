#pragma once

#include <fstream>
#include <nlohmann/json.hpp>

namespace epikv {

// What scipy and statsmodels say of the figures of experiments: golden/make_experiments.py.
inline const nlohmann::json& ExperimentGoldens() {
  static const nlohmann::json* goldens = [] {
    std::ifstream file(EPIKV_SOURCE_DIR "/tests/golden/experiments.json");
    return new nlohmann::json(nlohmann::json::parse(file));
  }();
  return *goldens;
}

}  // namespace epikv
