#include "distributed/ring_relay.h"

namespace mlx_anvil {

Relay::Relay(const RingPlan& plan,
             const AttentionSizes& sizes,
             int64_t item_bytes,
             const std::array<mx::array, 2>& memory)
    : plan_(plan), sizes_(sizes), item_bytes_(item_bytes), memory_(memory) {}

void Relay::arrive() {
  begun_.received.wait();
  begun_.sent.wait();  // the next piece arrives in its memory
  slot_ ^= receives_ ? 1 : 0;
  receives_ = false;
}

void Relay::begin(std::optional<Neighbours>& neighbours,
                  int piece,
                  std::optional<int> sent,
                  std::optional<int> received) {
  if (!sent && !received) {
    return;
  }
  std::optional<mx::array> out, in;
  if (sent) {
    out = bytes_of(slot_, *sent, piece);
  }
  if (received) {
    in = bytes_of(slot_ ^ 1, *received, piece);
  }
  begun_ = neighbours->begin(out ? &*out : nullptr, in ? &*in : nullptr);
  receives_ = received.has_value();
}

void* Relay::memory() const {
  return const_cast<char*>(memory_[slot_].data<char>());
}

// Pieces differ in length by a row.
mx::array Relay::bytes_of(int slot, int source, int piece) const {
  const int64_t rows = plan_.piece_rows(source, piece);
  const int64_t bytes = piece_bytes(sizes_, rows, item_bytes_);
  const mx::Shape shape = {static_cast<int>(rows), static_cast<int>(bytes / rows)};
  mx::array view(shape, mx::uint8, nullptr, {});
  mx::array::Flags flags = memory_[slot].flags();
  flags.contiguous = flags.row_contiguous = true;
  view.copy_shared_buffer(memory_[slot], {shape[1], 1}, flags, static_cast<size_t>(bytes));
  return view;
}

}  // namespace mlx_anvil
