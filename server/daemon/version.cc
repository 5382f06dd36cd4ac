#include "server/daemon/version.h"

#include "absl/strings/str_cat.h"
#include "server/daemon/commit.h"

namespace epikv {

absl::string_view Commit() { return EPIKV_COMMIT; }

std::string VersionText() {
  return absl::StrCat("epikvd ", EPIKV_VERSION, " (commit ", Commit(), ")");
}

}  // namespace epikv
