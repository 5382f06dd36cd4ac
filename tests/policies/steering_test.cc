#include "policies/steering.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "nlohmann/json.hpp"

// What a steering artefact holds, and how strongly it acts at which token.

namespace epikv {
namespace steering_test {

using nlohmann::json;
using testing::HasSubstr;

ModelShape Shape() {
  ModelShape shape;
  shape.num_layers = 4;
  shape.hidden_size = 3;
  return shape;
}

json Data() { return {{"layer", 2}, {"at", {9, 5}}, {"ends", {5}}, {"marks", {7}}}; }

absl::StatusOr<std::shared_ptr<const PolicyData>> Read(const json& data,
                                                       std::vector<int64_t> shape = {3}) {
  NamedArrays arrays;
  arrays["vector"] = {.shape = shape, .values = {1, 2, 3}};
  return ReadSteering({.json = data.dump(), .arrays = arrays}, Shape());
}

std::shared_ptr<const SteeringVector> VectorOf(const json& data) {
  const auto read = Read(data);
  EXPECT_TRUE(read.ok()) << read.status();
  return std::static_pointer_cast<const SteeringVector>(*read);
}

TEST(SteeringArtefact, HoldsTheVectorAndItsTokens) {
  json data = Data();
  data["begin"] = 1;
  data["end"] = 2;
  const auto vector = VectorOf(data);
  EXPECT_EQ(vector->layer, 2);
  EXPECT_EQ(vector->values, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(vector->at, (std::vector<int32_t>{5, 9}));
  EXPECT_EQ(vector->begin, 1);
  EXPECT_EQ(vector->end, 2);
}

TEST(SteeringArtefact, RefusesWhatItIsNot) {
  auto refusal = [](const char* field, const json& value) {
    json data = Data();
    data[field] = value;
    return Read(data).status();
  };
  for (const auto& [field, value, words] : std::vector<std::tuple<const char*, json, const char*>>{
           {"layer", 4, "0 to 3"},
           {"layer", -1, "0 to 3"},
           {"layer", 1.5, "0 to 3"},
           {"at", json::array(), "at is empty"},
           {"at", 5, "at must be a list"},
           {"at", {-1}, "at must hold token ids"},
           {"marks", {"wait"}, "marks must hold token ids"},
           {"ends", {4294967296}, "ends must hold token ids"},
           {"begin", "think", "begin must be a token id"}}) {
    const absl::Status status = refusal(field, value);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(status.message(), HasSubstr(words));
  }
  EXPECT_THAT(Read(Data(), {1, 3}).status().message(), HasSubstr("'vector' [3]"));
  EXPECT_THAT(ReadSteering({.json = Data().dump(), .arrays = {}}, Shape()).status().message(),
              HasSubstr("'vector' [3]"));
  EXPECT_THAT(Read(json::array()).status().message(), HasSubstr("an object"));
}

// What the vector is multiplied by at each of `tokens`.
std::vector<float> Amounts(const json& data, const std::vector<int32_t>& tokens) {
  SteeringState state({.vector = VectorOf(data), .options = {.coefficient = 1, .growth = 0.5f}});
  std::vector<float> amounts;
  for (const int32_t token : tokens) {
    amounts.push_back(state.AmountAt(token));
    state.Add(token);
  }
  return amounts;
}

TEST(SteeringState, ActsAtItsTokensAlone) {
  EXPECT_EQ(Amounts(Data(), {3, 5, 9, 7}), (std::vector<float>{0, 1, 1, 0}));
}

TEST(SteeringState, ActsBetweenBeginAndEnd) {
  json data = Data();
  data["begin"] = 1;
  data["end"] = 2;
  EXPECT_EQ(Amounts(data, {5, 1, 5, 2, 5, 1, 9}), (std::vector<float>{0, 0, 1, 0, 0, 0, 1}));
}

TEST(SteeringState, GrowsWithMarkedSentencesEvery128Tokens) {
  std::vector<int32_t> tokens(300, 3);
  tokens[0] = tokens[1] = 7;  // one sentence, twice marked
  tokens[10] = 5;
  tokens[20] = 5;  // one without a mark
  tokens[127] = 9;
  tokens[128] = 9;
  tokens[130] = 7;
  tokens[140] = 5;
  tokens[255] = 9;
  tokens[256] = 9;
  const std::vector<float> amounts = Amounts(Data(), tokens);
  EXPECT_EQ(amounts[127], 1);
  EXPECT_EQ(amounts[128], 1.5);
  EXPECT_EQ(amounts[255], 1.5);
  EXPECT_EQ(amounts[256], 2);
}

}  // namespace steering_test
}  // namespace epikv
