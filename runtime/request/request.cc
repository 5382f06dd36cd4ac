#include "runtime/request/request.h"

#include <algorithm>
#include <iterator>

namespace epikv {

bool MeasuresPrompt(const PolicyTraits& traits) {
  constexpr Signal kOfPrompts[] = {
      Signal::kPromptAttention,  Signal::kQueries, Signal::kQueryMoments, Signal::kLogitEntropy,
      Signal::kResidualDistance, Signal::kGate,    Signal::kFinalHidden};
  return std::any_of(std::begin(kOfPrompts), std::end(kOfPrompts),
                     [&](Signal signal) { return traits.signals.Has(signal); });
}

}  // namespace epikv
