#include "policies/attention/rkv.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "policies/lookahead.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

constexpr absl::string_view kRedundancies[] = {"exact", "linear"};

const ParamSpec kRkvParams[] = {
    LambdaParam(0.5), WindowParam(8),      PoolKernelParam(7), RedundancyParam(), RkvCompatParam(),
    QueriesParam(),   PseudoTokensParam(), DraftParam(),       SlackParam(127),
};

constexpr float kDuplicate = 0.5;  // a cosine above it

// What column `duplicate` says of a token without one, beside the index + 1 of one that has.
constexpr float kNoDuplicate = -1;

// Of tokens a[i] and b[j] that are duplicates, notes each as the other's newest so far.
void NoteDuplicates(const at::Tensor& unit, const std::vector<int64_t>& a,
                    const std::vector<int64_t>& b, std::vector<int64_t>& newest) {
  if (a.empty() || b.empty()) return;
  auto rows = [&](const std::vector<int64_t>& tokens) {
    return unit.index_select(0, at::tensor(tokens, at::kLong));
  };
  const at::Tensor cosines = rows(a).matmul(rows(b).t());  // [a, b]
  const float* cosine = cosines.const_data_ptr<float>();
  for (const int64_t one : a) {
    for (const int64_t other : b) {
      if (!(*cosine++ > kDuplicate) || one == other) continue;
      newest[one] = std::max(newest[one], other);
      newest[other] = std::max(newest[other], one);
    }
  }
}

// Brings `newest`, of each token the newest duplicate or -1, to what it is beside tokens from
// `born` on, which it says nothing of, and after the loss of the newest duplicates of `bereft`,
// ascending. unit: keys of length 1 in birth order, [n, key_width]. Blocks from the newest tokens
// to the oldest: no pair of two blocks is looked at twice, and none that could only show an older
// duplicate of a token that has one. 2 x key_width FLOP a pair of a token born or bereft and
// another: at most, and after a prompt, n^2 / 2 pairs.
void FindDuplicates(const at::Tensor& unit, int64_t born, const std::vector<int64_t>& bereft,
                    std::vector<int64_t>& newest) {
  constexpr int64_t kBlock = 256;
  for (int64_t end = unit.size(0); end > born; end -= kBlock) {
    const int64_t begin = std::max(born, end - kBlock);
    std::vector<int64_t> without, with, older;  // one among those from `end` on; without, before it
    std::vector<int64_t> all(end);
    std::iota(all.begin(), all.end(), int64_t{0});
    for (int64_t t = begin; t < end; ++t) (newest[t] < end ? without : with).push_back(t);
    for (int64_t t = 0; t < begin; ++t) {
      if (newest[t] < end) older.push_back(t);
    }
    NoteDuplicates(unit, without, all, newest);
    NoteDuplicates(unit, with, older, newest);
  }
  std::vector<int64_t> without, all(born);
  std::iota(all.begin(), all.end(), int64_t{0});
  for (const int64_t token : bereft) {
    if (newest[token] < 0) without.push_back(token);
    if (std::ssize(without) < kBlock && token != bereft.back()) continue;
    NoteDuplicates(unit, without, all, newest);
    without.clear();
  }
}

// Of each token of a lane, in birth order, the newest duplicate, or -1. From one round to the next
// column 0 keeps it: only tokens that are new or have lost theirs look for one.
std::vector<int64_t> NewestDuplicates(Lane& lane, const at::Tensor& unit) {
  const int64_t n = unit.size(0);
  const at::Tensor by_birth = lane.by_birth(), index = lane.index().index_select(0, by_birth);
  const int64_t* const slot = by_birth.const_data_ptr<int64_t>();
  const int64_t* const token = index.const_data_ptr<int64_t>();
  const absl::Span<float> column = lane.cache().column(0, lane.layer(), lane.head());
  int64_t born = n;  // the first token that no round has looked at
  while (born > 0 && column[slot[born - 1]] == 0) --born;
  std::vector<int64_t> newest(n, -1), bereft;
  for (int64_t t = 0; t < born; ++t) {
    const float noted = column[slot[t]];
    if (noted == kNoDuplicate) continue;
    const int64_t duplicate = static_cast<int64_t>(noted) - 1;
    const int64_t* const found = std::lower_bound(token, token + n, duplicate);
    if (found < token + n && *found == duplicate) {
      newest[t] = found - token;
    } else {
      bereft.push_back(t);
    }
  }
  FindDuplicates(unit, born, bereft, newest);
  for (int64_t t = 0; t < n; ++t) {
    column[slot[t]] = newest[t] < 0 ? kNoDuplicate : static_cast<float>(token[newest[t]] + 1);
  }
  return newest;
}

