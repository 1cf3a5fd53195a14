#include "random.h"
#include "schedule.h"

#include <cmath>
#include <cstring>

namespace gnfuse {
namespace {

constexpr int N = at::MERSENNE_STATE_N;
constexpr int M = at::MERSENNE_STATE_M;
constexpr uint64_t kMask53 = (uint64_t(1) << 53) - 1;
constexpr int64_t kStretch = 65536; // elements drawn at a time, 15 us

inline uint32_t twist(uint32_t u, uint32_t v) {
  const uint32_t mixed = (u & 0x80000000u) | (v & 0x7fffffffu);
  return (mixed >> 1) ^ ((0u - (v & 1u)) & 0x9908b0dfu);
}

// Mask bits of eight draws from 16 tempered words. A draw is first word * 2^32 + second word, its low 53 bits.
inline uint64_t compare8(const uint32_t* words, uint64_t limit) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i pair = _mm512_rol_epi64(_mm512_loadu_si512(words), 32);
  const __m512i draw = _mm512_and_si512(pair, _mm512_set1_epi64(static_cast<int64_t>(kMask53)));
  return _mm512_cmplt_epu64_mask(draw, _mm512_set1_epi64(static_cast<int64_t>(limit)));
#else
  uint64_t bits = 0;
  for (int i = 0; i < 8; ++i) {
    const uint64_t draw = ((uint64_t(words[2 * i]) << 32) | words[2 * i + 1]) & kMask53;
    bits |= uint64_t(draw < limit) << i;
  }
  return bits;
#endif
}

// Collects bits and writes them as 64-bit words.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* out) : out_(out) {}

  void push(uint64_t bits, int count) {
    word_ |= bits << fill_;
    fill_ += count;
    if (fill_ >= 64) {
      flush();
      fill_ -= 64;
      word_ = fill_ == 0 ? 0 : bits >> (count - fill_);
    }
  }

  void flush() {
    std::memcpy(out_, &word_, sizeof(word_));
    out_ += sizeof(word_);
  }

 private:
  uint8_t* out_;
  uint64_t word_ = 0;
  int fill_ = 0;
};

} // namespace

VectorTwister::VectorTwister(const at::mt19937_data_pod& state)
    : data_(state), next_(state.next_), available_(static_cast<uint32_t>(state.left_ - 1)) {}

void VectorTwister::refresh() {
  uint32_t* __restrict p = data_.state_.data();
  // word i needs the words i, i + 1 and i + 397 (mod 624): three runs in which no word depends on one of its own run
  for (int i = 0; i < N - M; ++i) {
    p[i] = p[i + M] ^ twist(p[i], p[i + 1]);
  }
#pragma GCC ivdep
  for (int i = N - M; i < 2 * (N - M); ++i) {
    p[i] = p[i - (N - M)] ^ twist(p[i], p[i + 1]);
  }
#pragma GCC ivdep
  for (int i = 2 * (N - M); i < N - 1; ++i) {
    p[i] = p[i - (N - M)] ^ twist(p[i], p[i + 1]);
  }
  p[N - 1] = p[M - 1] ^ twist(p[N - 1], p[0]);
  next_ = 0;
  available_ = N;
  tempered_ = false;
}

void VectorTwister::temper() {
  if (tempered_) {
    return;
  }
  const uint32_t* __restrict p = data_.state_.data();
  uint32_t* __restrict out = words_;
  for (int i = 0; i < N; ++i) {
    uint32_t y = p[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    out[i] = y ^ (y >> 18);
  }
  tempered_ = true;
}

void VectorTwister::draw(int64_t n, uint64_t limit, uint8_t* bits) {
  BitWriter writer(bits);
  const auto single = [&](uint32_t first, uint32_t second) {
    writer.push((((uint64_t(first) << 32) | second) & kMask53) < limit, 1);
  };
  while (n > 0) {
    if (available_ == 0) {
      refresh();
    }
    temper();
    int64_t pairs = std::min<int64_t>(available_ / 2, n);
    n -= pairs;
    available_ -= static_cast<uint32_t>(2 * pairs);
    for (; pairs >= 8; pairs -= 8, next_ += 16) {
      writer.push(compare8(words_ + next_, limit), 8);
    }
    for (; pairs > 0; --pairs, next_ += 2) {
      single(words_[next_], words_[next_ + 1]);
    }
    if (n > 0 && available_ == 1) { // a draw that straddles two states
      const uint32_t first = words_[next_];
      refresh();
      temper();
      single(first, words_[0]);
      next_ = 1;
      available_ = N - 1;
      --n;
    }
  }
  writer.flush();
}

void VectorTwister::skip(int64_t n) {
  int64_t words = 2 * n;
  while (words > 0) {
    if (available_ == 0) {
      refresh();
    }
    const int64_t step = std::min<int64_t>(words, available_);
    next_ += static_cast<uint32_t>(step);
    available_ -= static_cast<uint32_t>(step);
    words -= step;
  }
}

at::mt19937_data_pod VectorTwister::state() const {
  at::mt19937_data_pod state = data_;
  state.next_ = next_;
  state.left_ = static_cast<int>(available_ + 1);
  return state;
}

MaskStream::MaskStream(const at::mt19937_data_pod& state, int64_t size, double keep_probability)
    : twister_(std::make_unique<VectorTwister>(state)),
      bits_(div_up(size, 64) * 8),
      size_(size),
      // draw * 2^-53 < p  <=>  draw < ceil(p * 2^53): the product is exact
      limit_(static_cast<uint64_t>(std::ceil(std::ldexp(keep_probability, 53)))) {}

MaskStream::MaskStream(const uint8_t* bytes, int64_t size) : bits_(div_up(size, 64) * 8), size_(size), done_(size) {
  BitWriter writer(bits_.get());
  for (int64_t i = 0; i < size; ++i) {
    writer.push(bytes[i], 1);
  }
  writer.flush();
}

void MaskStream::draw_stretch() {
  const int64_t done = done_.load(std::memory_order_relaxed);
  const int64_t n = std::min(kStretch, size_ - done);
  twister_->draw(n, limit_, bits_.get() + done / 8);
  done_.store(done + n, std::memory_order_release);
}

void MaskStream::require(int64_t end) {
  while (done_.load(std::memory_order_acquire) < std::min(end, size_)) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      pause_thread();
      continue;
    }
    if (done_.load(std::memory_order_relaxed) < end) {
      draw_stretch();
    }
    busy_.store(false, std::memory_order_release);
  }
}

void MaskStream::try_draw(int64_t end) {
  while (done_.load(std::memory_order_acquire) < std::min(end, size_) &&
         !busy_.exchange(true, std::memory_order_acquire)) {
    if (done_.load(std::memory_order_relaxed) < end) {
      draw_stretch();
    }
    busy_.store(false, std::memory_order_release);
  }
}

at::mt19937_data_pod MaskStream::finish() {
  require(size_);
  return twister_->state();
}

} // namespace gnfuse
