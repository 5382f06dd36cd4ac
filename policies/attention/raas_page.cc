#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>
#include <vector>

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

// The pages of which a lane holds tokens, oldest first, and what bounds those tokens' keys channel
// by channel. Made of the keys where a page is not as the last step left it.
struct LanePages {
  std::vector<int64_t> number;  // index / page. [pages]
  std::vector<int64_t> tokens;  // cached. [pages]
  at::Tensor low, high;         // fp32 [pages, key_width]
};

struct PageState final : PolicyState {
  std::unique_ptr<PolicyState> Clone() const override {
    auto copy = std::make_unique<PageState>(*this);
    for (LanePages& lane : copy->lanes) {
      if (!lane.low.defined()) continue;
      lane.low = lane.low.clone();
      lane.high = lane.high.clone();
    }
    return copy;
  }

  int64_t budget = 0;            // pages
  std::vector<LanePages> lanes;  // [layers x kv_heads]
};

// Column `date`, alike for all tokens of a page: the last decode step (index of its token, plus 1)
// in which the lane used the page, at first that in which its first token was cached. Of a prompt's
// pages 0.
class RaasPage final : public Policy {
 public:
  explicit RaasPage(const Params& params)
      : page_(params.Int("page")), alpha_(params.Float("alpha")) {}

  std::unique_ptr<PolicyState> NewState(const SequenceInfo& info) const override {
    auto state = std::make_unique<PageState>();
    state->budget = info.budget / page_;
    return state;
  }

