// Tells ThreadSanitizer of absl::Mutex. Linked into the tests of a build with -fsanitize=thread.
//
// Debian's Abseil is not built with the sanitizer, so its locks and unlocks are invisible and all
// that they guard looks like a race. These definitions stand before the shared library's own: they
// report to the sanitizer and call on. Conditions, which Abseil evaluates on whichever thread
// unlocks, count as part of the lock: what they read is not watched. gRPC locks through the same
// library and is seen too. Here is what this repository, gRPC and Abseil itself call; readers that
// wait for a condition would have to be added.

#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/synchronization/mutex.h"

namespace {

// The shared library's function of the same name as `mine`.
template <typename Function>
Function Next(Function mine) {
  void* address;  // the first word of a pointer to a member that is not virtual
  std::memcpy(&address, &mine, sizeof(address));
  Dl_info info;
  void* next = dladdr(address, &info) != 0 && info.dli_sname != nullptr
                   ? dlsym(RTLD_NEXT, info.dli_sname)
                   : nullptr;
  if (next == nullptr) {
    std::fputs("tsan_absl.cc: Abseil's shared library does not have what is replaced here\n",
               stderr);
    std::abort();
  }
  std::memcpy(&mine, &next, sizeof(next));
  return mine;
}

template <auto kFunction>
auto Real() {
  static const auto real = Next(kFunction);
  return real;
}

// While a thread waits, others have the mutex. Some ways to wait call others.
class Waiting {
 public:
  explicit Waiting(void* mutex) : mutex_(depth_++ == 0 ? mutex : nullptr) {
    if (mutex_ != nullptr) __tsan_mutex_pre_unlock(mutex_, 0);
  }
  ~Waiting() {
    --depth_;
    if (mutex_ == nullptr) return;
    __tsan_mutex_post_unlock(mutex_, 0);
    __tsan_mutex_pre_lock(mutex_, 0);
    __tsan_mutex_post_lock(mutex_, 0, 0);
  }

 private:
  static thread_local int depth_;
  void* const mutex_;
};
thread_local int Waiting::depth_ = 0;

// A lock that waits for a condition. Some ways to do so call others.
class Locking {
 public:
  explicit Locking(void* mutex) : mutex_(depth_++ == 0 ? mutex : nullptr) {
    if (mutex_ != nullptr) __tsan_mutex_pre_lock(mutex_, 0);
  }
  ~Locking() {
    --depth_;
    if (mutex_ != nullptr) __tsan_mutex_post_lock(mutex_, 0, 0);
  }

 private:
  static thread_local int depth_;
  void* const mutex_;
};
thread_local int Locking::depth_ = 0;

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

void Mutex::Lock() {
  __tsan_mutex_pre_lock(this, 0);
  (this->*Real<&Mutex::Lock>())();
  __tsan_mutex_post_lock(this, 0, 0);
}

bool Mutex::TryLock() {
  __tsan_mutex_pre_lock(this, __tsan_mutex_try_lock);
  const bool locked = (this->*Real<&Mutex::TryLock>())();
  __tsan_mutex_post_lock(
      this, locked ? __tsan_mutex_try_lock : __tsan_mutex_try_lock | __tsan_mutex_try_lock_failed,
      0);
  return locked;
}

void Mutex::Unlock() {
  __tsan_mutex_pre_unlock(this, 0);
  (this->*Real<&Mutex::Unlock>())();
  __tsan_mutex_post_unlock(this, 0);
}

void Mutex::ReaderLock() {
  __tsan_mutex_pre_lock(this, __tsan_mutex_read_lock);
  (this->*Real<&Mutex::ReaderLock>())();
  __tsan_mutex_post_lock(this, __tsan_mutex_read_lock, 0);
}

void Mutex::ReaderUnlock() {
  __tsan_mutex_pre_unlock(this, __tsan_mutex_read_lock);
  (this->*Real<&Mutex::ReaderUnlock>())();
  __tsan_mutex_post_unlock(this, __tsan_mutex_read_lock);
}

// absl::Notification waits so.
void Mutex::LockWhen(const Condition& condition) {
  Locking locking(this);
  (this->*Real<&Mutex::LockWhen>())(condition);
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  Locking locking(this);
  return (this->*Real<&Mutex::LockWhenWithTimeout>())(condition, timeout);
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  Locking locking(this);
  return (this->*Real<&Mutex::LockWhenWithDeadline>())(condition, deadline);
}

void Mutex::Await(const Condition& condition) {
  Waiting waiting(this);
  (this->*Real<&Mutex::Await>())(condition);
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  Waiting waiting(this);
  return (this->*Real<&Mutex::AwaitWithTimeout>())(condition, timeout);
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  Waiting waiting(this);
  return (this->*Real<&Mutex::AwaitWithDeadline>())(condition, deadline);
}

void CondVar::Wait(Mutex* mutex) {
  Waiting waiting(mutex);
  (this->*Real<&CondVar::Wait>())(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  Waiting waiting(mutex);
  return (this->*Real<&CondVar::WaitWithTimeout>())(mutex, timeout);
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  Waiting waiting(mutex);
  return (this->*Real<&CondVar::WaitWithDeadline>())(mutex, deadline);
}

ABSL_NAMESPACE_END
}  // namespace absl
