#include "tests/broken_policy.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "policies/policy.h"
#include "policies/select.h"

namespace epikv {
namespace {

constexpr absl::string_view kFaults[] = {
    "throws", "throws_observing", "nan",       "protected",       "too_few",   "not_there",
    "twice",  "too_many_lanes",   "no_answer", "throws_a_number", "not_found", "throws_opening",
};

const ParamSpec kParams[] = {
    {.name = "fault", .type = ParamType::kChoice, .choices = kFaults, .help = "what it does wrong"},
};

struct Rounds final : PolicyState {
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<Rounds>(*this); }
  int64_t left = 2;  // that go well
};

class Broken final : public Policy {
 public:
  explicit Broken(std::string fault) : fault_(std::move(fault)) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo&) const override {
    if (fault_ == "throws_opening") throw 42;
    return std::make_unique<Rounds>();
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    if (fault_ != "throws_observing") return;
    if (static_cast<Rounds*>(steps[0].state)->left == 0) throw std::runtime_error("out of order");
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    const CacheView& cache = tasks[0].cache;
    int64_t& left = static_cast<Rounds*>(tasks[0].state)->left;
    const bool well = left > 0;
    if (well) --left;
    if (!well && fault_ == "throws") throw std::runtime_error("out of order");
    if (!well && fault_ == "throws_a_number") throw 42;
    if (!well && fault_ == "no_answer") return {};
    if (!well && fault_ == "not_found") return {{.status = absl::NotFoundError("no such thing")}};

    const absl::Span<const int32_t> index = cache.index(0, 0);
    std::vector<float> age(index.begin(), index.end());
    if (!well && fault_ == "nan") {
      std::fill(age.begin(), age.end(), std::numeric_limits<float>::quiet_NaN());
    }
    auto victims = LowestScores(age, index, cache.protection(), cache.newest(), cache.excess(0, 0));
    if (!victims.ok()) return {{.status = victims.status()}};
    Eviction eviction{.victims = {*std::move(victims)}};
    if (well) return {std::move(eviction)};
    std::vector<int32_t>& named = eviction.victims[0];
    if (fault_ == "protected") named[0] = static_cast<int32_t>(cache.newest());
    if (fault_ == "too_few") named.clear();
    if (fault_ == "not_there") named[0] = static_cast<int32_t>(cache.newest()) + 1;
    if (fault_ == "twice") named.push_back(named[0]);
    if (fault_ == "too_many_lanes") eviction.victims.push_back(named);
    return {std::move(eviction)};
  }

 private:
  const std::string fault_;
};

}  // namespace

extern constinit const PolicySpec kBrokenPolicy{
    .name = "broken",
    .summary = "breaks the contract",
    .params = kParams,
    .traits =
        [](const Params&, const ModelShape&) {
          return PolicyTraits{.prompt = PromptEviction::kByChunk, .state_bytes = sizeof(Rounds)};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<Broken>(params.Choice("fault"));
    },
};

}  // namespace epikv
