// What constraints may be over a large vocabulary of made-up tokens: the longest `maxLength` and
// `.{0,N}` that compile, and what a token of `.{500}` takes. For docs/constraints.md.
//
//   constraint_limits [TOKENS]     128,000 unless told otherwise
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "runtime/constraints/constraint.h"
#include "runtime/text/tokenizer.h"

namespace epikv {
namespace {

constexpr int kTokens = 500;    // of the text that is timed
constexpr int kLongest = 1024;  // looked for

// Each byte, as files of byte fallback spell it, and words of one to twelve letters.
std::unique_ptr<Tokenizer> MakeTokenizer(size_t tokens) {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocab[absl::StrCat("<0x", absl::Hex(byte, absl::kZeroPad2), ">")] = byte;
  }
  std::mt19937_64 random(1);
  absl::flat_hash_set<std::string> words;
  while (words.size() + 256 < tokens) {
    std::string word = random() % 2 == 0 ? "▁" : "";
    for (uint64_t left = 1 + random() % 12; left > 0; --left) {
      word += static_cast<char>('a' + random() % 26);
    }
    const size_t id = 256 + words.size();
    if (words.insert(word).second) vocab[word] = id;
  }
  const nlohmann::json json = {
      {"version", "1.0"},
      {"added_tokens", nlohmann::json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer", nullptr},
      {"post_processor", nullptr},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders",
         {{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}}}}}},
      {"model",
       {{"type", "BPE"},
        {"byte_fallback", true},
        {"vocab", std::move(vocab)},
        {"merges", nlohmann::json::array()},
        {"unk_token", nullptr}}}};
  return *Tokenizer::FromJson(json.dump());
}

// All numbers up to this one compile; larger ones may, where xgrammar counts repetitions instead.
int Longest(ConstraintCompiler& compiler, ConstraintText::Kind kind,
            absl::FunctionRef<std::string(int)> text) {
  for (int n = 1; n <= kLongest; ++n) {
    if (!compiler.Compile({kind, {text(n)}}).ok()) return n - 1;
  }
  return kLongest;
}

// Milliseconds of each token of a text that the regex may be.
std::vector<double> TimesOf(const std::shared_ptr<const Constraint>& constraint) {
  std::vector<double> times;
  std::mt19937_64 random(2);
  ConstraintState state(constraint, {});
  for (int i = 0; i < kTokens && !state.must_end(); ++i) {
    std::vector<int32_t> allowed;
    for (size_t word = 0; word < state.allowed().size(); ++word) {
      for (int bit = 0; bit < 32; ++bit) {
        if (state.allowed()[word] >> bit & 1) {
          allowed.push_back(static_cast<int32_t>(32 * word) + bit);
        }
      }
    }
    const auto begin = std::chrono::steady_clock::now();
    if (!state.Accept(allowed[random() % allowed.size()]).ok()) break;
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  std::sort(times.begin(), times.end());
  return times;
}

int Run(int64_t tokens) {
  const std::unique_ptr<Tokenizer> tokenizer = MakeTokenizer(static_cast<size_t>(tokens));
  ConstraintCompiler compiler(*tokenizer, tokens);
  using Kind = ConstraintText::Kind;
  std::cout << tokens << " tokens\nmaxLength: "
            << Longest(
                   compiler, Kind::kJsonSchema,
                   [](int n) { return absl::StrCat(R"({"type":"string","maxLength":)", n, "}"); })
            << "\n.{0,N}: "
            << Longest(compiler, Kind::kRegex, [](int n) { return absl::StrCat(".{0,", n, "}"); })
            << "\n";
  const auto begin = std::chrono::steady_clock::now();
  const auto long_text = compiler.Compile({Kind::kRegex, {".{500}"}});
  if (!long_text.ok()) {
    std::cout << ".{500}: " << long_text.status() << "\n";
    return 0;
  }
  const std::chrono::duration<double> compiled = std::chrono::steady_clock::now() - begin;
  const std::vector<double> times = TimesOf(*long_text);
  std::cout << ".{500}: compiled in " << compiled.count() << " s; " << times.size()
            << " tokens, ms each: median " << times[times.size() / 2] << ", most " << times.back()
            << "\n";
  return 0;
}

}  // namespace
}  // namespace epikv

int main(int argc, char** argv) {
  int64_t tokens = 128'000;
  if (argc > 1 && (!absl::SimpleAtoi(argv[1], &tokens) || tokens <= 256)) {
    std::cerr << "constraint_limits [TOKENS], more than 256\n";
    return 1;
  }
  return epikv::Run(tokens);
}
