// As decode_matrix.h, with keys and values as affine codes of 4 or 8 bits in groups of 64 or 128
// columns.
//
// Matrix products multiply the codes themselves. Scales and biases are applied to sums of a span,
// which is 64 columns of one group:
//
//   score = sum over spans: scale (q . codes) + bias sum(q)
//   out   = (weights scale) codes + sum of weights bias
//
// so a code takes one or two instructions: two at a time, a shift and a mask. A lane has 16
// adjacent columns of each span of its key, and 8 of the two keys of its values.
// Function constants choose between elements by metal::select() (unroll.h).
#pragma once

#include "metal/common/pairs.h"
#include "metal/flash_attention/decode_matrix_state.h"
#include "metal/flash_attention/quantized.h"

constant bool groups_have_128 [[function_constant(23)]];  // columns; otherwise 64

enum { kSpan = 64 };

// Two codes in the halves of a word to a pair of T, which stands for (pair - offset) * unit.
template <typename T>
struct CodePairs;

// The bits of an integer are those of a subnormal half, a multiple of 2^-24.
template <>
struct CodePairs<half> {
  METAL_FUNC static float unit() { return 0x1p24f; }
  METAL_FUNC static float offset(bool) { return 0.0f; }
  METAL_FUNC static uint of(uint codes, bool, uint) { return codes; }
};

// Products with subnormals would be subnormal in float32. A bfloat has 7 bits below 128.
template <>
struct CodePairs<bfloat> {
  METAL_FUNC static float unit() { return 1.0f; }
  METAL_FUNC static float offset(bool has_4_bits) { return has_4_bits ? 128.0f : 0.0f; }
  METAL_FUNC static uint of(uint codes, bool has_4_bits, uint exponents) {
    // 128 plus the low bits, plus 0 or -128: that is 128 or 256, less 256.
    const uint one = pair_of(bfloat(1.0f)), less = pair_of(bfloat(-256.0f));
    const uint low = (codes & 0x007f007fu) | exponents;
    const uint top = (codes & 0x00800080u) | exponents;
    const uint of_8_bits = fma_pairs<bfloat>(low, one, fma_pairs<bfloat>(top, one, less));
    return metal::select(of_8_bits, codes | exponents, has_4_bits);
  }
};

// The bits of a pair of 128, for CodePairs<bfloat>. There is at least one part, which compilers do
// not know. With a constant, a code's mask and this would be two instructions, not one.
METAL_FUNC uint exponents_of_codes(int parts) {
  return 0x43004300u * uint(metal::min(parts, 1));
}

// Two codes of a word, or of 16 bits each of two words: number `pair` in the order that takes the
// fewest instructions.
METAL_FUNC uint codes_at(uint word, int pair, bool has_4_bits) {
  return has_4_bits ? word >> (4 * pair) & 0x000f000fu : word >> (8 * pair) & 0x00ff00ffu;
}

// A block of keys or values in memory. A row past the last one stands for that.
template <typename T, int kKeys>
struct CodeBlock {
  const thread CodeRows<T>& codes;
  const thread BlockPages<kKeys>& pages;
  int begin;

  // Offsets of row `row` of the n-th eight.
  METAL_FUNC uint word_of(int n, int row) const thread {
    const CodeRows<T> page = of_row(n, row);
    return page.near_word(row);
  }
  METAL_FUNC uint scale_of(int n, int row) const thread {
    const CodeRows<T> page = of_row(n, row);
    return page.near_scale(row);
  }

 private:
  // Returns the codes that have it, and makes `row` its place among them.
  METAL_FUNC CodeRows<T> of_row(int n, thread int& row) const thread {
    row = metal::min(begin + kKeysOfLookup * n + row, codes.rows - 1);
    return codes.of_page(pages.of(codes.table, n, row), row);
  }
};

// Scales and biases of the key place.row of each fragment, two spans in a word.
template <typename T, int kDim, int kKeys>
struct SpanFactors {
  enum { kFragments = kKeys / 8, kSpans = kDim / kSpan };
  static_assert(kSpans <= 2, "a word has two");
  uint scales[kFragments];
  uint biases[kFragments];

  METAL_FUNC void load(CodeBlock<T, kKeys> from, FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      const uint at = from.scale_of(n, place.row);
      scales[n] = word_at(reinterpret_cast<const device T*>(from.codes.scales) + at);
      biases[n] = word_at(from.codes.biases + at);
    }
  }

  METAL_FUNC float scale(int n, int span) const thread { return factor(scales[n], span); }
  METAL_FUNC float bias(int n, int span) const thread { return factor(biases[n], span); }

 private:
  METAL_FUNC static uint word_at(const device T* at) {
    return kSpans == 2 && !groups_have_128 ? *reinterpret_cast<const device uint*>(at)
                                           : *reinterpret_cast<const device ushort*>(at);
  }
  METAL_FUNC static float factor(uint word, int span) {
    const Pair<T> pair = as_type<Pair<T>>(word);
    return metal::select(static_cast<float>(pair[span]), static_cast<float>(pair[0]),
                         groups_have_128);
  }
};

