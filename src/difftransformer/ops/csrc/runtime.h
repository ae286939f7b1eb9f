// What the kernels need from the process around them: threads and memory. They do not depend on torch, so that one
// built library works with its later releases, and a small program can run them.
#pragma once

#include <cstdint>
#include <functional>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace difftransformer {

class Runtime {
 public:
  virtual ~Runtime() = default;
  virtual int64_t threads() const = 0;
  // Calls work(begin, end) for ranges that cover 0 .. count, in parallel.
  virtual void run(int64_t count, const std::function<void(int64_t, int64_t)>& work) = 0;
  // Returns uninitialised memory, aligned to 64 bytes and valid until the call ends.
  virtual void* allocate(int64_t bytes) = 0;
};

// Flushes denormal numbers to zero while it lives. Peaked scores leave exponentials far below a row's largest, and each
// denormal number would cost the processor over a hundred cycles.
class FlushDenormals {
 public:
  FlushDenormals(const FlushDenormals&) = delete;
#if defined(__x86_64__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  unsigned before_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | kFlushToZero));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  static constexpr uint64_t kFlushToZero = 1 << 24;
  uint64_t before_;
#else
  FlushDenormals() {}
#endif
};

// Pauses between two reads of a value that another thread will change.
inline void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Work>
void parallel_for(Runtime& runtime, int64_t count, const Work& work) {
  runtime.run(count, [&](int64_t begin, int64_t end) {
    const FlushDenormals flushed;
    work(begin, end);
  });
}

}  // namespace difftransformer
