#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace epikv {

// Bytes that one model's constraints hold, and which tenant's they are. A tenant may ask for more
// while he holds no more than is left to all: one alone half of the limit, two a third each, so
// that some is left to one who comes (dynamic thresholds: Choudhury and Hahne, IEEE/ACM ToN 6(2),
// 1998). What was begun may grow up to the limit. Thread-safe.
class ConstraintMemory : public std::enable_shared_from_this<ConstraintMemory> {
 public:
  // One tenant's part; what holds some of it keeps it alive. Thread-safe.
  class Share {
   public:
    Share(std::string tenant, std::shared_ptr<ConstraintMemory> memory);
    ~Share();

    // Below 0: gives back.
    void Hold(int64_t bytes);
    int64_t bytes() const { return bytes_; }
    // What all tenants' constraints leave of the limit.
    int64_t left() const { return memory_->limit_ - *memory_->bytes_; }
    // It may ask for no more.
    bool IsFull() const { return bytes() > left(); }
    // The limit is exceeded, and this share is no smaller than the mean.
    bool MustShrink() const {
      return left() < 0 && bytes() * memory_->num_shares_ >= *memory_->bytes_;
    }

   private:
    const std::string tenant_;
    const std::shared_ptr<ConstraintMemory> memory_;
    std::atomic<int64_t> bytes_ = 0;
  };

  explicit ConstraintMemory(int64_t limit) : limit_(limit) {}

  std::shared_ptr<Share> Of(const std::string& tenant);
  // Of all tenants. It may outlive this.
  std::shared_ptr<const std::atomic<int64_t>> bytes() const { return bytes_; }

 private:
  const int64_t limit_;
  const std::shared_ptr<std::atomic<int64_t>> bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  std::atomic<int64_t> num_shares_ = 0;  // that live
  absl::Mutex mu_;
  absl::flat_hash_map<std::string, std::weak_ptr<Share>> shares_ ABSL_GUARDED_BY(mu_);  // that live
};

}  // namespace epikv
