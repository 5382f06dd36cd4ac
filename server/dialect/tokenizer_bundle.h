#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/models/served_model.h"

namespace epikv {

struct BundledFile {
  std::string name;
  absl::string_view bytes;
};

// A ZIP archive of these files, not compressed. Fewer than 4 GiB in all. The same files give the
// same bytes.
std::string ZipOf(absl::Span<const BundledFile> files);

// What a router loads a model's tokenizer from, as files of a Hugging Face checkpoint:
// tokenizer.json, generation_config.json with the tokens that end an output, and, if the model file
// has them, the chat template and the special tokens that it knows (tokenizer_config.json).
std::string TokenizerBundle(const ServedModel& model);

}  // namespace epikv
