// Gradients in the scales and biases of an affine matrix. With G = y^T x, summed over rows of x:
//   d_scales[n, g] = sum over k in group g of G[n, k] code[n, k]
//   d_biases[n, g] = sum over rows m of y[m, n] (sum over k in group g of x[m, k])
// G is never stored: tiles of it stay in cache until they are multiplied by the codes.
//
//   for each panel of rows of w:
//     pack their columns of y
//     for each block of columns:
//       tile = y^T x, in lane order
//       for each row of w: unpack the block's codes; sums of groups += code * tile
//     d_biases += y^T (sums of x)
#include "common/simd/panels.h"
#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

using Sizes = QuantizedScaleGradientSizes;

// Bfloat16 words are pairs of rows of x. A single row is its own G, which has to be float32.
bool has_pairs(const Sizes& sizes) {
  return kWordsOf<bf16> == Words::kBf16Pairs && sizes.matrix.dtype == KernelDtype::kBfloat16 &&
         sizes.rows > 1;
}

template <class Action>
void with_words(const Sizes& sizes, Action action) {
  if (has_pairs(sizes)) {
    action(std::integral_constant<Words, kWordsOf<bf16>>());
  } else {
    action(std::integral_constant<Words, Words::kFloat32>());
  }
}

int64_t words_of(const Sizes& sizes) {
  return has_pairs(sizes) ? word_count<Words::kBf16Pairs>(sizes.rows) : sizes.rows;
}

int64_t groups_of(const Sizes& sizes) {
  return sizes.matrix.columns / sizes.matrix.format.group;
}

int64_t blocks_of(const Sizes& sizes) {
  const int64_t block = int64_t{unit_values(sizes.matrix.format.bits)} * kLanes;
  return (sizes.matrix.columns + block - 1) / block;
}

// Panels of a block's columns.
int64_t block_panels(const Sizes& sizes) {
  return unit_values(sizes.matrix.format.bits) * kLanes / kPanel;
}

// The parts of an operand in memory, in floats.
int64_t x_floats(const Sizes& sizes) {
  return sizes.has_scales ? blocks_of(sizes) * block_panels(sizes) * words_of(sizes) * kPanel : 0;
}
int64_t group_sum_floats(const Sizes& sizes) {
  return panel_count(groups_of(sizes)) * sizes.rows * kPanel;
}

// x in lane order, and the sums of its groups.
struct Packed {
  Panels x, group_sums;

  Packed(const Sizes& sizes, float* data)
      : x{data, words_of(sizes)}, group_sums{data + x_floats(sizes), sizes.rows} {}
};

// A row of the sums for scales is padded by a vector.
int64_t scale_sums_step(const Sizes& sizes) {
  return groups_of(sizes) + kLanes;
}
int64_t scale_sums_floats(const Sizes& sizes) {
  return sizes.has_scales ? kPanel * scale_sums_step(sizes) : 0;
}

// Sums for a panel of rows of w.
struct Sums {
  float* scales;
  Panels biases;

  Sums(const Sizes& sizes, float* data)
      : scales(data), biases{data + scale_sums_floats(sizes), kPanel} {}
};

int64_t pairs_floats(const Sizes& sizes) {
  return has_pairs(sizes) ? words_of(sizes) * kPanel : 0;
}

struct Scratch {
  Panels y;        // one panel, float32
  Panels y_words;  // one panel of pairs, or y
  Panels tile;     // G for a block of columns

  Scratch(const Sizes& sizes, float* data)
      : y{data, sizes.rows},
        y_words{has_pairs(sizes) ? data + sizes.rows * kPanel : data, words_of(sizes)},
        tile{data + sizes.rows * kPanel + pairs_floats(sizes), kPanel} {}
};

// tile[n] = sum over words of y[n] x, or adds to it, for the panel's rows of w.
template <Words kWords>
void multiply_panel(
    Panels y, int64_t rows, const float* x, int64_t columns, bool adds, float* tile) {
  const float one = 1.0f;
  for (int64_t n = 0; n < rows; n += kTileRows) {
    const int64_t count = rows - n < kTileRows ? rows - n : kTileRows;
    float* const to = tile + n * kPanel;
    const LeftOperand left = left_columns(y, n, 0);
    if (adds) {
      multiply<kWords, Accumulate::kAdd, true>(left, x, count, columns, y.rows, to);
    } else {
      multiply<kWords, Accumulate::kNone, true>(left, x, count, columns, y.rows, to, &one);
    }
  }
}