// A block of keys in registers: the left operand of k q^T, a span at a time. Of 4 bits, words 2 and
// 3 are not used.
template <typename T, int kDim, int kKeys>
struct KeyCodes {
  enum { kFragments = kKeys / 8, kSpans = kDim / kSpan };
  uint words[kFragments][kSpans][4];
  uint exponents;  // exponents_of_codes
  SpanFactors<T, kDim, kKeys> factors;

  struct Span {
    using Element = T;
    enum { kColumnFragments = kSpan / 8 };
    const thread KeyCodes& keys;
    int span;

    METAL_FUNC Fragment<T> block(int n, int k) const thread {
      const thread uint(&words)[4] = keys.words[n][span];
      const uint word = metal::select(words[k / 2], words[k / 4], keys_have_4_bits);
      const uint codes = metal::select(codes_at(word, k % 2, false), codes_at(word, k % 4, true),
                                       keys_have_4_bits);
      return fragment_of_pair<T>(CodePairs<T>::of(codes, keys_have_4_bits, keys.exponents));
    }
  };

  // First of the lane's 16 columns of the first span.
  METAL_FUNC static int column(FragmentPlace place) { return 8 * place.column; }

  // The elements of a row of q, from the lane's columns of a span on, in the order of codes.
  METAL_FUNC static Fragment<T> query(const thread uint4* eights, int k) {
    const uint4 eight = eights[k / 4];
    const int of_4_bits = k % 4, of_8_bits = k % 4 / 2 * 4 + k % 2;
    const ushort2 pair(
        metal::select(element(eight, of_8_bits), element(eight, of_4_bits), keys_have_4_bits),
        metal::select(element(eight, of_8_bits + 2), element(eight, of_4_bits + 4),
                      keys_have_4_bits));
    return fragment_of_pair<T>(as_type<uint>(pair));
  }

  METAL_FUNC static ushort element(uint4 eight, int i) {
    return as_type<ushort2>(eight[i / 2])[i % 2];
  }

  // `own` starts at the lane's columns.
  METAL_FUNC void load(CodeBlock<T, kKeys> all,
                       CodeBlock<T, kKeys> own,
                       FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kFragments; ++n) {
      const device uint* at = own.codes.words + own.word_of(n, place.row);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kSpans; ++i) {
        if (keys_have_4_bits) {
          load_words<2>(at + kSpan / 8 * i, true, words[n][i]);
        } else {
          load_words<4>(at + kSpan / 4 * i, true, words[n][i]);
        }
      }
    }
    factors.load(all, place);
  }
};

// A block of values in registers, transposed: the left operand of v^T p^T, a span at a time. Of 4
// bits, the second words are not used.
template <typename T, int kDim, int kKeys>
struct ValueCodes {
  enum { kFragments = kKeys / 8, kSpans = kDim / kSpan };
  uint words[kFragments][2][kSpans][2];  // of keys place.column and place.column + 1
  uint exponents;                        // exponents_of_codes
  SpanFactors<T, kDim, kKeys> factors;

  METAL_FUNC static int column(FragmentPlace place) { return 8 * place.row; }

  // What an element of the left operand's fragment f is multiplied by to be a code.
  METAL_FUNC static float unit(int f) {
    const bool shifted = metal::is_same_v<T, half> && values_have_4_bits && f % 2 == 1;
    return shifted ? CodePairs<T>::unit() / 16.0f : CodePairs<T>::unit();
  }

  // Column f of the lane's eight of a span, of both keys of fragment n.
  METAL_FUNC Fragment<T> block(int span, int f, int n) const thread {
    const uint both =
        as_type<uint>(ushort2(half_word(words[n][0][span], f), half_word(words[n][1][span], f)));
    const uint codes = metal::select(codes_at(both, f % 2, false), codes_at(both, f % 4, true),
                                     values_have_4_bits);
    const uint pair = CodePairs<T>::of(codes, values_have_4_bits, exponents);
    const uint shifted = both >> (f % 4 / 2 * 8) & 0x00f000f0u;  // unit() is for this
    const bool shifts = metal::is_same_v<T, half> && f % 2 == 1 && values_have_4_bits;
    return fragment_of_pair<T>(metal::select(pair, shifted, shifts));
  }

