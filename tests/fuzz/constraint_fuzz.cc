// What a client says that a text has to be: it is refused with a reason that can be told, or walked
// by tokens that it allows. The first byte of an input says of which kind it is.

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "runtime/constraints/constraint.h"
#include "runtime/text/utf8.h"
#include "tests/fuzz/byte_tokenizer.h"
#include "tests/fuzz/require.h"

namespace epikv {
namespace {

void CheckError(const absl::Status& status) {
  Require(!status.message().empty(), "an error has a text");
  Require(!FirstInvalidUtf8(status.message()).has_value(), "that clients can read");
  Require(absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status),
          "it is the text's fault", status.ToString());
}

void Walk(std::shared_ptr<const Constraint> constraint, uint64_t seed) {
  constexpr int kSteps = 40;
  const auto end = static_cast<int32_t>(Bytes().vocab_size()) - 1;
  ConstraintState state(std::move(constraint), {&end, 1});
  std::mt19937_64 random(seed);
  for (int step = 0; step < kSteps && !state.must_end(); ++step) {
    std::vector<int32_t> tokens;
    for (int32_t token = 0; token < end; ++token) {
      if (state.allowed()[token / 32] >> (token % 32) & 1) tokens.push_back(token);
    }
    Require(!tokens.empty(), "what need not end can go on");
    const absl::Status status = state.Accept(tokens[random() % tokens.size()]);
    if (!status.ok()) return CheckError(status);
  }
}

void CheckInput(absl::string_view input) {
  if (input.empty()) return;
  const auto vocab = static_cast<int64_t>(Bytes().vocab_size());
  // Of its own: what is remembered would not be compiled.
  ConstraintCompiler compiler(Bytes(), vocab);
  ConstraintText text{static_cast<ConstraintText::Kind>(static_cast<uint8_t>(input[0]) % 4), {}};
  input.remove_prefix(1);
  text.texts = {std::string(input)};
  if (text.kind == ConstraintText::Kind::kChoice) text.texts = absl::StrSplit(input, '\n');
  const auto constraint = compiler.Compile(text);
  if (!constraint.ok()) return CheckError(constraint.status());
  Walk(*constraint, input.size());
}

}  // namespace
}  // namespace epikv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  epikv::CheckInput({reinterpret_cast<const char*>(data), size});
  return 0;
}
