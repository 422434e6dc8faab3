#include "distributed/ring_graph.h"

#include <array>
#include <limits>
#include <optional>
#include <vector>

#include "common/broadcast.h"
#include "common/mlx_ops.h"
#include "common/simulate.h"
#include "distributed/exchange.h"
#include "distributed/ring_plan.h"
#include "flash_attention/backward.h"
#include "flash_attention/compose.h"
#include "flash_attention/forward.h"

namespace mlx_anvil {

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A result of some keys.
struct Partial {
  mx::array out;  // float32
  mx::array lse;
};

// Segments of queries and keys, as rows of the arrays, and how the kernels see them.
struct Pair {
  Segment queries, keys;
  AttentionConfig config;
};

class Builder {
 public:
  Builder(const RingConfig& config, const RingInputs& in, RingGraph kind, mx::Stream s)
      : config_(config),
        in_(in),
        kind_(kind),
        s_(s),
        plan_({config.group.size(), in.q.shape(2), config.zigzag},
              config.group.rank(),
              config.attention,
              /*in_pieces=*/false) {}

  Arrays forward() {
    std::vector<Partial> totals;  // of each segment of queries
    const std::vector<Segment> own = plan_.rows(plan_.rank());
    for (const Segment& segment : own) {
      totals.push_back(start(segment));
    }
    Arrays kv = {in_.k, in_.v};
    Arrays done;  // of the hop before
    for (int hops = 0; hops < plan_.ranks(); ++hops) {
      if (hops > 0) {
        kv = pass_on(kv, done);
        done.clear();
      }
      for (size_t i = 0; i < own.size(); ++i) {
        done.push_back(totals[i].lse);
        for (const Pair& pair : pairs(hops, own[i])) {
          totals[i] = joined(totals[i], attend(pair, kv));
        }
      }
    }
    Arrays outs, lses;
    for (size_t i = 0; i < own.size(); ++i) {
      outs.push_back(totals[i].out);
      lses.push_back(totals[i].lse);
    }
    mx::array out = joined_rows(outs), lse = joined_rows(lses);
    if (in_.lengths) {
      const mx::array used = rows_in_use();
      out = choose(mx::expand_dims(used, -1, s_), out, mx::array(0.0f), s_);
      lse = choose(used, lse, start_of_lse(in_.q.shape(2)), s_);
    }
    // A rank that needs no more keys passes them on all the same.
    return ordered({mx::astype(out, in_.q.dtype(), s_), lse}, kv, s_);
  }

  // Rows past the end have no gradients, but that of their sink.
  Arrays backward(const mx::array& out,
                  const mx::array& lse,
                  const mx::array& any_d_out,
                  const mx::array& any_d_lse) {
    mx::array d_out = any_d_out, d_lse = any_d_lse;
    if (in_.lengths) {
      const mx::array used = rows_in_use();
      d_out = choose(mx::expand_dims(used, -1, s_), d_out, mx::array(0, d_out.dtype()), s_);
      d_lse = choose(used, d_lse, mx::array(0.0f), s_);
    }
    const std::vector<Segment> own = plan_.rows(plan_.rank());
    std::vector<std::optional<mx::array>> d_q(own.size());
    Arrays kv = {in_.k, in_.v};
    Arrays sums, arrived;  // the gradients of kv, as far as they have come, with and without ours
    for (int hops = 0; hops < plan_.ranks(); ++hops) {
      if (hops > 0) {
        kv = pass_on(kv, arrived);
        arrived = pass_on(sums, kv);
      }
      std::vector<std::array<std::optional<mx::array>, 2>> of_keys(own.size());
      for (size_t i = 0; i < own.size(); ++i) {
        for (const Pair& pair : pairs(hops, own[i])) {
          Arrays inputs = {rows_of(in_.q, pair.queries), rows_of(kv[0], pair.keys),
                           rows_of(kv[1], pair.keys)};
          AttentionConfig config = pair.config;
          add_key_mask(config, inputs, pair);
          for (const mx::array& x : Arrays{out, lse, d_out, d_lse}) {
            inputs.push_back(rows_of(x, pair.queries));
          }
          const Arrays gradients = backward_of(config, inputs);
          add_to(d_q[i], gradients[0]);
          const size_t at = pair.keys.first > 0 ? 1 : 0;
          for (size_t j = 0; j < 2; ++j) {
            add_to(of_keys[at][j], gradients[1 + j]);
          }
        }
      }
      Arrays share;
      for (size_t j = 0; j < 2; ++j) {
        share.push_back(share_of(of_keys, j, kv[j], own));
      }
      sums = share;
      for (size_t j = 0; hops > 0 && j < 2; ++j) {
        sums[j] = mx::add(arrived[j], share[j], s_);
      }
    }
    if (plan_.ranks() > 1) {  // home
      sums = pass_on(sums, kv);
    }
    Arrays d_q_rows;
    for (size_t i = 0; i < own.size(); ++i) {
      d_q_rows.push_back(d_q[i] ? *d_q[i] : wide_zeros(rows_of(in_.q, own[i])));
    }
    Arrays results = {mx::astype(joined_rows(d_q_rows), in_.q.dtype(), s_),
                      mx::astype(sums[0], in_.k.dtype(), s_),
                      mx::astype(sums[1], in_.v.dtype(), s_)};
    if (in_.sinks) {
      results.push_back(sink_gradient(out, lse, d_out, any_d_lse));
    }
    return results;
  }

