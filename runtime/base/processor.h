#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

// What kernels may use of the processor.

namespace epikv {

struct Processor {
  bool avx2 = false;    // with FMA, F16C, BMI and BMI2
  bool avx512 = false;  // x86-64-v4: F, BW, CD, DQ and VL
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  // Whether avx512_bf16 is faster than widening to fp32. Intel's processors take two cycles for 32
  // products in bfloat16, and half a one for 16 in fp32; AMD's half a one or a whole for either.
  bool fast_bf16_pairs = false;
  bool amx_bf16 = false;  // a matrix unit, and the system lets this process use it
  bool amx_int8 = false;  // the same, of integers
  // Whether its prefetchers keep up with a loop that reads memory once, in sequence: to fetch ahead
  // by hand is then slower, by a third to a half on AMD's 4th generation, and AMD's others are
  // taken to be alike. Intel's gain by it.
  bool follows_streams = false;
  bool neon = false;
  bool neon_dot = false;  // products of four pairs of int8
};

// This one, less what LimitProcessor took from it.
const Processor& ThisProcessor();

// Whether a product that reads each piece of a packed weight `passes` times in a row fetches the
// next one meanwhile. What reads it more than once comes by the next in bursts, which no prefetcher
// follows.
bool FetchesAhead(int64_t passes);

enum class ProcessorLimit {
  kNone,
  kAvx512,  // and nothing that Processor names behind it
  kAvx2,
  kPlain,  // none of all these
};
// "auto", "avx512", "avx2" or "plain".
std::optional<ProcessorLimit> ProcessorLimitOf(absl::string_view name);

// From now on ThisProcessor() has no more than that, nor have the libraries below LibTorch: call it
// before they are used. Loops that the compiler clones (clones.h) look for themselves, and are not
// limited. FAILED_PRECONDITION if the processor has less.
absl::Status LimitProcessor(ProcessorLimit limit);

}  // namespace epikv
