// How many units experiments need: planned, and the power at that size counted in simulated
// experiments, by the code that reports use. Prints a JSON array, one object a design, for
// epikv_lab.bench.experiment_power.
//
//   experiment_power EXPERIMENTS   simulated ones of each design; 0: none, plans alone
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/experiments/figures/comparison.h"
#include "server/experiments/figures/metric_tally.h"
#include "server/experiments/figures/planner.h"

namespace epikv {
namespace {

constexpr double kAlpha = .05;
constexpr int kLooks = 20;
// Of the normal distribution, at 1 - alpha / 2 and at a power of .8.
constexpr double kQuantileOfAlpha = 1.959963984540054, kQuantileOfPower = .8416212335729143;

// What is true of an experiment of two equal arms.
struct Truth {
  std::string what;  // "rate", "mean", "window"
  double rate = 0;   // of the control; 0: means, whose standard deviation is 1
  double effect = 0;
  double r2 = 0;  // of the variance, what the covariate explains
};

enum class Looking {
  kOnce,        // a plain test at the end, no covariate
  kSequential,  // kLooks, at the default tau
  kTuned,       // kLooks, at the plan's tau
  kAdjusted,    // as kTuned, and adjusted by the covariate
};
constexpr Looking kLookings[] = {Looking::kOnce, Looking::kSequential, Looking::kTuned,
                                 Looking::kAdjusted};

std::string NameOf(Looking looking) {
  switch (looking) {
    case Looking::kOnce:
      return "once";
    case Looking::kSequential:
      return "sequential";
    case Looking::kTuned:
      return "tuned";
    case Looking::kAdjusted:
      return "adjusted";
  }
  return "";
}

MetricKind KindOf(const Truth& truth) {
  return truth.rate > 0 ? MetricKind::kProportion : MetricKind::kMean;
}

double VarianceOf(const Truth& truth, double effect) {
  const double rate = truth.rate + effect;
  return truth.rate > 0 ? rate * (1 - rate) : 1;
}

// In both arms together: the effect changes the variance of a rate, and not what the covariate has
// of it.
double R2Of(const Truth& truth) {
  const double control = VarianceOf(truth, 0), treatment = VarianceOf(truth, truth.effect);
  return truth.r2 * 2 * control / (control + treatment);
}

absl::StatusOr<UnitPlan> PlanOf(const Truth& truth, Looking looking) {
  if (looking == Looking::kOnce) {
    const double variance = VarianceOf(truth, 0) + VarianceOf(truth, truth.effect);
    const double errors = (kQuantileOfAlpha + kQuantileOfPower) / truth.effect;
    return UnitPlan{.units = 2 * std::llround(std::ceil(errors * errors * variance)), .power = .8};
  }
  Design design{.alpha = kAlpha, .looks = kLooks};
  if (looking != Looking::kSequential) design.tuning = Tuning::kLastLook;
  if (looking == Looking::kAdjusted) design.covariate_r2 = R2Of(truth);
  return PlanUnits({.kind = KindOf(truth), .sd = 1, .rate = truth.rate}, truth.effect, design);
}

// A unit with one observation.
ArmSums UnitSums(double value, double x) {
  const double square = value * value;
  return {.units = 1,
          .s = value,
          .n = 1,
          .ss = square,
          .sn = value,
          .nn = 1,
          .ssss = square * square,
          .sssn = square * value,
          .ssnn = square,
          .snnn = value,
          .nnnn = 1,
          .squares = square,
          .covered = 1,
          .covered_s = value,
          .covered_n = 1,
          .x = x,
          .xx = x * x,
          .xs = x * value,
          .xn = x};
}

// So many units with the same value and covariate.
ArmSums Crowd(double units, double value, double x) {
  ArmSums sums;
  const ArmSums one = UnitSums(value, x);
  for (double ArmSums::*sum :
       {&ArmSums::units, &ArmSums::s, &ArmSums::n, &ArmSums::ss, &ArmSums::sn, &ArmSums::nn,
        &ArmSums::ssss, &ArmSums::sssn, &ArmSums::ssnn, &ArmSums::snnn, &ArmSums::nnnn,
        &ArmSums::squares, &ArmSums::covered, &ArmSums::covered_s, &ArmSums::covered_n, &ArmSums::x,
        &ArmSums::xx, &ArmSums::xs, &ArmSums::xn}) {
    sums.*sum = units * (one.*sum);
  }
  return sums;
}

// Draws an experiment's units.
class World {
 public:
  World(const Truth& truth, uint64_t seed)
      : truth_(truth), random_(seed), drift_(normal_(random_)) {}

  // Adds so many to both arms, dealt by chance. is_covered: their covariate is told.
  void Add(int64_t units, bool is_covered, std::vector<ArmSums>& arms) {
    if (truth_.rate > 0) {
      const int64_t treated = std::binomial_distribution<int64_t>(units, .5)(random_);
      arms[0] += Rates(units - treated, 0);
      arms[1] += Rates(treated, truth_.effect);
    } else {
      for (int64_t i = 0; i < units; ++i) {
        const size_t arm = std::bernoulli_distribution()(random_);
        arms[arm] += Mean(arm == 1 ? truth_.effect : 0);
      }
    }
    if (is_covered) return;
    for (ArmSums& arm : arms) {
      arm.covered = arm.covered_s = arm.covered_n = arm.x = arm.xx = arm.xs = arm.xn = 0;
    }
  }

