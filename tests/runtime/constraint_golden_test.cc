// What may come next beside xgrammar's own wheel, for tokenizers of all kinds:
// golden/make_constraints.py.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/reason.h"
#include "runtime/constraints/constraint.h"
#include "runtime/text/tokenizer.h"

namespace epikv {
namespace constraint_golden_test {

using Json = nlohmann::json;
using Kind = ConstraintText::Kind;

std::string ReadGolden(const std::string& file) {
  std::ifstream in(absl::StrCat(EPIKV_SOURCE_DIR, "/tests/golden/", file));
  EXPECT_TRUE(in) << file;
  return {std::istreambuf_iterator<char>(in), {}};
}

ConstraintText TextOf(const Json& walk) {
  const std::string kind = walk["kind"];
  const Kind known = kind == "regex"         ? Kind::kRegex
                     : kind == "choice"      ? Kind::kChoice
                     : kind == "json_schema" ? Kind::kJsonSchema
                                             : Kind::kGrammar;
  return {known, walk["texts"]};
}

// Hex digits, each of four tokens.
std::string HexOf(absl::Span<const uint32_t> allowed, size_t digits) {
  std::string hex;
  for (size_t i = 0; i < digits; ++i) {
    hex.push_back("0123456789abcdef"[allowed[i / 8] >> (4 * (i % 8)) & 15]);
  }
  return hex;
}

void Walk(ConstraintCompiler& compiler, const std::vector<std::string>& masks, const Json& walk) {
  const auto constraint = compiler.Compile(TextOf(walk));
  ASSERT_TRUE(constraint.ok()) << constraint.status();
  ConstraintState state(*constraint, {});
  absl::Status status;
  for (const Json& step : walk["steps"]) {
    const std::string& expected = masks.at(step[0]);
    const bool ends = step[1], goes_on = !step[2].is_null();
    ASSERT_EQ(status.ok(), ends || goes_on) << status;
    if (!status.ok()) return;
    EXPECT_EQ(HexOf(state.allowed(), expected.size()), expected);
    EXPECT_EQ(state.may_end(), ends);
    EXPECT_EQ(state.must_end(), ends && !goes_on);
    if (goes_on) status = state.Accept(step[2]);
  }
}

class ConstraintGoldenTest : public testing::TestWithParam<int> {};

TEST_P(ConstraintGoldenTest, AllowsWhatTheWheelsMatcherAccepts) {
  const Json golden = Json::parse(ReadGolden("constraints.json"))["vocabularies"][GetParam()];
  const std::string name = golden["tokenizer"];
  const auto tokenizer =
      Tokenizer::FromJson(ReadGolden(absl::StrCat("tokenizers/", name, ".tokenizer.json")));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  ConstraintCompiler compiler(**tokenizer, (*tokenizer)->vocab_size());
  ASSERT_GT(golden["walks"].size(), 30u);
  for (const Json& walk : golden["walks"]) {
    SCOPED_TRACE(absl::StrCat(name, ": ", walk["texts"].dump(), " along ", walk["steps"].dump()));
    Walk(compiler, golden["masks"], walk);
  }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, ConstraintGoldenTest, testing::Range(0, 6));

}  // namespace constraint_golden_test
}  // namespace epikv
