#include "runtime/admission/kv_demand.h"

#include <algorithm>

namespace epikv {
namespace {

// Most tokens that a lane holds while a prompt is cached in chunks, with a round after each.
int64_t PeakByChunk(int64_t prefill, int64_t budget, int64_t chunk) {
  const int64_t whole = prefill / chunk * chunk;  // the last chunk may be a part of one
  const int64_t in_last_part = std::min(budget, whole) + prefill - whole;
  if (whole == 0) return in_last_part;
  return std::max(in_last_part, std::min(budget, whole - chunk) + chunk);
}

// Most tokens of a lane, until the prompt is cached and settled, and from then on.
struct LaneRoom {
  int64_t prefill = 0, decode = 0;
};

// Tokens that a lane holds until the first round behind packets, which are cached at once: it comes
// at the next multiple of a chunk.
int64_t BeforeFirstRound(const Request& request, int64_t chunk) {
  return std::min(request.prefill_tokens(), (request.packet_tokens / chunk + 1) * chunk);
}

// Of a lane that is held to its own budget.
LaneRoom RoomOf(const Request& request, int64_t lane, int64_t budget, int64_t longest,
                int64_t chunk) {
  const int64_t prefill = request.prefill_tokens(), missing = request.MissingOf(lane);
  const int64_t held = prefill - missing;  // if nothing is evicted
  if (!request.traits.evicts) return {.prefill = held, .decode = longest - missing};
  LaneRoom room{.prefill = held,
                .decode = std::min(std::min(held, budget) + longest - prefill,
                                   budget + request.traits.slack + 1)};
  if (request.traits.prompt == PromptEviction::kByChunk) {
    const int64_t first =
        request.packet_tokens > 0 ? BeforeFirstRound(request, chunk) - missing : 0;
    room.prefill = std::min(held, std::max(PeakByChunk(prefill, budget, chunk), first));
  }
  return room;
}

// Of lanes that share budgets, behind packets that may leave them unequal. No lane is held to its
// own budget then, and all share their room evenly (SequenceCache::ShareRoom): sums count, and what
// a lane holds until its first round.
std::vector<LaneRoom> SharedRooms(const Request& request, const std::vector<int64_t>& budgets,
                                  int64_t longest, int64_t chunk) {
  const int64_t prefill = request.prefill_tokens(), slack = request.traits.slack;
  const bool by_chunk = request.traits.prompt == PromptEviction::kByChunk;
  const auto lanes = std::ssize(budgets);
  int64_t budget = 0, missing = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    budget += budgets[lane];
    missing += request.MissingOf(lane);
  }
  const bool fits = prefill * lanes - missing <= budget + chunk * lanes;
  const bool never_evicts = longest * lanes - missing <= budget + (slack + 1) * lanes;
  std::vector<LaneRoom> rooms;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t gone = request.MissingOf(lane);
    rooms.push_back(
        {.prefill = !by_chunk || fits
                        ? prefill - gone
                        : std::max(budgets[lane] + chunk, BeforeFirstRound(request, chunk) - gone),
         .decode = never_evicts ? longest - gone : budgets[lane] + slack + 1});
  }
  return rooms;
}

std::vector<LaneRoom> RoomsOf(const Request& request, const std::vector<int64_t>& budgets,
                              int64_t longest, int64_t chunk) {
  const PolicyTraits& traits = request.traits;
  if (traits.evicts && traits.pool != Pool::kLane && request.packet_tokens > 0) {
    return SharedRooms(request, budgets, longest, chunk);
  }
  std::vector<LaneRoom> rooms;
  for (int64_t lane = 0; lane < std::ssize(budgets); ++lane) {
    rooms.push_back(RoomOf(request, lane, budgets[lane], longest, chunk));
  }
  return rooms;
}

}  // namespace

int64_t ScratchRows(const ScratchPass& pass, int64_t prefill) {
  if (pass.chunk > 0) return std::min(prefill, pass.chunk) + pass.more;
  return pass.drafts ? 0 : pass.lookahead;
}

KvDemand DemandOf(const Request& request, const std::vector<int64_t>& budgets, int64_t longest,
                  int64_t chunk, const KvLayout& layout) {
  KvDemand demand{.budget = budgets};
  const int64_t prefill = request.prefill_tokens();
  const ScratchPass& pass = request.traits.pass;
  for (int64_t lane = 0; lane < std::ssize(budgets); ++lane) {
    const bool over = budgets[lane] < prefill - request.MissingOf(lane);
    demand.passes |= request.traits.evicts && pass.any() && over;
  }
  const int64_t scratch = demand.passes ? ScratchRows(pass, prefill) : 0;
  for (const LaneRoom& room : RoomsOf(request, budgets, longest, chunk)) {
    demand.prefill.push_back(std::max(room.prefill + scratch, room.decode));
    demand.decode.push_back(room.decode);
  }
  int64_t step_rows = std::min(prefill, chunk);
  if (demand.passes && pass.chunk > 0) step_rows = std::max(step_rows, ScratchPass::kStepTokens);
  demand.prefill_bytes = BytesOf(layout, demand.prefill) + step_rows * layout.step_bytes_per_row +
                         (demand.passes ? layout.pass_bytes : 0);
  demand.decode_bytes =
      BytesOf(layout, demand.decode) + (1 + request.guess_tokens) * layout.step_bytes_per_row;
  return demand;
}

void AddDraft(const Request& request, const KvLayout& layout, KvDemand& demand) {
  const ScratchPass& pass = request.traits.pass;
  if (!demand.passes || !pass.drafts) return;
  for (const int64_t budget : demand.budget) {
    demand.draft.push_back(std::min(budget, request.prefill_tokens()) + pass.lookahead);
  }
  demand.prefill_bytes += BytesOf(layout, demand.draft);
}

}  // namespace epikv
