// Zeroed memory on page boundaries.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <new>

namespace clowder {

inline constexpr std::size_t kPageBytes = 4096;

constexpr std::size_t round_up(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct Unmap {
  std::size_t bytes = 0;
  void operator()(std::byte* memory) const { ::munmap(memory, bytes); }
};
using AlignedMemory = std::unique_ptr<std::byte, Unmap>;

// Pages that are never touched cost nothing: buffers for the worst case are mostly empty.
inline AlignedMemory allocate_zeroed(std::size_t bytes) {
  const std::size_t mapped = round_up(bytes == 0 ? 1 : bytes, kPageBytes);
  void* memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return AlignedMemory(static_cast<std::byte*>(memory), Unmap{mapped});
}

}  // namespace clowder