 private:
  // ---- which keys -------------------------------------------------------------------------------

  // The pairs of a segment of this rank's queries with the keys that are here after `hops`.
  std::vector<Pair> pairs(int hops, const Segment& queries) const {
    std::vector<Pair> seen;
    for (const Segment& keys : plan_.rows(plan_.source(hops))) {
      if (kind_ == RingGraph::kSame || plan_.sees(queries, keys)) {
        seen.push_back({queries, keys,
                        config_of_block(config_.attention, queries.position, queries.length,
                                        keys.position, keys.length,
                                        /*simplified=*/kind_ == RingGraph::kShortest)});
      }
    }
    return seen;
  }

  Arrays pass_on(const Arrays& arrays, const Arrays& after) const {
    return exchange_with_neighbours(arrays, after, config_.group, 1, s_);
  }

  mx::array rows_of(const mx::array& x, const Segment& segment) const {
    if (segment.length == x.shape(2)) {
      return x;
    }
    mx::Shape begin(x.ndim(), 0), end = x.shape();
    begin[2] = static_cast<int>(segment.first);
    end[2] = static_cast<int>(segment.first + segment.length);
    return mx::slice(x, begin, end, s_);
  }

  mx::array joined_rows(const Arrays& parts) const {
    return parts.size() == 1 ? parts[0] : mx::concatenate(parts, 2, s_);
  }

  // int32 [length]: positions of rows of a segment, in the whole sequence.
  mx::array positions(const Segment& segment) const {
    return mx::arange(static_cast<int>(segment.position),
                      static_cast<int>(segment.position + segment.length), s_);
  }

  // [batch, 1, rows]
  mx::array before_end(const mx::array& positions) const {
    const mx::array ends = mx::expand_dims(mx::expand_dims(*in_.lengths, -1, s_), -1, s_);
    return mx::less(positions, ends, s_);
  }

  mx::array rows_in_use() const {
    Arrays all;
    for (const Segment& segment : plan_.rows(plan_.rank())) {
      all.push_back(positions(segment));
    }
    return before_end(all.size() == 1 ? all[0] : mx::concatenate(all, 0, s_));
  }

  // Hides keys past the end. Queries that see no key to their right need no mask: rows past the end
  // are cleared afterwards. With a mask, the gradient of a block is the same graph for any window.
  void add_key_mask(AttentionConfig& config, Arrays& inputs, const Pair& pair) const {
    const bool hides_keys = in_.lengths && config_.attention.window_right > 0;
    if (!hides_keys && kind_ == RingGraph::kShortest) {
      return;
    }
    config.mask = AttentionMask::kBool;
    inputs.push_back(hides_keys ? mx::expand_dims(before_end(positions(pair.keys)), 1, s_)
                                : mx::full({1, 1, 1, 1}, true, mx::bool_, s_));
  }

  // ---- forward ----------------------------------------------------------------------------------

  mx::array start_of_lse(int rows) const {
    const mx::Shape shape = {in_.q.shape(0), in_.q.shape(1), rows};
    if (!in_.sinks) {
      return mx::full(shape, kMinusInfinity, mx::float32, s_);
    }
    return stretch(mx::expand_dims(*in_.sinks, -1, s_), shape, s_);
  }

  // A sink is a key whose value is 0.
  Partial start(const Segment& segment) const {
    const int rows = static_cast<int>(segment.length);
    return {mx::zeros({in_.q.shape(0), in_.q.shape(1), rows, in_.v.shape(3)}, mx::float32, s_),
            start_of_lse(rows)};
  }

  Partial attend(const Pair& pair, const Arrays& kv) const {
    Arrays inputs = {rows_of(in_.q, pair.queries), rows_of(kv[0], pair.keys),
                     rows_of(kv[1], pair.keys)};
    AttentionConfig config = pair.config;
    add_key_mask(config, inputs, pair);
    AttentionInputs in{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt, std::nullopt};
    if (inputs.size() > 3) {
      in.mask = inputs[3];
    }
    const bool fused =
        !why_not_fused(in.q.shape(3), in.v.shape(3), /*gradient=*/false, for_gpu(s_));
    const Arrays results = fused ? apply_attention(config, in, /*with_lse=*/true, s_)
                                 : compose_attention(config, in, s_);
    return {mx::astype(results[0], mx::float32, s_), results[1]};
  }