 private:
  // Two kinds of units, whose rates differ so that the kind explains r2 of the variance.
  ArmSums Rates(int64_t units, double effect) {
    const double r = std::sqrt(truth_.r2), rate = truth_.rate;
    const int64_t good = std::binomial_distribution<int64_t>(units, rate)(random_);
    const ArmSums of_good = Kind(good, rate + (1 - rate) * r + effect, 1);
    ArmSums sums = Kind(units - good, rate - rate * r + effect, 0);
    return sums += of_good;
  }
  ArmSums Kind(int64_t units, double rate, double x) {
    const auto ones = std::binomial_distribution<int64_t>(units, rate)(random_);
    ArmSums sums = Crowd(static_cast<double>(units - ones), 0, x);
    return sums += Crowd(static_cast<double>(ones), 1, x);
  }
  // Of windows: a load that drifts, its correlation .95 from one to the next.
  ArmSums Mean(double effect) {
    const double x = normal_(random_), rest = normal_(random_);
    if (truth_.what == "window") {
      drift_ = .95 * drift_ + std::sqrt(1 - .95 * .95) * x;
      return UnitSums(std::sqrt(.5) * (drift_ + rest) + effect, 0);
    }
    return UnitSums(std::sqrt(truth_.r2) * x + std::sqrt(1 - truth_.r2) * rest + effect, x);
  }

  const Truth& truth_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  double drift_;
};

bool IsFound(const std::vector<ArmSums>& arms, const Truth& truth, Looking looking, double tau) {
  if (looking == Looking::kOnce) {
    const MetricEstimates estimates = Estimate({.arms = arms});
    const double variance = estimates.arms[0].variance + estimates.arms[1].variance;
    const double difference = *estimates.arms[1].mean - *estimates.arms[0].mean;
    return std::abs(difference) > kQuantileOfAlpha * std::sqrt(variance);
  }
  AnalysisOptions options{.kind = KindOf(truth), .alpha = kAlpha};
  if (looking != Looking::kSequential) options.tau = tau;
  return !Compare({.arms = arms}, 0, 1, options).interval.Holds(0);
}

struct Counted {
  double power = 0;  // the share of experiments that find the effect
  double units = 0;  // that they had by then, or in the end; of both arms, mean
};

Counted Simulate(const Truth& truth, Looking looking, const UnitPlan& plan, int experiments) {
  Counted counted;
  const int looks = looking == Looking::kOnce ? 1 : kLooks;
  for (int i = 0; i < experiments; ++i) {
    World world(truth, 1'000'003 + static_cast<uint64_t>(i));
    std::vector<ArmSums> arms(2);
    int64_t units = 0;
    for (int look = 1; look <= looks; ++look) {
      const int64_t more = plan.units * look / looks - units;
      world.Add(more, looking == Looking::kAdjusted, arms);
      units += more;
      if (!IsFound(arms, truth, looking, plan.tau)) continue;
      counted.power += 1;
      break;
    }
    counted.units += static_cast<double>(units);
  }
  counted.power /= experiments;
  counted.units /= experiments;
  return counted;
}

const Truth kTruths[] = {
    {.what = "rate", .rate = .5, .effect = -.05, .r2 = .3},
    {.what = "rate", .rate = .5, .effect = -.02, .r2 = .3},
    {.what = "rate", .rate = .9, .effect = -.05, .r2 = .3},
    {.what = "rate", .rate = .9, .effect = -.03, .r2 = .3},
    {.what = "rate", .rate = .9, .effect = -.01, .r2 = .3},
    {.what = "rate", .rate = .99, .effect = -.01, .r2 = .3},
    {.what = "mean", .effect = .2, .r2 = .5},
    {.what = "mean", .effect = .1, .r2 = .5},
    {.what = "mean", .effect = .05, .r2 = .5},
    {.what = "window", .effect = 1},
    {.what = "window", .effect = .5},
    {.what = "window", .effect = .25},
};

std::string RowOf(const Truth& truth, int experiments) {
  std::vector<std::string> fields = {absl::StrCat(R"("what":")", truth.what, R"(","rate":)",
                                                  truth.rate, R"(,"effect":)", truth.effect,
                                                  R"(,"r2":)", truth.r2)};
  for (Looking looking : kLookings) {
    if (looking == Looking::kAdjusted && truth.r2 == 0) continue;
    const absl::StatusOr<UnitPlan> plan = PlanOf(truth, looking);
    if (!plan.ok()) std::abort();  // none of these is out of range
    std::string told = absl::StrCat(R"({"units":)", plan->units, R"(,"planned":)", plan->power);
    if (experiments > 0) {
      const Counted counted = Simulate(truth, looking, *plan, experiments);
      absl::StrAppend(&told, R"(,"power":)", counted.power, R"(,"mean_units":)", counted.units);
    }
    fields.push_back(absl::StrCat("\"", NameOf(looking), "\":", told, "}"));
  }
  return absl::StrCat("{", absl::StrJoin(fields, ","), "}");
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  const int experiments = argc == 2 ? std::atoi(argv[1]) : -1;
  if (experiments < 0) {
    std::fprintf(stderr, "usage: experiment_power EXPERIMENTS\n");
    return 2;
  }
  std::vector<std::string> rows;
  for (const epikv::Truth& truth : epikv::kTruths) {
    rows.push_back(epikv::RowOf(truth, experiments));
  }
  std::printf("[%s]\n", absl::StrJoin(rows, ",\n").c_str());
  return 0;
}
