#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "runtime/request/request.h"

namespace epikv {

// Where a step's time went. CPU: of the engine thread.
enum class Stage {
  kSchedule,
  kDraft,
  kForward,
  kAttention,  // the operator: a part of kForward. No CPU time: reading it costs a system call
  kTaps,       // a part of kForward
  kSample,
  kDeliver,
  kObserve,
  kEvict,
};
inline constexpr int kNumStages = 9;

struct StepStats {
  int64_t prefill_tokens = 0;
  int64_t decode_tokens = 0;                        // accepted guesses among them
  int64_t guessed_tokens = 0, accepted_tokens = 0;  // that ran ahead, and came true
  int64_t pass_tokens = 0;                          // of scratch passes
  int64_t sequences = 0;
  absl::Duration wall[kNumStages];
  absl::Duration cpu[kNumStages];
  absl::Duration total_wall, total_cpu;
  // After the step; each completion of several counts as running.
  int64_t running = 0, waiting = 0;
  // The same by the priority that was asked for.
  std::array<int64_t, kNumPriorities> running_by_priority{}, waiting_by_priority{};
  // Of a request that comes behind all that waits. Absent before anything was measured.
  std::optional<absl::Duration> predicted_wait;
  int64_t kv_used_bytes = 0, kv_reserved_bytes = 0, kv_capacity_bytes = 0;
  int64_t tier_reserved_bytes = 0, tier_capacity_bytes = 0;
  int64_t kv_prefix_bytes = 0;  // of cached prefixes, beside what is reserved
  // Since the start: K/V rows that made room for others, and the longest time that one admission
  // took to move them.
  int64_t kv_rows_moved = 0;
  absl::Duration kv_longest_move;
  // Of the process: the KV pool up to the last row that was ever held, and the attention rows that
  // running requests keep for their policies.
  int64_t kv_touched_bytes = 0, signal_bytes = 0;
};

}  // namespace epikv
