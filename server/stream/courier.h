#pragma once

#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/steady_cond_var.h"
#include "server/stream/outbox.h"

namespace epikv {

// A thread that carries what the engine put into outboxes to their streams, so that the engine
// never runs transport code, and that looks for streams whose clients read nothing.
class Courier {
 public:
  // patrol: how often it looks; a fraction of the stall limit.
  explicit Courier(absl::Duration patrol);
  // Precondition: no outbox posts any more.
  ~Courier();

  // Outbox::Deliver follows on the courier's thread.
  void Post(std::shared_ptr<Outbox> outbox);
  // Outbox::DeliverLate follows there after `delay`, if the outbox still lives.
  void ComeBack(std::weak_ptr<Outbox> outbox, absl::Duration delay);
  // Outbox::CheckStall is called now and then while the outbox lives.
  void Watch(std::weak_ptr<Outbox> outbox);

 private:
  void Run();
  // When something was posted, or is due, or at `until`.
  std::vector<std::shared_ptr<Outbox>> TakePosted(absl::Time until);
  std::vector<std::weak_ptr<Outbox>> TakeDue();
  std::vector<std::shared_ptr<Outbox>> LiveOutboxes();

  const absl::Duration patrol_;
  absl::Mutex mu_;
  SteadyCondVar changed_;  // posted_, due_ or stopping_
  std::vector<std::shared_ptr<Outbox>> posted_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<Outbox>> watched_ ABSL_GUARDED_BY(mu_);
  std::multimap<absl::Time, std::weak_ptr<Outbox>> due_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace epikv
