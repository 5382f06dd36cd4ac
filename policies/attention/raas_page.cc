#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "policies/lane.h"
#include "policies/policy.h"

namespace epikv {
namespace {

const ParamSpec kParams[] = {
    {.name = "page",
     .type = ParamType::kInt,
     .fallback = int64_t{16},
     .min = 1,
     .max = 1024,
     .help = "neighbouring tokens that share a date and go together"},
    {.name = "alpha",
     .type = ParamType::kFloat,
     .fallback = 0.0,
     .max = 1,
     .help = "a page is used if its score exceeds this; 0: if it is among the upper half of the "
             "budget's pages"},
    SlackParam(0),
};

struct PageBudget final : PolicyState {
  explicit PageBudget(int64_t pages) : pages(pages) {}
  std::unique_ptr<PolicyState> Clone() const override {
    return std::make_unique<PageBudget>(*this);
  }
  const int64_t pages;
};

// Column `date`, alike for all tokens of a page: the last decode step (index of its token, plus 1)
// in which the lane used the page, at first that in which its first token was cached. Of a prompt's
// pages 0.
class RaasPage final : public Policy {
 public:
  explicit RaasPage(const Params& params)
      : page_(params.Int("page")), alpha_(params.Float("alpha")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override {
    return std::make_unique<PageBudget>(info.budget / page_);
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kPrefill) continue;
      const int64_t budget = static_cast<const PageBudget*>(step.state)->pages;
      for (int64_t layer = 0; layer < step.cache.num_layers(); ++layer) {
        for (int64_t head = 0; head < step.cache.num_kv_heads(); ++head) {
          Lane lane(step.cache, layer, head);
          Date(budget, lane);
        }
      }
    }
  }

  std::vector<Eviction> Evict(absl::Span<EvictionTask> tasks) const override {
    std::vector<Eviction> evictions;
    evictions.reserve(tasks.size());
    for (const EvictionTask& task : tasks) evictions.push_back(EvictOne(task.cache));
    return evictions;
  }

 private:
  void Date(int64_t budget, Lane& lane) const {
    const absl::Span<float> column = lane.cache().column(0, lane.layer(), lane.head());
    at::Tensor dates =
        at::from_blob(column.data(), {static_cast<int64_t>(column.size())}, at::kFloat);
    // page: of each slot, its place among those cached.
    const auto [pages, page] =
        at::_unique(lane.index().floor_divide(page_), /*sorted=*/true, /*return_inverse=*/true);
    at::Tensor date = at::zeros(pages.size(0)).scatter_reduce(0, page, dates, "amax");
    const at::Tensor score = PageScores(budget, lane, page, pages.size(0));
    const float now = static_cast<float>(lane.cache().newest() + 1);
    date.masked_fill_(Used(budget, score), now);
    if (lane.cache().newest() % page_ == 0) date[-1] = now;  // the first token of its page
    date.masked_fill_(score.isnan(), std::numeric_limits<float>::quiet_NaN());
    dates.copy_(date.index_select(0, page));
  }

  // Log of the newest query's softmax over pages, of the query head that gives a page most. A
  // page's logit is the least upper bound that channels one by one put on those of its tokens; not
  // scaled, and of the `budget` highest pages alone (three at least), as published. [num_pages]
  at::Tensor PageScores(int64_t budget, Lane& lane, const at::Tensor& page,
                        int64_t num_pages) const {
    const at::Tensor& keys = lane.keys();
    auto extreme = [&](const char* which) {  // of each channel. [num_pages, width]
      return at::zeros({num_pages, keys.size(1)})
          .scatter_reduce(0, page.unsqueeze(1).expand_as(keys), keys, which,
                          /*include_self=*/false);
    };
    const at::Tensor query = lane.queries().select(1, -1).unsqueeze(1);  // [group, 1, width]
    const at::Tensor bound = at::maximum(query * extreme("amin"), query * extreme("amax"))
                                 .sum(-1);  // [group, num_pages]
    const int64_t ranked = std::min(std::max<int64_t>(3, budget), num_pages);
    const at::Tensor least =
        std::get<0>(bound.kthvalue(num_pages - ranked + 1, -1, /*keepdim=*/true));
    return bound.masked_fill(bound < least, -std::numeric_limits<float>::infinity())
        .log_softmax(-1)
        .amax(0);
  }

  // bool [num_pages]
  at::Tensor Used(int64_t budget, const at::Tensor& score) const {
    if (alpha_ > 0) return score.exp() > alpha_;
    // Of equals the newer: pages are in birth order.
    const int64_t n = score.size(0);
    const at::Tensor ascending = score.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    const int64_t used = std::min(budget / 2, n);
    return at::zeros(n, at::kBool).index_fill_(0, ascending.narrow(0, n - used, used), true);
  }

  Eviction EvictOne(CacheView& cache) const {
    Eviction eviction;
    for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
      for (int64_t head = 0; head < cache.num_kv_heads(); ++head) {
        eviction.victims.emplace_back();
        eviction.status.Update(DropPages(cache, layer, head, eviction.victims.back()));
      }
    }
    return eviction;
  }

  // Pages go whole, but for what of them is protected: more tokens than must, if need be.
  absl::Status DropPages(CacheView& cache, int64_t layer, int64_t head,
                         std::vector<int32_t>& victims) const {
    const int64_t count = cache.excess(layer, head);
    if (count == 0) return absl::OkStatus();
    const absl::Span<const int32_t> index = cache.index(layer, head);
    const absl::Span<const float> date = cache.column(0, layer, head);
    std::map<std::pair<float, int64_t>, std::vector<int32_t>> pages;  // by (date, number)
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (cache.protection().Covers(index[slot], cache.newest())) continue;
      if (std::isnan(date[slot])) {
        return absl::InternalError(absl::StrCat("the date of token ", index[slot], " is NaN"));
      }
      pages[{date[slot], index[slot] / page_}].push_back(index[slot]);
    }
    for (const auto& [page, tokens] : pages) {
      if (std::ssize(victims) >= count) break;
      victims.insert(victims.end(), tokens.begin(), tokens.end());
    }
    if (std::ssize(victims) >= count) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat(count, " tokens must go but only ", victims.size(), " may"));
  }

  const int64_t page_;
  const double alpha_;
};

}  // namespace

extern constinit const PolicySpec kRaasPage{
    .name = "raas_page",
    .summary = "drops the pages of neighbouring tokens that were longest not used",
    .paper = "arXiv 2502.11147 (RaaS)",
    .evidence = "golden: DerekHJH/RaaS 71cb3c7 `RaaSCache`; groups: raas_page_test.cc",
    .params = kParams,
    .traits =
        [](const Params& params, const ModelShape&) {
          return PolicyTraits{.granularity = Granularity::kHead,
                              .signals = Signal::kKeys | Signal::kQueries,
                              .window = 1,
                              .columns = {"date"},
                              .slack = params.Int("slack"),
                              .published = {.prompt = true, .recent = 1},
                              .state_bytes = sizeof(PageBudget)};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<RaasPage>(params);
    },
};

}  // namespace epikv
