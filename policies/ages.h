#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace epikv {

// Ages at which something is known of a token. Between two of them it is read off by the logarithm
// of the age, beyond the first and the last it is what it is there.
class Ages {
 public:
  static constexpr int64_t kOldest = 1 << 20;  // that can be told apart, in tokens

  // ages: in tokens, ascending, 1 to kOldest each; not empty.
  explicit Ages(absl::Span<const int64_t> ages);

  int64_t count() const { return count_; }

  // The last of the ages that is not above this one, and how far this one is towards the next: 0
  // where there is none.
  struct Place {
    int64_t at = 0;
    float beyond = 0;
  };
  Place PlaceOf(int64_t age) const {
    return age < static_cast<int64_t>(places_.size()) ? places_[age] : Place{.at = count_ - 1};
  }

  // known(i): what is known at the i-th age.
  template <class Known>
  float At(int64_t age, const Known& known) const {
    const Place place = PlaceOf(age);
    const float at = known(place.at);
    return place.beyond == 0 ? at : (1 - place.beyond) * at + place.beyond * known(place.at + 1);
  }

 private:
  const int64_t count_;
  std::vector<Place> places_;  // [the last age]
};

}  // namespace epikv
