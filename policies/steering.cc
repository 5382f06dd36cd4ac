#include "policies/steering.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace epikv {
namespace {

using Json = nlohmann::json;

bool Among(const std::vector<int32_t>& ascending, int32_t token) {
  return std::binary_search(ascending.begin(), ascending.end(), token);
}

std::optional<int32_t> TokenOf(const Json& value) {
  if (!value.is_number_integer() || value < 0 || value > 2147483647) return std::nullopt;
  return value.get<int32_t>();
}

// Of a list of token ids, ascending.
absl::StatusOr<std::vector<int32_t>> TokensOf(const Json& data, const char* name) {
  const Json list = data.value(name, Json());
  std::vector<int32_t> tokens;
  if (!list.is_array()) return absl::InvalidArgumentError(absl::StrCat(name, " must be a list"));
  for (const Json& item : list) {
    const std::optional<int32_t> token = TokenOf(item);
    if (!token.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(name, " must hold token ids"));
    }
    tokens.push_back(*token);
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PolicyData>> ReadSteering(const ArtefactData& artefact,
                                                               const ModelShape& shape) {
  const Json data = Json::parse(artefact.json.begin(), artefact.json.end());
  if (!data.is_object()) return absl::InvalidArgumentError("must be an object");
  auto vector = std::make_shared<SteeringVector>();
  const Json layer = data.value("layer", Json());
  if (!layer.is_number_integer() || layer < 0 || layer >= shape.num_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer must be a block of the model, 0 to ", shape.num_layers - 1));
  }
  vector->layer = layer.get<int64_t>();
  for (const auto& [name, tokens] : {std::pair("at", &vector->at), std::pair("ends", &vector->ends),
                                     std::pair("marks", &vector->marks)}) {
    absl::StatusOr<std::vector<int32_t>> read = TokensOf(data, name);
    if (!read.ok()) return read.status();
    *tokens = *std::move(read);
  }
  if (vector->at.empty()) {
    return absl::InvalidArgumentError("at is empty: nothing would be steered");
  }
  for (const auto& [name, token] :
       {std::pair("begin", &vector->begin), std::pair("end", &vector->end)}) {
    if (!data.contains(name) || data[name].is_null()) continue;
    *token = TokenOf(data[name]);
    if (!token->has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(name, " must be a token id"));
    }
  }
  const auto values = artefact.arrays.find("vector");
  if (values == artefact.arrays.end() ||
      values->second.shape != std::vector<int64_t>{shape.hidden_size}) {
    return absl::InvalidArgumentError(
        absl::StrCat("arrays must hold 'vector' [", shape.hidden_size, "]"));
  }
  vector->values = values->second.values;
  return vector;
}

std::shared_ptr<const SteeringVector> SteeringOf(const ModelShape& shape) {
  const auto found = shape.artefacts.find(kSteering);
  if (found == shape.artefacts.end()) return nullptr;
  return std::static_pointer_cast<const SteeringVector>(found->second);
}

SteeringState::SteeringState(Steering steering)
    : steering_(std::move(steering)), inside_(!vector().begin.has_value()) {}

bool SteeringState::InsideAfter(int32_t token) const {
  if (token == vector().end) return false;
  return inside_ || token == vector().begin;
}

float SteeringState::AmountAt(int32_t token) const {
  if (!InsideAfter(token) || !Among(vector().at, token)) return 0;
  return steering_.options.coefficient + steering_.options.growth * static_cast<float>(counted_);
}

void SteeringState::Add(int32_t token) {
  inside_ = InsideAfter(token);
  mark_seen_ |= Among(vector().marks, token);
  if (Among(vector().ends, token)) {
    marked_ += mark_seen_ ? 1 : 0;
    mark_seen_ = false;
  }
  if (++tokens_ % kRefresh == 0) counted_ = marked_;
}

}  // namespace epikv