  void Observe(absl::Span<SequenceStep> steps) const override {
    for (SequenceStep& step : steps) {
      if (step.phase == Phase::kPrefill) continue;
      PageState& state = static_cast<PageState&>(*step.state);
      const int64_t heads = step.cache.num_kv_heads();
      state.lanes.resize(step.cache.num_layers() * heads);
      for (int64_t i = 0; i < std::ssize(state.lanes); ++i) {
        Lane lane(step.cache, i / heads, i % heads);
        const std::vector<int64_t> place = Follow(lane, state.lanes[i]);
        Date(state.budget, lane, state.lanes[i], place);
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
  // Brings `pages` to what the lane holds after a decode step. Returns the place in it of each
  // slot's page. [used]
  std::vector<int64_t> Follow(const Lane& lane, LanePages& pages) const {
    const CacheView& cache = lane.cache();
    const absl::Span<const int32_t> index = cache.index(lane.layer(), lane.head());
    const at::Tensor rows = cache.keys(lane.layer(), lane.head());  // [used, key_width]
    Regrouping regrouping = Regroup(index, cache.newest(), pages);
    CarryBounds(regrouping, rows.size(1), pages);

    std::vector<int64_t> place(index.size());
    std::vector<int64_t> slots, places;  // of the keys to be read, and of their pages
    for (size_t slot = 0; slot < index.size(); ++slot) {
      const int64_t number = index[slot] / page_;
      place[slot] = regrouping.place[number];
      if (!regrouping.fresh[number] && index[slot] != cache.newest()) continue;
      slots.push_back(static_cast<int64_t>(slot));
      places.push_back(place[slot]);
    }
    const at::Tensor keys =
        rows.index_select(0, at::tensor(slots, at::kLong)).to(at::kFloat);  // [slots, key_width]
    LanePages& now = regrouping.pages;
    if (slots.size() == 1) {
      at::Tensor low = now.low[places[0]], high = now.high[places[0]];
      at::minimum_out(low, low, keys[0]);
      at::maximum_out(high, high, keys[0]);
    } else {
      const at::Tensor page = at::tensor(places, at::kLong).unsqueeze(1).expand_as(keys);
      now.low.scatter_reduce_(0, page, keys, "amin");
      now.high.scatter_reduce_(0, page, keys, "amax");
    }
    pages = std::move(now);
    return place;
  }

  // The pages that a lane holds now, beside those it held after the last step.
  struct Regrouping {
    LanePages pages;             // without bounds
    std::vector<int64_t> place;  // in `pages`, by number
    std::vector<bool> fresh;     // no bounds to carry over: it is new, or lost tokens. By number
    std::vector<int64_t> from;   // places before and now of those whose bounds hold but for the
    std::vector<int64_t> to;     // newest token
  };

  Regrouping Regroup(absl::Span<const int32_t> index, int64_t newest,
                     const LanePages& before) const {
    Regrouping now;
    std::vector<int64_t> tokens(newest / page_ + 1);  // by number
    for (int32_t token : index) ++tokens[token / page_];
    now.place.resize(tokens.size());
    now.fresh.resize(tokens.size());
    size_t old = 0;
    for (int64_t number = 0; number < std::ssize(tokens); ++number) {
      if (tokens[number] == 0) continue;
      while (old < before.number.size() && before.number[old] < number) ++old;
      const bool was = old < before.number.size() && before.number[old] == number;
      now.place[number] = std::ssize(now.pages.number);
      // A round that took tokens from a page left it fewer than it had.
      now.fresh[number] =
          !was || tokens[number] != before.tokens[old] + (number == newest / page_ ? 1 : 0);
      if (!now.fresh[number]) {
        now.from.push_back(static_cast<int64_t>(old));
        now.to.push_back(now.place[number]);
      }
      now.pages.number.push_back(number);
      now.pages.tokens.push_back(tokens[number]);
    }
    return now;
  }

  // Gives the pages of `now` the bounds they had; fresh ones are bounded by nothing yet.
  static void CarryBounds(Regrouping& now, int64_t key_width, LanePages& before) {
    LanePages& pages = now.pages;
    const int64_t count = std::ssize(pages.number);
    if (std::ssize(now.from) == count && pages.number == before.number) {
      pages.low = std::move(before.low);
      pages.high = std::move(before.high);
      return;
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    pages.low = at::full({count, key_width}, kInfinity);
    pages.high = at::full({count, key_width}, -kInfinity);
    if (now.from.empty()) return;
    const at::Tensor from = at::tensor(now.from, at::kLong), to = at::tensor(now.to, at::kLong);
    pages.low.index_copy_(0, to, before.low.index_select(0, from));
    pages.high.index_copy_(0, to, before.high.index_select(0, from));
  }

  // place: of each slot's page.
  void Date(int64_t budget, const Lane& lane, const LanePages& pages,
            const std::vector<int64_t>& place) const {
    const CacheView& cache = lane.cache();
    const absl::Span<float> dates = lane.cache().column(0, lane.layer(), lane.head());
    const float now = static_cast<float>(cache.newest() + 1);
    std::vector<float> date(pages.number.size());
    for (size_t slot = 0; slot < dates.size(); ++slot) {
      float& of_page = date[place[slot]];
      if (dates[slot] > of_page || std::isnan(dates[slot])) of_page = dates[slot];
    }
    const at::Tensor scores = PageScores(budget, lane, pages);
    const float* score = scores.const_data_ptr<float>();
    const at::Tensor used = Used(budget, scores);
    for (size_t page = 0; page < date.size(); ++page) {
      if (used.const_data_ptr<bool>()[page]) date[page] = now;
      if (page + 1 == date.size() && pages.tokens[page] == 1) date[page] = now;  // just opened
      if (std::isnan(score[page])) date[page] = score[page];
    }
    for (size_t slot = 0; slot < dates.size(); ++slot) dates[slot] = date[place[slot]];
  }

  // Log of the newest query's softmax over pages, of the query head that gives a page most. A
  // page's logit is the least upper bound that channels one by one put on those of its tokens; not
  // scaled, and of the `budget` highest pages alone (three at least), as published. A page none of
  // whose tokens the query sees has none. fp32 [pages]
  at::Tensor PageScores(int64_t budget, const Lane& lane, const LanePages& pages) const {
    const at::Tensor query = lane.cache()
                                 .queries(lane.layer())
                                 .select(0, -1)
                                 .narrow(0, lane.head() * lane.group(), lane.group())
                                 .to(at::kFloat);  // [group, width]
    const AttentionFacts attention = lane.cache().attention(lane.layer());
    at::Tensor bound = query.clamp_min(0).matmul(pages.high.t()) +
                       query.clamp_max(0).matmul(pages.low.t());  // [group, pages]
    if (attention.soft_cap.has_value()) {
      bound.mul_(attention.scale);
      SoftCap(bound, attention);
      bound.div_(attention.scale);
    }
    if (attention.window.has_value()) Hide(lane.cache().newest() - *attention.window, pages, bound);
    const int64_t num_pages = bound.size(1);
    const int64_t ranked = std::min(std::max<int64_t>(3, budget), num_pages);
    const at::Tensor least =
        std::get<0>(bound.kthvalue(num_pages - ranked + 1, -1, /*keepdim=*/true));
    return bound.masked_fill(bound < least, -std::numeric_limits<float>::infinity())
        .log_softmax(-1)
        .amax(0);
  }

  // Of pages that hold nothing newer than token `last`.
  void Hide(int64_t last, const LanePages& pages, at::Tensor& bound) const {
    const auto after = std::upper_bound(
        pages.number.begin(), pages.number.end(), last,
        [this](int64_t last, int64_t number) { return last < (number + 1) * page_ - 1; });
    bound.narrow(-1, 0, after - pages.number.begin())
        .fill_(-std::numeric_limits<float>::infinity());
  }

  // bool [num_pages]
  at::Tensor Used(int64_t budget, const at::Tensor& score) const {
    if (alpha_ > 0) return score.exp() > alpha_;
    // Of equals the newer: pages are in birth order.
    const int64_t n = score.size(0);
    const at::Tensor ascending = score.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
    const int64_t seen = n - score.isneginf().sum().item<int64_t>();
    const int64_t used = std::min(budget / 2, seen);
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
        [](const Params& params, const ModelShape& shape) {
          const int64_t lanes = shape.num_layers * shape.num_kv_heads, page = params.Int("page");
          const int64_t bytes_of_page = 2 * shape.key_width * static_cast<int64_t>(sizeof(float)) +
                                        2 * int64_t{sizeof(int64_t)};
          return PolicyTraits{
              .granularity = Granularity::kHead,
              .signals = Signal::kKeys | Signal::kQueries,
              .window = 1,
              .columns = {"date"},
              .slack = params.Int("slack"),
              .published = {.recent = 1},
              .state_bytes_per_token = (lanes * bytes_of_page + page - 1) / page,
              // Broken pages: of the prompt's end, the sinks and the newest token;
              // protected spans may break more.
              .state_bytes = lanes * (3 * bytes_of_page + int64_t{sizeof(LanePages)})};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<RaasPage>(params);
    },
};

}  // namespace epikv