// Adds up lanes that are units of the same group.
class GroupSums {
 public:
  explicit GroupSums(int64_t units_per_group)
      : width_(units_per_group < kLanes ? static_cast<int>(units_per_group) : kLanes),
        shift_(__builtin_ctz(static_cast<unsigned>(units_per_group))) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lane_[lane] = static_cast<uint32_t>(lane);
      first_lane_[lane] = static_cast<uint32_t>(lane * width_ % kLanes);
    }
    is_group_ = lane_ < static_cast<uint32_t>(kLanes / width_);
  }

  // Adds the sums of a block's units to those of its groups.
  void add(f32v units, int64_t block, float* to) const {
    for (int bit = 1; bit < width_; bit *= 2) {
      units += lookup(units, lane_ ^ static_cast<uint32_t>(bit));
    }
    const f32v groups = lookup(units, first_lane_);
    float* const at = to + (block * kLanes >> shift_);
    store_lanes(at, load_lanes(at) + (is_group_ ? groups : f32v{}));
  }

 private:
  const int width_, shift_;
  u32v lane_, first_lane_;
  i32v is_group_;  // a mask
};

template <class Format>
class ScaleGradient {
 public:
  explicit ScaleGradient(const QuantizedScaleGradientTileArgs& args)
      : args_(args),
        units_(args.sizes.matrix.columns / BlockUnits::kValues),
        step_(scale_sums_step(args.sizes)),
        x_(args.sizes, args.x),
        sums_(args.sizes, args.sums),
        scratch_(args.sizes, args.scratch),
        group_sums_(args.sizes.matrix.format.group / BlockUnits::kValues) {}

  void run() {
    with_elements(args_.sizes.matrix.dtype, [&](auto element) {
      using T = decltype(element);
      const Source<T> y = {static_cast<const T*>(args_.y) + args_.first, args_.sizes.matrix.outputs,
                           1};
      pack_right<Words::kFloat32>(y, args_.sizes.rows, args_.count, scratch_.y);
      if (has_pairs(args_.sizes)) {
        pack_right<kWordsOf<T>>(y, args_.sizes.rows, args_.count, scratch_.y_words);
      }
    });
    if (args_.sizes.has_scales) {
      add_scales();
    }
    add_biases();
    if (args_.is_last) {
      store();
    }
  }

 private:
  using BlockUnits = Units<Format::kBits>;
  static constexpr int kBlockPanels = BlockUnits::kValues * kLanes / kPanel;

  void add_scales() {
    if (args_.is_first) {
      std::memset(sums_.scales, 0, args_.count * step_ * sizeof(float));
    }
    const int64_t blocks = blocks_of(args_.sizes);
    for (int64_t block = 0; block < blocks; ++block) {
      if (args_.sizes.rows == 1) {
        // G = y x: y comes after the sums.
        const float* const x = x_.x.at(0, block * kBlockPanels);
        for (int64_t n = 0; n < args_.count; ++n) {
          add_codes(n, block, x, kPanel, scratch_.y.data[n]);
        }
        continue;
      }
      with_words(args_.sizes, [&](auto words) {
        for (int p = 0; p < kBlockPanels; ++p) {
          multiply_panel<words.value>(scratch_.y_words, args_.count,
                                      x_.x.at(0, block * kBlockPanels + p), kPanel, false,
                                      scratch_.tile.at(0, p));
        }
      });
      for (int64_t n = 0; n < args_.count; ++n) {
        add_codes(n, block, scratch_.tile.at(n, 0), kPanel * kPanel, 1.0f);
      }
    }
  }

  // Adds codes times a row of the tile, times `factor`.
  void add_codes(int64_t n, int64_t block, const float* tile, int64_t panel_step, float factor) {
    const uint32_t* const row =
        args_.sizes.matrix.weights.w + (args_.first + n) * units_ * BlockUnits::kWords;
    const int64_t unit = block * kLanes;
    BlockUnits codes;
    codes.load(row + unit * BlockUnits::kWords, units_ - unit);
    f32v sums[2] = {};
    unroll<BlockUnits::kValues>([&](auto i) {
      const float* const at = tile + i.value / 2 * panel_step + i.value % 2 * kLanes;
      sums[i.value % 2] += Format::value(codes.template shifted<i.value>()) * load_lanes(at);
    });
    group_sums_.add((sums[0] + sums[1]) * factor, block, sums_.scales + n * step_);
  }

  void add_biases() {
    const int64_t groups = groups_of(args_.sizes);
    for (int64_t panel = 0; panel < panel_count(groups); ++panel) {
      const int64_t left = groups - panel * kPanel;
      multiply_panel<Words::kFloat32>(scratch_.y, args_.count, x_.group_sums.at(0, panel),
                                      left < kPanel ? left : kPanel, !args_.is_first,
                                      sums_.biases.at(0, panel));
    }
  }

