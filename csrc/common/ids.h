// Ids: integers that select one of `count` rows or experts.
#pragma once

#include <functional>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// The words of an error around the id and the count: {"ids", " and w ", " rows"} gives
// "ids has 9 and w 4 rows".
struct IdsText {
  const char* name;
  const char* before_count;
  const char* after_count;
};

// Returns true if the host can read the integers now: on the CPU, if the array has been evaluated.
// On CUDA the host does not share memory.
bool ids_are_readable(const mx::array& ids, const mx::Stream& stream);

// Throws for an id out of range, if the ids are readable. Negative ones count from the end. Other
// ids are left to the kernels, which clamp.
void require_ids(const char* op,
                 const mx::array& ids,
                 int64_t count,
                 const IdsText& text,
                 const mx::Stream& stream);

// Calls `use` with each integer of a vector and the one before it, at first 0, if the integers are
// readable.
void for_each_readable(const mx::array& integers,
                       const mx::Stream& stream,
                       const std::function<void(int64_t, int64_t)>& use);

// Ids as kernels read them, in 32 bits: those that do not fit become the nearest that do, which are
// out of range too. uint32 stays.
mx::array ids_in_32_bits(const mx::array& ids, mx::Stream stream);

// The same in int32, for kernels that clamp: what does not fit becomes the nearest number that
// does.
mx::array ids_in_int32(const mx::array& ids, mx::Stream stream);

// The same, clamped to 0 .. most, for kernels that do not clamp.
mx::array ids_up_to(const mx::array& ids, int most, mx::Stream stream);

// Throws unless `places`, if they are readable, are all numbers from 0 to places.size() - 1.
void require_permutation(const char* op,
                         const char* name,
                         const mx::array& places,
                         const mx::Stream& stream);

}  // namespace mlx_anvil
