// The operands of one chunk after another, for the kernels that walk along a sequence.
//
// A walk has four turns per chunk, in which a kernel uses its tiles in this order:
//   forward:  keys (from); values, inverse; queries, weights; keys (to)
//   backward: keys (to); values, weights, inverse; queries; keys (from)
// begin() starts the first turn, and arrive() each other one. All threads call them together.
#pragma once

#include "metal/gated_delta/channels.h"
#include "metal/gated_delta/chunk_tiles.h"

// Where the operands of a head are. `values` are the columns of v, or of the gradient of y, of the
// threadgroup. With a decay per channel, q and k are what chunk_prepare_channels.metal made of
// them.
template <typename T, bool kPairs, bool kPerChannel, int kKeyDim>
struct ChunkSource {
  using Weight = typename ChunkNumbers<T, kPairs>::Weight;
  using Key = metal::conditional_t<kPerChannel, Weight, T>;
  enum { kPlanes = ChunkNumbers<T, kPairs>::kPlanes, kSquare = kChunk * kChunk };
  enum { kKeyPlanes = kPerChannel ? int(kPlanes) : 1, kRows = kChunk * kKeyDim };
  enum { kFacts = kChunkRows * kChunk + (kPerChannel ? kKeyDim : 0) };

  Rows<Key> q, k;  // of the whole head, or of all chunks
  Rows<T> values;  // of the whole head
  const device Weight *inverse, *weights;
  const device float* rows;

  METAL_FUNC const device float* facts(ChunkPlace chunk) const thread {
    return rows + chunk.index * kFacts;
  }
  METAL_FUNC Rows<Weight> inverse_plane(ChunkPlace chunk, int plane) const thread {
    return {inverse + (chunk.index * kPlanes + plane) * kSquare, kChunk, 1, kChunk, kChunk};
  }
  METAL_FUNC Rows<Weight> weights_of(ChunkPlace chunk) const thread {
    return {weights + chunk.index * kSquare, kChunk, 1, kChunk, kChunk};
  }
  METAL_FUNC Rows<Key> keys(ChunkPlace chunk,
                            ChunkOperand operand,
                            int panel,
                            int plane) const thread {
    if (kPerChannel) {
      const long place = (chunk.index * kChunkOperands + operand) * kPlanes + plane;
      return {k.data + place * kRows + panel * kPanel, kKeyDim, 1, kChunk, kPanel};
    }
    return chunk_rows(operand == kQueriesFrom ? q : k, chunk, panel);
  }
};

// sum += left x an operand's rows of a panel, or their transpose. `kRounded`: with pairs, the
// product of high parts alone.
template <ChunkOperand kOperand, bool kTransposed, bool kRounded, typename Walk>
METAL_FUNC void add_keys(const thread Walk& walk,
                         thread RegTile<float, 16, kChunk>& sum,
                         const thread RegTile<float, 16, kChunk>& left,
                         int panel,
                         FragmentPlace place) {
  add_product<bool(Walk::kOfPairs), kTransposed, kRounded>(
      sum, left, walk.template keys<kOperand>(panel, 0), place);
  if (!kRounded && Walk::kKeyPlanes == 2) {
    add_product<bool(Walk::kOfPairs), kTransposed, true>(
        sum, left, walk.template keys<kOperand>(panel, 1), place);
  }
}

// Multiplies the columns of a state by the decay through the chunk.
template <bool kPerChannel, typename Walk>
METAL_FUNC void decay_state(const thread Walk& walk,
                            thread RegTile<float, 16, kPanel>& s,
                            int panel,
                            FragmentPlace place) {
  if (kPerChannel) {
    scale_columns(s, walk.decays() + panel * kPanel, place);
  } else {
    s.scale(walk.facts(kDecayBefore)[kChunk - 1]);
  }
}

// Tiles are loaded when they are needed, in the place of the one before. kGroups: products are
// those of four SIMD groups, for pairs. kBackward: the order of turns above.
template <typename T, bool kPairs, bool kPerChannel, bool kGroups, bool kBackward, int kKeyDim>
struct ChunkWalk {
  using Source = ChunkSource<T, kPairs, kPerChannel, kKeyDim>;
  using Weight = typename Source::Weight;
  using Key = typename Source::Key;
  enum { kOfPairs = kPairs, kKeyPlanes = Source::kKeyPlanes };

  Source source;
  threadgroup float* memory;
  uint thread_index;
  ChunkPlace chunk;

  // `next` is the chunk that comes after, if there is one; `all`: q and the weights are needed.
  METAL_FUNC void start(ChunkPlace first, bool exists, bool all) thread {}
  METAL_FUNC void begin(ChunkPlace own, ChunkPlace next, bool has_next) thread {
    chunk = own;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < Source::kFacts; i += kChunkThreads) {
      memory[i] = source.facts(chunk)[i];
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  template <int kTurn>
  METAL_FUNC void arrive() thread {}

  template <ChunkOperand kOperand>
  METAL_FUNC const threadgroup Key* keys(int panel, int plane) const thread {
    return load<Key>(source.keys(chunk, kOperand, panel, plane), kPerChannel || keys_are_vectors);
  }
  METAL_FUNC const threadgroup T* values() const thread {
    return load<T>(chunk_rows(source.values, chunk, 0), values_are_vectors);
  }
  METAL_FUNC const threadgroup Weight* inverse(int plane) const thread {
    return load<Weight>(source.inverse_plane(chunk, plane), true);
  }
  METAL_FUNC const threadgroup Weight* weights() const thread {
    return load<Weight>(source.weights_of(chunk), true);
  }
  METAL_FUNC const threadgroup float* facts(ChunkRow row) const thread {
    return memory + row * kChunk;
  }
  METAL_FUNC const threadgroup float* decays() const thread { return memory + kChunkRows * kChunk; }

 private:
  template <typename U>
  METAL_FUNC const threadgroup U* load(Rows<U> from, bool vectors) const thread {
    return load_tile<U>(memory + Source::kFacts, from, vectors, thread_index);
  }
};