  void store() {
    const int64_t groups = groups_of(args_.sizes);
    with_elements(args_.sizes.matrix.dtype, [&](auto element) {
      using T = decltype(element);
      for (int64_t n = 0; n < args_.count; ++n) {
        const int64_t at = (args_.first + n) * groups;
        unpack_row(sums_.biases, n, groups, 1.0f, static_cast<T*>(args_.d_biases) + at);
        if (args_.sizes.has_scales) {
          for (int64_t g = 0; g < groups; g += kLanes) {
            store_columns(static_cast<T*>(args_.d_scales) + at, g, groups,
                          load_lanes(sums_.scales + n * step_ + g));
          }
        }
      }
    });
  }

  const QuantizedScaleGradientTileArgs& args_;
  const int64_t units_, step_;
  const Packed x_;
  const Sums sums_;
  const Scratch scratch_;
  const GroupSums group_sums_;
};

// Sums of groups of a row of x, to a row of panels.
template <class T>
void sum_groups(const Sizes& sizes, const T* x, int64_t row, Panels to) {
  const int64_t group = sizes.matrix.format.group;
  for (int64_t g = 0; g < groups_of(sizes); ++g) {
    f32v sum{};
    for (int64_t k = g * group; k < (g + 1) * group; k += kLanes) {
      sum += load_lanes(x + k);
    }
    to.at(row, g / kPanel)[g % kPanel] = lane_sum(sum);
  }
}

// Packs one row of words in lane order.
template <Words kWords, class T>
void pack_words(const Sizes& sizes, const T* even, const T* odd, int64_t word, Panels to) {
  const int values = unit_values(sizes.matrix.format.bits);
  const int64_t columns = sizes.matrix.columns, block_columns = int64_t{values} * kLanes;
  for (int64_t block = 0; block < blocks_of(sizes); ++block) {
    const int64_t first = block * block_columns, left = columns - first;
    const int64_t count = left < block_columns ? left : block_columns;
    alignas(64) float in_order[32 * kLanes];
    pack_right_row<kWords>(even + first, odd ? odd + first : nullptr, 1, count, {in_order, 1}, 0);
    quantized_load_row(KernelDtype::kFloat32, in_order, count, values, values,
                       to.at(word, block * block_columns / kPanel), to.rows * kPanel);
  }
}

}  // namespace

int64_t quantized_scale_gradient_packed(const Sizes& sizes) {
  return x_floats(sizes) + group_sum_floats(sizes);
}

int64_t quantized_scale_gradient_sums(const Sizes& sizes) {
  return scale_sums_floats(sizes) + panel_count(groups_of(sizes)) * kPanel * kPanel;
}

int64_t quantized_scale_gradient_scratch(const Sizes& sizes) {
  const int64_t of_tile = sizes.has_scales ? block_panels(sizes) * kPanel * kPanel : 0;
  return sizes.rows * kPanel + pairs_floats(sizes) + of_tile;
}

void quantized_scale_gradient_pack(const QuantizedScaleGradientPackArgs& args) {
  const Sizes& sizes = args.sizes;
  const Packed to(sizes, args.to);
  with_elements(sizes.matrix.dtype, [&](auto element) {
    using T = decltype(element);
    const auto row = [&](int64_t m) {
      return m < sizes.rows ? static_cast<const T*>(args.x) + m * sizes.matrix.columns : nullptr;
    };
    for (int64_t pair = args.first; pair < args.first + args.count; ++pair) {
      const int64_t end = 2 * pair + 2 < sizes.rows ? 2 * pair + 2 : sizes.rows;
      for (int64_t m = 2 * pair; m < end; ++m) {
        sum_groups(sizes, row(m), m, to.group_sums);
      }
      if (!sizes.has_scales) {
        continue;
      }
      if (has_pairs(sizes)) {
        pack_words<kWordsOf<T>>(sizes, row(2 * pair), row(2 * pair + 1), pair, to.x);
        continue;
      }
      for (int64_t m = 2 * pair; m < end; ++m) {
        pack_words<Words::kFloat32>(sizes, row(m), static_cast<const T*>(nullptr), m, to.x);
      }
    }
  });
}

void quantized_scale_gradient(const QuantizedScaleGradientTileArgs& args) {
  with_format(args.sizes.matrix.format, [&](auto format) {
    if constexpr (decltype(format)::kHasBiases) {
      ScaleGradient<decltype(format)>(args).run();
    }
  });
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE
