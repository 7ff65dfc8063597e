// The threads of the process that compute. One call at a time has them; a second caller meanwhile computes alone.
#pragma once
#include <cstddef>

namespace pool {

// How many threads `run` may use, the caller's included. Returns how many those are: fewer if the system allows no more.
int set_threads(int count);
int threads();

void run_tasks(int num_tasks, void (*task)(void* context, int index), void* context);

// Call task(i) for every i below num_tasks, in any order, and return when all are done. Neighbours go to one thread.
// Throws std::bad_alloc if one of them threw.
template <class F> void run(int num_tasks, const F& task) {
  if (num_tasks == 1 || threads() == 1) {
    for (int i = 0; i < num_tasks; i++) task(i);
    return;
  }
  run_tasks(num_tasks, [](void* context, int index) { (*(const F*)context)(index); }, (void*)&task);
}

// Memory of the calling thread for intermediate results: `slot` (0 to 7) tells uses at the same time apart. Aligned to
// 64 bytes; what it held before is lost when it grows. Throws std::bad_alloc.
void* scratch(int slot, size_t bytes);

}  // namespace pool
