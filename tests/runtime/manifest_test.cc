#include "runtime/model/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace epikv {
namespace manifest_test {

using Json = nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// A manifest of two layers, every field set.
Json Valid() {
  return Json::parse(R"({
    "format": "epikv.model/1", "name": "m", "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16", "vocab_size": 100, "context_length": 64, "hidden_size": 32,
    "num_heads": 4, "num_kv_heads": 2, "bos_token_id": 1, "eos_token_ids": [2, 3],
    "ropes": [{"layout": "half", "inv_freq": [1.0, 0.5, 0, 1], "attention_factor": 1.25},
              {"layout": "interleaved", "inv_freq": [], "attention_factor": 1}],
    "layers": [{"key_width": 8, "value_width": 16, "scale": 0.5, "soft_cap": null,
                "window": null, "rope": 0, "output_projection": "layers.0.o"},
               {"key_width": 8, "value_width": 16, "scale": 1, "soft_cap": 30.0,
                "window": 16, "rope": 1, "output_projection": "layers.1.o"},
               {"key_width": 8, "value_width": 16, "scale": 1, "soft_cap": null,
                "window": null, "rope": 1, "output_projection": "layers.2.o"}],
    "final_norm": {"weight": "norm.w", "eps": 1e-5, "wide": true, "offset": 1},
    "calibration": {"policy": "epikv_flat", "layer_a": 0, "layer_b": 1, "sign": -1, "window": 32,
                    "confirmed": true, "figures": {"anything": [1, 2]}},
    "sampling": {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.25, "typical_p": 1,
                 "repetition_penalty": 1.5}
  })");
}

TEST(ManifestTest, AllFieldsAreRead) {
  const auto m = Manifest::Parse(Valid().dump());
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_EQ(m->name, "m");
  EXPECT_EQ(m->architecture, "LlamaForCausalLM");
  EXPECT_EQ(m->dtype, DType::kBFloat16);
  EXPECT_EQ(m->vocab_size, 100);
  EXPECT_EQ(m->context_length, 64);
  EXPECT_EQ(m->hidden_size, 32);
  EXPECT_EQ(m->num_heads, 4);
  EXPECT_EQ(m->num_kv_heads, 2);
  EXPECT_EQ(m->bos_token, 1);
  EXPECT_THAT(m->eos_tokens, ElementsAre(2, 3));
  ASSERT_EQ(m->ropes.size(), 2);
  EXPECT_EQ(m->ropes[0].layout, Rope::Layout::kHalf);
  EXPECT_THAT(m->ropes[0].inv_freq, ElementsAre(1, 0.5, 0, 1));
  EXPECT_EQ(m->ropes[0].attention_factor, 1.25);
  EXPECT_EQ(m->ropes[1].layout, Rope::Layout::kInterleaved);
  ASSERT_EQ(m->num_layers(), 3);
  EXPECT_EQ(m->layers[0].key_width, 8);
  EXPECT_EQ(m->layers[0].value_width, 16);
  EXPECT_EQ(m->layers[0].scale, 0.5);
  EXPECT_EQ(m->layers[0].soft_cap, std::nullopt);
  EXPECT_EQ(m->layers[0].window, std::nullopt);
  EXPECT_EQ(m->layers[1].soft_cap, 30.0);
  EXPECT_EQ(m->layers[1].window, 16);
  EXPECT_EQ(m->layers[1].rope, 1);
  EXPECT_EQ(m->layers[1].output_projection, "layers.1.o");
  ASSERT_TRUE(m->final_norm.has_value());
  EXPECT_EQ(m->final_norm->weight, "norm.w");
  EXPECT_EQ(m->final_norm->eps, 1e-5);
  EXPECT_TRUE(m->final_norm->wide);
  EXPECT_EQ(m->final_norm->offset, 1);
  ASSERT_TRUE(m->calibration.has_value());
  EXPECT_EQ(m->calibration->policy, "epikv_flat");
  EXPECT_EQ(m->calibration->layer_a, 0);
  EXPECT_EQ(m->calibration->layer_b, 1);
  EXPECT_EQ(m->calibration->sign, -1);
  EXPECT_EQ(m->calibration->window, 32);
  EXPECT_TRUE(m->calibration->confirmed);
  EXPECT_EQ(m->sampling.temperature, .5f);
  EXPECT_EQ(m->sampling.top_p, .75f);
  EXPECT_EQ(m->sampling.top_k, 20);
  EXPECT_EQ(m->sampling.min_p, .25f);
  EXPECT_EQ(m->sampling.typical_p, 1);
  EXPECT_EQ(m->sampling.repetition_penalty, 1.5f);
}