class Rkv final : public ScoredPolicy {
 public:
  explicit Rkv(const Params& params)
      : ScoredPolicy(Granularity::kHead), params_(params), score_(params) {}

  Eviction Draft(const EvictionTask& task) const override { return DraftOf(task, params_); }

 private:
  at::Tensor Score(const EvictionTask&, Lane& lane) const override { return score_.Of(lane); }

  const Params params_;
  const RkvScore score_;
};

}  // namespace

ParamSpec LambdaParam(double fallback) {
  return {.name = "lambda",
          .type = ParamType::kFloat,
          .fallback = fallback,
          .max = 1,
          .help =
              "weight of importance, against that of redundancy. R-KV's code says 0.07 and its "
              "README 0.1; two other engines measured 0.5 to be 7 to 9 points better"};
}

ParamSpec RedundancyParam() {
  return {.name = "redundancy",
          .type = ParamType::kChoice,
          .fallback = std::string("exact"),
          .choices = kRedundancies,
          .help =
              "exact: the newest of a token's duplicates is not blamed for it, which a round "
              "looks for among all keys for those that are new or lost theirs; linear: every "
              "duplicate is"};
}

ParamSpec RkvCompatParam() {
  return {.name = "compat",
          .type = ParamType::kBool,
          .fallback = false,
          .help =
              "as the authors' code has it: tokens without a duplicate spare the oldest token "
              "(with redundancy = exact)"};
}

RkvScore::RkvScore(const Params& params)
    : lambda_(params.Float("lambda")),
      kernel_(params.Int("kernel")),
      exact_(params.Choice("redundancy") == "exact"),
      compat_(params.Bool("compat")) {}

void RkvScore::AddTraits(const Params& params, PolicyTraits& traits) {
  if (params.Choice("redundancy") != "exact") return;
  traits.columns = {"duplicate"};
  traits.compares_all_pairs = true;
}

at::Tensor RkvScore::Of(Lane& lane) const {
  // The largest logit of the group, before any softmax; that one over the tokens before the
  // window alone.
  const at::Tensor logits =
      BeforeWindow(lane, std::get<0>(lane.window_logits().max(0)));  // [w, before]
  const int64_t before = logits.size(1);
  const at::Tensor importance =
      PoolNeighbours(SoftmaxOfSeen(logits).mean(0, /*keepdim=*/true), kernel_, "max").squeeze(0);
  const at::Tensor redundancy = Similarity(lane).softmax(-1).narrow(0, 0, before);
  return WithWindow(lane, lambda_ * importance - (1 - lambda_) * redundancy);
}

// Mean cosine of a token's key with those of the lane. In birth order, [n].
at::Tensor RkvScore::Similarity(Lane& lane) const {
  const at::Tensor keys = lane.keys().index_select(0, lane.by_birth());
  const at::Tensor unit = keys / (keys.norm(2, -1, /*keepdim=*/true) + 1e-8);  // [n, key_width]
  const int64_t n = unit.size(0);
  at::Tensor sum = unit.matmul(unit.sum(0)) - unit.square().sum(-1);
  if (exact_) {
    const std::vector<int64_t> duplicates = NewestDuplicates(lane, unit);
    std::vector<int64_t> blamer, spared;
    for (int64_t token = 0; token < n; ++token) {
      const int64_t other = compat_ ? std::max<int64_t>(0, duplicates[token]) : duplicates[token];
      if (other < 0 || other == token) continue;
      blamer.push_back(token);
      spared.push_back(other);
    }
    const at::Tensor to = at::tensor(spared, at::kLong);
    const at::Tensor blame =
        unit.index_select(0, at::tensor(blamer, at::kLong)).mul_(unit.index_select(0, to)).sum(-1);
    sum.index_add_(0, to, blame, -1);
  }
  return sum / n;
}

extern constinit const PolicySpec kRkv{
    .name = "rkv",
    .summary = "drops the tokens that the newest queries use least and whose keys repeat others'",
    .paper = "arXiv 2505.24133",
    .evidence = "golden: Zefan-Cai/R-KV d15c976 `R1KV` (redundancy = exact); linear: rkv_test.cc",
    .params = kRkvParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape&) { return CheckWindow(params); },
    .traits =
        [](const Params& params, const ModelShape&) {
          PolicyTraits traits = WindowTraits(params);
          traits.published.prompt = false;
          RkvScore::AddTraits(params, traits);
          AddLookahead(params, traits);
          return traits;
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Rkv>(params);
    },
};

}  // namespace epikv
