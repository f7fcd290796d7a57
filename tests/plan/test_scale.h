// How much a test does. CLOWDER_TEST_SCALE=small is for builds that are slow, such as those with sanitizers.
#pragma once

#include <cstdlib>
#include <string_view>

namespace clowder::plan::explore {

inline bool is_small_scale() {
  const char* scale = std::getenv("CLOWDER_TEST_SCALE");
  return scale != nullptr && std::string_view(scale) == "small";
}

template <class T>
T scaled(T usual, T small) {
  return is_small_scale() ? small : usual;
}

}  // namespace clowder::plan::explore
