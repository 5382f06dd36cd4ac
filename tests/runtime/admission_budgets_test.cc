#include "runtime/admission/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "runtime/kv/kv_layout.h"
#include "runtime/model/model_shape.h"
#include "tests/fixtures/admission_fixture.h"

namespace epikv {
namespace admission_budgets_test {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::UnorderedElementsAre;

// Budgets.

TEST_F(AdmissionTest, RatioIsOfPromptAndMaxOutputRoundedUp) {
  auto budget = [&](int64_t prompt, int64_t output, double ratio) {
    RequestOptions options = Ask(prompt, output, "by_chunk", 1);
    options.kv.budget = ratio;
    return Accept(options).budget;
  };
  EXPECT_EQ(budget(60, 40, 0.5), 50);
  EXPECT_EQ(budget(60, 41, 0.5), 51);
  EXPECT_EQ(budget(60, 40, 1.0), 100);
  EXPECT_EQ(budget(60, 40, 0.001), 1);
  EXPECT_EQ(budget(60, 40, 0.071), 8);
  // In doubles 0.07 x 100 is a little over 7, and so for many others.
  for (int64_t percent = 1; percent <= 100; ++percent) {
    for (int64_t hundreds : {1, 3, 7, 20}) {
      EXPECT_EQ(budget(hundreds * 60, hundreds * 40, percent / 100.0), percent * hundreds)
          << percent << " % of " << hundreds * 100;
    }
  }
}

TEST_F(AdmissionTest, BudgetOfFullIsEverything) {
  for (int64_t enough : {29, 500}) {
    const Request request = Accept(Ask(10, 20, "full", enough));
    EXPECT_EQ(request.budget, 30);
    EXPECT_THAT(request.demand.decode, Each(29));
  }
}

TEST_F(AdmissionTest, FullRefusesABudgetThatItCannotKeep) {
  const Rejection rejection = Refuse(Ask(10, 20, "full", 28));
  EXPECT_EQ(rejection.reason, "KV_BUDGET");
  EXPECT_EQ(rejection.code, absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(rejection.message, HasSubstr("evicts nothing and may cache 29 tokens"));
  EXPECT_THAT(rejection.metadata, UnorderedElementsAre(Pair("budget", "28"), Pair("min", "29")));
  RequestOptions ratio = Ask(10, 20, "full", 1);
  ratio.kv.budget = 0.5;
  EXPECT_FALSE(Accepts(ratio));
  ratio.kv.budget = 1.0;
  EXPECT_TRUE(Accepts(ratio));
}

TEST_F(AdmissionTest, BudgetThatHoldsEverythingRefusesNothing) {
  // 104 tokens are ever cached: the last output token is not.
  EXPECT_FALSE(Accepts(Ask(100, 5, "refuses", 103)));
  const Request request = Accept(Ask(100, 5, "refuses", 104));
  EXPECT_THAT(request.demand.budget, Each(104));
  EXPECT_THAT(request.demand.prefill, Each(104));
  EXPECT_TRUE(Accepts(Ask(100, 5, "refuses", kMost)));
}

// Whatever a refusal names as the smallest budget is accepted, and one token less is refused.
TEST_F(AdmissionTest, SmallestBudgetNamedIsTheSmallest) {
  std::mt19937 random(1);
  auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int64_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const char* const policies[] = {"by_chunk", "at_end", "refuses", "ragged"};
    RequestOptions options = Ask(draw(1, 120), draw(1, 200), policies[draw(0, 3)], draw(1, 80));
    ProtectionOptions& protection = options.kv.protection;
    const int64_t total = options.prompt.size() + *options.stop.max_output_tokens;
    if (draw(0, 4) == 0) {
      protection.equal = true;
    } else {
      if (draw(0, 2) == 0) protection.prompt = draw(0, 1) == 1;
      if (draw(0, 2) == 0) protection.sinks = draw(0, 40);
      if (draw(0, 2) == 0) protection.recent = draw(0, 60);
      for (int64_t spans = draw(0, 3); spans > 0; --spans) {
        const int64_t begin = draw(0, total - 1);
        protection.spans.push_back({begin, std::min(total, begin + draw(1, 50))});
      }
    }
    const auto resolved = admission_.Resolve(options);
    const auto* rejection = std::get_if<Rejection>(&resolved);
    if (rejection == nullptr) continue;
    ASSERT_THAT(Fields(*rejection), ElementsAre("kv.budget"));
    ++refused;
    const int64_t smallest = std::stoll(rejection->metadata.at("min"));
    ASSERT_GT(smallest, std::get<int64_t>(options.kv.budget));
    options.kv.budget = smallest;
    ASSERT_TRUE(Accepts(options)) << "round " << round << ": " << rejection->message;
    options.kv.budget = smallest - 1;
    ASSERT_FALSE(Accepts(options)) << "round " << round << ": " << rejection->message;
  }
  EXPECT_GT(refused, 2000);
}

// An accepted budget always leaves enough unprotected tokens for a round, whenever it comes.
TEST_F(AdmissionTest, ProtectedTokensFitEveryLane) {
  std::mt19937 random(2);
  auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 3000; ++round) {
    const char* const policies[] = {"by_chunk", "at_end", "refuses", "ragged"};
    RequestOptions options = Ask(draw(1, 60), draw(1, 60), policies[draw(0, 3)], draw(1, 90));
    ProtectionOptions& protection = options.kv.protection;
    if (draw(0, 2) == 0) protection.sinks = draw(0, 20);
    if (draw(0, 2) == 0) protection.recent = draw(0, 20);
    if (draw(0, 1) == 0) protection.spans = {{4, 4 + draw(1, 20)}};
    const auto resolved = admission_.Resolve(options);
    if (!std::holds_alternative<Request>(resolved)) continue;
    const Request& request = std::get<Request>(resolved);
    const int64_t least =
        *std::min_element(request.demand.budget.begin(), request.demand.budget.end());
    const int64_t longest = options.prompt.size() + *options.stop.max_output_tokens - 1;
    for (int64_t newest = 0; newest < longest; ++newest) {
      int64_t covered = 0;
      for (int64_t i = 0; i <= newest; ++i) covered += request.protection.Covers(i, newest);
      ASSERT_LE(covered, least) << "round " << round << " newest " << newest;
    }
  }
}

// Demand.

// Tokens in a cache, step by step: what the engine will do, without any formula. Budgets by lane.
class TokenCounts {
 public:
  TokenCounts(const Request& request, int64_t chunk, std::mt19937& random)
      : request_(request), live_(request.demand.budget.size()) {
    prefill_peak = decode_peak = live_;
    const int64_t prompt = static_cast<int64_t>(request.prompt.size());
    while (cached_ < prompt) {
      // The scheduler may cut a chunk anywhere.
      const int64_t most = std::min(prompt - cached_, chunk - cached_ % chunk);
      Cache(std::uniform_int_distribution<int64_t>(1, most)(random), prefill_peak);
      const bool at_end = cached_ == prompt;
      if (at_end && request.max_output_tokens == 1) break;  // ends before it settles
      const bool round =
          request.traits.prompt == PromptEviction::kAtEnd ? at_end : at_end || cached_ % chunk == 0;
      if (round) Evict(0);
    }
    for (int64_t output = 1; output < request.max_output_tokens; ++output) {
      Cache(1, decode_peak);
      Evict(request.traits.slack);
    }
  }

