// The cross-rank flags, each in its reader's memory. What a writer raises reaches a reader at some later time, at each
// reader at another, and in the writer's order.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/task.h"
#include "random.h"

namespace clowder::plan::explore {

class FlagBoard {
 public:
  struct Arrival {
    std::int32_t reader = 0;
    std::int32_t writer = 0;
    FlagKind kind = FlagKind::kDone;
  };

  void reset(std::int32_t num_ranks) {
    num_ranks_ = num_ranks;
    const auto pairs = static_cast<std::size_t>(num_ranks) * static_cast<std::size_t>(num_ranks);
    values_.assign(pairs * kNumFlagKinds, 0);
    pairs_.assign(pairs, Pair{});
    pending_.clear();
  }

  std::int32_t value(std::int32_t reader, FlagKind kind, std::int32_t writer) const {
    return values_[index_of(reader, writer) * kNumFlagKinds + static_cast<std::size_t>(kind)];
  }
  bool has_pending() const { return !pending_.empty(); }
  // A pair in whose queue no place is left must deliver first.
  bool is_full(std::int32_t reader, std::int32_t writer) const {
    return pairs_[index_of(reader, writer)].count == kCapacity;
  }

  void raise(std::int32_t reader, FlagKind kind, std::int32_t writer, std::int32_t epoch) {
    const std::size_t index = index_of(reader, writer);
    Pair& pair = pairs_[index];
    if (pair.count == 0) {
      pair.position = pending_.size();
      pending_.push_back(index);
    }
    pair.raised[static_cast<std::size_t>((pair.first + pair.count++) % kCapacity)] = {kind, epoch};
  }

  Arrival deliver_any(Random& random) {
    return deliver_pair(pending_[random.below(static_cast<std::uint32_t>(pending_.size()))]);
  }
  Arrival deliver(std::int32_t reader, std::int32_t writer) { return deliver_pair(index_of(reader, writer)); }

 private:
  static constexpr std::int32_t kCapacity = 8;
  struct Raised {
    FlagKind kind = FlagKind::kDone;
    std::int32_t epoch = 0;
  };
  struct Pair {
    std::array<Raised, kCapacity> raised;
    std::int32_t first = 0;
    std::int32_t count = 0;
    std::size_t position = 0;  // in pending_, while count > 0
  };

  std::size_t index_of(std::int32_t reader, std::int32_t writer) const {
    return static_cast<std::size_t>(reader) * static_cast<std::size_t>(num_ranks_) + static_cast<std::size_t>(writer);
  }

  Arrival deliver_pair(std::size_t index) {
    Pair& pair = pairs_[index];
    const Raised raised = pair.raised[static_cast<std::size_t>(pair.first)];
    pair.first = (pair.first + 1) % kCapacity;
    if (--pair.count == 0) {
      pending_[pair.position] = pending_.back();
      pairs_[pending_.back()].position = pair.position;
      pending_.pop_back();
    }
    values_[index * kNumFlagKinds + static_cast<std::size_t>(raised.kind)] = raised.epoch;
    const auto ranks = static_cast<std::size_t>(num_ranks_);
    return {static_cast<std::int32_t>(index / ranks), static_cast<std::int32_t>(index % ranks), raised.kind};
  }

  std::int32_t num_ranks_ = 0;
  std::vector<std::int32_t> values_;
  std::vector<Pair> pairs_;
  std::vector<std::size_t> pending_;  // pairs with something under way
};

}  // namespace clowder::plan::explore
