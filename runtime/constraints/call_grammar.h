#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/constraints/constraint.h"
#include "runtime/text/chat/chat_format.h"

namespace epikv {

// A function that an answer may call.
struct CalledFunction {
  std::string name;
  std::string schema;  // of its arguments, an object's; empty: any object's
  // Where the schema cannot be held, arguments are any object.
  bool lenient = false;
};

// What an answer may call, and whether it has to.
struct CallRule {
  CallSyntax syntax = CallSyntax::kHermes;
  std::vector<CalledFunction> functions;  // none: it calls nothing
  bool required = false;                  // it is a call, and nothing else
  bool several = true;                    // it may call more than once
};

// The constraint that holds an answer to it: what is said beside calls is free, and a call that has
// begun is whole, with arguments that its schema allows. INVALID_ARGUMENT, with the function's
// name, for a schema that cannot be held (json_schema.h).
absl::StatusOr<ConstraintText> ConstraintOfCalls(const CallRule& rule);

}  // namespace epikv
