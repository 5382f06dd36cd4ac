#include "runtime/model/model.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/kernels/dense_matmul.h"
#include "runtime/ranks/ranks.h"

namespace epikv {
namespace model_test {

using absl::StatusCode;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ModelPath(const std::string& name) {
  return absl::StrCat(EPIKV_TEST_MODELS, "/", name);
}

std::unique_ptr<Model> Load(const std::string& name, ModelOptions options = {}) {
  options.trusts_code = true;
  absl::StatusOr<std::unique_ptr<Model>> model = LoadModelFile(ModelPath(name + ".pt"), options);
  if (!model.ok()) throw std::runtime_error(std::string(model.status().message()));
  return *std::move(model);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string WriteTemporary(const std::string& name, const std::string& contents) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path, std::ios::binary) << contents;
  return path;
}

std::string Sizes(const at::Tensor& tensor) { return absl::StrJoin(tensor.sizes(), "x"); }

// Attention that looks at the row itself only: the value of each head, times `gain`.
class OwnValue : public ForwardHooks {
 public:
  explicit OwnValue(double gain = 1) : gain_(gain) {}

  at::Tensor Block(const at::Tensor& residual, int64_t layer) override {
    calls.push_back(absl::StrCat("block(", layer, ") ", Sizes(residual)));
    return residual;
  }

  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override {
    calls.push_back(
        absl::StrCat("attention(", layer, ") ",
                     absl::StrJoin({Sizes(q), Sizes(k), Sizes(v), Sizes(normed)}, " ")));
    return v.repeat_interleave(q.size(1) / v.size(1), 1) * gain_;
  }

  std::vector<std::string> calls;

 private:
  const double gain_;
};

// The same values with gaps between the rows.
class Strider : public OwnValue {
 public:
  at::Tensor Block(const at::Tensor& residual, int64_t layer) override { return Gapped(residual); }

  at::Tensor Attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& normed, int64_t layer) override {
    return Gapped(OwnValue::Attention(q, k, v, normed, layer));
  }

 private:
  static at::Tensor Gapped(const at::Tensor& rows) {
    return at::stack({rows, rows}, 1).select(1, 0);
  }
};

class Thrower : public OwnValue {
 public:
  at::Tensor Attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                       int64_t) override {
    throw std::runtime_error("the pool is gone");
  }
};

// Tokens drawn by `seed`. [n]
at::Tensor Tokens(const Model& model, int64_t n, uint64_t seed = 1) {
  std::vector<int64_t> ids(n);
  for (int64_t& id : ids) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    id = static_cast<int64_t>((seed >> 33) % model.manifest().vocab_size);
  }
  return at::tensor(ids, at::kLong);
}

// Logits of every row. [n, vocab]
at::Tensor Logits(const Model& model, const at::Tensor& tokens, ForwardHooks& hooks) {
  const at::Tensor rows = at::arange(tokens.numel());
  return model.Forward(tokens, rows, rows, hooks);
}

at::Tensor Logits(const Model& model, const at::Tensor& tokens) {
  OwnValue hooks;
  return Logits(model, tokens, hooks);
}

double LargestDifference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

class ModelTest : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(, ModelTest,
                         testing::Values("mha", "gqa", "mqa", "tied", "gqa_bf16", "gqa_fp16",
                                         "wide", "wide_bf16", "wide_fp16", "wide_int8", "wide_int4",
                                         "tied_compiled", "wide_bf16_compiled",
                                         "wide_int8_compiled", "bent_compiled"),
                         [](const auto& info) { return info.param; });

TEST_P(ModelTest, CallsHooksInOrderWithTheManifestsShapes) {
  const auto model = Load(GetParam());
  const Manifest& m = model->manifest();
  OwnValue hooks;
  Logits(*model, Tokens(*model, 5), hooks);
  std::vector<std::string> expected;
  for (int64_t layer = 0; layer < m.num_layers(); ++layer) {
    const LayerFacts& facts = m.layers[layer];
    expected.push_back(absl::StrCat("block(", layer, ") 5x", m.hidden_size));
    expected.push_back(absl::StrCat("attention(", layer, ") 5x", m.num_heads, "x", facts.key_width,
                                    " 5x", m.num_kv_heads, "x", facts.key_width, " 5x",
                                    m.num_kv_heads, "x", facts.value_width, " 5x", m.hidden_size));
  }
  expected.push_back(absl::StrCat("block(", m.num_layers(), ") 5x", m.hidden_size));
  EXPECT_EQ(hooks.calls, expected);
}

