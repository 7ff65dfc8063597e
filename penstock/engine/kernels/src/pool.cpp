#include "pool.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pool {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kSpins = 20000;  // pauses a helper waits for the next job before it sleeps: some hundred microseconds

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
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
        task(context, index);
        num_done.fetch_add(1, std::memory_order_acq_rel);
      }
    }
  }

  void helper(int self) {
    uint32_t seen = 0;
    for (;;) {
      for (int spins = 0; job.load(std::memory_order_acquire) == seen && spins < kSpins; spins++) relax();
      if (job.load(std::memory_order_acquire) == seen) {
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
    num_shares.store(count, std::memory_order_release);
    uint32_t number = job.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < count; i++) {
      uint64_t begin = uint64_t(num_tasks) * i / count, end = uint64_t(num_tasks) * (i + 1) / count;
      shares[i].word.store(pack(number, begin, end), std::memory_order_release);
    }
    job.store(number, std::memory_order_seq_cst);
    if (num_asleep.load(std::memory_order_seq_cst) > 0) job.notify_all();
    work(0);
    for (int spins = 0; num_done.load(std::memory_order_acquire) < num_tasks; spins++) {
      // A helper that is late may wait for this very core.
      spins < kSpins ? relax() : std::this_thread::yield();
    }
  }
};

// Never destroyed: helpers use it until the process ends.
Pool& instance() {
  static Pool* pool = new Pool;
  return *pool;
}
int num_started = 1;

}  // namespace

void set_threads(int count) {
  Pool& pool = instance();
  std::lock_guard<std::mutex> lock(pool.busy);
  count = count < 1 ? 1 : count > kMaxThreads ? kMaxThreads : count;
  for (; num_started < count; num_started++) std::thread([&pool, self = num_started] { pool.helper(self); }).detach();
  pool.num_threads.store(count);
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
    buffer.size = (bytes + bytes / 4 + 4095) & ~size_t(4095);
    buffer.data = aligned_alloc(4096, buffer.size);
  }
  return buffer.data;
}

}  // namespace pool
