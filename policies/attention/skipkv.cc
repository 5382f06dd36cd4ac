#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "policies/attention/rkv.h"
#include "policies/clones.h"
#include "policies/scored_policy.h"
#include "policies/window_score.h"

namespace epikv {
namespace {

const ParamSpec kSkipkvParams[] = {
    {.name = "threshold",
     .type = ParamType::kFloat,
     .fallback = 0.95,
     .min = -1,
     .max = 1,
     .help = "cosine of two sentences above which the older one says nothing new"},
    {.name = "sentences",
     .type = ParamType::kInt,
     .fallback = int64_t{512},
     .min = 1,
     .max = 65536,
     .help = "newest sentences that are remembered"},
    {.name = "ends",
     .type = ParamType::kIntList,
     .min = 0,
     .max = 2147483647,
     .help = "ids of the tokens that end sentences. Empty: those that end a line in this "
             "model's tokenizer, or without any its full stop"},
    LambdaParam(0.1),
    WindowParam(8),
    PoolKernelParam(7),
    RedundancyParam(),
    RkvCompatParam(),
    SlackParam(127),
};

// The sentences of one sequence. One of a single token is compared with those before it, and not
// remembered.
class Sentences final : public PolicyState {
 public:
  Sentences(int64_t hidden_size, int64_t most, double threshold)
      : most_(most), threshold_(threshold), sum_(hidden_size) {}

  static int64_t Bytes(int64_t hidden_size, int64_t most) {
    return static_cast<int64_t>(sizeof(Sentences)) + 2 * hidden_size * kSumBytes +
           most * (static_cast<int64_t>(sizeof(Sentence)) + hidden_size * kNumberBytes);
  }

  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<Sentences>(*this); }

  // The next token. hidden: its hidden state after the final norm.
  void Add(absl::Span<const float> hidden, bool ends) {
    for (size_t c = 0; c < sum_.size(); ++c) sum_[c] += hidden[c];
    ++next_;
    if (ends) Close();
  }

  struct Sentence {
    int64_t begin = 0, end = 0;  // indexes of its tokens, [begin, end)
    float penalty = 0;           // the cosine with the last sentence that said the same
  };
  const std::vector<Sentence>& remembered() const { return sentences_; }  // oldest first

 private:
  static constexpr int64_t kSumBytes = sizeof(double), kNumberBytes = sizeof(float);

  void Close() {
    const double count = static_cast<double>(next_ - begin_);
    std::vector<float> unit(sum_.size());
    double square = 0;
    for (double sum : sum_) square += sum / count * (sum / count);
    const double norm = std::sqrt(square) + 1e-8;
    for (size_t c = 0; c < sum_.size(); ++c) unit[c] = static_cast<float>(sum_[c] / count / norm);
    for (size_t s = 0; s < sentences_.size(); ++s) {
      const float* const other = &units_[s * unit.size()];
      double cosine = 0;
      for (size_t c = 0; c < unit.size(); ++c) cosine += static_cast<double>(unit[c]) * other[c];
      // What is no number costs no number, so that the round tells of it.
      if (!(cosine <= threshold_)) sentences_[s].penalty = static_cast<float>(cosine);
    }
    if (next_ - begin_ > 1) Remember(unit);
    begin_ = next_;
    std::fill(sum_.begin(), sum_.end(), 0);
  }

  void Remember(const std::vector<float>& unit) {
    const auto width = std::ssize(unit);
    if (std::ssize(sentences_) == most_) {
      sentences_.erase(sentences_.begin());
      units_.erase(units_.begin(), units_.begin() + width);
    } else if (sentences_.size() == sentences_.capacity()) {
      const int64_t room = std::min(most_, std::max<int64_t>(8, 2 * std::ssize(sentences_)));
      sentences_.reserve(room);
      units_.reserve(room * width);
    }
    const float own = std::isfinite(unit[0]) ? 0 : unit[0];
    sentences_.push_back({.begin = begin_, .end = next_, .penalty = own});
    units_.insert(units_.end(), unit.begin(), unit.end());
  }