TEST_P(ModelTest, GivesLogitsOfTheRowsAskedFor) {
  const auto model = Load(GetParam());
  const at::Tensor tokens = Tokens(*model, 6);
  OwnValue hooks;
  const at::Tensor all = Logits(*model, tokens);
  const at::Tensor last = at::tensor({int64_t{4}, int64_t{1}});
  const at::Tensor some = model->Forward(tokens, at::arange(6), last, hooks);
  EXPECT_EQ(some.scalar_type(), at::kFloat);
  EXPECT_LT(LargestDifference(some, all.index_select(0, last)), 1e-5);
  const at::Tensor none = model->Forward(tokens, at::arange(6), at::empty({0}, at::kLong), hooks);
  EXPECT_EQ(Sizes(none), absl::StrCat("0x", model->manifest().vocab_size));
}

TEST_P(ModelTest, PackedWeightsComputeTheSame) {
  const auto packed = Load(GetParam());
  const auto plain = Load(GetParam(), {.prepack = false});
  const bool wide = packed->manifest().dtype == DType::kFloat32;
  for (const int64_t n : {1, 3, 16, 70}) {
    const at::Tensor expected = Logits(*plain, Tokens(*plain, n));
    const double scale = expected.abs().max().item<double>();
    EXPECT_LT(LargestDifference(Logits(*packed, Tokens(*packed, n)), expected),
              scale * (wide ? 1e-5 : 2e-2))
        << n << " rows";
  }
}

TEST_P(ModelTest, OutputProjectionsSurvivePackingBitForBit) {
  const auto packed = Load(GetParam());
  const auto plain = Load(GetParam(), {.prepack = false});
  for (int64_t layer = 0; layer < packed->manifest().num_layers(); ++layer) {
    EXPECT_TRUE(packed->output_projection(layer).equal(plain->output_projection(layer)));
  }
}

TEST(TorchScriptModelTest, SaysWhatItRuns) {
  const auto model = Load("wide");
  const std::optional<DensePath> ours = FastestDensePath(DType::kFloat32);
  EXPECT_EQ(model->description(),
            absl::StrCat("TorchScript, float32, 15 of 15 linears prepacked for ",
                         ours.has_value() ? DensePathName(*ours) : "oneDNN"));
  EXPECT_EQ(Load("wide", {.prepack = false})->description(),
            "TorchScript, float32, no linear prepacked, as asked");
  for (const std::string dtype : {"bfloat16", "float16"}) {
    const auto narrow = Load(dtype == "float16" ? "wide_fp16" : "wide_bf16");
    EXPECT_THAT(narrow->description(), HasSubstr(absl::StrCat(", ", dtype, ", ")));
    // Outputs of packed linears may be filled up to whole blocks.
    EXPECT_GT(2 * narrow->weight_bytes(), 0.99 * model->weight_bytes()) << dtype;
    EXPECT_LT(2 * narrow->weight_bytes(), 1.01 * model->weight_bytes()) << dtype;
  }
  EXPECT_TRUE(nlohmann::json::parse(model->tokenizer_json()).contains("model"));
}

TEST(TorchScriptModelTest, LinearsOfIntegersAreNearThoseTheyWereMadeOf) {
  const struct {
    const char *name, *of;
    double logits, weights;  // root mean square errors allowed, relative
  } cases[] = {{"wide_int8", "wide", 0.03, 0.01}, {"wide_int4", "wide_bf16", 0.4, 0.15}};
  auto rms = [](const at::Tensor& x) { return x.to(at::kFloat).square().mean().sqrt(); };
  for (const auto& c : cases) {
    const auto quantized = Load(c.name), dense = Load(c.of);
    const at::Tensor tokens = Tokens(*dense, 20), expected = Logits(*dense, tokens);
    const auto error = (rms(Logits(*quantized, tokens) - expected) / rms(expected)).item<double>();
    EXPECT_GT(error, 1e-4) << c.name;
    EXPECT_LT(error, c.logits) << c.name;
    for (int64_t layer = 0; layer < dense->manifest().num_layers(); ++layer) {
      const at::Tensor weight = dense->output_projection(layer);
      const at::Tensor near = quantized->output_projection(layer);
      EXPECT_EQ(near.scalar_type(), weight.scalar_type());
      EXPECT_LT((rms(near - weight) / rms(weight)).item<double>(), c.weights) << c.name;
    }
    EXPECT_THAT(quantized->description(), HasSubstr(", 15 linears of integers ("));
    EXPECT_LT(quantized->weight_bytes(), dense->weight_bytes());
  }
}

