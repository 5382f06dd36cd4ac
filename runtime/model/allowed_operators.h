#pragma once

#include "absl/strings/string_view.h"

namespace epikv {

// Whether code in a model file may call it: "aten::add", "prim::If". Allowed is what computes on
// tensors, numbers, lists and strings. Not allowed is what reads or writes files, prints, starts
// threads, keeps state, draws random numbers, or shows memory that nobody wrote.
bool OperatorIsAllowed(absl::string_view name);

}  // namespace epikv
