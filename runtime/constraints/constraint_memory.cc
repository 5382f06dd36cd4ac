#include "runtime/constraints/constraint_memory.h"

#include <utility>

namespace epikv {

ConstraintMemory::Share::Share(std::string tenant, std::shared_ptr<ConstraintMemory> memory)
    : tenant_(std::move(tenant)), memory_(std::move(memory)) {
  ++memory_->num_shares_;
}

ConstraintMemory::Share::~Share() {
  --memory_->num_shares_;
  absl::MutexLock lock(&memory_->mu_);
  const auto found = memory_->shares_.find(tenant_);
  // Unless the tenant has another by now.
  if (found != memory_->shares_.end() && found->second.expired()) memory_->shares_.erase(found);
}

void ConstraintMemory::Share::Hold(int64_t bytes) {
  bytes_ += bytes;
  *memory_->bytes_ += bytes;
}

std::shared_ptr<ConstraintMemory::Share> ConstraintMemory::Of(const std::string& tenant) {
  std::shared_ptr<Share> share;
  absl::MutexLock lock(&mu_);
  std::weak_ptr<Share>& known = shares_[tenant];
  share = known.lock();
  if (share == nullptr) known = share = std::make_shared<Share>(tenant, shared_from_this());
  return share;
}

}  // namespace epikv
