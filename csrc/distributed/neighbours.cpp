#include "distributed/neighbours.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <typeinfo>

#include "common/errors.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/distributed/distributed_impl.h"

namespace mlx_anvil {

namespace {

std::atomic<bool> connection_lost = false;
std::mutex calls;

// Streams of our own: transfers in both directions, while MLX's default stream computes.
struct Streams {
  mx::Stream send = mx::new_thread_unsafe_stream(mx::Device::cpu);
  mx::Stream receive = mx::new_thread_unsafe_stream(mx::Device::cpu);
};

const Streams& streams() {
  static const Streams* const streams = new Streams;  // never deleted: MLX may still use them
  return *streams;
}

// MLX's ring has a thread for each socket. Of other backends we do not know that two threads may
// use them at once.
bool is_duplex(const Group& group) {
  return backend_of(group) == "ring";
}

// In any ring, some rank is odd: it receives first, then its neighbour can send, and so on.
bool sends_first(const Group& group) {
  return group.rank() % 2 == 0;
}

}  // namespace

std::string backend_of(const Group& group) {
  if (group.size() == 1) {
    return "";
  }
  // MLX does not say. The classes are mlx::core::distributed::<backend>::...
  const mx::distributed::detail::GroupImpl& implementation = *group.raw_group();
  const std::string type = typeid(implementation).name();
  for (const char* name : {"ring", "jaccl", "mpi", "nccl"}) {
    const std::string scope = std::to_string(std::string(name).size()) + name;
    if (type.find("11distributed" + scope) != std::string::npos) {
      return name;
    }
  }
  return "unknown";
}

mx::Stream communication_stream(const Group& group) {
  return group.raw_group()->communication_stream({});
}

int right_of(const Group& group) {
  return (group.rank() + 1) % group.size();
}

int left_of(const Group& group) {
  return (group.rank() + group.size() - 1) % group.size();
}

void exchange(const Group& group,
              const mx::array& out,
              int to,
              mx::array& in,
              int from,
              const mx::Stream& stream) {
  mx::distributed::detail::GroupImpl& engine = *group.raw_group();
  if (sends_first(group)) {
    engine.send(out, to, stream);
    engine.recv(in, from, stream);
  } else {
    engine.recv(in, from, stream);
    engine.send(out, to, stream);
  }
}

void require_connection(const char* op) {
  if (connection_lost) {
    throw_internal_error(op, "an earlier transfer of this process failed; start all ranks again.");
  }
}

Neighbours::Neighbours(const char* op, const Group& group) : op_(op), group_(group), lock_(calls) {
  require_connection(op);
  streams();
}

void Neighbours::Transfer::wait() {
  if (done_.valid()) {
    done_.get();
  }
}

Neighbours::Pair Neighbours::begin(const mx::array* out, mx::array* in) {
  Pair pair;
  const auto send = [&] {
    if (out) {
      pair.sent = begin_one(*out, /*send=*/true);
    }
  };
  if (sends_first(group_)) {
    send();
  }
  if (in) {
    pair.received = begin_one(*in, /*send=*/false);
  }
  if (!sends_first(group_)) {
    send();
  }
  return pair;
}

Neighbours::Transfer Neighbours::begin_one(const mx::array& x, bool send) {
  const mx::Stream& stream = send || !is_duplex(group_) ? streams().send : streams().receive;
  mx::distributed::detail::GroupImpl& engine = *group_.raw_group();
  const int peer = send ? right_of(group_) : left_of(group_);
  mx::array own = x;
  if (send) {
    engine.send(own, peer, stream);
  } else {
    engine.recv(own, peer, stream);
  }
  auto done = std::make_shared<std::promise<void>>();
  Transfer transfer;
  transfer.done_ = done->get_future();
  mx::cpu::get_command_encoder(stream).dispatch(
      [done, stream, peer, send, own = std::move(own), op = op_, rank = group_.rank()] {
        try {
          mx::scheduler::check_error(stream);
          done->set_value();
        } catch (const std::exception& error) {
          connection_lost = true;
          const std::string what = "rank " + std::to_string(rank) +
                                   (send ? " could not send to" : " received nothing from") +
                                   " rank " + std::to_string(peer) + ": " + error.what();
          done->set_exception(std::make_exception_ptr(std::runtime_error(op_message(op, what))));
        }
      });
  return transfer;
}

}  // namespace mlx_anvil