// What the daemon's deterministic mode stands on: steps of one size, whoever shares them.
TEST(TorchScriptModelTest, BitsOfARowDoNotDependOnItsNeighboursOrItsPlace) {
  for (const char* name : {"gqa", "gqa_bf16", "gqa_fp16", "wide", "wide_bf16", "wide_fp16",
                           "wide_int8", "wide_int4", "bent_compiled", "wide_bf16_compiled"}) {
    for (const bool prepack : {true, false}) {
      const auto model = Load(name, {.prepack = prepack});
      const at::Tensor tokens = Tokens(*model, 16);
      const at::Tensor expected = Logits(*model, tokens);
      for (const int64_t row : {0, 6, 9, 15}) {
        at::Tensor others = Tokens(*model, 16, 100 + row);
        others[15 - row] = tokens[row];
        EXPECT_TRUE(Logits(*model, others)[15 - row].equal(expected[row]))
            << name << (prepack ? " packed" : " plain") << ", row " << row;
      }
    }
  }
}

class AnyLoader : public testing::TestWithParam<std::string> {};

INSTANTIATE_TEST_SUITE_P(, AnyLoader, testing::Values("tied", "tied_compiled"),
                         [](const auto& info) { return info.param; });

TEST_P(AnyLoader, HooksOfThreadsDoNotMix) {
  const auto model = Load(GetParam());
  const at::Tensor tokens = Tokens(*model, 4);
  OwnValue once(1), twice(2);
  const at::Tensor expected_once = Logits(*model, tokens, once);
  const at::Tensor expected_twice = Logits(*model, tokens, twice);
  ASSERT_FALSE(expected_once.equal(expected_twice));
  const auto run = [&](OwnValue& hooks, const at::Tensor& expected, int& wrong) {
    for (int i = 0; i < 50; ++i) wrong += !Logits(*model, tokens, hooks).equal(expected);
  };
  int wrong_once = 0, wrong_twice = 0;
  std::thread other([&] { run(twice, expected_twice, wrong_twice); });
  run(once, expected_once, wrong_once);
  other.join();
  EXPECT_EQ(wrong_once + wrong_twice, 0);
  EXPECT_EQ(once.calls.size(), 51 * 7u);
  EXPECT_EQ(twice.calls.size(), 51 * 7u);
}

TEST(AnyLoaderTest, TakesResultsOfHooksThatAreNotContiguous) {
  for (const char* name : {"wide", "wide_bf16", "wide_bf16_compiled"}) {
    const auto model = Load(name);
    const at::Tensor tokens = Tokens(*model, 5);
    Strider strider;
    EXPECT_TRUE(Logits(*model, tokens, strider).equal(Logits(*model, tokens))) << name;
  }
}

TEST_P(AnyLoader, RunsOnAfterAHookHasThrown) {
  const auto model = Load(GetParam());
  const at::Tensor tokens = Tokens(*model, 4);
  const at::Tensor expected = Logits(*model, tokens);
  Thrower thrower;
  try {
    Logits(*model, tokens, thrower);
    FAIL() << "the hook's exception is lost";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("the pool is gone"));
  }
  EXPECT_TRUE(Logits(*model, tokens).equal(expected));
}

TEST_P(AnyLoader, ThrowsOnATokenOutsideTheVocabulary) {
  const auto model = Load(GetParam());
  EXPECT_THROW(Logits(*model, at::tensor({model->manifest().vocab_size})), std::exception);
}

