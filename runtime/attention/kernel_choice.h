#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

// Which of several kernels attends.

namespace epikv {

template <class Kernel>
struct KernelTiming {
  Kernel kernel;
  double microseconds = 0;  // of one layer; the least of several runs
};

// The kernel that `asked` names. With "auto" the fastest; but if `deterministic` the first of the
// enumeration: bits are the kernel's, and what is fastest differs from start to start and from
// replica to replica. Adds a line to `description`. INVALID_ARGUMENT, with what there is, for
// another name. setting, what: for people. timings: of the kernels that this processor and model
// have, fastest first; not empty.
template <class Kernel>
absl::StatusOr<Kernel> ChooseKernel(absl::string_view setting, absl::string_view asked,
                                    bool deterministic, absl::string_view what,
                                    const std::vector<KernelTiming<Kernel>>& timings,
                                    absl::string_view (*name)(Kernel),
                                    std::vector<std::string>& description) {
  std::string line = absl::StrCat(what, ":");
  std::vector<absl::string_view> names = {"auto"};
  std::optional<Kernel> chosen;
  for (const KernelTiming<Kernel>& t : timings) {
    absl::StrAppendFormat(&line, " %s %.0f", name(t.kernel), t.microseconds);
    names.push_back(name(t.kernel));
    if (asked == name(t.kernel)) chosen = t.kernel;
  }
  const bool pinned = deterministic && asked == "auto";
  if (pinned) {
    chosen = std::min_element(timings.begin(), timings.end(), [](const auto& a, const auto& b) {
               return a.kernel < b.kernel;
             })->kernel;
  } else if (asked == "auto") {
    chosen = timings.front().kernel;
  }
  if (!chosen.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        setting, " '", asked,
        "' is not available on this processor and model; these are: ", absl::StrJoin(names, ", ")));
  }
  description.push_back(
      absl::StrCat(line, "; using ", name(*chosen), pinned ? ", pinned by deterministic" : ""));
  return *chosen;
}

}  // namespace epikv
