#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/constraints/constraint.h"

namespace epikv {

// What is wrong with a constraint before xgrammar looks at it: sizes, nesting, UTF-8, and what that
// library would ignore without a word. INVALID_ARGUMENT.
absl::Status CheckConstraintText(const ConstraintText& text);

// EBNFs of xgrammar's: of texts that a regex matches, by one automaton (its own way from a regex to
// rules reads (a+b?)+ in all ways at once, which are as many as the text's length cubed); and of
// one of several texts.
std::string GrammarOfRegex(const std::string& regex);
std::string GrammarOfChoices(const std::vector<std::string>& choices);

}  // namespace epikv