// Its products are those of the TorchScript file, and the compiler rounds where torch does. "bent"
// has functions, such as tanh, that differ in their last bits.
TEST(CompiledModelTest, HasTheBitsOfTorchScript) {
  for (const std::string name : {"tied", "wide_bf16", "wide_int8", "bent"}) {
    const auto script = Load(name), compiled = Load(name + "_compiled");
    for (const int64_t rows : {1, 2, 3, 16, 70}) {
      const at::Tensor tokens = Tokens(*script, rows);
      const at::Tensor is = Logits(*compiled, tokens), expected = Logits(*script, tokens);
      if (name == "bent") {
        EXPECT_LT(LargestDifference(is, expected), 1e-4) << rows << " rows";
      } else {
        EXPECT_TRUE(is.equal(expected)) << name << ", " << rows << " rows";
      }
    }
    for (int64_t layer = 0; layer < script->manifest().num_layers(); ++layer) {
      EXPECT_TRUE(compiled->output_projection(layer).equal(script->output_projection(layer)));
    }
    const at::Tensor residual = at::randn({3, script->manifest().hidden_size})
                                    .to(script->output_projection(0).scalar_type());
    if (script->manifest().final_norm.has_value()) {
      EXPECT_TRUE(compiled->FinalNormed(residual).equal(script->FinalNormed(residual))) << name;
    }
    EXPECT_EQ(compiled->weight_bytes(), script->weight_bytes()) << name;
  }
}

// Those that look at embeddings throw, while others run.
TEST(CompiledModelTest, AForwardThatThrowsLeavesNobodyWaiting) {
  const auto model = Load("tied_compiled");
  const at::Tensor tokens = Tokens(*model, 4), expected = Logits(*model, tokens);
  std::vector<std::thread> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back([&] {
      for (int run = 0; run < 100; ++run) {
        Thrower thrower;
        EXPECT_THROW(Logits(*model, tokens, thrower), std::runtime_error);
      }
    });
  }
  for (int run = 0; run < 100; ++run) EXPECT_TRUE(Logits(*model, tokens).equal(expected));
  for (std::thread& thread : others) thread.join();
}

TEST(CompiledModelTest, SaysWhatItRuns) {
  EXPECT_THAT(Load("wide_bf16_compiled")->description(),
              HasSubstr("compiled by AOTInductor, bfloat16, 15 of 15 linears prepacked for "));
}

TEST(CompiledModelTest, IsRefusedWhereItCannotOrMayNotRun) {
  const std::string path = ModelPath("tied_compiled.pt");
  const auto untrusted = LoadModelFile(path);
  EXPECT_EQ(untrusted.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(untrusted.status().message(), HasSubstr("set trust_compiled_models if you trust"));
  const auto split = LoadModelFile(
      path, {.ranks = std::make_shared<Ranks>(Ranks::Share(1), 0), .trusts_code = true});
  EXPECT_EQ(split.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(split.status().message(), HasSubstr("a compiled model cannot be split"));
}

TEST(OperatorsTest, ThrowOutsideAForward) {
  const at::Tensor x = at::zeros({1, 2, 4});
  const auto call = [](const char* name, torch::jit::Stack stack) {
    c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  };
  for (const auto& [name, stack] : std::map<const char*, torch::jit::Stack>{
           {"epikv::block", {x, 0}}, {"epikv::attention", {x, x, x, x, 0}}}) {
    try {
      call(name, stack);
      FAIL() << name << " did not throw";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(name), HasSubstr("outside a forward")));
    }
  }
}

TEST(OperatorsTest, ScopesNest) {
  OwnValue outer, inner;
  const auto block = [] {
    torch::jit::Stack stack = {at::zeros({1, 4}), 0};
    c10::Dispatcher::singleton().findSchemaOrThrow("epikv::block", "").callBoxed(&stack);
  };
  const HooksScope scope(outer);
  {
    const HooksScope nested(inner);
    block();
  }
  block();
  EXPECT_THAT(outer.calls, ElementsAre("block(0) 1x4"));
  EXPECT_THAT(inner.calls, ElementsAre("block(0) 1x4"));
}

at::Tensor Call(const char* name, torch::jit::Stack stack) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(&stack);
  return stack.back().toTensor();
}

// Numbers of any size, some of them far from the rest.
at::Tensor AnySize(at::IntArrayRef sizes, at::ScalarType dtype) {
  return (at::randn(sizes) * at::exp(at::randn(sizes))).to(dtype);
}

