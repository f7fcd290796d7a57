# All .cpp files below the given folders.
function(clowder_glob out)
  set(sources)
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
    list(APPEND sources ${found})
  endforeach()
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()

# Gives each file of kernels the flags of its instruction set, or leaves it out where the target has none of them.
# A macro, because a source's properties hold in the folder that sets them.
macro(clowder_select_kernels sources)
  include(CheckCXXSourceCompiles)
  check_cxx_source_compiles("
    #if !defined(__x86_64__)
    #error another architecture
    #endif
    int main() {}" CLOWDER_HAS_X86_KERNELS)
  if(CLOWDER_HAS_X86_KERNELS)
    set(avx2_flags -mavx2 -mfma)
    set(avx512_flags ${avx2_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512)
    set_source_files_properties(src/engine/cpu/kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "${avx2_flags}")
    set_source_files_properties(src/engine/cpu/kernels_avx512.cpp PROPERTIES COMPILE_OPTIONS "${avx512_flags}")
  else()
    list(FILTER ${sources} EXCLUDE REGEX "/kernels_avx(2|512)\\.cpp$")
  endif()
  # Loops become vector code where no exception flag and no errno has to be kept; values stay the same.
  foreach(source IN LISTS ${sources})
    if(source MATCHES "/kernels_[^/]*\\.cpp$")
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS -fno-trapping-math -fno-math-errno)
    endif()
  endforeach()
endmacro()

# Header-only packages may come with the build requirements of Python instead of the system.
function(clowder_add_packages_of_python)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(NOT Python_Interpreter_FOUND)
    return()
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; print(u.find_spec('pgm_build_deps').submodule_search_locations[0])"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(folder)
    list(APPEND CMAKE_PREFIX_PATH ${folder}/cli11 ${folder}/nlohmann_json)
    set(CMAKE_PREFIX_PATH "${CMAKE_PREFIX_PATH}" PARENT_SCOPE)
  endif()
endfunction()

# find_package that says in one line how to get what is missing.
macro(clowder_find_package name system_package)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    message(FATAL_ERROR "${name} is missing: pip install -r requirements/build.txt, "
                        "or sudo apt-get install ${system_package}")
  endif()
endmacro()

# The targets of the library, all made of the same objects:
#   clowder            what users link, static or shared as BUILD_SHARED_LIBS says; only CLOWDER_API is visible
#   clowder_internal   what our own programs and tests link: they know what is hidden in a shared library
function(clowder_add_library)
  add_library(clowder_objects OBJECT ${ARGN})
  target_include_directories(clowder_objects PRIVATE ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(clowder_objects PRIVATE clowder_options)
  set_target_properties(clowder_objects PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)

  set(objects $<TARGET_OBJECTS:clowder_objects>)
  if(CLOWDER_HAS_SM90)
    clowder_add_sm90_kernels()
    list(APPEND objects $<TARGET_OBJECTS:clowder_sm90_kernels>)
  endif()

  add_library(clowder ${objects})
  add_library(clowder::clowder ALIAS clowder)
  clowder_set_usage(clowder)
  set_target_properties(clowder PROPERTIES
    LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  if(NOT BUILD_SHARED_LIBS)
    add_library(clowder_internal ALIAS clowder)
    return()
  endif()
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.ld)
  target_link_options(clowder PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined)
  set_target_properties(clowder PROPERTIES LINK_DEPENDS ${exports})
  add_library(clowder_internal STATIC EXCLUDE_FROM_ALL ${objects})
  clowder_set_usage(clowder_internal)
  set_target_properties(clowder_internal PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

function(clowder_set_usage target)
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC Threads::Threads)
  if(CLOWDER_HAS_SM90)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
endfunction()

# What `cmake --install` puts where: the library, headers, the package for find_package(clowder), the command.
function(clowder_install)
  include(GNUInstallDirs)
  include(CMakePackageConfigHelpers)
  set(folder ${CMAKE_INSTALL_LIBDIR}/cmake/clowder)
  install(TARGETS clowder EXPORT clowder_targets)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/clowder DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT clowder_targets NAMESPACE clowder:: FILE clowder-targets.cmake DESTINATION ${folder})
  # Below 1.0 any minor version may change the interface.
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/clowder-config-version.cmake COMPATIBILITY SameMinorVersion)
  # A static library leaves it to its users to link the CUDA runtime.
  set(CLOWDER_NEEDS_CUDA OFF)
  if(CLOWDER_HAS_SM90 AND NOT BUILD_SHARED_LIBS)
    set(CLOWDER_NEEDS_CUDA ON)
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/clowder-config.cmake.in ${PROJECT_BINARY_DIR}/clowder-config.cmake @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/clowder-config.cmake ${PROJECT_BINARY_DIR}/clowder-config-version.cmake
    DESTINATION ${folder})
  if(TARGET clowder_cli)
    install(TARGETS clowder_cli)
  endif()
endfunction()
