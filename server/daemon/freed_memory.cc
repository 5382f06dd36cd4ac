#include "server/daemon/freed_memory.h"

#ifdef EPIKV_MIMALLOC
#include <mimalloc.h>
#endif

namespace epikv {

void ReturnFreedMemory(absl::Duration after) {
#ifdef EPIKV_MIMALLOC
  mi_option_set(mi_option_decommit_delay, absl::ToInt64Milliseconds(after));
  mi_option_set(mi_option_segment_decommit_delay, absl::ToInt64Milliseconds(after));
#endif
}

void ReturnFreedMemoryOfThread() {
#ifdef EPIKV_MIMALLOC
  mi_collect(/*force=*/true);
#endif
}

}  // namespace epikv