// A last place of the dtype, or of float32 sums.
double LastPlace(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 1.0 / 128 : dtype == at::kHalf ? 1.0 / 1024 : 1e-5;
}

class FusedOperators : public ::testing::TestWithParam<at::ScalarType> {};

INSTANTIATE_TEST_SUITE_P(DTypes, FusedOperators,
                         ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf, at::kDouble),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(FusedOperators, RmsNormIsItsDefinition) {
  at::manual_seed(1);
  for (int64_t width : {1, 7, 64, 896}) {
    for (const auto& [wide, offset] :
         std::vector<std::pair<bool, double>>{{false, 0}, {true, 0}, {true, 1}}) {
      const at::Tensor x = AnySize({5, 3, width}, GetParam()), weight = AnySize(width, GetParam());
      const at::Tensor of = x.to(at::kDouble);
      const at::Tensor normed = of / at::sqrt(of.pow(2).mean(-1, true) + 1e-6);
      const at::Tensor by = weight.to(at::kDouble);
      const at::Tensor expected =
          wide ? (by + offset) * normed : by * normed.to(GetParam()).to(at::kDouble);
      for (const at::Tensor& in : {x, x.transpose(0, 1).contiguous().transpose(0, 1)}) {
        const at::Tensor got = Call("epikv::rms_norm", {in, weight, 1e-6, wide, offset});
        EXPECT_EQ(got.scalar_type(), GetParam());
        EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected, 2 * LastPlace(GetParam()), 1e-6))
            << width << " wide, " << wide;
      }
    }
  }
  const at::Tensor none = at::empty({0, 64}, GetParam());
  EXPECT_EQ(Call("epikv::rms_norm", {none, none.new_ones(64), 1e-6, false, 0.0}).size(0), 0);
}

TEST_P(FusedOperators, SwiGluIsItsDefinition) {
  at::manual_seed(2);
  for (int64_t width : {1, 7, 4864}) {
    const at::Tensor both = AnySize({3, 2 * width}, GetParam()).mul_(10);
    const at::Tensor gate = both.narrow(1, 0, width), up = both.narrow(1, width, width);
    const at::Tensor of = gate.to(at::kDouble);
    const at::Tensor expected =
        (of * of.sigmoid()).to(GetParam()).to(at::kDouble) * up.to(at::kDouble);
    const at::Tensor got = Call("epikv::swiglu", {gate, up});
    EXPECT_EQ(got.scalar_type(), GetParam());
    EXPECT_TRUE(at::allclose(got.to(at::kDouble), expected, 2 * LastPlace(GetParam()), 1e-6));
  }
}

// A weight of integers near `weight` [out, in], and its scales: as epikv.export.quantize has it.
std::pair<at::Tensor, at::Tensor> Quantized(const at::Tensor& weight, int64_t bits, int64_t group) {
  const int64_t most = bits == 8 ? 127 : 7;
  const at::Tensor grouped = weight.unflatten(1, {-1, group});
  const at::Tensor scale = (grouped.abs().amax(-1) / most).to(at::kBFloat16);
  const at::Tensor integers = (grouped / scale.to(at::kFloat).unsqueeze(-1))
                                  .round()
                                  .clamp(-most, most)
                                  .flatten(1)
                                  .to(at::kInt);
  if (bits == 8) return {integers.to(at::kChar), scale};
  const at::Tensor pairs = (integers + 8).unflatten(1, {-1, 2});
  return {(pairs.select(2, 0) + pairs.select(2, 1) * 16).to(at::kByte), scale};
}

