#include "distributed/ring_route.h"

#include "distributed/ring_agreement.h"

namespace mlx_anvil {

PieceRoute::PieceRoute(const char* op,
                       const RingCall& call,
                       const RingPlan& plan,
                       const AttentionOperands& args,
                       int64_t item_bytes)
    : plan_(plan),
      args_(args),
      item_bytes_(item_bytes),
      relay_(plan, args.sizes, item_bytes, call.pieces) {
  if (plan.ranks() > 1) {
    neighbours_.emplace(op, call.group);
    require_agreement(*neighbours_, op, call, args, plan.pieces());
  }
}

void PieceRoute::advance(int piece, int hops) {
  relay_.arrive();
  const int source = plan_.source(hops), next = plan_.source(hops + 1);
  const bool sends = hops < plan_.hops(source, piece);
  const bool receives = hops + 1 < plan_.ranks() && hops + 1 <= plan_.hops(next, piece);
  if (hops == 0) {
    take_own(piece, sends);
  } else {
    views_ =
        packed_views(args_.sizes, plan_.piece_rows(source, piece), relay_.memory(), item_bytes_);
  }
  relay_.begin(neighbours_, piece, sends ? std::optional(source) : std::nullopt,
               receives ? std::optional(next) : std::nullopt);
}

// A piece of one segment is used in place.
void PieceRoute::take_own(int piece, bool travels) {
  const std::vector<Segment> segments = plan_.piece(plan_.rank(), piece);
  const bool in_place = segments.size() == 1;
  if (travels || !in_place) {
    pack_piece(args_, segments, item_bytes_, relay_.memory());
    views_ = packed_views(args_.sizes, plan_.piece_rows(plan_.rank(), piece), relay_.memory(),
                          item_bytes_);
  }
  if (in_place) {
    views_ = {moved(args_.k, 0, segments[0].first, item_bytes_),
              moved(args_.v, 0, segments[0].first, item_bytes_)};
  }
}

}  // namespace mlx_anvil
