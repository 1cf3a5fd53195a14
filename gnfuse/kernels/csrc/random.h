// The dropout mask that eager's bernoulli_ would draw from the same generator, as bits, drawn while others compute.
#pragma once

#include "common.h"

#include <ATen/core/MT19937RNGEngine.h>

#include <atomic>

namespace gnfuse {

// A copy of the generator's mt19937 that makes many numbers at once.
class VectorTwister {
 public:
  explicit VectorTwister(const at::mt19937_data_pod& state);

  // Appends `n` mask bits from bit 0 of `bits` on. Bit set: a 53-bit draw is below `limit`. n % 64 == 0 unless it is the
  // last call for these bits; writes whole 64-bit words.
  void draw(int64_t n, uint64_t limit, uint8_t* bits);

  // Moves on by n elements without looking at them.
  void skip(int64_t n);

  at::mt19937_data_pod state() const;

 private:
  void refresh();
  void temper();

  at::mt19937_data_pod data_;
  uint32_t next_; // word to be used next
  uint32_t available_; // words left before the state must be renewed
  bool tempered_ = false;
  alignas(64) uint32_t words_[at::MERSENNE_STATE_N + 16]; // the state, tempered
};

// The mask of one call. Threads ask for the bits that they need; whoever finds them missing draws the next stretch.
class MaskStream {
 public:
  // No dropout: every element is kept.
  MaskStream() = default;
  MaskStream(const at::mt19937_data_pod& state, int64_t size, double keep_probability);

  // A mask of bytes (0 or 1) that ATen has drawn.
  MaskStream(const uint8_t* bytes, int64_t size);

  MaskView at(int64_t first) const {
    return {bits_.get(), first};
  }

  // Returns once the bits before `end` are there.
  void require(int64_t end);

  // Draws towards `end` if nobody else is drawing.
  void try_draw(int64_t end);

  // The generator's state after the whole mask.
  at::mt19937_data_pod finish();

 private:
  void draw_stretch();

  std::unique_ptr<VectorTwister> twister_;
  Buffer<uint8_t> bits_;
  int64_t size_ = 0;
  uint64_t limit_ = 0;
  std::atomic<int64_t> done_{0};
  std::atomic<bool> busy_{false};
};

} // namespace gnfuse
