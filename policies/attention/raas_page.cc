#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "policies/loops.h"
#include "policies/policy.h"

namespace epikv {
namespace {

const ParamSpec kRaasPageParams[] = {
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

// The pages of which a lane holds tokens, oldest first, and what bounds those tokens' keys.
struct LanePages {
  std::vector<int64_t> number;  // index / page. [pages]
  std::vector<int64_t> tokens;  // cached. [pages]
  std::vector<float> date;      // the column's. [pages]
  KeyBounds bounds;             // of the pages' keys
  int64_t held = 0;             // tokens of all pages
};

struct PageState final : PolicyState {
  std::unique_ptr<PolicyState> Clone() const override { return std::make_unique<PageState>(*this); }

  int64_t budget = 0;            // pages
  std::vector<LanePages> lanes;  // [layers x kv_heads]
};

// Column `date`, alike for all tokens of a page: the last decode step (index of its token, plus 1)
// in which the lane used the page, at first that in which its first token was cached. Of a prompt's
// pages 0.
//
// A step of a lane takes 4 x group x key_width FLOP and 8 x key_width bytes a page, an exponential
// for each page and query head, and a look at each token, whose date may be another.
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
      CacheView& cache = step.cache;
      PageState& state = static_cast<PageState&>(*step.state);
      const int64_t heads = cache.num_kv_heads(), group = cache.num_heads() / heads;
      state.lanes.resize(cache.num_layers() * heads);
      std::vector<float> by_number(cache.newest() / page_ + 1);
      for (int64_t layer = 0; layer < cache.num_layers(); ++layer) {
        const at::Tensor queries = cache.queries(layer).select(0, -1).to(at::kFloat);
        for (int64_t head = 0; head < heads; ++head) {
          LanePages& pages = state.lanes[layer * heads + head];
          Follow(cache, layer, head, pages);
          const absl::Span<const float> of_head(
              queries.const_data_ptr<float>() + head * group * queries.size(1),
              group * queries.size(1));
          Date(PageScores(state.budget, cache, cache.attention(layer), of_head, pages),
               state.budget, cache.newest(), pages);
          for (size_t page = 0; page < pages.number.size(); ++page) {
            by_number[pages.number[page]] = pages.date[page];
          }
          SpreadGroups(cache.index(layer, head), page_, by_number.data(),
                       cache.column(0, layer, head).data());
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
  // Brings `pages` to what the lane holds after a decode step.
  void Follow(CacheView& cache, int64_t layer, int64_t head, LanePages& pages) const {
    const absl::Span<const int32_t> index = cache.index(layer, head);
    const at::Tensor keys = cache.keys(layer, head);  // [used, key_width]
    // A lane that lost no token since has one more.
    if (std::ssize(index) != pages.held + 1) Regroup(cache, layer, head, keys, pages);
    const auto newest =
        std::find(index.rbegin(), index.rend(), static_cast<int32_t>(cache.newest()));
    const at::Tensor key = keys.select(0, index.rend() - newest - 1).to(at::kFloat);
    AddToken(cache.newest(), key.const_data_ptr<float>(), pages);
  }

  // The pages of all tokens but the newest: those of the last step, but for what a round took.
  void Regroup(CacheView& cache, int64_t layer, int64_t head, const at::Tensor& keys,
               LanePages& pages) const {
    const absl::Span<const int32_t> index = cache.index(layer, head);
    const absl::Span<const float> dates = cache.column(0, layer, head);
    struct Held {
      int64_t tokens = 0;
      float date = 0;
      std::vector<int64_t> slots;  // of a page whose bounds are to be made
    };
    std::vector<Held> held(cache.newest() / page_ + 1);  // by number
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (index[slot] == cache.newest()) continue;
      Held& page = held[index[slot] / page_];
      ++page.tokens;
      if (dates[slot] > page.date || std::isnan(dates[slot])) page.date = dates[slot];
    }
    // A page that lost tokens has fewer than it had.
    std::vector<int64_t> known(held.size(), -1);  // places before, by number
    for (size_t old = 0; old < pages.number.size(); ++old) {
      const int64_t number = pages.number[old];
      if (held[number].tokens == pages.tokens[old]) known[number] = static_cast<int64_t>(old);
    }
    for (size_t slot = 0; slot < index.size(); ++slot) {
      const int64_t number = index[slot] / page_;
      if (known[number] < 0 && index[slot] != cache.newest()) {
        held[number].slots.push_back(static_cast<int64_t>(slot));
      }
    }
    const int64_t num_pages =
        std::count_if(held.begin(), held.end(), [](const Held& page) { return page.tokens > 0; });
    LanePages now{.bounds = KeyBounds(keys.size(1), num_pages + 1), .held = std::ssize(index) - 1};
    for (int64_t number = 0; number < std::ssize(held); ++number) {
      const Held& page = held[number];
      if (page.tokens == 0) continue;
      now.number.push_back(number);
      now.tokens.push_back(page.tokens);
      now.date.push_back(page.date);
      if (known[number] >= 0) {
        now.bounds.AddCopy(pages.bounds, known[number]);
      } else {
        AddBounds(keys.index_select(0, at::tensor(page.slots, at::kLong)), now.bounds);
      }
    }
    pages = std::move(now);
  }

  // Of one page's keys, [tokens, key_width].
  static void AddBounds(const at::Tensor& keys, KeyBounds& bounds) {
    const at::Tensor rows = keys.to(at::kFloat);
    const float* const key = rows.const_data_ptr<float>();
    bounds.Add(key);
    for (int64_t token = 1; token < rows.size(0); ++token) {
      bounds.Widen(bounds.size() - 1, key + token * rows.size(1));
    }
  }

  void AddToken(int64_t token, const float* key, LanePages& pages) const {
    ++pages.held;
    if (pages.number.empty() || pages.number.back() != token / page_) {
      pages.number.push_back(token / page_);
      pages.tokens.push_back(1);
      pages.date.push_back(0);
      pages.bounds.Add(key);
      return;
    }
    ++pages.tokens.back();
    pages.bounds.Widen(pages.bounds.size() - 1, key);
  }

  void Date(const std::vector<float>& score, int64_t budget, int64_t newest,
            LanePages& pages) const {
    const float now = static_cast<float>(newest + 1);
    for (const int64_t page : Used(budget, score)) pages.date[page] = now;
    if (pages.tokens.back() == 1) pages.date.back() = now;  // just opened
    for (size_t page = 0; page < score.size(); ++page) {
      if (std::isnan(score[page])) pages.date[page] = score[page];
    }
  }

  // Log of the newest query's softmax over pages, of the query head that gives a page most. A
  // page's logit is the least upper bound that channels one by one put on those of its tokens; not
  // scaled, and of the `budget` highest pages alone (three at least), as published. A page none of
  // whose tokens the query sees has none; one of which it sees some counts whole, for the bound
  // holds for these, too. queries: [group, width]. [pages]
  std::vector<float> PageScores(int64_t budget, const CacheView& cache,
                                const AttentionFacts& attention, absl::Span<const float> queries,
                                const LanePages& pages) const {
    const int64_t num_pages = pages.bounds.size(), stride = pages.bounds.stride();
    const int64_t group = cache.num_heads() / cache.num_kv_heads();
    const int64_t ranked = std::min(std::max<int64_t>(3, budget), num_pages);
    const int64_t hidden =
        attention.window.has_value() ? Hidden(cache.newest() - *attention.window, pages) : 0;
    std::vector<float> bounds = pages.bounds.Most(queries);  // [group, stride]
    std::vector<float> lowest(num_pages - ranked + 1), score(num_pages, kNone);
    for (int64_t head = 0; head < group; ++head) {
      const absl::Span<float> bound(bounds.data() + head * stride, num_pages);
      if (attention.soft_cap.has_value()) Cap(attention, bound);
      std::fill(bound.begin(), bound.begin() + hidden, kNone);
      std::partial_sort_copy(bound.begin(), bound.end(), lowest.begin(), lowest.end());
      const float least = lowest.back(), total = LogSumExp(bound, least);
      if (std::isnan(total)) return std::vector<float>(num_pages, total);
      for (int64_t page = 0; page < num_pages; ++page) {
        if (bound[page] >= least) score[page] = std::max(score[page], bound[page] - total);
      }
    }
    return score;
  }

  // Bounds are not scaled, the cap's logits are.
  static void Cap(const AttentionFacts& attention, absl::Span<float> bound) {
    for (float& x : bound) {
      x = static_cast<float>(*attention.soft_cap / attention.scale *
                             std::tanh(x * attention.scale / *attention.soft_cap));
    }
  }

  // Pages that hold nothing newer than token `last`: the first ones.
  int64_t Hidden(int64_t last, const LanePages& pages) const {
    return std::upper_bound(
               pages.number.begin(), pages.number.end(), last,
               [this](int64_t last, int64_t number) { return last < (number + 1) * page_ - 1; }) -
           pages.number.begin();
  }

  // Pages that count as used. score: [pages], all numbers or none.
  std::vector<int64_t> Used(int64_t budget, const std::vector<float>& score) const {
    std::vector<int64_t> used;
    for (int64_t page = 0; page < std::ssize(score); ++page) {
      if (alpha_ > 0 ? std::exp(score[page]) > alpha_ : score[page] > kNone) used.push_back(page);
    }
    if (alpha_ > 0 || std::ssize(used) <= budget / 2) return used;
    // Of equals the newer: pages are in birth order.
    std::nth_element(
        used.begin(), used.begin() + budget / 2, used.end(),
        [&](int64_t a, int64_t b) { return std::pair(score[a], a) > std::pair(score[b], b); });
    used.resize(budget / 2);
    return used;
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
    struct Open {
      int64_t tokens = 0;  // unprotected
      float date = 0;
    };
    std::vector<Open> open(cache.newest() / page_ + 1);  // by number
    for (size_t slot = 0; slot < index.size(); ++slot) {
      if (cache.protection().Covers(index[slot], cache.newest())) continue;
      if (std::isnan(date[slot])) {
        return absl::InternalError(absl::StrCat("the date of token ", index[slot], " is NaN"));
      }
      Open& page = open[index[slot] / page_];
      ++page.tokens;
      page.date = date[slot];
    }
    std::vector<std::pair<float, int64_t>> oldest;  // (date, number), as a heap
    for (int64_t number = 0; number < std::ssize(open); ++number) {
      if (open[number].tokens > 0) oldest.emplace_back(open[number].date, number);
    }
    std::make_heap(oldest.begin(), oldest.end(), std::greater<>());
    std::vector<bool> goes(open.size());
    int64_t going = 0;
    while (going < count && !oldest.empty()) {
      std::pop_heap(oldest.begin(), oldest.end(), std::greater<>());
      goes[oldest.back().second] = true;
      going += open[oldest.back().second].tokens;
      oldest.pop_back();
    }
    for (const int32_t token : index) {
      if (goes[token / page_] && !cache.protection().Covers(token, cache.newest())) {
        victims.push_back(token);
      }
    }
    if (going >= count) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(count, " tokens must go but only ", going, " may"));
  }

  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  const int64_t page_;
  const double alpha_;
};

}  // namespace

extern constinit const PolicySpec kRaasPage{
    .name = "raas_page",
    .summary = "drops the pages of neighbouring tokens that were longest not used",
    .paper = "arXiv 2502.11147 (RaaS)",
    .evidence = "golden: DerekHJH/RaaS 71cb3c7 `RaaSCache`; groups: raas_page_test.cc",
    .params = kRaasPageParams,
    .traits =
        [](const Params& params, const ModelShape& shape) {
          const int64_t lanes = shape.num_layers * shape.num_kv_heads, page = params.Int("page");
          const int64_t bytes_of_page = 2 * shape.key_width * static_cast<int64_t>(sizeof(float)) +
                                        2 * int64_t{sizeof(int64_t)} + int64_t{sizeof(float)};
          return PolicyTraits{
              .granularity = Granularity::kHead,
              .signals = Signal::kKeys | Signal::kQueries,
              .window = 1,
              .columns = {"date"},
              .slack = params.Int("slack"),
              .published = {.recent = 1},
              .state_bytes_per_token = (lanes * bytes_of_page + page - 1) / page,
              // Broken pages: of the prompt's end, the sinks and the newest token; protected spans
              // may break more. And a block of bounds that is not full.
              .state_bytes = lanes * ((3 + KeyBounds::kBlock - 1) * bytes_of_page +
                                      int64_t{sizeof(LanePages)})};
        },
    .make = [](const Params& params, const ModelShape&) -> std::shared_ptr<const Policy> {
      return std::make_shared<RaasPage>(params);
    },
};

}  // namespace epikv