  std::vector<int64_t> prefill_peak, decode_peak;
  int64_t rounds = 0;

 private:
  void Cache(int64_t count, std::vector<int64_t>& peak) {
    cached_ += count;
    for (size_t lane = 0; lane < live_.size(); ++lane) {
      live_[lane] += count;
      peak[lane] = std::max(peak[lane], live_[lane]);
    }
  }
  void Evict(int64_t slack) {
    if (!request_.traits.evicts) return;
    bool over = false;
    for (size_t lane = 0; lane < live_.size(); ++lane) {
      over |= live_[lane] > request_.demand.budget[lane] + slack;
    }
    if (!over) return;
    ++rounds;
    for (size_t lane = 0; lane < live_.size(); ++lane) {
      live_[lane] = std::min(live_[lane], request_.demand.budget[lane]);
    }
  }

  const Request& request_;
  int64_t cached_ = 0;
  std::vector<int64_t> live_;
};

class DemandLaw : public AdmissionTest, public testing::WithParamInterface<const char*> {
 protected:
  int64_t Draw(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  // Calls `check` with random accepted requests and what they come to hold.
  void ForRandomRequests(int rounds,
                         const std::function<void(const Request&, const TokenCounts&)>& check) {
    int accepted = 0, evicting = 0;
    for (int round = 0; round < rounds; ++round) {
      AdmissionLimits limits = Limits();
      limits.prefill_chunk_tokens = Draw(1, 64);
      // One after the other: compilers differ in the order of arguments.
      const int64_t budget = Draw(1, 250);
      const int64_t output = Draw(0, 3) == 0 ? Draw(1, 4) : Draw(1, 80), prompt = Draw(1, 200);
      RequestOptions options = Ask(prompt, output, GetParam(), budget);
      if (options.kv.policy != "full") {
        const int64_t slack = Draw(0, 1);
        options.kv.params["slack"] = slack * Draw(0, 70);
      } else {
        options.kv.budget = {};
      }
      const auto resolved = Make(limits).Resolve(options);
      if (!std::holds_alternative<Request>(resolved)) continue;
      const Request& request = std::get<Request>(resolved);
      const TokenCounts counts(request, limits.prefill_chunk_tokens, random_);
      check(request, counts);
      ++accepted;
      evicting += counts.rounds > 0;
      if (HasFailure()) {
        FAIL() << "prompt " << options.prompt.size() << " output "
               << *options.stop.max_output_tokens << " budget " << request.budget << " slack "
               << request.traits.slack << " chunk " << limits.prefill_chunk_tokens;
      }
    }
    EXPECT_GT(accepted, rounds / 10);
    if (std::string(GetParam()) != "full") {
      EXPECT_GT(evicting, rounds / 20);
    }
  }
  std::mt19937 random_{3};
};

TEST_P(DemandLaw, IsExactlyWhatTheLanesComeToHold) {
  ForRandomRequests(4000, [](const Request& request, const TokenCounts& counts) {
    for (int64_t lane = 0; lane < kFakeLanes; ++lane) {
      // A lane has one capacity while the prompt is cached, and it only shrinks.
      EXPECT_EQ(request.demand.prefill[lane],
                std::max(counts.prefill_peak[lane], counts.decode_peak[lane]));
      if (request.max_output_tokens > 1) {
        EXPECT_EQ(request.demand.decode[lane], counts.decode_peak[lane]);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, DemandLaw,
                         testing::Values("at_end", "by_chunk", "full", "refuses"),
                         [](const auto& info) { return info.param; });

// Lanes of unequal budgets have their rounds together, so some never fill: a bound, not exact.
class UnequalDemandLaw : public DemandLaw {};

TEST_P(UnequalDemandLaw, IsNeverExceededByAnyLane) {
  ForRandomRequests(4000, [](const Request& request, const TokenCounts& counts) {
    for (int64_t lane = 0; lane < kFakeLanes; ++lane) {
      EXPECT_GE(request.demand.prefill[lane], counts.prefill_peak[lane]);
      EXPECT_GE(request.demand.prefill[lane], counts.decode_peak[lane]);
      EXPECT_GE(request.demand.decode[lane], counts.decode_peak[lane]);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, UnequalDemandLaw, testing::Values("ragged"),
                         [](const auto& info) { return info.param; });

TEST_F(AdmissionTest, RoundSlackAndChunkSlackAreNotBothCharged) {
  RequestOptions options = Ask(1000, 500, "by_chunk", 100);
  options.kv.params["slack"] = int64_t{50};
  EXPECT_THAT(Accept(options).demand.prefill, Each(151));
  options.kv.params["slack"] = int64_t{10};
  EXPECT_THAT(Accept(options).demand.prefill, Each(132));
  EXPECT_THAT(Accept(options).demand.decode, Each(111));
}

TEST_F(AdmissionTest, LanesMayHaveUnequalBudgets) {
  const Request request = Accept(Ask(100, 100, "ragged", 41));
  EXPECT_THAT(request.demand.budget, ElementsAre(20, 62, 20, 62));
  EXPECT_THAT(request.demand.decode, ElementsAre(21, 63, 21, 63));
  // 96 is the last multiple of the chunk in the prompt.
  EXPECT_THAT(request.demand.prefill, ElementsAre(52, 94, 52, 94));
}

TEST_F(AdmissionTest, ScoringInChunksDemandsAllScoredTokens) {
  RequestOptions options = Ask(10);
  options.forced.assign(25, 1);
  options.force_in_chunks = true;
  EXPECT_THAT(Accept(options).demand.prefill, Each(34));
}

// Bytes.

TEST_F(AdmissionTest, BytesAreRowsTablesAndState) {
  const Request full = Accept(Ask(10, 11, "full", 20));
  // 20 tokens in 4 lanes of 4 + 4 floats; one table of index and position.
  EXPECT_EQ(full.demand.peak_bytes(), 20 * kFakeLanes * 32 + 20 * 8);
  EXPECT_EQ(admission_.kv_bytes_per_token(), kFakeLanes * 32);

  const Request request = Accept(Ask(10, 100, "refuses", 40));
  // 41 tokens; a table a layer with two columns; state by token; one tap of 16 floats, twice.
  EXPECT_EQ(request.demand.peak_bytes(),
            41 * kFakeLanes * 32 + 41 * 2 * (8 + 2 * 4) + 41 * 24 + 1000 + 2 * 16 * 4);
}

// And, in decode, the logits of one layer that they are made of.
TEST_F(AdmissionTest, AttentionRowsAreCountedByTokenInTheLayersMeasured) {
  const ModelShape shape = admission_.shape();
  auto bytes = [&](const PolicyTraits& traits) {
    return LayoutOf(shape, {DType::kFloat32}, traits, 0).state_bytes_per_token;
  };
  const int64_t logits = shape.num_heads * 4;
  EXPECT_EQ(bytes({.signals = Signal::kAttentionRow}), kFakeLanes * 4 + logits);
  EXPECT_EQ(bytes({.signals = Signal::kAttentionRow, .attention_layers = {1}}),
            shape.num_kv_heads * 4 + logits);
  EXPECT_EQ(bytes({.signals = Signal::kPromptAttention}), kFakeLanes * 4);
}

TEST_F(AdmissionTest, TableIsAsLongAsItsLongestLane) {
  const KvLayout layout{.num_lanes = 4,
                        .row_bytes = 100,
                        .num_tables = 2,
                        .slot_bytes = 10,
                        .state_bytes_per_token = 1,
                        .state_bytes = 7};
  EXPECT_EQ(BytesOf(layout, {2, 1, 5, 3}), 11 * 100 + (2 + 5) * 10 + 5 * 1 + 7);
}

TEST_F(AdmissionTest, HalfPrecisionHalvesTheRows) {
  Manifest manifest = FakeManifest(kContext);
  manifest.dtype = DType::kBFloat16;
  EXPECT_EQ(Make(Limits(), manifest).kv_bytes_per_token(), kFakeLanes * 16);
}

// A row is its elements and a scale; also of the keys of a layer that are turned at each step.
TEST_F(AdmissionTest, Int8RowsAreAByteAnElementAndAScale) {
  AdmissionLimits limits = Limits();
  limits.kv_dtype = KvDType::kInt8;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Manifest manifest = FakeManifest(kContext);
    manifest.dtype = dtype;
    const Admission admission = Make(limits, manifest);
    EXPECT_EQ(admission.kv_bytes_per_token(), kFakeLanes * 2 * (4 + 4));
    RequestOptions options = Ask(10, 11, "full", 20);
    const int64_t rows = 20 * kFakeLanes * 16 + 20 * 8;
    EXPECT_EQ(Accept(admission, options).demand.peak_bytes(), rows);
    options.kv.positions = PositionMode::kCache;
    EXPECT_EQ(Accept(admission, options).demand.peak_bytes(),
              rows + 20 * admission.shape().num_kv_heads * (4 + 4));
  }
}

TEST_F(AdmissionTest, WhatCanNeverFitIsRefusedWithTheNumbers) {
  const RequestOptions options = Ask(10, 11, "full", 20);
  AdmissionLimits limits = Limits();
  limits.kv_capacity_bytes = Accept(options).demand.peak_bytes();
  Accept(Make(limits), options);
  const std::string needed = absl::StrCat(limits.kv_capacity_bytes);
  --limits.kv_capacity_bytes;
  const Rejection rejection = Refuse(Make(limits), options);
  EXPECT_EQ(rejection.reason, "KV_POOL_TOO_SMALL");
  EXPECT_EQ(rejection.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(rejection.metadata,
              UnorderedElementsAre(Pair("needed_bytes", needed),
                                   Pair("capacity_bytes", absl::StrCat(limits.kv_capacity_bytes))));
}

// 99 tokens of prompt and 20 more, 119 of which are cached: of `kFakeLanes` lanes each holds 99
// before the first round, and 51 before any other.
TEST_F(AdmissionTest, ARoundThatComparesTooManyPairsIsRefused) {
  const RequestOptions options = Ask(99, 20, "pairs", 50);
  AdmissionLimits limits = Limits();
  limits.max_round_pairs = kFakeLanes * 99 * 98 / 2;
  Accept(Make(limits), options);
  --limits.max_round_pairs;
  const Admission admission = Make(limits);
  const Rejection rejection = Refuse(admission, options);
  EXPECT_EQ(rejection.reason, "ROUND_TOO_LARGE");
  EXPECT_EQ(rejection.code, absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.policy_params.redundancy"));
  EXPECT_THAT(rejection.metadata,
              UnorderedElementsAre(Pair("pairs", absl::StrCat(limits.max_round_pairs + 1)),
                                   Pair("most_pairs", absl::StrCat(limits.max_round_pairs))));
  // Without rounds, or with others.
  Accept(admission, Ask(99, 20, "pairs", 119));
  Accept(admission, Ask(99, 20, "at_end", 50));
}

// Completions need no step in which all of them have theirs.
TEST_F(AdmissionTest, PairsOfARoundAreOfOneCompletion) {
  RequestOptions options = Ask(99, 20, "pairs", 100);
  options.completions = 3;
  options.sampling.temperature = 1;
  AdmissionLimits limits = Limits();
  limits.max_round_pairs = kFakeLanes * 101 * 100 / 2;
  EXPECT_EQ(Accept(Make(limits), options).demand.decode_round_pairs, limits.max_round_pairs);
  EXPECT_EQ(Accept(Make(limits), Ask(99, 20, "full", 119)).demand.prefill_round_pairs, 0);
}

TEST_F(AdmissionTest, PairsInDecodeAreThoseOfTheBudget) {
  const KvDemand demand = Accept(Make(Limits()), Ask(99, 20, "pairs", 50)).demand;
  EXPECT_EQ(demand.prefill_round_pairs, kFakeLanes * 99 * 98 / 2);
  EXPECT_EQ(demand.decode_round_pairs, kFakeLanes * 51 * 50 / 2);
}

TEST_F(AdmissionTest, PairsOfEachTokenCount) {
  RequestOptions options = Ask(99, 20, "pairs", 50);
  options.kv.params["each"] = int64_t{7};
  AdmissionLimits limits = Limits();
  limits.max_round_pairs = kFakeLanes * (99 * 98 / 2 + 7 * 99);
  Accept(Make(limits), options);
  --limits.max_round_pairs;
  EXPECT_EQ(Refuse(Make(limits), options).reason, "ROUND_TOO_LARGE");
}

TEST_F(AdmissionTest, AWindowWhoseLogitsTakeTooMuchIsRefused) {
  const Manifest manifest = FakeManifest(1 << 20);
  AdmissionLimits limits = Limits();
  limits.max_round_pairs = kMost;
  const Admission admission = Make(limits, manifest);
  const int64_t group = admission.shape().num_heads / admission.shape().num_kv_heads;
  constexpr int64_t kTokens = 1 << 15;
  const int64_t most = (int64_t{1} << 30) / (3 * 4 * group * kTokens);
  RequestOptions options = Ask(kTokens, 2, "pairs", 50);
  options.kv.params["window"] = most;
  Accept(admission, options);
  options.kv.params["window"] = most + 1;
  const Rejection rejection = Refuse(admission, options);
  EXPECT_EQ(rejection.reason, "ROUND_TOO_LARGE");
  EXPECT_THAT(Fields(rejection), ElementsAre("kv.policy_params.window"));
}

// One of them may hold what the others do not.
TEST_F(AdmissionTest, LanesThatShareABudgetCountForTheLongest) {
  const Manifest manifest = FakeManifest(1 << 20);
  AdmissionLimits limits = Limits();
  limits.max_round_pairs = kMost;
  const Admission admission = Make(limits, manifest);
  const int64_t group = admission.shape().num_heads / admission.shape().num_kv_heads;
  constexpr int64_t kBudget = 1 << 10, kTokens = kBudget * kFakeLanes * 2;
  const int64_t most = (int64_t{1} << 30) / (3 * 4 * group * (kBudget + 1));
  RequestOptions options = Ask(10, kTokens, "pairs", kBudget);
  options.kv.params["window"] = most;
  Accept(admission, options);
  options.kv.params["pool"] = true;
  EXPECT_EQ(Refuse(admission, options).reason, "ROUND_TOO_LARGE");
  options.kv.params["window"] = most / kFakeLanes - 1;
  Accept(admission, options);
}

}  // namespace admission_budgets_test
}  // namespace epikv
