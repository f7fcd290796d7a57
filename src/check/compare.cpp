#include "check/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check/random.h"

namespace clowder::check {
namespace {

// Squared. Below the normal numbers of bf16 and fp32, which begin at 2^-126, engines keep no relative precision, and
// sigmoids of far arguments are 0: what is missing there is no error.
constexpr double kVanishing = 0x1p-240;

// Squared norms of the error and of the reference over one part.
struct Norms {
  double error = 0.0;
  double reference = 0.0;

  void add(const Norms& other) {
    error += other.error;
    reference += other.reference;
  }

  double relative_to(double norm) const {
    if (!std::isfinite(error)) return std::numeric_limits<double>::infinity();
    if (error <= kVanishing) return 0.0;
    return norm == 0.0 ? std::numeric_limits<double>::infinity() : std::sqrt(error / norm);
  }
  double relative() const { return relative_to(reference); }
};

double worst(const std::vector<Norms>& parts) {
  double most = 0.0;
  for (const Norms& part : parts) most = std::max(most, part.relative());
  return most;
}

Norms norms_of(std::span<const float> actual, std::span<const double> reference) {
  Norms norms;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double value = static_cast<double>(actual[i]);
    // NaN and infinity alike must end as an infinite error, also where the reference is infinite.
    const double error = std::isfinite(value) ? value - reference[i] : std::numeric_limits<double>::infinity();
    norms.error += error * error;
    norms.reference += reference[i] * reference[i];
  }
  return norms;
}

double worst_row_error(std::span<const Norms> rows) {
  Norms sum;
  std::int64_t used = 0;
  for (const Norms& row : rows) {
    sum.add(row);
    used += row.reference > 0.0 ? 1 : 0;
  }
  const double mean = used == 0 ? 0.0 : sum.reference / static_cast<double>(used);
  double most = 0.0;
  for (const Norms& row : rows) most = std::max(most, row.relative_to(std::max(row.reference, mean)));
  return most;
}

// Four lanes that do not wait for each other, of a multiply-and-rotate hash over words of 64 bits.
class Hash {
 public:
  void add(std::uint64_t word) {
    std::uint64_t& lane = lanes_[count_++ % kLanes];
    lane = (lane ^ word) * kMultiplier;
    lane = (lane << 29) | (lane >> 35);
  }

  std::string finish(std::uint64_t bytes) const {
    std::uint64_t state = mix_bits(bytes);
    for (const std::uint64_t lane : lanes_) state = mix_bits(state * kMultiplier ^ lane);
    std::string text;
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[(state >> shift) & 15u];
    return text;
  }

 private:
  static constexpr int kLanes = 4;
  static constexpr std::uint64_t kMultiplier = 0x9fb21c651e98df25u;  // odd, with its bits spread
  std::uint64_t lanes_[kLanes] = {1, 2, 3, 4};
  std::uint64_t count_ = 0;
};

std::string digest_bytes(const void* data, std::size_t bytes) {
  Hash hash;
  const auto* source = static_cast<const unsigned char*>(data);
  for (std::size_t begin = 0; begin < bytes; begin += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, source + begin, std::min(sizeof word, bytes - begin));
    hash.add(word);
  }
  return hash.finish(bytes);
}

}  // namespace

Comparison compare(std::span<const float> actual, std::span<const double> reference, const TensorShape& shape) {
  const std::int64_t blocks = (shape.columns + kColumnBlock - 1) / kColumnBlock;
  std::vector<Norms> column_blocks(static_cast<std::size_t>(blocks));
  std::vector<Norms> rows(static_cast<std::size_t>(shape.rows()));
  std::vector<Norms> groups(static_cast<std::size_t>(shape.groups));
  Norms all;
  for (std::int64_t row = 0; row < shape.rows(); ++row) {
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t begin = row * shape.columns + block * kColumnBlock;
      const auto count = static_cast<std::size_t>(std::min(kColumnBlock, shape.columns - block * kColumnBlock));
      const auto offset = static_cast<std::size_t>(begin);
      const Norms part = norms_of(actual.subspan(offset, count), reference.subspan(offset, count));
      column_blocks[block].add(part);
      rows[row].add(part);
    }
    groups[row / shape.rows_per_group].add(rows[row]);
  }
  for (const Norms& group : groups) all.add(group);

  Comparison result;
  result.rel = all.relative();
  result.rel_worst_column_block = worst(column_blocks);
  result.rel_worst_row = worst(rows);
  result.rel_worst_expert = worst(groups);
  for (std::int64_t group = 0; group < shape.groups; ++group) {
    const std::span<const Norms> of_group(rows.data() + group * shape.rows_per_group,
                                          static_cast<std::size_t>(shape.rows_per_group));
    result.worst_row_error = std::max(result.worst_row_error, worst_row_error(of_group));
  }
  return result;
}

std::string digest(std::span<const bf16> values) { return digest_bytes(values.data(), values.size_bytes()); }
std::string digest(std::span<const float> values) { return digest_bytes(values.data(), values.size_bytes()); }

}  // namespace clowder::check
