// The default CPU generator, and the masks drawn from it.
#pragma once

#include "operators.h"
#include "random.h"

#include <mutex>

namespace gnfuse {

// A dropout mask of `size` elements from the default generator. Holds the generator's lock while it lives; `commit` moves
// the generator to where eager's bernoulli_ leaves it.
class ForwardMask {
 public:
  ForwardMask(int64_t size, double keep_probability);
  ~ForwardMask();

  MaskStream& stream() {
    return *stream_;
  }
  // The generator's state before the draw, as get_rng_state() gives it.
  const Tensor& state_before() const {
    return state_before_;
  }
  void commit();

 private:
  Tensor state_before_;
  std::unique_lock<std::mutex> lock_;
  std::unique_ptr<MaskStream> stream_;
};

// Moves the default generator as a mask of `size` elements would, without drawing it. Size 0 does nothing. The caller
// moves `twister()`, when there is one, by `size`.
class GeneratorSkip {
 public:
  GeneratorSkip(int64_t size, double keep_probability);

  VectorTwister* twister() {
    return twister_.get();
  }
  const Tensor& state_before() const {
    return state_before_;
  }
  void commit();

 private:
  Tensor state_before_;
  std::unique_lock<std::mutex> lock_;
  std::unique_ptr<VectorTwister> twister_;
};

// The same mask again, from the state before the draw.
std::unique_ptr<MaskStream> replay_mask(const Tensor& state, int64_t size, double keep_probability);

} // namespace gnfuse
