#include "runtime/admission/unknown_policy.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "runtime/text/edit_distance.h"

namespace epikv {

std::string UnknownPolicy(PolicyCatalog catalog, absl::string_view name) {
  std::vector<std::pair<size_t, absl::string_view>> close;
  for (const PolicySpec* spec : catalog) {
    if (IsClose(name, spec->name)) close.emplace_back(EditDistance(name, spec->name), spec->name);
  }
  std::sort(close.begin(), close.end());
  std::vector<absl::string_view> nearest;
  for (const auto& [distance, known] : close) {
    if (distance <= close.front().first + 1) nearest.push_back(known);
  }
  return absl::StrCat(
      "unknown policy '", name, "'; ",
      nearest.empty() ? "" : absl::StrCat("did you mean ", absl::StrJoin(nearest, ", "), "? "),
      "`epikv policies --all` lists all");
}

}  // namespace epikv
