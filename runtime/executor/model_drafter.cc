#include "runtime/executor/model_drafter.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "policies/spec.h"
#include "runtime/base/require.h"
#include "runtime/base/steady_time.h"
#include "runtime/model/model_shape.h"
#include "runtime/request/request.h"
#include "runtime/step/step_item.h"

namespace epikv {
namespace {

// What the newest measurement weighs, if it is longer or shorter than what was known. What takes
// many times as long says that the process has stood still.
constexpr double kLonger = 0.05, kShorter = 0.2, kMostOfExpected = 4;

// Of a cache that keeps all, in lanes of so many tokens.
Request RequestOf(int64_t tokens, int64_t num_lanes) {
  const std::vector<int64_t> capacity(num_lanes, tokens);
  return {.traits = {.evicts = false, .granularity = Granularity::kToken},
          .budget = tokens,
          .bypass_prefix_cache = true,
          .demand = {.budget = capacity, .prefill = capacity, .decode = capacity}};
}

// logits: [vocab].
int32_t Likeliest(at::Tensor logits, const std::map<int32_t, float>* bias) {
  if (bias != nullptr && !bias->empty()) {
    logits = logits.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    auto* const row = logits.mutable_data_ptr<float>();
    for (const auto& [token, added] : *bias) {
      if (token < logits.size(0)) row[token] += added;
    }
  }
  return static_cast<int32_t>(logits.argmax().item<int64_t>());
}

}  // namespace

struct ModelDrafter::Drafted {
  Drafted(KvPool& pool, SequenceId of, int64_t tokens, const ModelShape& shape)
      : id(of),
        request(RequestOf(tokens, shape.num_layers * shape.num_kv_heads)),
        sequence(pool, id, request, shape) {}

  // Tokens that are cached, without guesses.
  int64_t cached() const { return sequence.cache.newest() + 1; }
  bool HasRoom() const { return sequence.cache.next() < request.budget; }

