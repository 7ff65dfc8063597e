#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pool {
namespace {

constexpr int kMaxThreads = 256;
constexpr std::chrono::microseconds kSpinTime{300};  // how long a thread looks for work, or for its end, before it sleeps
constexpr int kPauses = 32;  // between two looks at the clock: a pause takes 10 to 140 cycles, by the processor

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Wait until `is_done()`, for kSpinTime at most. Returns whether it is.
template <class F> bool spin(const F& is_done) {
  if (is_done()) return true;
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPauses; i++) {
      if (is_done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

// The tasks a thread has left, in one word so that taking one is one exchange: job number, end, begin. The job number
// makes a word that was read during the job before useless.
struct alignas(64) Share {
  std::atomic<uint64_t> word{0};
};
constexpr uint64_t kField = (1 << 24) - 1;
uint64_t pack(uint64_t job, uint64_t begin, uint64_t end) { return (job & 0xffff) << 48 | end << 24 | begin; }

struct Pool {
  std::mutex busy;
  std::atomic<int> num_threads{1};
  Share shares[kMaxThreads];
  void (*task)(void*, int) = nullptr;
  void* context = nullptr;
  std::atomic<int> num_shares{0};
  alignas(64) std::atomic<uint32_t> job{0};
  alignas(64) std::atomic<int> num_done{0};
  std::atomic<int> num_asleep{0};
  std::atomic<bool> has_failed{false};  // a task of the job had no memory

  // Take one task of a share: the owner from the front, thieves from the back. -1 if there is none.
  static int take(Share& share, bool front) {
    uint64_t word = share.word.load(std::memory_order_acquire);
    for (;;) {
      uint64_t begin = word & kField, end = word >> 24 & kField;
      if (begin >= end) return -1;
      uint64_t next = front ? word + 1 : word - (uint64_t(1) << 24);
      if (share.word.compare_exchange_weak(word, next, std::memory_order_acq_rel)) return front ? begin : end - 1;
    }
  }

  // A task taken belongs to the current job, and that job cannot end before the task is done: so `task` is its own.
  void work(int self) {
    int count = num_shares.load(std::memory_order_acquire);
    if (self >= count) return;
    for (int i = 0; i < count; i++) {
      Share& share = shares[(self + i) % count];
      for (int index; (index = take(share, i == 0)) >= 0;) {
        try {
          task(context, index);
        } catch (...) {  // a thread that throws would end the process
          has_failed.store(true, std::memory_order_relaxed);
        }
        num_done.fetch_add(1, std::memory_order_acq_rel);
      }
    }
  }

  void helper(int self) {
    uint32_t seen = 0;
    for (;;) {
      if (!spin([&] { return job.load(std::memory_order_acquire) != seen; })) {
        num_asleep.fetch_add(1);
        job.wait(seen);
        num_asleep.fetch_sub(1);
      }
      seen = job.load(std::memory_order_acquire);
      work(self);
    }
  }

  void run(int num_tasks, void (*f)(void*, int), void* c) {
    std::unique_lock<std::mutex> lock(busy, std::try_to_lock);
    int count = num_threads.load();
    if (!lock.owns_lock() || num_tasks > int(kField)) {
      for (int i = 0; i < num_tasks; i++) f(c, i);
      return;
    }
    task = f;
    context = c;
    num_done.store(0, std::memory_order_relaxed);
    has_failed.store(false, std::memory_order_relaxed);
    num_shares.store(count, std::memory_order_release);
    uint32_t number = job.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < count; i++) {
      uint64_t begin = uint64_t(num_tasks) * i / count, end = uint64_t(num_tasks) * (i + 1) / count;
      shares[i].word.store(pack(number, begin, end), std::memory_order_release);
    }
    job.store(number, std::memory_order_seq_cst);
    if (num_asleep.load(std::memory_order_seq_cst) > 0) job.notify_all();
    work(0);
    auto is_done = [&] { return num_done.load(std::memory_order_acquire) >= num_tasks; };
    if (!spin(is_done)) {
      while (!is_done()) std::this_thread::yield();  // a helper that is late may wait for this very core
    }
    if (has_failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }
};

// Never destroyed: helpers use it until the process ends. A child that was forked has no helpers, and its copy may be
// busy for ever, so it gets a new one and computes alone until it asks for threads.
Pool* current = nullptr;
int num_started = 1;

void renew() {
  current = new Pool;
  num_started = 1;
}

Pool& instance() {
  static const bool is_ready = [] {
    renew();
    return pthread_atfork(nullptr, nullptr, renew) == 0;
  }();
  (void)is_ready;
  return *current;
}

}  // namespace

int set_threads(int count) {
  Pool& pool = instance();
  std::lock_guard<std::mutex> lock(pool.busy);
  count = count < 1 ? 1 : count > kMaxThreads ? kMaxThreads : count;
  try {
    for (; num_started < count; num_started++) std::thread([&pool, self = num_started] { pool.helper(self); }).detach();
  } catch (const std::system_error&) {  // the system allows no more
    count = num_started;
  }
  pool.num_threads.store(count);
  return count;
}

int threads() { return instance().num_threads.load(std::memory_order_relaxed); }

void run_tasks(int num_tasks, void (*task)(void*, int), void* context) { instance().run(num_tasks, task, context); }

void* scratch(int slot, size_t bytes) {
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { free(data); }
  };
  static thread_local Buffer buffers[8];
  Buffer& buffer = buffers[slot];
  if (buffer.size < bytes) {
    free(buffer.data);
    const size_t size = (bytes + bytes / 4 + 4095) & ~size_t(4095);
    buffer.data = aligned_alloc(4096, size);
    buffer.size = buffer.data ? size : 0;
    if (!buffer.data) throw std::bad_alloc();
  }
  return buffer.data;
}

}  // namespace pool
