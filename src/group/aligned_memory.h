// Zeroed memory on page boundaries.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace clowder {

inline constexpr std::size_t kPageBytes = 4096;

constexpr std::size_t round_up(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kPageBytes}); }
};
using AlignedMemory = std::unique_ptr<std::byte, AlignedDelete>;

inline AlignedMemory allocate_zeroed(std::size_t bytes) {
  AlignedMemory memory(static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, std::align_val_t{kPageBytes})));
  std::memset(memory.get(), 0, bytes);
  return memory;
}

}  // namespace clowder
