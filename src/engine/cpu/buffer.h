// Memory that grows to what is asked for and is kept from pass to pass. Its contents are nobody's after a pass.
#pragma once

#include <cstdint>
#include <cstring>

#include "group/aligned_memory.h"

namespace clowder::cpu {

template <class T>
class Buffer {
 public:
  void reserve(std::int64_t count) {
    if (count <= capacity_) return;
    memory_ = allocate_zeroed(static_cast<std::size_t>(count) * sizeof(T));
    capacity_ = count;
  }

  T* data() const { return reinterpret_cast<T*>(memory_.get()); }
  std::int64_t bytes() const { return capacity_ * static_cast<std::int64_t>(sizeof(T)); }

  // Every byte becomes 0xff, so every element NaN.
  void poison() {
    if (capacity_ > 0) std::memset(memory_.get(), 0xff, static_cast<std::size_t>(capacity_) * sizeof(T));
  }

 private:
  AlignedMemory memory_;
  std::int64_t capacity_ = 0;
};

}  // namespace clowder::cpu
