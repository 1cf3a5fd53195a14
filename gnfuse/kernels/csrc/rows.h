// Loops over the channel rows inside a flat range of one group: S elements belong to each channel.
#pragma once

#include "common.h"

#include <algorithm>

namespace gnfuse {

// Calls visit(channel, offset, n) for the stretch of each channel in [first, first + n) of a group.
template <typename Visit>
void for_rows(int64_t first, int64_t n, int64_t S, const Visit& visit) {
  int64_t channel = first / S;
  int64_t room = (channel + 1) * S - first;
  for (int64_t offset = 0; offset < n; ++channel, room = S) {
    const int64_t count = std::min(room, n - offset);
    visit(channel, offset, count);
    offset += count;
  }
}

// y[i] = op(x[i]) for n elements; reads no element past x[n - 1].
template <typename acc, typename Op>
void map_row(const acc* x, acc* y, int64_t n, const Op& op) {
  using V = Vec<acc>;
  int64_t i = 0;
  for (; i + V::size() <= n; i += V::size()) {
    op(V::loadu(x + i)).store(y + i);
  }
  if (i < n) {
    op(V::loadu(x + i, n - i)).store(y + i, static_cast<int>(n - i));
  }
}

// GroupNorm's y for a flat range of a group; scale and shift are per channel of the group, nullptr for none.
template <typename acc>
void normalise_rows(
    const acc* x, acc* y, int64_t first, int64_t n, int64_t S, const acc* scale, const acc* shift, acc mean, acc rstd) {
  using V = Vec<acc>;
  if (scale == nullptr) {
    const V m(mean);
    const V r(rstd);
    map_row(x, y, n, [&](const V& v) { return (v - m) * r; });
    return;
  }
  for_rows(first, n, S, [&](int64_t c, int64_t offset, int64_t count) {
    const V a(scale[c]);
    const V b(shift[c]);
    map_row(x + offset, y + offset, count, [&](const V& v) { return at::vec::fmadd(a, v, b); });
  });
}

// The parts of a group for the passes over its elements: whole channels, or stretches of one channel where S is large.
class RowParts {
 public:
  RowParts(int64_t D, int64_t S)
      : size_(D * S), S_(S), splits_(div_up(S, kPart)), channels_(std::max<int64_t>(1, kPart / std::max<int64_t>(S, 1))) {
    stretch_ = splits_ == 1 ? S : div_up(div_up(S, splits_), kBlock) * kBlock;
    splits_ = div_up(S, stretch_);
    parts_ = splits_ > 1 ? D * splits_ : div_up(D, channels_);
  }
  int64_t count() const {
    return parts_;
  }
  // Stretches of a channel that are summed apart.
  int64_t splits() const {
    return splits_;
  }
  int64_t begin(int64_t part) const {
    return splits_ > 1 ? (part / splits_) * S_ + (part % splits_) * stretch_ : part * channels_ * S_;
  }
  int64_t end(int64_t part) const {
    if (splits_ > 1) {
      return std::min((part / splits_ + 1) * S_, begin(part) + stretch_);
    }
    return std::min(size_, begin(part) + channels_ * S_);
  }

 private:
  int64_t size_, S_, splits_, channels_, stretch_, parts_;
};

} // namespace gnfuse
