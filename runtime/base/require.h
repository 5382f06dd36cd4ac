#pragma once

#include <stdexcept>

namespace epikv {

// A condition that only a fault of our own can break. It throws, so that the request in whose
// course it is found ends, and the process lives: every other request's state is as it was.
inline void Require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

}  // namespace epikv
