#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"

namespace epikv {

// A property of what is fuzzed. Where it does not hold, `seen` is told and the process ends, so
// that libFuzzer keeps the input.
inline void Require(bool holds, const char* property, absl::string_view seen = "") {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n%s\n", property, std::string(seen).c_str());
  std::abort();
}

}  // namespace epikv
