# find_package(clowder) gives the target clowder::clowder.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/clowder-targets.cmake)
