#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/text/tokenizer/json_fields.h"

namespace epikv {

// The part `post_processor` of a tokenizer, for one sequence: tokens put around it.
struct PostProcessor {
  std::vector<int32_t> prefix;
  std::vector<int32_t> suffix;

  // `json`: null, ByteLevel (which concerns offsets alone), TemplateProcessing, or a Sequence of
  // these.
  static absl::StatusOr<PostProcessor> FromJson(const Json& json);
};

}  // namespace epikv
