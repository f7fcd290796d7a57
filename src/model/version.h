// The version of Clowder; the build defines CLOWDER_VERSION where it knows better.
#pragma once

namespace clowder {

#ifdef CLOWDER_VERSION
inline constexpr const char* kVersion = CLOWDER_VERSION;
#else
inline constexpr const char* kVersion = "0.1.0";
#endif

}  // namespace clowder
