#include "policies/recipe.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace epikv {

extern const DecoratorSpec kCaote;
extern const DecoratorSpec kCritical;
extern const DecoratorSpec kFastCaote;
extern const DecoratorSpec kInertia;
extern const DecoratorSpec kTwin;
extern const DecoratorSpec kVatp;

namespace {

constexpr const DecoratorSpec* kDecorators[] = {
    &kCaote,      //
    &kCritical,   //
    &kFastCaote,  //
    &kInertia,    //
    &kTwin,       //
    &kVatp,       //
};

absl::Span<const absl::string_view> DecoratorNames() {
  static const auto& names = *new std::vector<absl::string_view>([] {
    std::vector<absl::string_view> all;
    for (const DecoratorSpec* spec : kDecorators) all.push_back(spec->name);
    return all;
  }());
  return names;
}

constexpr absl::string_view kAllocators[] = {"uniform", "pyramid", "head_pool", "model_pool"};

std::string KnownDecorators() { return absl::StrJoin(DecoratorNames(), ", "); }

absl::string_view ComparableName(Comparable comparable) {
  switch (comparable) {
    case Comparable::kLane:
      return "within a lane";
    case Comparable::kLayer:
      return "within a layer";
    case Comparable::kModel:
      return "in the whole model";
  }
  return "";
}

}  // namespace

const DecoratorSpec* FindDecorator(absl::string_view name) {
  for (const DecoratorSpec* spec : kDecorators) {
    if (spec->name == name) return spec;
  }
  return nullptr;
}

ParamSpec ScopeParam(absl::string_view help) {
  static constexpr absl::string_view kScopes[] = {"head", "model"};
  return {.name = "scope",
          .type = ParamType::kChoice,
          .fallback = std::string("head"),
          .choices = kScopes,
          .help = help};
}

Granularity ScopeOf(const Params& params) {
  return params.Choice("scope") == "head" ? Granularity::kHead : Granularity::kToken;
}

ParamSpec DecorateParam() {
  return {.name = "decorate",
          .type = ParamType::kChoiceList,
          .fallback = std::vector<std::string>{},
          .choices = DecoratorNames(),
          .help = "what is made of the scores before victims are chosen, first to last"};
}

ParamSpec AllocatorParam(absl::string_view fallback) {
  return {.name = "allocator",
          .type = ParamType::kChoice,
          .fallback = std::string(fallback),
          .choices = kAllocators,
          .help =
              "how lanes share the budget: alike; pyramid: the later the layer the less; "
              "head_pool, model_pool: the best scores of a layer's heads, of all lanes"};
}

ParamSpec FloorParam(double fallback) {
  return {.name = "floor",
          .type = ParamType::kFloat,
          .fallback = fallback,
          .max = 1,
          .help = "with a pool: the share of the budget that every lane keeps for its own best"};
}

ParamSpec SelectParam() {
  static constexpr absl::string_view kSelectors[] = {"top_k", "sample", "threshold"};
  return {.name = "select",
          .type = ParamType::kChoice,
          .fallback = std::string("top_k"),
          .choices = kSelectors,
          .help =
              "top_k: the best stay; sample: tokens stay by chance, without replacement, "
              "with probability proportional to their scores; threshold: as top_k, and in a round "
              "all that score below `threshold` go too"};
}

ParamSpec ThresholdParam() {
  return {.name = "threshold",
          .type = ParamType::kFloat,
          .fallback = 0.0,
          .min = -1e9,
          .max = 1e9,
          .help = "with select = threshold: the lowest score that may stay within the budget"};
}

ParamSpec CadenceParam() {
  return {.name = "cadence",
          .type = ParamType::kInt,
          .fallback = int64_t{64},
          .min = 1,
          .max = 65536,
          .help = "decode tokens between two rounds that drop what the policy has no use for"};
}

absl::Status CheckRecipe(const Params& params, ScoreTraits score) {
  if (params.Has("decorate")) {
    std::string last = "the policy";
    for (const std::string& name : params.ChoiceList("decorate")) {
      const DecoratorSpec& spec = *FindDecorator(name);
      if (spec.takes == ScoreKind::kMass && score.kind != ScoreKind::kMass) {
        return absl::InvalidArgumentError(absl::StrCat(
            "decorate: '", name, "' takes scores that are masses, and ", last,
            " gives ones that are only larger or smaller; known: ", KnownDecorators()));
      }
      score = {.kind = spec.gives.kind,
               .comparable = std::min(score.comparable, spec.gives.comparable)};
      last = absl::StrCat("'", name, "'");
    }
  }
  if (params.Has("select") && params.Choice("select") == "sample" &&
      score.kind != ScoreKind::kMass) {
    return absl::InvalidArgumentError(
        "select: 'sample' takes scores that are masses, and these are only larger or smaller");
  }
  if (params.Has("threshold") && params.Float("threshold") != 0 &&
      params.Choice("select") != "threshold") {
    return absl::InvalidArgumentError("threshold: says nothing without select = threshold");
  }
  if (params.Has("allocator")) {
    const std::string& allocator = params.Choice("allocator");
    const Comparable needed = allocator == "head_pool"    ? Comparable::kLayer
                              : allocator == "model_pool" ? Comparable::kModel
                                                          : Comparable::kLane;
    if (score.comparable < needed) {
      return absl::InvalidArgumentError(
          absl::StrCat("allocator: '", allocator, "' compares scores ", ComparableName(needed),
                       ", and these may be compared only ", ComparableName(score.comparable)));
    }
  }
  return absl::OkStatus();
}

void AddRecipe(const Params& params, PolicyTraits& traits) {
  if (params.Has("decorate")) {
    for (const std::string& name : params.ChoiceList("decorate")) {
      const DecoratorSpec& spec = *FindDecorator(name);
      traits.signals = traits.signals | spec.signals;
      traits.pairs_per_token += spec.pairs_per_token;
      traits.columns.insert(traits.columns.end(), spec.columns.begin(), spec.columns.end());
    }
  }
  if (params.Has("allocator")) {
    const std::string& allocator = params.Choice("allocator");
    if (allocator == "head_pool") traits.pool = Pool::kLayer;
    if (allocator == "model_pool") traits.pool = Pool::kModel;
  }
}

std::vector<int64_t> RecipeLaneBudgets(const Params& params, const ModelShape& shape,
                                       int64_t budget) {
  std::vector<int64_t> budgets(shape.num_layers * shape.num_kv_heads, budget);
  if (params.Choice("allocator") != "pyramid" || shape.num_layers == 1) return budgets;
  constexpr double kBeta = 20;
  const int64_t window = params.Has("window") ? std::min(params.Int("window"), budget) : 0;
  const double least = (budget - window) / kBeta;
  const double most = 2.0 * (budget - window) - least;
  int64_t spent = 0;  // of all layers so far
  double owed = 0;
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    owed += window + most - layer * (most - least) / (shape.num_layers - 1);
    const int64_t rounded = std::llround(owed) - spent;  // sums stay exact
    spent += rounded;
    std::fill_n(budgets.begin() + layer * shape.num_kv_heads, shape.num_kv_heads, rounded);
  }
  return budgets;
}

}  // namespace epikv
