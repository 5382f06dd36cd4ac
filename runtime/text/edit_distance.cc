#include "runtime/text/edit_distance.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"

namespace epikv {

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

bool IsClose(absl::string_view name, absl::string_view known) {
  const size_t most = 1 + known.size() / 4;
  if (name.size() > known.size() + most) return false;  // each byte more is an edit
  return EditDistance(name, known) <= most || (name.size() >= 3 && absl::StrContains(known, name));
}

}  // namespace epikv
