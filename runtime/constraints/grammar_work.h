#pragma once

#include <cstdint>
#include <exception>
#include <limits>
#include <string>

// Bounds what xgrammar does in a thread, and hears what it says. The library knows no limits of its
// own: a grammar of some bytes can mean more states than there is memory. Its loops count
// (cmake/xgrammar.cmake puts the calls there) instead of looking at a clock, so that what is
// refused does not depend on the load.

namespace epikv {

// Thrown out of the library.
struct GrammarTooCostly : std::exception {
  const char* what() const noexcept override {
    return "it needs too much work: the text is small, but what it describes is large";
  }
};

// One state or edge made or visited each: some 50 ns.
inline thread_local int64_t grammar_work_left = std::numeric_limits<int64_t>::max();
// One made each, and kept for a time: at most some 50 bytes.
inline thread_local int64_t grammar_memory_left = std::numeric_limits<int64_t>::max();

// Called by the library.
inline void SpendGrammarWork(int64_t units) {
  grammar_work_left -= units;
  if (grammar_work_left < 0) throw GrammarTooCostly();
}
inline void SpendGrammarMemory(int64_t units) {
  SpendGrammarWork(units);
  grammar_memory_left -= units;
  if (grammar_memory_left < 0) throw GrammarTooCostly();
}

// While it lives, this thread may visit and make so many, and the first warning is kept. One at a
// time.
class GrammarWork {
 public:
  explicit GrammarWork(int64_t most) : GrammarWork(most, most) {}
  // most_made: of `most`. What is visited grows with the vocabulary; what is made need not.
  GrammarWork(int64_t most, int64_t most_made);
  ~GrammarWork();
  GrammarWork(const GrammarWork&) = delete;
  GrammarWork& operator=(const GrammarWork&) = delete;

  int64_t spent() const { return most_ - grammar_work_left; }
  // What the library does not do although it is asked to; empty: nothing.
  const std::string& warning() const;

 private:
  const int64_t most_;
};

}  // namespace epikv
