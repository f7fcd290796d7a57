// A loop on several threads, for host code that prepares or checks. Which thread takes which index is left open, so
// bodies must not share what they write.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace clowder {

// Calls body(index) for each index in [0, count). Body must not throw.
template <class Body>
void parallel_for(std::int64_t count, int threads, const Body& body) {
  if (threads <= 1 || count <= 1) {
    for (std::int64_t index = 0; index < count; ++index) body(index);
    return;
  }
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    for (std::int64_t index = next++; index < count; index = next++) body(index);
  };
  std::vector<std::jthread> others;
  for (int i = 1; i < threads && i < count; ++i) others.emplace_back(work);
  work();
}

}  // namespace clowder
