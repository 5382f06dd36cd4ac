#include "server/daemon/settings.h"

#include <google/protobuf/util/field_mask_util.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/errors.h"
#include "server/daemon/config_checks.h"
#include "server/daemon/setting_text.h"

namespace epikv {
namespace {

// What can be changed while requests run.
constexpr absl::string_view kChangeable[] = {"max_queued_requests",
                                             "max_queued_tokens",
                                             "default_max_output_tokens",
                                             "default_policy",
                                             "default_equal_protection",
                                             "drain_seconds",
                                             "log_level"};

bool Changeable(absl::string_view field) {
  return std::find(std::begin(kChangeable), std::end(kChangeable), field) != std::end(kChangeable);
}

// "drain_seconds: 5, log_level: "debug""
std::string Values(const v1::ServerConfig& config, const std::vector<std::string>& fields) {
  return absl::StrJoin(fields, ", ", [&config](std::string* out, const std::string& name) {
    const auto* field = v1::ServerConfig::descriptor()->FindFieldByName(name);
    absl::StrAppend(out, name, ": ", ValueText(config, *field));
  });
}

}  // namespace

v1::ServerConfig Settings::Get() const {
  absl::MutexLock lock(&mu_);
  return config_;
}

void Settings::Use(const std::function<void(const Config&)>& use) {
  absl::MutexLock updating(&updating_);
  use(config());
}

std::variant<v1::ServerConfig, Rejection> Settings::Update(const v1::ServerConfig& wanted,
                                                           const std::vector<std::string>& fields,
                                                           bool validate_only) {
  std::vector<FieldViolation> violations;
  if (fields.empty()) violations.push_back({"update_mask", "must name at least one field"});
  google::protobuf::FieldMask mask;
  for (const std::string& field : fields) {
    if (Changeable(field)) {
      mask.add_paths(field);
    } else {
      violations.push_back(
          {"update_mask",
           absl::StrCat("'", field, "' cannot be changed while the daemon runs; these can: ",
                        absl::StrJoin(kChangeable, ", "))});
    }
  }
  absl::MutexLock updating(&updating_);
  v1::ServerConfig next = Get();
  google::protobuf::util::FieldMaskUtil::MergeMessageTo(wanted, mask, {}, &next);
  for (FieldViolation& violation : ViolationsOf(next)) {
    violations.push_back({absl::StrCat("config.", violation.field), violation.description});
  }
  if (!violations.empty()) return InvalidRequest(std::move(violations));
  if (validate_only) return next;
  if (absl::Status status = apply_(ConfigOf(next)); !status.ok()) {
    return InvalidRequest({{"config", std::string(status.message())}});
  }
  log_.Info(absl::StrCat(
      "changed over the port for operators: ", Values(next, fields),
      "; this holds until the daemon ends: write it into the configuration to keep it"));
  absl::MutexLock lock(&mu_);
  config_ = next;
  return next;
}

absl::Status PutInService(ModelPtr model, bool replace, Settings& settings, Models& models) {
  absl::Status status;
  settings.Use([&](const Config& now) {
    status = Apply(now.serving, *model);
    if (!status.ok() || models.Put(model, replace)) return;
    status = absl::AlreadyExistsError(
        absl::StrCat("a model '", model->name, "' is served already; give it another name"));
  });
  return status;
}

}  // namespace epikv
