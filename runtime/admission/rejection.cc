#include "runtime/admission/rejection.h"

#include "absl/strings/str_cat.h"

namespace epikv {

void Violations::Add(absl::string_view field, std::string description) {
  if (rejection_.violations.size() == kMaxViolations) return;
  rejection_.violations.push_back({std::string(field), std::move(description)});
}

void Violations::Because(absl::string_view reason, std::map<std::string, std::string> metadata,
                         absl::StatusCode code) {
  if (!rejection_.reason.empty()) return;
  rejection_.reason = std::string(reason);
  rejection_.metadata = std::move(metadata);
  rejection_.code = code;
}

Rejection Violations::Take() {
  if (rejection_.reason.empty()) rejection_.reason = "INVALID_REQUEST";
  const FieldViolation& first = rejection_.violations.front();
  rejection_.message = absl::StrCat(first.field, ": ", first.description);
  if (rejection_.violations.size() > 1) {
    absl::StrAppend(&rejection_.message, " (and ", rejection_.violations.size() - 1, " more)");
    // Several kinds of fault at once are one bad request.
    rejection_.code = absl::StatusCode::kInvalidArgument;
  }
  return std::move(rejection_);
}

}  // namespace epikv
