// Mixtures of experts. The rows of a step are sorted by expert, and each expert's panels multiply its rows: one task for
// each expert and panel, so that the weights of an expert are read once from memory for all of its rows. A row's result is
// that of the linear layers, whatever rows are beside it, and results are added in the order of the row's choices.
#include <algorithm>
#include <vector>

#include "functions.h"
#include "pool.h"
#include "vec.h"

namespace ISA {
namespace {

constexpr int64_t kMostRows = 1024;  // of a step at a time: so much memory do the sorted rows take
constexpr int64_t kTaskElements = 65536;

// Where the rows of each expert lie when they are sorted by expert, and in the order of the step otherwise.
struct Order {
  std::vector<int64_t> first;  // of each expert, and where the last one ends
  std::vector<int64_t> place;  // of each row's choices, [rows, top_k]

  Order(const int64_t* chosen, int64_t count, int64_t num_experts) : first(num_experts + 1), place(count) {
    for (int64_t i = 0; i < count; i++) first[chosen[i] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) first[e + 1] += first[e];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < count; i++) place[i] = next[chosen[i]]++;
  }
};

// Multiply the sorted rows of x by the weights of their experts.
void multiply_sorted(const ExpertsArgs& a, const Order& order, const Packed& all, const void* x, void* out, int64_t columns,
                     int32_t activation) {
  const int64_t panels = all.num_panels / a.num_experts;
  std::vector<Packed> weights;
  std::vector<Part> parts;
  std::vector<LinearArgs> each;
  weights.reserve(a.num_experts);
  parts.reserve(a.num_experts);
  for (int64_t e = 0; e < a.num_experts; e++) {
    const int64_t row = order.first[e], rows = order.first[e + 1] - row;
    if (!rows) continue;
    weights.push_back(panels_of(all, e * panels, panels));
    parts.push_back({(char*)out + row * columns * all.element_bytes, columns, columns, 0});
    each.push_back({&weights.back(), (const char*)x + row * all.inputs * all.element_bytes, all.inputs, rows, &parts.back(),
                    1, activation, nullptr, 0, a.limit, a.slope});
  }
  linears(each.data(), int(each.size()));
}

template <class F> void in_tasks(int64_t rows, int64_t row_elements, const F& each) {
  const int64_t per_task = kTaskElements / row_elements + 1;
  pool::run(int((rows + per_task - 1) / per_task), [&](int task) {
    for (int64_t row = task * per_task; row < rows && row < (task + 1) * per_task; row++) each(row);
  });
}

template <class T, class S> void experts_of(const ExpertsArgs& a) {
  const int64_t inputs = a.gate_up->inputs, choices = a.rows * a.top_k;
  const T* x = (const T*)a.x;
  const S* shares = (const S*)a.shares;
  const Order order(a.chosen, choices, a.num_experts);
  T* sorted = (T*)pool::scratch(2, size_t(choices) * (inputs + a.intermediate) * sizeof(T));
  T* gated = sorted + choices * inputs;
  in_tasks(choices, inputs, [&](int64_t i) {
    memcpy(sorted + order.place[i] * inputs, x + i / a.top_k * inputs, inputs * sizeof(T));
  });
  multiply_sorted(a, order, *a.gate_up, sorted, gated, a.intermediate, a.activation);
  multiply_sorted(a, order, *a.down, gated, sorted, inputs, kNone);
  in_tasks(a.rows, inputs * a.top_k, [&](int64_t row) {
    const int64_t* place = order.place.data() + row * a.top_k;
    for (int64_t column = 0; column < inputs; column += 16) {
      const int count = int(std::min<int64_t>(inputs - column, 16));
      f32x16 sum = {};
      for (int64_t k = 0; k < a.top_k; k++) {
        f32x16 result = load_first(sorted + place[k] * inputs + column, count) * scalar(shares[row * a.top_k + k]);
        sum += sizeof(S) == sizeof(T) ? rounded<T>(result) : result;
      }
      store_first((T*)a.out + row * inputs + column, sum, count);
    }
  });
}

template <class T, class S> void experts_in_parts(const ExpertsArgs& a) {
  for (int64_t row = 0; row < a.rows; row += kMostRows) {
    ExpertsArgs part = a;
    part.rows = std::min(a.rows - row, kMostRows);
    part.x = (const T*)a.x + row * a.gate_up->inputs;
    part.out = (T*)a.out + row * a.gate_up->inputs;
    part.chosen = a.chosen + row * a.top_k;
    part.shares = (const S*)a.shares + row * a.top_k;
    experts_of<T, S>(part);
  }
}

}  // namespace

void experts(const ExpertsArgs* a) {
  if (a->gate_up->element_bytes == 4) return experts_in_parts<float, float>(*a);
  a->share_bytes == 4 ? experts_in_parts<bf16, float>(*a) : experts_in_parts<bf16, bf16>(*a);
}

}  // namespace ISA
