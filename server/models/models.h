#pragma once

#include <grpcpp/support/status.h>

#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/base/lifecycle.h"
#include "server/models/served_model.h"

namespace epikv {

// The models in service, by name, and those that only end what they have begun. Thread-safe.
class Models {
 public:
  // `lifecycle` is told which names are in service, and outlives this.
  explicit Models(Lifecycle& lifecycle) : lifecycle_(lifecycle) {}
  // Precondition: Drain.
  ~Models();

  // The model that a client asks for; no name asks for the only one. Else the error to give.
  std::variant<ModelPtr, grpc::Status> Find(absl::string_view asked) const;
  bool Has(absl::string_view name) const { return Named(name) != nullptr; }
  ModelPtr Named(absl::string_view name) const;  // in service; null: none is
  // Whether another model serves the name of this one, or none.
  bool Replaced(const ServedModel& model) const;
  // Whether this model is in service. Unlike lock(), it never leaves the caller with the last
  // reference: on its own engine's thread a model cannot end.
  bool Serves(const std::weak_ptr<const ServedModel>& model) const;
  std::vector<ModelPtr> InService() const;  // sorted by name
  // Beside those in service, the ones whose requests have not all ended.
  std::vector<ModelPtr> Live() const;

  // `model` serves its name from now on. One that did so before takes no new request; it goes when
  // its last one has ended. False: there is one, and it is not to be replaced.
  bool Put(ModelPtr model, bool replace = true);
  // Out of service; what it has begun may go on until `deadline`. False: no such model.
  bool Remove(const std::string& name, absl::Time deadline);

  // Who asks for this name, while no model has it, is told to wait. Empty: none is being loaded.
  void SetLoading(const std::string& name);

  // New requests are refused, of models to come too, until Resume. Both tell the lifecycle.
  void StartDraining();
  bool Resume();          // false: Drain was called
  bool stopping() const;  // Drain was called
  // Refuses new requests for good and blocks until all have ended, at most until `deadline`; then
  // cancels the rest.
  void Drain(absl::Time deadline);

 private:
  // Ends with the model's last request.
  struct Retiring {
    ModelPtr model;
    std::thread thread;
    bool gone = false;
  };
  void Retire(ModelPtr model, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::list<Retiring> TakeGone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Lifecycle& lifecycle_;
  mutable absl::Mutex mu_;
  std::map<std::string, ModelPtr, std::less<>> in_service_ ABSL_GUARDED_BY(mu_);
  std::list<Retiring> retiring_ ABSL_GUARDED_BY(mu_);
  std::string loading_ ABSL_GUARDED_BY(mu_);
  bool draining_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace epikv