TEST_P(FusedOperators, QuantizedLinearIsNearTheLinearItWasMadeOf) {
  at::manual_seed(3);
  const at::Tensor weight = at::randn({130, 96}), bias = at::randn({130}).to(GetParam());
  for (const int64_t bits : {8, 4}) {
    const auto [integers, scale] = Quantized(weight, bits, 32);
    const at::Tensor wide = at::randn({2, 70, 192}).to(GetParam());
    const at::Tensor x = wide.narrow(2, 96, 96);  // with gaps between the rows
    if (GetParam() == at::kDouble) {
      EXPECT_THROW(Call("epikv::quantized_linear", {x, integers, scale, bias}), c10::Error);
      continue;
    }
    const at::Tensor expected = at::linear(x.to(at::kFloat), weight);
    const at::Tensor got = Call("epikv::quantized_linear", {x, integers, scale, c10::IValue()});
    EXPECT_EQ(got.scalar_type(), GetParam());
    EXPECT_EQ(got.sizes(), expected.sizes());
    const auto error = (got.to(at::kFloat) - expected).square().mean().sqrt().item<double>();
    EXPECT_LT(error, (bits == 8 ? 0.015 : 0.12) * std::sqrt(96.0));
    const at::Tensor added = Call("epikv::quantized_linear", {x, integers, scale, bias});
    const at::Tensor sum = got.to(at::kFloat) + bias.to(at::kFloat);
    const double place = LastPlace(GetParam()) * sum.abs().max().item<double>();
    EXPECT_LT(LargestDifference(added.to(at::kFloat), sum), 2 * place);
    const at::Tensor none = x.narrow(1, 0, 0);
    EXPECT_EQ(Sizes(Call("epikv::quantized_linear", {none, integers, scale, bias})), "2x0x130");
  }
}

TEST(FusedOperatorsTest, WeightsMayBeWiderThanWhatTheyWeigh) {
  const at::Tensor x = at::randn({3, 64}).to(at::kBFloat16), weight = at::randn({64});
  const at::Tensor got = Call("epikv::rms_norm", {x, weight, 1e-6, false, 0.0});
  EXPECT_EQ(got.scalar_type(), at::kFloat);  // as torch promotes
}

TEST(FusedOperatorsTest, ShapesThatDoNotFitAreRefused) {
  const at::Tensor x = at::zeros({2, 4});
  EXPECT_THROW(Call("epikv::rms_norm", {x, at::zeros({3}), 1e-6, false, 0.0}), c10::Error);
  EXPECT_THROW(Call("epikv::rms_norm", {at::zeros({}), at::zeros({1}), 1e-6, false, 0.0}),
               c10::Error);
  EXPECT_THROW(Call("epikv::swiglu", {x, at::zeros({4, 2})}), c10::Error);
  const at::Tensor scale = at::ones({3, 1}, at::kBFloat16), eight = at::zeros({2, 8});
  const at::Tensor weight = at::ones({3, 8}, at::kChar);
  auto multiply = [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& s,
                     const c10::IValue& bias = {}) {
    return Call("epikv::quantized_linear", {x, w, s, bias});
  };
  EXPECT_EQ(Sizes(multiply(eight, weight, scale)), "2x3");
  EXPECT_THROW(multiply(x, weight, scale), c10::Error);                      // 4 inputs
  EXPECT_THROW(multiply(eight.to(at::kDouble), weight, scale), c10::Error);  // no float
  EXPECT_THROW(multiply(eight, weight.to(at::kInt), scale), c10::Error);     // no bytes
  EXPECT_THROW(multiply(eight, weight, scale.to(at::kFloat)), c10::Error);   // no bfloat16
  EXPECT_THROW(multiply(eight, weight, scale.narrow(0, 0, 2)), c10::Error);  // 2 outputs
  EXPECT_THROW(multiply(eight, weight, scale.narrow(1, 0, 0)), c10::Error);  // no group
  EXPECT_THROW(multiply(eight, weight, scale.expand({3, 2})), c10::Error);   // groups of 4
  EXPECT_THROW(multiply(eight, weight, scale, at::zeros({4})), c10::Error);  // 4 biases
}

struct Refusal {
  StatusCode code;
  std::string reason;
};

