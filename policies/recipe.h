#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "policies/spec.h"

// What a request may vary of a scored policy: the decorators of its score, how the budget is shared
// out among lanes, how victims are drawn. Without torch.

namespace epikv {

class Decorator;

// What a number that a scorer gives a token says, and so what may be made of it.
enum class ScoreKind {
  kMass,   // >= 0, and proportional to what it estimates: an attention probability
  kValue,  // only larger or smaller
};

// Among which lanes the scores of one policy may be compared.
enum class Comparable { kLane, kLayer, kModel };

struct ScoreTraits {
  ScoreKind kind = ScoreKind::kValue;
  Comparable comparable = Comparable::kLane;
};

// A decorator's constant record. It turns the scores of a lane into others.
struct DecoratorSpec {
  absl::string_view name;
  absl::string_view summary;
  absl::string_view paper;
  ScoreKind takes = ScoreKind::kMass;
  ScoreTraits gives;  // no more comparable than what it was given
  SignalSet signals;
  absl::Span<const absl::string_view> columns = {};  // PolicyTraits::columns of its own
  int64_t pairs_per_token = 0;                       // PolicyTraits has it
  // first_column: place of the first of them.
  std::shared_ptr<const Decorator> (*make)(int64_t first_column) = nullptr;
};

const DecoratorSpec* FindDecorator(absl::string_view name);

// `scope`: head, where every lane keeps its own tokens, or model, where one decision holds for all.
// help: what is made of the lanes then.
ParamSpec ScopeParam(absl::string_view help);
Granularity ScopeOf(const Params& params);

// The parameters, for a policy's own list. Each is optional there.
ParamSpec DecorateParam();
ParamSpec AllocatorParam(absl::string_view fallback = "uniform");
ParamSpec FloorParam(double fallback = 0.2);
ParamSpec SelectParam();
ParamSpec ThresholdParam();  // with SelectParam
ParamSpec CadenceParam();    // PolicyTraits::rounds_every

// An error that names what is wrong: an unknown decorator, one that cannot take the scores before
// it, an allocator for which these scores are not comparable. score: of the undecorated scorer.
absl::Status CheckRecipe(const Params& params, ScoreTraits score);

// What the recipe adds to the policy's own traits: signals of decorators, the pool.
void AddRecipe(const Params& params, PolicyTraits& traits);

// PolicySpec::lane_budgets of `allocator = pyramid`, else equal ones (PyramidKV, arXiv 2406.02069,
// with beta = 20): linear in the layer, beside the window that every layer keeps.
std::vector<int64_t> RecipeLaneBudgets(const Params& params, const ModelShape& shape,
                                       int64_t budget);

}  // namespace epikv
