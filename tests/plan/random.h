// A small generator whose sequence depends on its seed alone, on every platform.
#pragma once

#include <cstdint>

namespace clowder::plan::explore {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  // splitmix64
  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  // In [0, bound), bound > 0.
  std::uint32_t below(std::uint32_t bound) {
    return static_cast<std::uint32_t>(((next() >> 32) * std::uint64_t{bound}) >> 32);
  }
  // In [low, high].
  std::int32_t between(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(below(static_cast<std::uint32_t>(high - low + 1)));
  }
  bool chance(double probability) { return static_cast<double>(next() >> 11) * 0x1.0p-53 < probability; }
  template <class T, int N>
  T pick(const T (&choices)[N]) {
    return choices[below(N)];
  }

 private:
  std::uint64_t state_;
};

}  // namespace clowder::plan::explore