// Of every file that tests/fixtures/broken_models.py writes.
const std::map<std::string, Refusal>& Refusals() {
  constexpr StatusCode kBroken = StatusCode::kFailedPrecondition, kDamaged = StatusCode::kDataLoss;
  static const auto& refusals = *new std::map<std::string, Refusal>{
      {"changes_constant", {kBroken, "forward changes a constant; a module keeps no state"}},
      {"constant_runs", {kBroken, "a constant of Embedding is no literal"}},
      {"deep_attributes", {kBroken, "nested too deep"}},
      {"deep_calls", {kBroken, "nested too deep"}},
      {"deep_comparisons", {kBroken, "nested too deep"}},
      {"deep_elifs", {kBroken, "nested too deep"}},
      {"deep_indexes", {kBroken, "nested too deep"}},
      {"deep_remainders", {kBroken, "nested too deep"}},
      {"deep_brackets", {kBroken, "nested too deep"}},
      {"deep_signs", {kBroken, "nested too deep"}},
      {"deep_sum", {kBroken, "nested too deep"}},
      {"deep_words", {kBroken, "nested too deep"}},
      {"default_reads", {kBroken, "the default of 'layer' of forward is no literal"}},
      {"default_runs", {kBroken, "the default of 'layer' of forward is no literal"}},
      {"foreign_object", {kBroken, "__torch__.torch.classes.quantized.LinearPackedParamsBase"}},
      {"more_methods", {kBroken, "MoreMethods.other, which forward does not call"}},
      {"not_classes", {kBroken, "its code has more than classes and functions"}},
      {"prints", {kBroken, "its code calls prim::Print, which is not allowed"}},
      {"quantized_tensor", {kBroken, "a tensor is QInt8"}},
      {"reads_file", {kBroken, "its code calls aten::from_file, which is not allowed"}},
      {"saves", {kBroken, "its code calls aten::save, which is not allowed"}},
      {"sets_state", {kBroken, "its code has __getstate__, which is not allowed"}},
      {"sparse_tensor", {kBroken, "a tensor is Sparse"}},
      {"state_of_a_part", {kBroken, "its code has __getstate__, which is not allowed"}},
      {"conditional", {kBroken, "attention(1) is called under a condition"}},
      {"drops_at_random", {kBroken, "forward draws random numbers: its dropout is not off"}},
      {"drops_in_attention", {kBroken, "forward draws random numbers: its dropout is not off"}},
      {"duplicated_attention", {kBroken, "attention(0) is called 2 times"}},
      {"duplicated_block", {kBroken, "block(1) is called 2 times"}},
      {"empty", {kDamaged, "not a ZIP archive"}},
      {"forked", {kBroken, "its code calls prim::fork"}},
      {"layer_not_constant", {kBroken, "attention is called with a layer that is not constant"}},
      {"manifest_dtype", {kBroken, "dtype must be"}},
      {"manifest_field", {kBroken, "num_heads is missing"}},
      {"manifest_format", {kBroken, "format must be \"epikv.model/1\", is \"other.model/1\""}},
      {"manifest_later",
       {kBroken, "made by a later version of epikv (format \"epikv.model/999\")"}},
      {"manifest_layers", {kBroken, "attention(2) is not called; block(3) is not called"}},
      {"manifest_other_dtype",
       {kBroken, "8 weights are not of the manifest's dtype BFloat16, first"}},
      {"manifest_norm",
       {kBroken, "final_norm's weight 'nowhere.weight' is not a parameter of the module"}},
      {"manifest_norm_shape", {kBroken, "final_norm's weight 'first.o_proj.weight' is "}},
      {"manifest_not_json", {kBroken, "manifest: not a JSON object"}},
      {"manifest_projection", {kBroken, "output_projection 'nowhere.weight' is not a parameter"}},
      {"manifest_rope", {kBroken, "layers[0].rope must be"}},
      {"manifest_type", {kBroken, "vocab_size must be"}},
      {"manifest_vocab", {kBroken, "a forward with token 11 at position 63 failed"}},
      {"manifest_width", {kBroken, "key_width"}},
      {"missing_attention", {kBroken, "attention(1) is not called"}},
      {"missing_block", {kBroken, "block(1) is not called"}},
      {"missing_last_block", {kBroken, "block(2) is not called"}},
      {"no_manifest", {kBroken, "the file has no manifest.json"}},
      {"no_tokenizer", {kBroken, "the file has no tokenizer.json"}},
      {"not_a_model", {kDamaged, "not a TorchScript file"}},
      {"tokenizer_not_json", {kBroken, "its tokenizer.json is not JSON"}},
      {"truncated", {kDamaged, "is damaged"}},
      {"unknown_operator", {kBroken, "elsewhere::same"}},
      {"unused_attention", {kBroken, "the result of attention(1) is not used"}},
      {"wrong_code", {kBroken, "cannot load it"}},
      {"wrong_inputs", {kBroken, "forward takes (Tensor, Tensor) and returns Tensor"}},
      {"wrong_logits_dtype", {kBroken, "the logits of 2 of 3 rows are Double [2, 11]"}},
      {"wrong_logits_rows", {kBroken, "the logits of 2 of 3 rows are Float [3, 11]"}},
      {"wrong_order", {kBroken, "the calls come in the order block(1), attention(1), block(0)"}},
      {"wrong_output", {kBroken, "returns Tuple[Tensor, Tensor]"}},
      {"wrong_schema", {kBroken, "argument 'normed'"}},
  };
  return refusals;
}

