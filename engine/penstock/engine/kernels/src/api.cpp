// The functions that other languages call, and the choice of the instruction set they run on.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "pool.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

// ISAS is the list of what the library was compiled for, the best first: EACH(amx) ... EACH(plain).
#define EACH(name) \
  namespace name { \
  extern const Table table; \
  }
ISAS
#undef EACH

namespace {

// Whether this processor has each of them.
bool has_plain() { return true; }
#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
// The processor has tiles, and the operating system lets this process use them.
bool has_amx() {
  unsigned a, b, c, d;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  bool tiles = d & 1u << 24, bf16 = d & 1u << 22;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return tiles && bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Choice {
  const Table* table;
  bool (*runs_here)();
};
#define EACH(name) {&name::table, has_##name},
const Choice kChoices[] = {ISAS};
#undef EACH

std::atomic<const Table*> chosen{nullptr};
const Table& table() { return *chosen.load(std::memory_order_relaxed); }

// What the functions return. The caller is not C++, so nothing may be thrown into it.
enum Status : int { kDone = 0, kNoMemory = 1, kNoSuchRow = 2 };

template <class... Args> int call(void (*function)(Args...), Args... args) noexcept {
  try {
    function(args...);
    return kDone;
  } catch (...) {  // std::bad_alloc: nothing else is thrown
    return kNoMemory;
  }
}

}  // namespace

// INTERFACE is a hash of this file and kernels.h. It is read before the library is loaded.
EXPORT __attribute__((used)) const char penstock_interface[];
const char penstock_interface[] = "penstock interface " INTERFACE;

// Use the named instruction set, or the best there is for "". The name of the one used, or null if it cannot run here.
EXPORT const char* penstock_select(const char* name) {
  for (const Choice& choice : kChoices) {
    if ((*name == 0 || strcmp(name, choice.table->name) == 0) && choice.runs_here()) {
      chosen = choice.table;
      return choice.table->name;
    }
  }
  return nullptr;
}

EXPORT int penstock_set_threads(int count) { return pool::set_threads(count); }
EXPORT int penstock_pack(const PackArgs* a) { return call(table().pack, a); }
EXPORT int penstock_pack_gguf(const PackGgufArgs* a) { return call(table().pack_gguf, a); }
EXPORT int penstock_compress(const CompressArgs* a) { return call(table().compress, a); }
EXPORT int penstock_linear(const LinearArgs* a) { return call(table().linear, a); }
EXPORT int penstock_experts(const ExpertsArgs* a) {
  for (int64_t i = 0; i < a->rows * a->top_k; i++)
    if (uint64_t(a->chosen[i]) >= uint64_t(a->num_experts)) return kNoSuchRow;
  return call(table().experts, a);
}
EXPORT int penstock_lookup(const LookupArgs* a) {
  const uint64_t num_columns = uint64_t(a->weight->num_panels) * 32;
  for (int64_t i = 0; i < a->rows; i++)
    if (uint64_t(a->ids[i]) >= num_columns) return kNoSuchRow;
  return call(table().lookup, a);
}
EXPORT int penstock_attention(const AttentionArgs* a) { return call(table().attention, a); }
EXPORT int penstock_write(const WriteArgs* a) { return call(table().write, a); }
EXPORT int penstock_norm(const NormArgs* a) { return call(table().norm, a); }
EXPORT int penstock_rope(const RopeArgs* a) { return call(table().rope, a); }
EXPORT int penstock_best(const RowsArgs* a) { return call(table().best, a); }
EXPORT int penstock_broken(const RowsArgs* a) { return call(table().broken, a); }
EXPORT int penstock_sample(const SampleArgs* a) {
  auto are_known = [&](const int64_t* ids, int64_t count) {
    return std::all_of(ids, ids + count, [&](int64_t id) { return uint64_t(id) < uint64_t(a->columns); });
  };
  for (const SampleRow* how = a->each; how < a->each + a->rows; how++) {
    if (!are_known(how->forbidden, how->num_forbidden) || !are_known(how->biased, how->num_biased) ||
        !are_known(how->tokens, how->num_tokens))
      return kNoSuchRow;
  }
  return call(table().sample, a);
}
EXPORT int penstock_rank(const RankArgs* a) { return call(table().rank, a); }
EXPORT int penstock_convolve(const ConvolveArgs* a) { return call(table().convolve, a); }
EXPORT int penstock_delta(const DeltaArgs* a) { return call(table().delta, a); }
EXPORT int penstock_space(const SpaceArgs* a) { return call(table().space, a); }
EXPORT int penstock_layers(const PagedLayer* layers, int64_t num_layers, const StepArgs* step) {
  return call(table().layers, layers, num_layers, step);
}
EXPORT int penstock_body(const NativeModelArgs* a, const StepArgs* step) {
  auto are_below = [](const int64_t* values, int64_t count, int64_t end) {
    return std::all_of(values, values + count, [&](int64_t value) { return uint64_t(value) < uint64_t(end); });
  };
  if (!are_below(a->ids, step->rows, a->num_tokens) || !are_below(a->positions, step->rows, a->num_positions) ||
      !are_below(a->kept, a->num_kept, step->rows))
    return kNoSuchRow;
  return call(table().body, a, step);
}
EXPORT uint64_t penstock_read(const void* data, int64_t bytes) { return table().read(data, bytes); }
