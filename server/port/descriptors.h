#pragma once

#include <cstdint>

namespace epikv {

// Raises the limit of open descriptors to what the process may have, and says what it is then.
// Shells and supervisors set a low one for programs that use select(2), which none of ours does.
int64_t RaiseDescriptorLimit();

// How many connections there is room for below this limit, beside the descriptors that are open
// and a reserve for models, stores, logs and scrapes.
int64_t ConnectionsWithin(int64_t descriptor_limit);

}  // namespace epikv