TEST(RefusalTest, EveryBrokenFileIsRefusedWithItsReason) {
  const auto broken = nlohmann::json::parse(ReadFile(ModelPath("broken/broken.json")));
  for (const auto& [name, what] : broken.items()) {
    SCOPED_TRACE(absl::StrCat(name, ": ", what.get<std::string>()));
    ASSERT_TRUE(Refusals().count(name)) << "add it to Refusals()";
    const Refusal& expected = Refusals().at(name);
    const auto model = LoadModelFile(ModelPath("broken/" + name + ".pt"));
    EXPECT_FALSE(std::filesystem::exists("ran")) << "code in the file was run";
    EXPECT_EQ(model.status().code(), expected.code);
    EXPECT_THAT(std::string(model.status().message()), HasSubstr(expected.reason));
  }
  EXPECT_EQ(broken.size(), Refusals().size());
  EXPECT_TRUE(LoadModelFile(ModelPath("broken/valid.pt")).ok());
}

TEST(WarningTest, WhatCodeOfAModelWarnsOfGoesNowhere) {
  testing::internal::CaptureStderr();
  const auto warns = Load("broken/warns");
  const at::Tensor logits = Logits(*warns, Tokens(*warns, 3));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(logits.size(0), 3);
}

TEST(RefusalTest, NamesEveryFaultAtOnce) {
  const auto model = LoadModelFile(ModelPath("many_faults.pt"));
  EXPECT_EQ(model.status().code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(model.status().message(),
              AllOf(HasSubstr("block(1) is called 2 times"),
                    HasSubstr("the result of attention(1) is not used"),
                    HasSubstr("1 weights are not of the manifest's dtype Float, first wide.weight"),
                    HasSubstr("'nowhere.weight' is not a parameter"),
                    HasSubstr("Float [2, 11], not Float [2, 10]")));
}

TEST(RefusalTest, AMissingFileIsNotFound) {
  const auto model = LoadModelFile(ModelPath("nowhere.pt"));
  EXPECT_EQ(model.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(model.status().message(), HasSubstr("nowhere.pt"));
}

TEST(RefusalTest, AFolderIsNoModel) {
  EXPECT_EQ(LoadModelFile(ModelPath("broken")).status().code(), StatusCode::kDataLoss);
}

TEST(RefusalTest, AFileCutAnywhereIsDamaged) {
  const std::string whole = ReadFile(ModelPath("broken/valid.pt"));
  for (size_t bytes = 0; bytes < whole.size(); bytes += 811) {
    const std::string path = WriteTemporary("cut.pt", whole.substr(0, bytes));
    EXPECT_EQ(LoadModelFile(path).status().code(), StatusCode::kDataLoss) << bytes << " bytes";
  }
}

TEST(RefusalTest, AFlippedBitIsToldOrHarmless) {
  const std::string whole = ReadFile(ModelPath("broken/valid.pt"));
  const auto valid = Load("broken/valid");
  const at::Tensor expected = Logits(*valid, Tokens(*valid, 3));
  int told = 0;
  for (size_t place = 5; place < whole.size(); place += 101) {
    std::string flipped = whole;
    flipped[place] = static_cast<char>(flipped[place] ^ (1 << (place % 8)));
    const auto model = LoadModelFile(WriteTemporary("flipped.pt", flipped));
    told += !model.ok();
    if (!model.ok()) continue;  // or it was in what nobody reads: padding, dates
    EXPECT_TRUE(Logits(**model, Tokens(**model, 3)).equal(expected)) << "byte " << place;
  }
  EXPECT_GT(told, 50);
}

}  // namespace model_test
}  // namespace epikv
