#pragma once

#include <atomic>

namespace epikv {

// What our threads do once they have had nothing to do for a while, after some work: give back what
// they have freed, say. One for the process.
class WhenIdle {
 public:
  // Before the first thread; null: nothing.
  static void Set(void (*hook)()) { hook_ = hook; }
  static void Run() {
    if (void (*const hook)() = hook_; hook != nullptr) hook();
  }

 private:
  static inline std::atomic<void (*)()> hook_ = nullptr;
};

}  // namespace epikv
