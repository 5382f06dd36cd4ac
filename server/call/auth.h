#pragma once

#include <grpcpp/support/status.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "runtime/base/steady_cond_var.h"
#include "server/base/file_contents.h"
#include "server/call/tokens.h"

namespace epikv {

// What a method of ours asks of its caller.
struct MethodRole {
  absl::string_view method;  // "GenerationService/Generate"
  Role role;
};
absl::Span<const MethodRole> MethodRoles();

struct AuthOptions {
  std::string tokens_file;    // empty: everyone is anonymous and may do everything
  bool certificates = false;  // clients show certificates that were verified
  absl::Duration poll = absl::Seconds(1);
  // The file has changed: it was taken into use, or, not OK, it was not. Of the polling thread.
  std::function<void(const absl::Status&)> on_reload = [](const absl::Status&) {};
};

// Tells who calls by the token that he shows, and whether he may. Thread-safe.
class Authenticator {
 public:
  // The error names the file.
  static absl::StatusOr<std::unique_ptr<Authenticator>> Create(AuthOptions options);
  ~Authenticator();

  // What a caller shows.
  struct Credentials {
    std::vector<absl::string_view> authorization;  // the values of that header
    std::vector<absl::string_view> certificate;  // the subject alternative names of his certificate
  };

  // Whether Credentials::certificate is looked at.
  bool reads_certificates() const { return options_.certificates; }

  // A token goes before a certificate. Refuses with UNAUTHENTICATED, or, once `caller` is known and
  // set, with PERMISSION_DENIED.
  std::optional<grpc::Status> Admit(absl::string_view method, const Credentials& shown,
                                    Identity& caller) const;

 private:
  explicit Authenticator(AuthOptions options) : options_(std::move(options)) {}
  absl::Status Load();
  void Poll();
  std::shared_ptr<const TokenTable> tokens() const;

  const AuthOptions options_;
  FileVersion loaded_;  // of the polling thread
  mutable absl::Mutex mu_;
  std::shared_ptr<const TokenTable> tokens_ ABSL_GUARDED_BY(mu_);  // null: none are asked for
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  SteadyCondVar stop_;
  std::thread thread_;
};

}  // namespace epikv