TEST(ManifestTest, SamplingMayLackAnyField) {
  Json json = Valid();
  json["sampling"] = {{"top_k", 3}};
  const auto some = Manifest::Parse(json.dump());
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_EQ(some->sampling.top_k, 3);
  EXPECT_EQ(some->sampling.temperature, std::nullopt);
  json.erase("sampling");
  const auto none = Manifest::Parse(json.dump());
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->sampling.top_k, std::nullopt);
}

TEST(ManifestTest, NullMeansNone) {
  Json json = Valid();
  json["bos_token_id"] = nullptr;
  json["eos_token_ids"] = Json::array();
  json["calibration"] = nullptr;
  json["final_norm"] = nullptr;
  const auto m = Manifest::Parse(json.dump());
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_EQ(m->final_norm.has_value(), false);
  EXPECT_EQ(m->bos_token, std::nullopt);
  EXPECT_TRUE(m->eos_tokens.empty());
  EXPECT_FALSE(m->calibration.has_value());
}

TEST(ManifestTest, UnknownFieldsAreIgnored) {
  Json json = Valid();
  json["note"] = "x";
  json["layers"][0]["note"] = 1;
  EXPECT_TRUE(Manifest::Parse(json.dump()).ok());
}

TEST(ManifestTest, UnknownFormatIsRefused) {
  for (const Json& format : {Json("epikv.model/2"), Json(1), Json()}) {
    Json json = Valid();
    json["format"] = format;
    const absl::Status status = Manifest::Parse(json.dump()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), AllOf(HasSubstr("epikv.model/1"), HasSubstr(format.dump())));
  }
  for (const char* text : {"", "{", "[]", "{}", "\xFF"}) {
    EXPECT_EQ(Manifest::Parse(text).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

struct Violation {
  const char* pointer;  // into the manifest
  Json value;           // put there
  const char* message;  // part of it
};

TEST(ManifestTest, EveryRangeIsChecked) {
  const std::vector<Violation> violations = {
      {"/name", "", "name must be a string, not empty, is \"\""},
      {"/architecture", 3, "architecture must be a string"},
      {"/dtype", "float64", "dtype must be float32, bfloat16 or float16, is float64"},
      {"/vocab_size", 0, "vocab_size must be an integer in [1, 2147483647], is 0"},
      {"/vocab_size", 1e30, "vocab_size must be an integer"},
      {"/context_length", -1, "context_length must be"},
      {"/context_length", 18446744073709551615u, "context_length must be"},
      {"/hidden_size", 1.5, "hidden_size must be"},
      {"/num_heads", 3, "num_heads must be a multiple of num_kv_heads, is 3 with 2"},
      {"/num_kv_heads", "2", "num_kv_heads must be"},
      {"/bos_token_id", 100, "bos_token_id must be an integer in [0, 99], is 100"},
      {"/eos_token_ids", {2, -1}, "eos_token_ids must hold integers in [0, 99]"},
      {"/eos_token_ids", Json::object(), "eos_token_ids must be a list, is an object"},
      {"/eos_token_ids", 2, "eos_token_ids must be a list"},
      {"/ropes", Json::array(), "ropes must not be empty"},
      {"/ropes/0", 3, "ropes[0] must be an object"},
      {"/ropes/0/layout", "neox", "ropes[0].layout must be half or interleaved, is neox"},
      {"/ropes/0/inv_freq", {1, "x"}, "ropes[0].inv_freq must hold numbers"},
      {"/ropes/0/inv_freq",
       {1, 1, 1, 1, 1},
       "layers[0].rope rotates 10 channels of a key that has 8"},
      {"/ropes/1/attention_factor", 0, "ropes[1].attention_factor must be a number above 0"},
      {"/layers", Json::array(), "layers must not be empty"},
      {"/layers/1/key_width", 0, "layers[1].key_width must be"},
      {"/layers/2/key_width", 16, "layers must all have the same key_width, they have 8, 16"},
      {"/layers/2/value_width", 8, "layers must all have the same value_width, they have 8, 16"},
      {"/layers/0/scale", -1, "layers[0].scale must be a number above 0"},
      {"/layers/1/soft_cap", 0, "layers[1].soft_cap must be a number above 0"},
      {"/layers/1/window", 0, "layers[1].window must be"},
      {"/layers/1/rope", 2, "layers[1].rope must be an integer in [0, 1], is 2"},
      {"/layers/2/output_projection", nullptr, "layers[2].output_projection must be a string"},
      {"/final_norm", 3, "final_norm must be an object"},
      {"/final_norm/weight", "", "final_norm.weight must be a string, not empty"},
      {"/final_norm/eps", 0, "final_norm.eps must be a number above 0"},
      {"/final_norm/wide", 1, "final_norm.wide must be true or false"},
      {"/final_norm/offset", 1e300, "final_norm.offset must be a number in ["},
      {"/calibration", 3, "calibration must be an object"},
      {"/calibration/policy", "", "calibration.policy must be"},
      {"/calibration/layer_a", 2, "calibration.layer_a must be an integer in [0, 1], is 2"},
      {"/calibration/layer_b", -1, "calibration.layer_b must be"},
      {"/calibration/layer_b", 0, "calibration.layer_b must not be layer_a"},
      {"/calibration/sign", 0, "calibration.sign must be 1 or -1, is 0"},
      {"/calibration/window", 1, "calibration.window must be"},
      {"/calibration/confirmed", 1, "calibration.confirmed must be true or false"},
      {"/sampling", 1, "sampling must be an object"},
      {"/sampling/temperature", -1, "sampling.temperature must be a number in [0, "},
      {"/sampling/temperature", 1e300, "sampling.temperature must be a number in [0, "},
      {"/sampling/top_p", 0, "sampling.top_p must be a number in ["},
      {"/sampling/top_p", 1.5, "sampling.top_p must be a number in ["},
      {"/sampling/top_k", -1, "sampling.top_k must be an integer in [0, "},
      {"/sampling/min_p", 2, "sampling.min_p must be a number in [0, 1]"},
      {"/sampling/typical_p", "x", "sampling.typical_p must be a number in ["},
      {"/sampling/repetition_penalty", 0, "sampling.repetition_penalty must be a number in ["},
  };
  for (const Violation& violation : violations) {
    Json json = Valid();
    json[Json::json_pointer(violation.pointer)] = violation.value;
    const absl::Status status = Manifest::Parse(json.dump()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const std::string message(status.message());
    EXPECT_THAT(message, HasSubstr(violation.message));
    EXPECT_THAT(message, Not(HasSubstr("; "))) << "one cause, one violation";
  }
}

// Paths of the leaves and inner fields of an object.
std::vector<std::string> Pointers(const Json& json, const std::string& path = "") {
  std::vector<std::string> result;
  if (!json.is_object() && !json.is_array()) return result;
  for (const auto& [key, value] : json.items()) {
    const std::string child = path + "/" + key;
    if (json.is_object()) result.push_back(child);
    for (std::string& inner : Pointers(value, child)) result.push_back(std::move(inner));
  }
  return result;
}

TEST(ManifestTest, EveryMissingFieldIsNamed) {
  for (const std::string& pointer : Pointers(Valid())) {
    if (pointer.find("figures") != std::string::npos || pointer == "/format") continue;
    // Which older files lack.
    if (pointer.find("/sampling") == 0 || pointer == "/final_norm") continue;
    const Json::json_pointer at(pointer);
    Json json = Valid();
    json[at.parent_pointer()].erase(at.back());
    EXPECT_THAT(Manifest::Parse(json.dump()).status().message(),
                HasSubstr(at.back() + " is missing"))
        << pointer;
  }
}

TEST(ManifestTest, AllViolationsAreNamedAtOnce) {
  Json json = Valid();
  json["vocab_size"] = -1;
  json["layers"][1]["rope"] = 9;
  json["calibration"].erase("sign");
  EXPECT_THAT(Manifest::Parse(json.dump()).status().message(),
              AllOf(HasSubstr("vocab_size must"), HasSubstr("; layers[1].rope must"),
                    HasSubstr("; calibration.sign is missing")));
}

TEST(ManifestTest, DamagedManifestNeverCrashes) {
  const std::string text = Valid().dump();
  std::mt19937 random(1);
  for (int round = 0; round < 5000; ++round) {
    std::string damaged = text;
    for (int i = random() % 3; i >= 0; --i) {
      damaged[random() % damaged.size()] = "0\"{}[],:-.eaN"[random() % 13];
    }
    const auto m = Manifest::Parse(damaged);
    EXPECT_TRUE(m.ok() || m.status().code() == absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace manifest_test
}  // namespace epikv
