#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace gnfuse {
namespace {

at::CPUGeneratorImpl* implementation(const at::Generator& generator) {
  return generator.get<at::CPUGeneratorImpl>();
}

Tensor draw_bytes(int64_t size, double keep_probability, std::optional<at::Generator> generator) {
  return at::empty({size}, at::kByte).bernoulli_(keep_probability, std::move(generator));
}

at::Generator restore(const Tensor& state) {
  at::Generator generator = at::detail::createCPUGenerator();
  generator.set_state(state);
  return generator;
}

bool same_state(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b) {
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ && a.state_ == b.state_;
}

// Draws with an odd and an even start, over several states of the twister.
bool probe() {
  for (const int before : {0, 1, 311}) {
    constexpr int64_t size = 1500;
    constexpr double keep = 0.7;
    at::Generator generator = at::detail::createCPUGenerator(1234);
    for (int i = 0; i < before; ++i) {
      implementation(generator)->random();
    }
    MaskStream stream(implementation(generator)->engine().data(), size, keep);
    const Tensor bytes = draw_bytes(size, keep, generator);
    const auto state = stream.finish();
    const MaskStream expected(bytes.const_data_ptr<uint8_t>(), size);
    if (!same_state(state, implementation(generator)->engine().data()) ||
        std::memcmp(stream.at(0).bits, expected.at(0).bits, size / 8) != 0) {
      return false;
    }
  }
  return true;
}

} // namespace

bool mask_matches_eager() {
  static const bool matches = probe(); // once a process; builds that draw through MKL differ
  return matches;
}

ForwardMask::ForwardMask(int64_t size, double keep_probability) {
  const bool own = mask_matches_eager();
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  lock_ = std::unique_lock<std::mutex>(generator.mutex());
  state_before_ = generator.get_state();
  if (own) {
    stream_ = std::make_unique<MaskStream>(implementation(generator)->engine().data(), size, keep_probability);
    return;
  }
  lock_.unlock(); // bernoulli_ takes it
  const Tensor bytes = draw_bytes(size, keep_probability, std::nullopt);
  stream_ = std::make_unique<MaskStream>(bytes.const_data_ptr<uint8_t>(), size);
}

ForwardMask::~ForwardMask() = default;

void ForwardMask::commit() {
  if (lock_.owns_lock()) {
    at::mt19937 engine;
    engine.set_data(stream_->finish());
    implementation(at::detail::getDefaultCPUGenerator())->set_engine(engine);
    lock_.unlock();
  }
}

GeneratorSkip::GeneratorSkip(int64_t size, double keep_probability) {
  if (size == 0) {
    return;
  }
  if (!mask_matches_eager()) {
    state_before_ = ForwardMask(size, keep_probability).state_before();
    return;
  }
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  lock_ = std::unique_lock<std::mutex>(generator.mutex());
  state_before_ = generator.get_state();
  twister_ = std::make_unique<VectorTwister>(implementation(generator)->engine().data());
}

void GeneratorSkip::commit() {
  if (twister_ != nullptr) {
    at::mt19937 engine;
    engine.set_data(twister_->state());
    implementation(at::detail::getDefaultCPUGenerator())->set_engine(engine);
    lock_.unlock();
  }
}

std::unique_ptr<MaskStream> replay_mask(const Tensor& state, int64_t size, double keep_probability) {
  const at::Generator generator = restore(state);
  if (mask_matches_eager()) {
    return std::make_unique<MaskStream>(implementation(generator)->engine().data(), size, keep_probability);
  }
  const Tensor bytes = draw_bytes(size, keep_probability, generator);
  return std::make_unique<MaskStream>(bytes.const_data_ptr<uint8_t>(), size);
}

Tensor draw_mask(int64_t size, double keep_probability) {
  ForwardMask mask(size, keep_probability);
  mask.stream().require(size);
  Tensor bits = at::empty({div_up(size, 64) * 8}, at::kByte);
  std::memcpy(bits.mutable_data_ptr(), mask.stream().at(0).bits, bits.numel());
  mask.commit();
  return bits;
}

} // namespace gnfuse