  const SequenceId id;
  const Request request;
  OpenSequence sequence;
  std::optional<int32_t> next;  // the likeliest token after those cached; unknown: some are unread
  std::vector<int32_t> ahead;   // guesses that are cached behind them, as scratch
};

ModelDrafter::ModelDrafter(std::unique_ptr<Model> model, ModelDrafterOptions options)
    : model_(std::move(model)),
      options_(options),
      shape_(ShapeOf(model_->manifest())),
      ropes_([this] {
        std::vector<RopeTable> ropes;
        for (const Rope& rope : model_->manifest().ropes) {
          ropes.emplace_back(rope, model_->manifest().context_length);
        }
        return ropes;
      }()),
      pool_(options_.pool_rows, shape_.key_width, shape_.value_width,
            {model_->manifest().dtype, KvDType::kModel}),
      no_rows_({}, shape_.num_kv_heads),
      forward_(*model_, shape_, ropes_, pool_,
               {.decode_kernel = options_.decode_kernel, .prefill_kernel = options_.prefill_kernel},
               no_rows_, times_) {}

ModelDrafter::~ModelDrafter() = default;

bool ModelDrafter::Open(SequenceId id, absl::Span<const int32_t> prompt, int64_t tokens) {
  const int64_t rows = tokens * shape_.num_layers * shape_.num_kv_heads;
  if (tokens > model_->manifest().context_length || rows > pool_.free_rows()) return false;
  if (!Knows(prompt)) return false;
  open_.emplace(id, std::make_unique<Drafted>(pool_, id, tokens, shape_));
  return true;
}

void ModelDrafter::Close(SequenceId id) { open_.erase(id); }

void ModelDrafter::Follow(Drafted& drafted, absl::Span<const int32_t> tokens) {
  SequenceCache& cache = drafted.sequence.cache;
  const int64_t cached = drafted.cached();
  Require(std::ssize(tokens) >= cached, "a sequence has fewer tokens than before");
  const absl::Span<const int32_t> since = tokens.subspan(cached);
  const auto [came, unused] =
      std::mismatch(since.begin(), since.end(), drafted.ahead.begin(), drafted.ahead.end());
  // The newest token is read in any case, for what comes after it.
  const int64_t true_guesses = std::min(came - since.begin(), std::ssize(since) - 1);
  cache.SetScratch(0);
  if (true_guesses > 0) cache.Append(cached, true_guesses);
  if (!since.empty()) drafted.next.reset();
  drafted.ahead.clear();
}

bool ModelDrafter::Knows(absl::Span<const int32_t> tokens) const {
  const int64_t vocab_size = model_->manifest().vocab_size;
  return std::all_of(tokens.begin(), tokens.end(),
                     [&](int32_t token) { return token >= 0 && token < vocab_size; });
}

void ModelDrafter::ReadOn(absl::Span<const DraftItem> items, int64_t room) {
  std::vector<Share> unread;
  for (const DraftItem& item : items) {
    Drafted& drafted = *open_.at(item.id);
    const absl::Span<const int32_t> tokens = item.tokens.subspan(drafted.cached());
    if (!tokens.empty() && Knows(tokens)) unread.push_back({&drafted, tokens, item.logit_bias});
  }
  // Who has little to read does not wait for a long prompt.
  std::stable_sort(unread.begin(), unread.end(), [](const Share& a, const Share& b) {
    return a.tokens.size() < b.tokens.size();
  });
  std::vector<Share> shares;
  std::vector<bool> whole;
  for (Share share : unread) {
    if (room <= 0) break;
    const int64_t count = std::min(std::ssize(share.tokens), room);
    whole.push_back(count == std::ssize(share.tokens));
    share.tokens = share.tokens.first(count);
    shares.push_back(share);
    room -= count;
  }
  if (shares.empty()) return;
  const std::vector<int32_t> next = Run(shares);
  for (size_t i = 0; i < shares.size(); ++i) {
    Drafted& drafted = *shares[i].drafted;
    drafted.sequence.cache.Append(drafted.cached(), std::ssize(shares[i].tokens));
    if (whole[i]) drafted.next = next[i];
  }
}

std::vector<std::vector<int32_t>> ModelDrafter::Guess(absl::Span<const DraftItem> items,
                                                      int64_t read_tokens) {
  for (const DraftItem& item : items) Follow(*open_.at(item.id), item.tokens);
  ReadOn(items, read_tokens);
  std::vector<std::vector<int32_t>> guesses(items.size());
  std::vector<Share> shares;
  std::vector<size_t> owners;
  std::vector<int32_t> next(items.size(), -1);
  for (size_t i = 0; i < items.size(); ++i) {
    next[i] = open_.at(items[i].id)->next.value_or(-1);
  }
  while (true) {
    shares.clear();
    owners.clear();
    for (size_t i = 0; i < items.size(); ++i) {
      if (next[i] < 0 || next[i] >= options_.vocab_size) continue;
      if (std::ssize(guesses[i]) == items[i].most) continue;
      guesses[i].push_back(next[i]);
      Drafted& drafted = *open_.at(items[i].id);
      if (std::ssize(guesses[i]) == items[i].most || !drafted.HasRoom()) {
        next[i] = -1;
        continue;
      }
      shares.push_back({&drafted, {&next[i], 1}, items[i].logit_bias});
      owners.push_back(i);
    }
    if (shares.empty()) return guesses;
    const std::vector<int32_t> likeliest = Run(shares);
    for (size_t s = 0; s < shares.size(); ++s) {
      Drafted& drafted = *shares[s].drafted;
      drafted.ahead.push_back(next[owners[s]]);
      drafted.sequence.cache.SetScratch(std::ssize(drafted.ahead));
      next[owners[s]] = likeliest[s];
    }
  }
}

void ModelDrafter::NoteGuessTime(absl::Duration took) {
  const absl::Duration known = guess_time_;
  if (known == absl::ZeroDuration()) {
    guess_time_ = took;
  } else {
    took = std::min(took, kMostOfExpected * known);
    guess_time_ += (took > known ? kLonger : kShorter) * (took - known);
  }
}

std::vector<int32_t> ModelDrafter::Run(absl::Span<const Share> shares) {
  const absl::Time begin = SteadyNow();
  std::vector<WorkItem> work;
  work.reserve(shares.size());  // they are pointed to
  std::vector<StepItem> step;
  int64_t row = 0;
  for (const auto& [drafted, tokens, logit_bias] : shares) {
    work.push_back({.id = drafted->id,
                    .request = &drafted->request,
                    .tokens = tokens,
                    .first = drafted->sequence.cache.next(),
                    .decode = tokens.size() == 1,
                    .num_outputs = 1});
    StepItem item{.work = &work.back(), .sequence = &drafted->sequence, .row = row};
    Place(item, shape_, model_->manifest().context_length);
    row += item.num_rows();
    step.push_back(std::move(item));
  }
  forward_.Run(absl::MakeSpan(step));
  std::vector<int32_t> likeliest;
  for (size_t i = 0; i < step.size(); ++i) {
    likeliest.push_back(Likeliest(step[i].logits[0], shares[i].logit_bias));
  }
  if (row == std::ssize(shares)) NoteGuessTime(SteadyNow() - begin);
  return likeliest;
}

}  // namespace epikv
