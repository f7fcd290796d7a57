# The engine for Hopper GPUs, where there is a CUDA compiler. Sets CLOWDER_HAS_SM90.
#
# CLOWDER_CUDA: AUTO builds it if nvcc (12.9 or newer) and CUTLASS's headers are found, ON demands them, OFF leaves it
# out. CLOWDER_CUTLASS_INCLUDE: the folder that holds cute/; by default that of the Python package nvidia-cutlass.
set(CLOWDER_CUDA AUTO CACHE STRING "Build the sm90 engine: AUTO, ON or OFF")
set_property(CACHE CLOWDER_CUDA PROPERTY STRINGS AUTO ON OFF)
set(CLOWDER_CUTLASS_INCLUDE "" CACHE PATH "The folder that holds cute/")

# Why there is no such engine, unless CLOWDER_CUDA demands it.
function(clowder_without_cuda reason)
  if(CLOWDER_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CLOWDER_CUDA is ON, but ${reason}")
  endif()
  message(STATUS "clowder: no sm90 engine: ${reason}")
endfunction()

function(clowder_find_cutlass)
  if(CLOWDER_CUTLASS_INCLUDE)
    return()
  endif()
  find_package(Python QUIET COMPONENTS Interpreter)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -c
        "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(folder AND EXISTS "${folder}/source/include/cute")
    set(CLOWDER_CUTLASS_INCLUDE "${folder}/source/include" CACHE PATH "The folder that holds cute/" FORCE)
  endif()
endfunction()

macro(clowder_find_cuda)
  set(CLOWDER_HAS_SM90 OFF)
  if(NOT CLOWDER_CUDA STREQUAL "OFF")
    include(CheckLanguage)
    find_program(CLOWDER_NVCC nvcc HINTS ENV CUDACXX PATHS /usr/local/cuda/bin)
    clowder_find_cutlass()
    if(NOT CLOWDER_NVCC)
      clowder_without_cuda("nvcc is missing: install the CUDA toolkit, 12.9 or newer")
    elseif(NOT CLOWDER_CUTLASS_INCLUDE)
      clowder_without_cuda("CUTLASS's headers are missing: pip install --no-deps -r requirements/cuda.txt")
    else()
      if(NOT CMAKE_CUDA_COMPILER)
        set(CMAKE_CUDA_COMPILER ${CLOWDER_NVCC})
      endif()
      if(NOT CMAKE_CUDA_HOST_COMPILER)
        set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
      endif()
      set(CMAKE_CUDA_ARCHITECTURES 90a-real)
      enable_language(CUDA)
      if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
        clowder_without_cuda("nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: 12.9 or newer is needed")
      else()
        set(CMAKE_CUDA_STANDARD 20)
        set(CMAKE_CUDA_STANDARD_REQUIRED ON)
        set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
        find_package(CUDAToolkit REQUIRED)
        set(CLOWDER_HAS_SM90 ON)
      endif()
    endif()
  endif()
endmacro()

# The engine's kernels, as objects of the library.
function(clowder_add_sm90_kernels)
  file(GLOB kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/engine/sm90/*.cu)
  add_library(clowder_sm90_kernels OBJECT ${kernels})
  target_include_directories(clowder_sm90_kernels PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src
                                                          ${CLOWDER_CUTLASS_INCLUDE})
  target_compile_options(clowder_sm90_kernels PRIVATE
    --expt-relaxed-constexpr
    # A contraction that one kernel gets and another does not would change bits.
    -fmad=false
    # A spill in a main loop costs more than any of our tricks wins.
    -Xptxas=-warn-spills)
  if(CLOWDER_WERROR)
    target_compile_options(clowder_sm90_kernels PRIVATE -Xptxas=-Werror)
  endif()
  set_target_properties(clowder_sm90_kernels PROPERTIES CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()
