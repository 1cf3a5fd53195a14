// Mean and variance of a contiguous row, equal to ATen's RowwiseMoments in every bit, but in parts that different
// threads can work on.
#pragma once

#include "common.h"

#include <utility>

namespace gnfuse {

template <typename acc>
class RowMoments {
 public:
  RowMoments(DType dtype, int64_t size);

  int64_t parts() const {
    return parts_;
  }

  // Bytes of state that the parts of one row fill and `finish` reads.
  int64_t state_bytes() const;

  void run_part(const void* row, int64_t part, void* state) const;

  // (mean, biased variance) once all parts have run; merges them in place.
  std::pair<acc, acc> finish(const void* row, void* state) const;

 private:
  DType dtype_;
  int64_t size_; // elements of the row
  int64_t vector_; // elements of one vector of the row's dtype
  int64_t chunks_; // of 16 vectors
  int64_t depth_; // levels of ATen's cascade
  int64_t part_log2_; // chunks in a part, as a power of two
  int64_t levels_; // levels that one part fills
  int64_t parts_;
};

} // namespace gnfuse
