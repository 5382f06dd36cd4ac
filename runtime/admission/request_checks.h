#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/admission/rejection.h"
#include "runtime/request/request.h"

namespace epikv {

constexpr size_t kMaxTenantBytes = 64;

// Adds what is wrong with the fields of `options` that mean the same under every policy and budget:
// ids, tokens, sampling, stops, what is asked of the output, scheduling.
void CheckRequest(const RequestOptions& options, int64_t vocab_size, int64_t max_running_requests,
                  Violations& violations);

}  // namespace epikv
