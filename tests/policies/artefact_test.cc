#include "policies/artefact.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "nlohmann/json.hpp"

// Whose artefact it is, and whether it may be loaded.

namespace epikv {
namespace artefact_test {

using nlohmann::json;
using testing::HasSubstr;

struct Number final : public PolicyData {
  explicit Number(int64_t number) : number(number) {}
  const int64_t number;
};

const ParamSpec kParams[] = {{.name = "depth", .type = ParamType::kInt, .min = 1, .max = 8},
                             {.name = "blocks", .type = ParamType::kIntList, .max = 8},
                             {.name = "by", .type = ParamType::kFloat, .max = 1}};

absl::Status Complete(Params& params, const ModelShape& shape) {
  if (!params.Has("depth")) params.Set("depth", shape.num_layers);
  return params.Int("depth") > shape.num_layers
             ? absl::InvalidArgumentError("deeper than the model")
             : absl::OkStatus();
}

const ParamSpec kWithADefault[] = {
    kParams[0],
    kParams[1],
    kParams[2],
    {.name = "slack", .type = ParamType::kInt, .fallback = int64_t{0}, .max = 9}};

const PolicySpec kPlain{
    .name = "plain", .params = kWithADefault, .calibrated = true, .complete = &Complete};
const PolicySpec kReads{
    .name = "reads",
    .params = kParams,
    .read_data = [](const ArtefactData& artefact,
                    const ModelShape&) -> absl::StatusOr<std::shared_ptr<const PolicyData>> {
      const json data = json::parse(artefact.json.begin(), artefact.json.end());
      if (!data.is_number_integer()) return absl::InvalidArgumentError("must be an integer");
      return std::make_shared<Number>(data.get<int64_t>() + std::ssize(artefact.arrays));
    },
    .calibrated = true,
};
const PolicySpec kUncalibrated{.name = "uncalibrated", .params = kParams};
const PolicySpec* const kCatalog[] = {&kPlain, &kReads, &kUncalibrated};

// Of all parameters that have no default.
json SomeParams() { return {{"depth", 3}, {"blocks", {1, 2}}, {"by", 0.25}}; }

constexpr char kWeights[] = "sha256:1234";

json Artefact(const std::string& policy) {
  return {{"format", "epikv.artefact/1"},
          {"policy", policy},
          {"model", {{"name", "small"}, {"weights", kWeights}}},
          {"made_with", "whatever a tool notes"}};
}

// A file of one array, x = 1; and one of another model.
absl::StatusOr<std::string> ReadBesideIt(const std::string& name) {
  if (name == "none.safetensors") return absl::NotFoundError("cannot read " + name);
  const std::string weights = name == "others.safetensors" ? "sha256:56" : kWeights;
  const json header = {{"__metadata__", {{"policy", "reads"}, {"weights", weights}}},
                       {"x", {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 4}}}}};
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.dump().size());
  return bytes + header.dump() + std::string("\0\0\x80\x3f", 4);
}

absl::Status Add(const json& artefact, ModelShape& shape, absl::string_view weights = kWeights) {
  return AddArtefact(artefact.dump(), kCatalog, weights, &ReadBesideIt, shape);
}

TEST(ArtefactTest, ParametersAreTheModelsDefaults) {
  ModelShape shape{.num_layers = 4};
  json artefact = Artefact("plain");
  artefact["params"] = SomeParams();
  ASSERT_EQ(Add(artefact, shape), absl::OkStatus());
  const std::map<std::string, ParamValue> expected = {
      {"depth", int64_t{3}}, {"blocks", std::vector<int64_t>{1, 2}}, {"by", 0.25}};
  EXPECT_EQ(shape.calibrated.at("plain"), expected);
  EXPECT_TRUE(shape.artefacts.contains("plain"));
}

TEST(ArtefactTest, ItsPolicyReadsTheData) {
  ModelShape shape{.num_layers = 4};
  json artefact = Artefact("reads");
  artefact["data"] = 7;
  ASSERT_EQ(Add(artefact, shape), absl::OkStatus());
  EXPECT_EQ(dynamic_cast<const Number&>(*shape.artefacts.at("reads")).number, 7);
}

struct Bad {
  const char* name;
  std::function<void(json&)> change;
  const char* says;
};

class BadArtefact : public testing::TestWithParam<Bad> {};

