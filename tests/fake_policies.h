#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "policies/spec.h"

// Policies that are only described, for tests of admission and engine without torch: their objects
// are counted and cannot be called.

namespace epikv {
namespace fake_policies {

// Policy objects that live.

inline std::atomic<int> live_objects{0};

inline std::shared_ptr<const Policy> Make(const Params&, const ModelShape&) {
  const std::shared_ptr<int> object(new int(++live_objects), [](int* p) {
    --live_objects;
    delete p;
  });
  return {object, reinterpret_cast<const Policy*>(object.get())};  // never dereferenced
}

inline constexpr absl::string_view kModes[] = {"max", "mean"};
inline const ParamSpec kParams[] = {
    {.name = "level", .type = ParamType::kFloat, .fallback = 0.5, .max = 1, .help = "a share"},
    {.name = "mode",
     .type = ParamType::kChoice,
     .fallback = "mean",
     .choices = kModes,
     .help = "one of two"},
    SlackParam(0),
};

template <PromptEviction prompt>
PolicyTraits Traits(const Params& params, const ModelShape&) {
  return {.prompt = prompt, .slack = params.Int("slack")};
}

inline const PolicySpec kAtEnd{.name = "at_end",
                               .summary = "sees the whole prompt",
                               .params = kParams,
                               .traits = &Traits<PromptEviction::kAtEnd>,
                               .make = &Make};
inline const PolicySpec kByChunk{.name = "by_chunk",
                                 .summary = "evicts in the prompt",
                                 .params = kParams,
                                 .traits = &Traits<PromptEviction::kByChunk>,
                                 .make = &Make};
inline const PolicySpec kFull{
    .name = "full",
    .summary = "keeps everything",
    .traits = [](const Params&, const ModelShape&) { return PolicyTraits{.evicts = false}; },
    .make = &Make};
// Every other lane has half the budget, and the lanes between them the rest.
inline const PolicySpec kRagged{
    .name = "ragged",
    .summary = "budgets differ by lane",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape& shape) {
          PolicyTraits traits = Traits<PromptEviction::kByChunk>(params, shape);
          traits.granularity = Granularity::kHead;
          return traits;
        },
    .lane_budgets =
        [](const Params&, const ModelShape& shape, int64_t budget) {
          std::vector<int64_t> budgets(shape.num_layers * shape.num_kv_heads);
          for (size_t lane = 0; lane < budgets.size(); ++lane) {
            budgets[lane] = lane % 2 == 0 ? budget / 2 : 2 * budget - budget / 2;
          }
          return budgets;
        },
    .make = &Make};
// Needs all that a policy can need.
inline const PolicySpec kRefuses{.name = "refuses",
                                 .summary = "cannot rank the prompt",
                                 .params = kParams,
                                 .traits =
                                     [](const Params& params, const ModelShape&) {
                                       return PolicyTraits{.granularity = Granularity::kLayer,
                                                           .signals = Signal::kResidualStep,
                                                           .residual_layers = {1},
                                                           .columns = {"age", "mass"},
                                                           .prompt = PromptEviction::kRefuses,
                                                           .slack = params.Int("slack"),
                                                           .published = {.sinks = 4},
                                                           .state_bytes_per_token = 24,
                                                           .state_bytes = 1000};
                                     },
                                 .make = &Make};

inline const PolicySpec* const kAll[] = {&kAtEnd, &kByChunk, &kFull, &kRagged, &kRefuses};

}  // namespace fake_policies

// One of every kind: sees the whole prompt first, evicts it by chunks, keeps everything, has lanes
// of unequal budgets, refuses prompts over the budget.
inline PolicyCatalog EveryKindOfPolicy() { return fake_policies::kAll; }

}  // namespace epikv
