#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "runtime/text/tokenizer/json_fields.h"

namespace epikv {

// Where a piece of text that does not begin with the replacement gets one put before it.
enum class MetaspacePrepend { kNever, kFirst, kAlways };  // kFirst: at the text's beginning

// What a pre-tokenizer and a decoder of the type Metaspace have in common: spaces are written as
// another character.
struct MetaspaceScheme {
  std::string replacement;  // one character, usually U+2581
  MetaspacePrepend prepend = MetaspacePrepend::kAlways;

  static absl::StatusOr<MetaspaceScheme> FromJson(const Json& json, const std::string& path);
};

}  // namespace epikv
