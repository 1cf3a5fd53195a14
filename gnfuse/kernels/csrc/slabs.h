// How a channels_last sample is cut: tiles of a few whole rows (a row is one position's C channels), and parts of many
// tiles. A tile is handled as one flat block against coefficients that repeat from row to row, so that C need not be a
// multiple of the vector width.
#pragma once

#include "common.h"

#include <algorithm>

namespace gnfuse {

class SlabParts {
 public:
  SlabParts(int64_t C, int64_t S)
      : C_(C), S_(S), tile_rows_(std::max<int64_t>(1, std::min(kBlock / C, S))) {
    part_rows_ = div_up(std::max<int64_t>(1, kPart / C), tile_rows_) * tile_rows_;
  }
  int64_t count() const {
    return div_up(S_, part_rows_);
  }
  int64_t tile_rows() const {
    return tile_rows_;
  }
  int64_t tile() const {
    return tile_rows_ * C_;
  }
  int64_t begin(int64_t part) const {
    return part * part_rows_;
  }
  int64_t end(int64_t part) const {
    return std::min(S_, begin(part) + part_rows_);
  }

  // Calls visit(first element of the tile in the sample, elements).
  template <typename Visit>
  void for_tiles(int64_t part, const Visit& visit) const {
    for (int64_t row = begin(part); row < end(part); row += tile_rows_) {
      visit(row * C_, std::min(tile_rows_, end(part) - row) * C_);
    }
  }

  // Repeats the first row of a tile-sized array in its other rows.
  template <typename acc>
  void repeat(acc* values) const {
    for (int64_t row = 1; row < tile_rows_; ++row) {
      std::copy(values, values + C_, values + row * C_);
    }
  }

 private:
  int64_t C_, S_, tile_rows_, part_rows_;
};

} // namespace gnfuse
