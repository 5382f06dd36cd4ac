#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "epikv/v1/experiment.pb.h"

namespace epikv {

// The windows of a switchback experiment, by number: window n begins n lengths after 1970. Nothing
// but the definition and a time says which one a request is in, and whether it is analysed; so no
// record of it is kept, and whoever reads records finds what was dealt.
class Windows {
 public:
  // Precondition: CheckDefinition found no fault with it.
  explicit Windows(const v1::Switchback& switchback);

  int64_t At(absl::Time time) const;
  absl::Time Begin(int64_t window) const;
  absl::Time End(int64_t window) const { return Begin(window + 1); }
  // Whether what begins then is left out.
  bool IsWashedOut(absl::Time time) const { return time - Begin(At(time)) < wash_out_; }

  absl::Duration length() const { return length_; }
  absl::Duration wash_out() const { return wash_out_; }

 private:
  absl::Duration length_, wash_out_;
};

// What is dealt in its stead: "window/<number>".
std::string WindowUnit(int64_t window);

// Of a switchback experiment; of another there are none.
std::optional<Windows> WindowsOf(const v1::Experiment& experiment);

}  // namespace epikv
