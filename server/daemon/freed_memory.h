#pragma once

#include "absl/time/time.h"

namespace epikv {

// When what is freed goes back to the system. At once while models load: the weights as they were
// read would be the peak. Later while they serve: what one step frees the next one takes.
void ReturnFreedMemory(absl::Duration after);
inline constexpr absl::Duration kFreedAfter = absl::Milliseconds(500);  // while they serve

// What this thread has freed goes back to the system now. It would keep it until it needs memory
// again.
void ReturnFreedMemoryOfThread();

}  // namespace epikv
