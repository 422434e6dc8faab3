// The sum of the rows of x with the same id: the gradient of taking rows. Sums are float32, and the
// terms come in one order in every run.
//   out[i] = sum of x[order[place]] over the places with sorted[place] == i
//
// Kernels: gather_sum_pairs_<dtype>.
// Grid: (blocks of packs of 16 bytes, ids or fewer). Threadgroup: 32 to 256.
// Bindings: x [pairs, columns], order [pairs]: the pairs sorted by id, sorted [pairs]: their ids,
// out [ids, columns], params (GatherSumParams).
// Function constants: 0: rows are whole, aligned packs. No other alignment is assumed.
//
//   for each id: place = the first of this id                    (binary search)
//     while sorted[place] == id: sum += x[order[place]]; place += 1
//     store
#include "metal/common/kernel.h"
#include "metal/common/strided_pack.h"
#include "metal/gather_matmul/params.h"

// The first place whose id is not below `id`.
METAL_FUNC int first_place(const device int* sorted, int id, int pairs) {
  int begin = 0, end = pairs;
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (sorted[middle] < id) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_sum_pairs(
    const device T* x [[buffer(0)]],
    const device uint* order [[buffer(1)]],
    const device int* sorted [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant GatherSumParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  enum { kSize = Pack<T>::kSize };
  const long columns = params.columns;
  const long column = (static_cast<long>(group.x) * threads.x + thread_in_group.x) * kSize;
  if (column >= columns) {
    return;
  }
  const int count = static_cast<int>(metal::min(static_cast<long>(kSize), columns - column));
  for (int id = int(group.y); id < params.ids; id += int(groups.y)) {
    float sum[kSize] = {};
    int place = first_place(sorted, id, params.pairs);
    for (; place < params.pairs && sorted[place] == id; ++place) {
      float row[kSize];
      load_pack(x + order[place] * columns + column, 1, count, row);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kSize; ++i) {
        sum[i] += row[i];
      }
    }
    store_pack(out + id * columns + column, count, sum);
  }
}

// ---- kernels

#define INSTANTIATE(dtype, T) MLX_ANVIL_KERNEL("gather_sum_pairs_" #dtype, gather_sum_pairs<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)
