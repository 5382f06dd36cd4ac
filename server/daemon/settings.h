#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "epikv/v1/config.pb.h"
#include "runtime/admission/admission.h"
#include "server/base/log.h"
#include "server/daemon/config.h"
#include "server/models/models.h"

namespace epikv {

// The settings of the run, of which some can be changed while it goes on. Thread-safe.
class Settings {
 public:
  // Brings the daemon to new settings. Not OK: they cannot be, and nothing was changed.
  using Apply = std::function<absl::Status(const Config&)>;

  // config: checked. apply: called one at a time. log: is told of changes.
  Settings(v1::ServerConfig config, Apply apply, const Log& log)
      : apply_(std::move(apply)), log_(log), config_(std::move(config)) {}

  v1::ServerConfig Get() const;
  Config config() const { return ConfigOf(Get()); }

  // Calls `use` with the settings as they are; none change meanwhile.
  void Use(const std::function<void(const Config&)>& use);

  // Takes `fields` from `wanted` and gives what holds now; or says all that is wrong and changes
  // nothing.
  std::variant<v1::ServerConfig, Rejection> Update(const v1::ServerConfig& wanted,
                                                   const std::vector<std::string>& fields,
                                                   bool validate_only);

 private:
  const Apply apply_;
  const Log& log_;
  absl::Mutex updating_ ABSL_ACQUIRED_BEFORE(mu_);
  mutable absl::Mutex mu_;
  v1::ServerConfig config_ ABSL_GUARDED_BY(mu_);
};

// The one way of a loaded model into service: with the settings as they are by then.
// ALREADY_EXISTS: its name is served, and is not to be replaced.
absl::Status PutInService(ModelPtr model, bool replace, Settings& settings, Models& models);

}  // namespace epikv
