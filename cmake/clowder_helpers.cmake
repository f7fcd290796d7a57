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