TEST_P(BadArtefact, IsRefusedAndLeavesNothingBehind) {
  ModelShape shape{.num_layers = 4};
  json artefact = Artefact("reads");
  artefact["data"] = 7;
  GetParam().change(artefact);
  const absl::Status status = Add(artefact, shape);
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().says));
  EXPECT_TRUE(shape.calibrated.empty());
  EXPECT_TRUE(shape.artefacts.empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, BadArtefact,
    testing::Values(
        Bad{"AList", [](json& a) { a = json::array(); }, "not a JSON object"},
        Bad{"NoFormat", [](json& a) { a.erase("format"); }, "format must be \"epikv.artefact/1\""},
        Bad{"NewerFormat", [](json& a) { a["format"] = "epikv.artefact/2"; }, "format must be"},
        Bad{"NoPolicy", [](json& a) { a.erase("policy"); }, "unknown policy ''"},
        Bad{"UnknownPolicy", [](json& a) { a["policy"] = "gone"; }, "unknown policy 'gone'"},
        Bad{"NoModel", [](json& a) { a.erase("model"); }, "model.weights is missing"},
        Bad{"ModelIsAName", [](json& a) { a["model"] = "small"; }, "model.weights is missing"},
        Bad{"OtherModel", [](json& a) { a["model"]["weights"] = "sha256:99"; },
            "another model, 'small' with weights sha256:99; the served model's are sha256:1234"},
        Bad{"Empty", [](json& a) { a.erase("data"); }, "holds neither params nor data"},
        Bad{"DataWithoutAReader", [](json& a) { a["policy"] = "plain"; },
            "policy 'plain' takes no data"},
        Bad{"NoDataForAReader",
            [](json& a) {
              a.erase("data");
              a["params"] = SomeParams();
            },
            "policy 'reads' takes data"},
        Bad{"BadData", [](json& a) { a["data"] = "7"; }, "data: must be an integer"},
        Bad{"ArraysThatAreNotThere", [](json& a) { a["arrays"] = "none.safetensors"; },
            "arrays: cannot read none.safetensors"},
        Bad{"ArraysOfAnotherModel", [](json& a) { a["arrays"] = "others.safetensors"; },
            "others.safetensors: its weights is 'sha256:56', not 'sha256:1234'"},
        Bad{"ArraysWithoutData",
            [](json& a) {
              a["policy"] = "plain";
              a.erase("data");
              a["params"] = SomeParams();
              a["arrays"] = "arrays.safetensors";
            },
            "has arrays, and no data"},
        Bad{"ArraysElsewhere", [](json& a) { a["arrays"] = "../arrays.safetensors"; },
            "arrays must be the name of a file beside this one"},
        Bad{"ArraysThatAreAFolder", [](json& a) { a["arrays"] = ".."; },
            "arrays must be the name of a file beside this one"},
        Bad{"ArraysWithoutAName", [](json& a) { a["arrays"] = 7; },
            "arrays must be the name of a file beside this one"},
        Bad{"ParamsAreAList", [](json& a) { a["params"] = {1}; }, "params is no object"},
        Bad{"UnknownParam",
            [](json& a) {
              a["params"] = SomeParams();
              a["params"]["deep"] = 3;
            },
            "params.deep"},
        Bad{"ParamIsMissing",
            [](json& a) {
              a["params"] = SomeParams();
              a["params"].erase("by");
            },
            "params.by: is missing"},
        Bad{"ParamWithADefault",
            [](json& a) {
              a["policy"] = "plain";
              a.erase("data");
              a["params"] = SomeParams();
              a["params"]["slack"] = 3;
            },
            "params.slack: has a default of its own"},
        Bad{"OfAPolicyThatTakesNone",
            [](json& a) {
              a["policy"] = "uncalibrated";
              a.erase("data");
              a["params"] = SomeParams();
            },
            "policy 'uncalibrated' takes no params"},
        Bad{"ParamOutOfRange",
            [](json& a) {
              a["params"] = SomeParams();
              a["params"]["depth"] = 9;
            },
            "params.depth"},
        Bad{"ParamOfNoType",
            [](json& a) {
              a["params"] = SomeParams();
              a["params"]["depth"] = nullptr;
            },
            "params.depth"},
        Bad{"ParamTheModelForbids",
            [](json& a) {
              a["policy"] = "plain";
              a.erase("data");
              a["params"] = SomeParams();
              a["params"]["depth"] = 6;
            },
            "params: deeper than the model"}),
    [](const auto& info) { return info.param.name; });

TEST(ArtefactTest, NoJson) {
  ModelShape shape;
  EXPECT_EQ(AddArtefact("{\"format\": ", kCatalog, kWeights, &ReadBesideIt, shape).message(),
            "not a JSON object");
}

TEST(ArtefactTest, ArraysAreReadFromTheFileBesideIt) {
  ModelShape shape;
  json artefact = Artefact("reads");
  artefact["data"] = 7;
  artefact["arrays"] = "arrays.safetensors";
  ASSERT_EQ(Add(artefact, shape), absl::OkStatus());
  EXPECT_EQ(static_cast<const Number&>(*shape.artefacts.at("reads")).number, 7 + 1);
}

TEST(ArtefactTest, TwoOfOnePolicy) {
  ModelShape shape;
  json artefact = Artefact("reads");
  artefact["data"] = 7;
  ASSERT_EQ(Add(artefact, shape), absl::OkStatus());
  EXPECT_THAT(std::string(Add(artefact, shape).message()), HasSubstr("a second artefact"));
}

TEST(ArtefactTest, OfAModelThatDoesNotSayWhoItIs) {
  ModelShape shape;
  json artefact = Artefact("reads");
  artefact["data"] = 7;
  const absl::Status status = Add(artefact, shape, "");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("export it again"));
}

}  // namespace artefact_test
}  // namespace epikv
