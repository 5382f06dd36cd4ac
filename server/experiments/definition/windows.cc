#include "server/experiments/definition/windows.h"

#include "absl/strings/str_cat.h"
#include "server/base/durations.h"

namespace epikv {

Windows::Windows(const v1::Switchback& switchback)
    : length_(DurationOf(switchback.window())), wash_out_(DurationOf(switchback.wash_out())) {}

int64_t Windows::At(absl::Time time) const {
  return absl::Floor(time - absl::UnixEpoch(), length_) / length_;
}

absl::Time Windows::Begin(int64_t window) const { return absl::UnixEpoch() + window * length_; }

std::string WindowUnit(int64_t window) { return absl::StrCat("window/", window); }

std::optional<Windows> WindowsOf(const v1::Experiment& experiment) {
  if (!experiment.has_switchback()) return std::nullopt;
  return Windows(experiment.switchback());
}

}  // namespace epikv
