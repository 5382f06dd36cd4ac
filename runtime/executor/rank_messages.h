#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "policies/spec.h"
#include "runtime/request/request.h"
#include "runtime/step/step_executor.h"

// What rank 0 tells the others of requests and steps, as JSON: what an executor does with them, but
// for sampling, which rank 0 alone does.

namespace epikv {

nlohmann::json RequestMessage(const Request& request);
// Its policy is one of the catalog, over the shard's shape. Throws where the message is no request.
std::unique_ptr<const Request> RequestOf(const nlohmann::json& message, PolicyCatalog catalog,
                                         const ModelShape& shape);

nlohmann::json ItemsMessage(absl::Span<const WorkItem> items);

// Items that own what they point to, but for their requests.
class ReceivedItems {
 public:
  ReceivedItems() = default;
  // `request`: of a sequence that is open.
  ReceivedItems(const nlohmann::json& message,
                absl::FunctionRef<const Request*(SequenceId)> request);

  absl::Span<const WorkItem> items() const { return items_; }

 private:
  std::vector<std::vector<int32_t>> tokens_;
  std::vector<WorkItem> items_;
};

}  // namespace epikv
