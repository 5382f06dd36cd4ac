#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "policies/spec.h"
#include "runtime/manifest.h"

// The model and the policies that tests without torch serve.

namespace epikv {

inline constexpr int64_t kFakeVocab = 64;
// K and V rows of 4 + 4 fp32 channels, 2 layers x 2 KV heads.
inline constexpr int64_t kFakeBytesPerToken = 2 * 2 * (4 + 4) * 4;

// Two layers, two KV heads, 64 tokens, end of sequence: 63.
inline Manifest FakeManifest(int64_t context_length = 4096) {
  const LayerFacts layer{.key_width = 4, .value_width = 4, .scale = 0.5};
  return {.name = "fake",
          .architecture = "Fake",
          .dtype = DType::kFloat32,
          .weights = "sha256:fake",
          .vocab_size = kFakeVocab,
          .context_length = context_length,
          .hidden_size = 16,
          .num_heads = 4,
          .num_kv_heads = 2,
          .eos_tokens = {63},
          .ropes = {{.inv_freq = {1.0, 0.1}}},
          .layers = {layer, layer}};
}

// Word-level: token i is the word "w<i>", made up with dots to `word_bytes` if it is shorter.
inline std::string FakeTokenizerJson(int64_t word_bytes = 0) {
  std::string vocab;
  for (int64_t i = 0; i < kFakeVocab; ++i) {
    std::string word = absl::StrCat("w", i);
    word.resize(std::max<size_t>(word.size(), static_cast<size_t>(word_bytes)), '.');
    absl::StrAppend(&vocab, i > 0 ? "," : "", "\"", word, "\":", i);
  }
  return absl::StrCat(R"({"version":"1.0","added_tokens":[],"normalizer":null,)",
                      R"("pre_tokenizer":{"type":"WhitespaceSplit"},"post_processor":null,)",
                      R"("decoder":null,"model":{"type":"WordLevel","vocab":{)", vocab,
                      R"(},"unk_token":"w0"}})");
}

// "w60 SYSTEM w61 USER w62 ASSISTANT w63 USER w62", for a FakeTokenizerJson.
inline constexpr const char* kFakeChatJson = R"({"default": {
  "begin": {"system": ["w60 "], "user": ["w61 "]},
  "between": {"system user": [" w61 "], "user assistant": [" w62 "], "assistant user": [" w63 "]},
  "generation": [" w62"], "end": [" w63"], "system": "first",
  "strip": {"system": "both", "user": "both", "assistant": "none"},
  "history": {"after": null, "strip": "none"}}})";

namespace fake_internal {

inline std::shared_ptr<const Policy> NoPolicy(const Params&, const ModelShape&) { return nullptr; }

inline PolicyTraits FullTraits(const Params&, const ModelShape&) { return {.evicts = false}; }

inline PolicyTraits WindowTraits(const Params& params, const ModelShape&) {
  return {
      .prompt = PromptEviction::kByChunk, .slack = params.Int("slack"), .published = {.sinks = 4}};
}

inline PolicyTraits PickyTraits(const Params&, const ModelShape&) {
  return {.columns = {"age"},
          .prompt = PromptEviction::kRefuses,
          .state_bytes_per_token = 24,
          .state_bytes = 1000};
}

inline constexpr absl::string_view kModes[] = {"calm", "eager"};
inline const ParamSpec kWindowParams[] = {
    {.name = "slack",
     .type = ParamType::kInt,
     .fallback = int64_t{0},
     .min = 0,
     .max = 64,
     .help = "tokens above the budget between rounds"},
    {.name = "mode",
     .type = ParamType::kChoice,
     .fallback = std::string("calm"),
     .choices = kModes,
     .help = "nothing depends on it"},
    {.name = "strength",
     .type = ParamType::kFloat,
     .fallback = 0.5,
     .min = 0,
     .max = 1,
     .help = "nothing depends on it"},
    {.name = "frozen", .type = ParamType::kBool, .fallback = false, .help = "not used"},
    {.name = "indexes",
     .type = ParamType::kIntList,
     .fallback = std::vector<int64_t>(),
     .min = 0,
     .max = 1e6,
     .help = "not used"}};

}  // namespace fake_internal

// `full`, `picky` (refuses a prompt over its budget) and `window` (evicts prompts by chunk; takes a
// parameter of every type).
inline PolicyCatalog FakeCatalog() {
  using namespace fake_internal;  // NOLINT: this function's own parts
  static const PolicySpec full{.name = "full",
                               .summary = "keeps everything",
                               .paper = "none",
                               .traits = FullTraits,
                               .make = NoPolicy};
  static const PolicySpec picky{.name = "picky",
                                .summary = "cannot rank prompt tokens",
                                .paper = "none",
                                .traits = PickyTraits,
                                .make = NoPolicy};
  static const PolicySpec window{.name = "window",
                                 .summary = "keeps the newest",
                                 .paper = "none",
                                 .params = kWindowParams,
                                 .traits = WindowTraits,
                                 .make = NoPolicy};
  static const PolicySpec* const catalog[] = {&full, &picky, &window};
  return catalog;
}

}  // namespace epikv