  const int64_t most_;
  const double threshold_;
  int64_t begin_ = 0, next_ = 0;  // of the sentence that is not complete; of the next token
  std::vector<double> sum_;       // of its hidden states
  std::vector<Sentence> sentences_;
  std::vector<float> units_;  // [sentences, hidden]
};

class Skipkv final : public ScoredPolicy {
 public:
  Skipkv(const Params& params, const ModelShape& shape)
      : ScoredPolicy(Granularity::kHead),
        score_(params),
        hidden_size_(shape.hidden_size),
        most_(params.Int("sentences")),
        threshold_(params.Float("threshold")),
        ends_(params.IntList("ends")) {
    std::sort(ends_.begin(), ends_.end());
  }

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    return std::make_unique<Sentences>(hidden_size_, most_, threshold_);
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      auto& sentences = static_cast<Sentences&>(*step.state);
      for (int64_t i = 0; i < step.count; ++i) {
        sentences.Add(step.signals.final_hidden.subspan(i * hidden_size_, hidden_size_),
                      std::binary_search(ends_.begin(), ends_.end(), step.tokens[i]));
      }
    }
  }

 private:
  at::Tensor Score(const EvictionTask& task, Lane& lane) const override {
    at::Tensor score = score_.Of(lane);
    Penalise(static_cast<const Sentences&>(*task.state), lane, score);
    return score;
  }

  // Takes a sentence's penalty from each of its tokens, where the lane has two of them at least.
  static void Penalise(const Sentences& sentences, Lane& lane, at::Tensor& score) {
    const int64_t n = score.size(0);
    const int64_t* const slot = lane.by_birth().const_data_ptr<int64_t>();
    const int64_t* const index = lane.index().const_data_ptr<int64_t>();
    auto* const scores = score.mutable_data_ptr<float>();
    int64_t place = 0;
    for (const Sentences::Sentence& sentence : sentences.remembered()) {
      while (place < n && index[slot[place]] < sentence.begin) ++place;
      const int64_t first = place;
      while (place < n && index[slot[place]] < sentence.end) ++place;
      if (sentence.penalty == 0 || place - first < 2) continue;
      for (int64_t i = first; i < place; ++i) scores[slot[i]] -= sentence.penalty;
    }
  }

  const RkvScore score_;
  const int64_t hidden_size_, most_;
  const double threshold_;
  std::vector<int64_t> ends_;
};

}  // namespace

extern constinit const PolicySpec kSkipkv{
    .name = "skipkv",
    .summary =
        "drops the tokens that the newest queries use least, whose keys repeat others', and "
        "whose sentence a later one repeats",
    .paper = "arXiv 2512.07993 (SkipKV), the eviction half; steering is an option of any request",
    .evidence = "golden: TTTTTTris/SkipKV 4492840 `SkipKV` (compat = true)",
    .params = kSkipkvParams,
    .scores = true,
    .complete = [](Params& params, const ModelShape& shape) -> absl::Status {
      if (absl::Status status = CheckWindow(params); !status.ok()) return status;
      if (!shape.final_norm) {
        return absl::InvalidArgumentError(
            "this model's file does not say which norm is its last: export it again");
      }
      if (!params.Has("ends") || params.IntList("ends").empty()) {
        params.Set("ends",
                   std::vector<int64_t>(shape.sentence_ends.begin(), shape.sentence_ends.end()));
      }
      if (!params.IntList("ends").empty()) return absl::OkStatus();
      return absl::InvalidArgumentError(
          "ends: this model's tokenizer has no token that ends a line, and no full stop: name "
          "tokens that end sentences");
    },
    .traits =
        [](const Params& params, const ModelShape& shape) {
          PolicyTraits traits = WindowTraits(params, Signal::kFinalHidden);
          traits.published.prompt = false;
          traits.state_bytes = Sentences::Bytes(shape.hidden_size, params.Int("sentences"));
          RkvScore::AddTraits(params, traits);
          return traits;
        },
    .make = [](const Params& params, const ModelShape& shape) -> std::shared_ptr<const Policy> {
      return std::make_shared<Skipkv>(params, shape);
    },
};

}  // namespace epikv