  // The 16 bits with column f.
  METAL_FUNC static ushort half_word(const thread uint (&of_span)[2], int f) {
    return metal::select(as_type<ushort2>(of_span[f / 4])[f % 4 / 2],
                         as_type<ushort2>(of_span[0])[f / 4], values_have_4_bits);
  }

  METAL_FUNC void load(CodeBlock<T, kKeys> all,
                       CodeBlock<T, kKeys> own,
                       FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int v = 0; v < 2 * kFragments; ++v) {
      const int n = v / 2, e = v % 2;
      const device uint* at = own.codes.words + own.word_of(n, place.column + e);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kSpans; ++i) {
        if (values_have_4_bits) {
          load_words<1>(at + kSpan / 8 * i, true, words[n][e][i]);
        } else {
          load_words<2>(at + kSpan / 4 * i, true, words[n][e][i]);
        }
      }
    }
    factors.load(all, place);
  }
};

// 1 / x of a power of two, from 2^-126 to 2^126.
METAL_FUNC float inverse_of_power(float x) {
  return as_type<float>(0x7f000000u - as_type<uint>(x));
}

template <typename T, int kDim, int kKeys>
struct QuantizedMatrixRows {
  using State = DecodeMatrixState<T, kDim, kKeys>;
  using Keys = KeyCodes<T, kDim, kKeys>;
  using Values = ValueCodes<T, kDim, kKeys>;
  enum { kRows = State::kRows, kSpans = kDim / kSpan };

  State state;
  CodeRows<T> all_keys, own_keys;  // of this part: from the first column, and from the lane's on
  CodeRows<T> all_values, own_values;
  BlockPages<kKeys> pages;             // of the block to load next
  RegTile<T, kSpan, kRows> q[kSpans];  // in the order of KeyCodes
  float2 q_sums[kSpans];               // over the columns of a span
  float2 bias_sums[kSpans];            // over the lane's keys, of weight times bias
  // Of each row, in all lanes' places: the sum over keys of weights, as `out` has them, times the
  // offset of codes.
  Fragment<float> offset_sums[kSpans];
  // Weights of half are multiplied by a power of two, so that those of small scales keep their
  // bits.
  float weight_unit;
  // The next block, prefetched while the current one is processed.
  Keys keys;
  Values values;