  Partial joined(const Partial& a, const Partial& b) const {
    const mx::array top = mx::stop_gradient(mx::maximum(a.lse, b.lse, s_), s_);
    const mx::array blind = mx::equal(top, mx::array(kMinusInfinity), s_);
    const mx::array base = mx::where(blind, mx::array(0.0f), top, s_);
    const auto weight = [&](const mx::array& lse) {
      const mx::array seen = mx::greater(lse, mx::array(kMinusInfinity), s_);
      const mx::array safe = choose(seen, lse, base, s_);
      return choose(seen, mx::exp(mx::subtract(safe, base, s_), s_), mx::array(0.0f), s_);
    };
    const mx::array of_a = weight(a.lse), of_b = weight(b.lse);
    const mx::array sum = mx::add(of_a, of_b, s_);
    const mx::array total = mx::where(blind, mx::array(1.0f), sum, s_);
    const auto share = [&](const mx::array& w, const mx::array& out) {
      return mx::multiply(mx::expand_dims(mx::divide(w, total, s_), -1, s_), out, s_);
    };
    const mx::array lse = mx::add(base, mx::log(total, s_), s_);
    return {mx::add(share(of_a, a.out), share(of_b, b.out), s_),
            choose(blind, mx::array(kMinusInfinity), lse, s_)};
  }

  // ---- backward ---------------------------------------------------------------------------------

  // d_q, d_k and d_v in float32.
  Arrays backward_of(const AttentionConfig& config, const Arrays& inputs) const {
    const AttentionGradients wanted{.q = true, .kv = true};
    const bool fused =
        !why_not_fused(in_.q.shape(3), in_.v.shape(3), /*gradient=*/true, for_gpu(s_));
    const bool masked = config.mask != AttentionMask::kNone;
    const size_t at = 3 + masked;
    Arrays gradients;
    if (fused) {
      gradients = apply_attention_backward(config, wanted, inputs, /*has_d_lse=*/true, s_);
    } else {
      AttentionInputs in{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt, std::nullopt};
      if (masked) {
        in.mask = inputs[3];
      }
      gradients = compose_attention_backward(config, in, inputs[at], inputs[at + 1], inputs[at + 2],
                                             inputs[at + 3], wanted, s_);
    }
    for (mx::array& x : gradients) {
      x = mx::astype(x, mx::float32, s_);
    }
    return gradients;
  }

  void add_to(std::optional<mx::array>& sum, const mx::array& x) const {
    sum = sum ? mx::add(*sum, x, s_) : x;
  }

  mx::array wide_zeros(const mx::array& like) const {
    return mx::zeros(like.shape(), mx::float32, s_);
  }

  // The share of the gradients of keys (0) or values (1), of all segments of the part.
  mx::array share_of(const std::vector<std::array<std::optional<mx::array>, 2>>& of_keys,
                     size_t which,
                     const mx::array& whole,
                     const std::vector<Segment>& segments) const {
    Arrays parts;
    for (size_t i = 0; i < segments.size(); ++i) {
      parts.push_back(of_keys[i][which] ? *of_keys[i][which]
                                        : wide_zeros(rows_of(whole, segments[i])));
    }
    return joined_rows(parts);
  }

  mx::array sink_gradient(const mx::array& out,
                          const mx::array& lse,
                          const mx::array& d_out,
                          const mx::array& d_lse) const {
    const mx::array sinks = mx::expand_dims(*in_.sinks, -1, s_);
    const mx::array present = mx::greater(sinks, mx::array(kMinusInfinity), s_);
    const mx::array safe = mx::where(present, lse, mx::array(0.0f), s_);
    const mx::array p = mx::exp(mx::subtract(sinks, safe, s_), s_);
    const mx::array products =
        mx::multiply(mx::astype(d_out, mx::float32, s_), mx::astype(out, mx::float32, s_), s_);
    const mx::array delta = mx::subtract(mx::sum(products, -1, false, s_), d_lse, s_);
    const mx::array per_row = choose(present, mx::multiply(p, delta, s_), mx::array(0.0f), s_);
    return mx::negative(mx::sum(per_row, -1, false, s_), s_);
  }

  const RingConfig& config_;
  const RingInputs& in_;
  const RingGraph kind_;
  const mx::Stream s_;
  const RingPlan plan_;
};

}  // namespace

Arrays ring_forward_graph(const RingConfig& config,
                          const RingInputs& in,
                          RingGraph kind,
                          mx::Stream s) {
  return Builder(config, in, kind, s).forward();
}

Arrays ring_backward_graph(const RingConfig& config,
                           const RingInputs& in,
                           const mx::array& out,
                           const mx::array& lse,
                           const mx::array& d_out,
                           const mx::array& d_lse,
                           RingGraph kind,
                           mx::Stream s) {
  return Builder(config, in, kind, s).backward(out, lse, d_out, d_lse);
}

}  // namespace mlx_anvil
