#include "distributed/ring_route.h"

#include "distributed/ring_agreement.h"

namespace mlx_anvil {

mx::array bytes_of(const mx::array& memory, int64_t rows, int64_t bytes) {
  const mx::Shape shape = {static_cast<int>(rows), static_cast<int>(bytes / rows)};
  mx::array view(shape, mx::uint8, nullptr, {});
  mx::array::Flags flags = memory.flags();
  flags.contiguous = flags.row_contiguous = true;
  view.copy_shared_buffer(memory, {shape[1], 1}, flags, static_cast<size_t>(bytes));
  return view;
}

PieceRoute::PieceRoute(const char* op,
                       const RingCall& call,
                       const RingPlan& plan,
                       const AttentionOperands& args,
                       int64_t item_bytes)
    : call_(call), plan_(plan), args_(args), item_bytes_(item_bytes) {
  if (plan.ranks() > 1) {
    neighbours_.emplace(op, call.group);
    require_agreement(*neighbours_, op, call, args, plan.pieces());
  }
}

void PieceRoute::advance(int piece, int hops) {
  begun_.received.wait();
  begun_.sent.wait();  // the next piece arrives in its memory
  slot_ ^= receives_ ? 1 : 0;
  const int source = plan_.source(hops);
  const bool sends = hops < plan_.hops(source, piece);
  if (hops == 0) {
    take_own(piece, sends);
  } else {
    views_ = packed_views(args_.sizes, plan_.piece_rows(source, piece),
                          const_cast<char*>(call_.pieces[slot_].data<char>()), item_bytes_);
  }
  const int next = plan_.source(hops + 1);
  receives_ = hops + 1 < plan_.ranks() && hops + 1 <= plan_.hops(next, piece);
  if (sends || receives_) {
    std::optional<mx::array> out, in;
    if (sends) {
      out = memory_of(slot_, source, piece);
    }
    if (receives_) {
      in = memory_of(slot_ ^ 1, next, piece);
    }
    begun_ = neighbours_->begin(out ? &*out : nullptr, in ? &*in : nullptr);
  } else {
    begun_ = {};
  }
}

void PieceRoute::finish() {
  begun_.received.wait();
  begun_.sent.wait();
}

// A piece of one segment is used in place.
void PieceRoute::take_own(int piece, bool travels) {
  const std::vector<Segment> segments = plan_.piece(plan_.rank(), piece);
  const bool in_place = segments.size() == 1;
  if (travels || !in_place) {
    void* const memory = const_cast<char*>(call_.pieces[slot_].data<char>());
    pack_piece(args_, segments, item_bytes_, memory);
    views_ = packed_views(args_.sizes, plan_.piece_rows(plan_.rank(), piece), memory, item_bytes_);
  }
  if (in_place) {
    views_ = {moved(args_.k, 0, segments[0].first, item_bytes_),
              moved(args_.v, 0, segments[0].first, item_bytes_)};
  }
}

mx::array PieceRoute::memory_of(int slot, int source, int piece) const {
  const int64_t rows = plan_.piece_rows(source, piece);
  return bytes_of(call_.pieces[slot], rows, piece_bytes(args_.sizes, rows, item_bytes_));
}

}  // namespace mlx_anvil