  // `query` is row place.row.
  METAL_FUNC void begin(const device T* query, int parts, constant AttentionParams& params) thread {
    keys.exponents = values.exponents = exponents_of_codes(parts);
    const Rows<T> one = {query, 0, params.q_strides[3], 1, params.head_dim};
    const Fragment<T> ones = fragment_of<T>(T(1.0f), T(1.0f));
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSpans; ++i) {
      const int column = kSpan * i + Keys::column(state.place);
      const uint4 eights[2] = {load_eight(one, 0, column), load_eight(one, 0, column + 8)};
      Fragment<float> sums = fragment_of<float>(0.0f, 0.0f);
      MLX_ANVIL_UNROLL
      for (int k = 0; k < kSpan / 8; ++k) {
        q[i].fragments[k][0] = transposed(Keys::query(eights, k), state.place);
        metal::simdgroup_multiply_accumulate(sums, ones, q[i].fragments[k][0], sums);
      }
      q_sums[i] = elements_of(sums);
      bias_sums[i] = float2(0.0f);
      offset_sums[i] = fragment_of<float>(0.0f, 0.0f);
    }
    weight_unit = 1.0f;
    state.clear();
  }

  METAL_FUNC void look_up(int begin) thread { pages.look_up(all_keys.table, begin, state.end); }
  METAL_FUNC void load_keys(int begin) thread {
    keys.load(CodeBlock<T, kKeys>{all_keys, pages, begin},
              CodeBlock<T, kKeys>{own_keys, pages, begin}, state.place);
  }
  METAL_FUNC void load_values(int begin) thread {
    values.load(CodeBlock<T, kKeys>{all_values, pages, begin},
                CodeBlock<T, kKeys>{own_values, pages, begin}, state.place);
  }

  // Processes the loaded block, which starts at `begin`, and prefetches the one at `next`.
  METAL_FUNC void attend(int begin,
                         int next,
                         const device uchar* mask,
                         constant AttentionParams& params) thread {
    typename State::Scores scores;
    multiply_keys(scores);
    load_keys(next);
    const float2 highest = state.finish_scores(begin, mask, params, scores);
    if (state.needs_room(highest)) {
      scale(state.make_room(highest));
    }
    if (begin + kKeys > state.end) {
      clear_factors(begin);
    }
    fit_weights();
    add_values(scores);
    load_values(next);
    look_up(2 * next - begin);
  }

  // Makes state.out what a decode of plain values has.
  METAL_FUNC void finish() thread {
    const float unit = inverse_of_power(weight_unit);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSpans; ++i) {
      const float2 biases = float2(column_sum(bias_sums[i].x), column_sum(bias_sums[i].y));
      MLX_ANVIL_UNROLL
      for (int f = 0; f < 8; ++f) {
        thread Fragment<float>& sum = state.out.fragments[8 * i + f][0];
        const float2 codes = elements_of(sum) - elements_of(offset_sums[i]);
        sum = fragment_of<float>(metal::fma(codes, float2(Values::unit(f) * unit), biases));
      }
    }
  }

 private:
  METAL_FUNC void multiply_keys(thread typename State::Scores& scores) const thread {
    scores.zero();
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSpans; ++i) {
      typename State::Scores products;
      MLX_ANVIL_UNROLL
      for (int n = 0; n < State::kKeyFragments; ++n) {
        const float offset = CodePairs<T>::offset(keys_have_4_bits);
        products.fragments[n][0] =
            fragment_of<float>(offset == 0.0f ? float2(0.0f) : -offset * q_sums[i]);
      }
      products.mma(typename Keys::Span{keys, i}, q[i]);
      MLX_ANVIL_UNROLL
      for (int n = 0; n < State::kKeyFragments; ++n) {
        const float by = keys.factors.scale(n, i) * CodePairs<T>::unit();
        const float2 sum =
            metal::fma(elements_of(products.block(n, 0)), by, elements_of(scores.block(n, 0)));
        // A key with an infinite factor has NaNs. Without this, its score could be -inf and hide
        // them.
        const float given = keys.factors.bias(n, i), bias = metal::fma(by + given, 0.0f, given);
        scores.fragments[n][0] = fragment_of<float>(metal::fma(q_sums[i], float2(bias), sum));
      }
    }
  }

  METAL_FUNC void scale(float2 factors) thread {
    state.scale(factors);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSpans; ++i) {
      bias_sums[i] *= factors;
      offset_sums[i] = fragment_of<float>(elements_of(offset_sums[i]) * factors);
    }
  }

  // Keys past the last have weight zero: their factors must not be infinite.
  METAL_FUNC void clear_factors(int begin) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < State::kKeyFragments; ++n) {
      const bool exists = begin + 8 * n + state.place.row < state.end;
      values.factors.scales[n] = exists ? values.factors.scales[n] : 0;
      values.factors.biases[n] = exists ? values.factors.biases[n] : 0;
    }
  }

  // Weights times scales are to be less than 2^15. Weights are up to 2^kHeadroom.
  METAL_FUNC void fit_weights() thread {
    if (!metal::is_same_v<T, half>) {
      return;
    }
    float largest = 0.0f;
    MLX_ANVIL_UNROLL
    for (int n = 0; n < State::kKeyFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kSpans; ++i) {
        largest = metal::fmax(largest, metal::fabs(values.factors.scale(n, i)));
      }
    }
    if (!metal::simd_any(largest * weight_unit > 128.0f)) {
      return;
    }
    const uint exponent = as_type<uint>(metal::simd_max(largest)) & 0x7f800000u;
    const float unit = 64.0f * inverse_of_power(as_type<float>(exponent));
    state.scale(float2(unit * inverse_of_power(weight_unit)));
    weight_unit = unit;
  }

  METAL_FUNC void add_values(const thread typename State::Scores& scores) thread {
    float2 weights[State::kKeyFragments];
    MLX_ANVIL_UNROLL
    for (int n = 0; n < State::kKeyFragments; ++n) {
      weights[n] = state.weights(scores, n);
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kSpans; ++i) {
      Fragment<T> scaled[State::kKeyFragments];
      MLX_ANVIL_UNROLL
      for (int n = 0; n < State::kKeyFragments; ++n) {
        const float by = values.factors.scale(n, i) * weight_unit;
        scaled[n] = fragment_of<T>(weights[n] * by);
        bias_sums[i] = metal::fma(weights[n], float2(values.factors.bias(n, i)), bias_sums[i]);
      }
      if (CodePairs<T>::offset(values_have_4_bits) != 0.0f) {
        const T offset = static_cast<T>(CodePairs<T>::offset(true));
        MLX_ANVIL_UNROLL
        for (int n = 0; n < State::kKeyFragments; ++n) {
          metal::simdgroup_multiply_accumulate(offset_sums[i], fragment_of<T>(offset, offset),
                                               scaled[n], offset_sums[i]);
        }
      }
      // No branch in between: then mslc merges products into the largest of the unit.
      MLX_ANVIL_UNROLL
      for (int n = 0; n < State::kKeyFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int f = 0; f < 8; ++f) {
          thread Fragment<float>& sum = state.out.fragments[8 * i + f][0];
          metal::simdgroup_multiply_accumulate(sum, values.block(i, f, n), scaled[n], sum);
        }
      }
    }
  }
};
