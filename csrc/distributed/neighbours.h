// The two neighbours of a rank, in a ring over all ranks of a group: transfers that run while the
// caller computes. MLX's engine moves the bytes.
#pragma once

#include <future>
#include <memory>
#include <mutex>
#include <string>

#include "mlx/distributed/distributed.h"
#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

using Group = mx::distributed::Group;

// The name of the group's backend in MLX: "ring", "jaccl", "mpi", "nccl"; empty for a group of one.
std::string backend_of(const Group& group);

// The stream on which MLX communicates by default. Everything that does has to be in one order on
// all ranks.
mx::Stream communication_stream(const Group& group);

int right_of(const Group& group);
int left_of(const Group& group);

// Sends to `to` and receives from `from` on one stream, in an order in which no two ranks wait for
// each other. To be called while a primitive is evaluated. `out` and `in` are dense.
void exchange(const Group& group,
              const mx::array& out,
              int to,
              mx::array& in,
              int from,
              const mx::Stream& stream);

// Throws if an earlier transfer of this process failed: MLX waits forever on such a connection.
void require_connection(const char* op);

// Transfers of one call, which begins them in the same order as the other ranks. Only one call of a
// process has transfers at any time. Not for groups whose backend communicates on a GPU.
class Neighbours {
 public:
  Neighbours(const char* op, const Group& group);

  // A transfer that has begun. wait() returns when it is complete, or throws an error that names
  // the rank.
  class Transfer {
   public:
    void wait();

   private:
    friend class Neighbours;
    std::future<void> done_;
  };

  // Both keep the memory of `x`, which is dense, until they are complete.
  struct Pair {
    Transfer sent, received;
  };

  // Begins to send `out` to the right and to receive `in` from the left. Null: neither.
  Pair begin(const mx::array* out, mx::array* in);

 private:
  Transfer begin_one(const mx::array& x, bool send);

  const char* op_;
  Group group_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace mlx_anvil
