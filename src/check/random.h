// A counter-based generator: every value is a function of the seed, its tensor and its index, so that neither the
// number of threads nor of ranks changes data.
#pragma once

#include <cmath>
#include <cstdint>

namespace clowder::check {

// Names a stream of values; numbers are part of what a seed means.
enum class Stream : std::uint64_t {
  kX = 1,
  kDout,
  kTopkWeights,
  kW13,
  kW2,
  kSharedW13,
  kSharedW2,
  kMainW13,
  kMainW2,
  kMainSharedW13,
  kMainSharedW2,
  kRouting,
  kHotSlots,
  kDroppedSlots,
  kBadSlots,
};

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
inline std::uint64_t mix_bits(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

class Random {
 public:
  Random(std::uint64_t seed, Stream stream)
      : key_(mix_bits(mix_bits(seed + kGolden) ^ (static_cast<std::uint64_t>(stream) * kGolden))) {}

  std::uint64_t bits(std::uint64_t index) const { return mix_bits(mix_bits(key_ + index * kGolden) ^ key_); }

  // In (0, 1), never an end.
  double uniform(std::uint64_t index) const { return (static_cast<double>(bits(index) >> 12) + 0.5) * 0x1p-52; }

  // Box and Muller; values 2 i and 2 i + 1 share their two uniform numbers.
  double normal(std::uint64_t index) const {
    constexpr double kTwoPi = 6.283185307179586;
    const double radius = std::sqrt(-2.0 * std::log(uniform(index | 1u)));
    const double angle = kTwoPi * uniform(index & ~std::uint64_t{1});
    return radius * ((index & 1u) != 0 ? std::sin(angle) : std::cos(angle));
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;
  std::uint64_t key_;
};

}  // namespace clowder::check
