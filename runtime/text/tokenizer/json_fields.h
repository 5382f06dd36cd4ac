#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Access to the parts of a tokenizer.json. `path` is where an object lies in the file; it begins
// every error message. What is malformed is INVALID_ARGUMENT, what this program cannot do is
// UNIMPLEMENTED.

namespace epikv {

using Json = nlohmann::json;

absl::Status Malformed(absl::string_view path, absl::string_view what);
absl::Status Unsupported(absl::string_view path, absl::string_view what);

// That `object` is an object all of whose fields are among `known`: a field that nobody reads is
// refused, never ignored.
absl::Status CheckFields(const Json& object, absl::string_view path,
                         std::initializer_list<absl::string_view> known);

// The field, or null where it is absent. Precondition: `object` is an object.
const Json& Field(const Json& object, const char* name);

// The parts of a Sequence, a list in the field `name`, each given to add(part, path), as far as all
// goes well. No part may be a Sequence.
absl::Status ForEachOfSequence(
    const Json& sequence, absl::string_view path, const char* name,
    absl::FunctionRef<absl::Status(const Json& part, const std::string& path)> add);

// The field `type`, or "" if `object` is null. Malformed unless an object with a `type`.
absl::StatusOr<std::string> TypeOf(const Json& object, absl::string_view path);

// Fields with a value of the type.
absl::StatusOr<std::string> StringField(const Json& object, absl::string_view path,
                                        const char* name);
// A string of one character.
absl::StatusOr<std::string> CharacterField(const Json& object, absl::string_view path,
                                           const char* name);
// A token id: an integer, at least 0 and small enough to index a table by.
absl::StatusOr<int32_t> IdField(const Json& object, absl::string_view path, const char* name);
absl::StatusOr<int32_t> TokenId(const Json& value, absl::string_view path);

// `fallback`: the value where the field is absent or null; std::nullopt: it must be there.
absl::StatusOr<bool> BoolField(const Json& object, absl::string_view path, const char* name,
                               std::optional<bool> fallback);

}  // namespace epikv
