#include "policies/spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace epikv {
namespace spec_test {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr absl::string_view kColours[] = {"red", "green"};
const ParamSpec kParams[] = {
    {.name = "flag", .type = ParamType::kBool, .fallback = false},
    {.name = "count", .type = ParamType::kInt, .fallback = int64_t{3}, .min = 1, .max = 9},
    {.name = "share", .type = ParamType::kFloat, .fallback = 0.5, .max = 1},
    {.name = "colour",
     .type = ParamType::kChoice,
     .fallback = std::string("red"),
     .choices = kColours},
    {.name = "colours", .type = ParamType::kChoiceList, .choices = kColours},
    {.name = "tokens", .type = ParamType::kIntList, .fallback = std::vector<int64_t>{}, .max = 9},
    {.name = "layer", .type = ParamType::kInt, .max = 99},
};
const PolicySpec kSpec{
    .name = "test",
    .params = kParams,
    .complete = [](Params& params, const ModelShape& shape) -> absl::Status {
      if (!params.Has("layer")) params.Set("layer", shape.num_layers / 2);
      if (params.Int("layer") < shape.num_layers) return absl::OkStatus();
      return absl::InvalidArgumentError("layer is beyond the model");
    },
};

ResolvedParams Resolve(const std::map<std::string, ParamValue>& given) {
  return ResolveParams(kSpec, given, {.num_layers = 8});
}

// What is wrong with one value; empty if nothing is.
std::string Wrong(const std::string& param, ParamValue value) {
  const ResolvedParams resolved = Resolve({{param, std::move(value)}});
  if (resolved.violations.empty()) return "";
  EXPECT_EQ(resolved.violations.size(), 1u);
  EXPECT_EQ(resolved.violations[0].param, param);
  return resolved.violations[0].description;
}

TEST(ResolveParams, DefaultsFillWhatIsMissing) {
  const Params params = Resolve({}).params;
  EXPECT_EQ(params.Bool("flag"), false);
  EXPECT_EQ(params.Int("count"), 3);
  EXPECT_EQ(params.Float("share"), 0.5);
  EXPECT_EQ(params.Choice("colour"), "red");
  EXPECT_THAT(params.IntList("tokens"), ElementsAre());
  EXPECT_EQ(params.Int("layer"), 4) << "completed from the model's shape";
}

TEST(ResolveParams, GivenValuesWin) {
  const Params params = Resolve({{"flag", true},
                                 {"count", int64_t{9}},
                                 {"share", 0.25},
                                 {"colour", std::string("green")},
                                 {"tokens", std::vector<int64_t>{9, 0}},
                                 {"layer", int64_t{7}}})
                            .params;
  EXPECT_EQ(params.Bool("flag"), true);
  EXPECT_EQ(params.Int("count"), 9);
  EXPECT_EQ(params.Float("share"), 0.25);
  EXPECT_EQ(params.Choice("colour"), "green");
  EXPECT_THAT(params.IntList("tokens"), ElementsAre(9, 0));
  EXPECT_EQ(params.Int("layer"), 7);
}

TEST(ResolveParams, WholeNumbersAreIntAndFloat) {
  EXPECT_EQ(Resolve({{"count", 4.0}}).params.Int("count"), 4);
  EXPECT_EQ(Resolve({{"share", int64_t{1}}}).params.Float("share"), 1.0);
  EXPECT_THAT(Wrong("count", 4.5), HasSubstr("type int"));
  EXPECT_THAT(Wrong("count", NAN), HasSubstr("type int"));
  EXPECT_THAT(Wrong("share", NAN), HasSubstr("type float"));
  EXPECT_THAT(Wrong("share", INFINITY), HasSubstr("type float"));
}

TEST(ResolveParams, RangesAreInclusive) {
  EXPECT_EQ(Wrong("count", int64_t{1}), "");
  EXPECT_EQ(Wrong("count", int64_t{9}), "");
  EXPECT_THAT(Wrong("count", int64_t{0}), HasSubstr("between 1 and 9, is 0"));
  EXPECT_THAT(Wrong("count", int64_t{10}), HasSubstr("is 10"));
  EXPECT_THAT(Wrong("tokens", std::vector<int64_t>{1, 10}), HasSubstr("one is 10"));
}

TEST(ResolveParams, WrongTypesAreNamed) {
  EXPECT_THAT(Wrong("flag", int64_t{1}), HasSubstr("type bool"));
  EXPECT_THAT(Wrong("colour", true), HasSubstr("one of red, green"));
  EXPECT_THAT(Wrong("tokens", int64_t{1}), HasSubstr("type int_list"));
}

TEST(ResolveParams, UnknownChoiceListsTheKnown) {
  EXPECT_THAT(Wrong("colour", std::string("blue")), HasSubstr("one of red, green, is 'blue'"));
}

// A list of choices is no longer than there are choices, whatever a request holds.
TEST(ResolveParams, AListHasEachChoiceOnce) {
  using List = std::vector<std::string>;
  EXPECT_EQ(Wrong("colours", List{"green", "red"}), "");
  EXPECT_THAT(Wrong("colours", List{"red", "blue"}), HasSubstr("of red, green, one is 'blue'"));
  EXPECT_EQ(Wrong("colours", List(500'000, "red")), "has 'red' twice");
}

TEST(ResolveParams, UnknownParameterListsTheKnown) {
  EXPECT_THAT(Wrong("size", int64_t{1}),
              HasSubstr("known: flag, count, share, colour, colours, tokens, layer"));
}

TEST(ResolveParams, AllViolationsAtOnce) {
  const ResolvedParams resolved =
      Resolve({{"count", int64_t{0}}, {"colour", true}, {"size", int64_t{1}}});
  EXPECT_EQ(resolved.violations.size(), 3u);
}

TEST(ResolveParams, WhatTheModelForbidsIsAViolation) {
  const ResolvedParams resolved = Resolve({{"layer", int64_t{8}}});
  ASSERT_EQ(resolved.violations.size(), 1u);
  EXPECT_EQ(resolved.violations[0].description, "layer is beyond the model");
}

// The policy's own check: of one parameter where its message begins with the name.
TEST(ResolveParams, WhatIsWrongWithOneParameterIsItsViolation) {
  PolicySpec spec = kSpec;
  spec.complete = [](Params&, const ModelShape&) -> absl::Status {
    return absl::InvalidArgumentError("layer: is 8; there are: 0 to 7");
  };
  ResolvedParams resolved = ResolveParams(spec, {}, {.num_layers = 8});
  ASSERT_EQ(resolved.violations.size(), 1u);
  EXPECT_EQ(resolved.violations[0].param, "layer");
  EXPECT_EQ(resolved.violations[0].description, "is 8; there are: 0 to 7");
  spec.complete = [](Params&, const ModelShape&) -> absl::Status {
    return absl::InvalidArgumentError("size: no such parameter");
  };
  resolved = ResolveParams(spec, {}, {.num_layers = 8});
  ASSERT_EQ(resolved.violations.size(), 1u);
  EXPECT_EQ(resolved.violations[0].param, "");
  EXPECT_EQ(resolved.violations[0].description, "size: no such parameter");
}

TEST(SignalSet, NamesItsSignals) {
  const SignalSet set = Signal::kKeys | Signal::kAttentionRow;
  EXPECT_TRUE(set.Has(Signal::kKeys));
  EXPECT_FALSE(set.Has(Signal::kValues));
  EXPECT_THAT(set.Names(), ElementsAre("attention_row", "keys"));
}

TEST(FindPolicy, ByNameOrNull) {
  const PolicySpec* const catalog[] = {&kSpec};
  EXPECT_EQ(FindPolicy(catalog, "test"), &kSpec);
  EXPECT_EQ(FindPolicy(catalog, "tes"), nullptr);
}

}  // namespace spec_test
}  // namespace epikv
