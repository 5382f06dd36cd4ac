# LibTorch as an imported target of our own: find_package(Torch) defines a dummy
# protobuf::libprotobuf and, for CUDA wheels, demands a CUDA toolkit that we do not need.

if(NOT EPIKV_TORCH_DIR)
  message(FATAL_ERROR "EPIKV_TORCH_DIR is not set. It is the torch/ folder of an installed torch "
    "wheel, or an unpacked LibTorch; deploy/setup.sh installs one and prints it.")
endif()
set(_version_header ${EPIKV_TORCH_DIR}/include/torch/headeronly/version.h)
if(NOT EXISTS ${_version_header})
  set(_version_header ${EPIKV_TORCH_DIR}/include/torch/csrc/api/include/torch/version.h)
endif()
if(NOT EXISTS ${_version_header})
  message(FATAL_ERROR "EPIKV_TORCH_DIR=${EPIKV_TORCH_DIR} holds no LibTorch (no torch/version.h)")
endif()
file(STRINGS ${_version_header} _line REGEX "define TORCH_VERSION_(MAJOR|MINOR) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*" "\\1.\\2" EPIKV_TORCH_VERSION "${_line}")
if(EPIKV_TORCH_VERSION VERSION_LESS 2.10)
  message(FATAL_ERROR "LibTorch ${EPIKV_TORCH_VERSION} is too old: 2.10 or newer is needed")
endif()
message(STATUS "LibTorch ${EPIKV_TORCH_VERSION} from ${EPIKV_TORCH_DIR}")

add_library(torch_imported INTERFACE)
target_include_directories(torch_imported SYSTEM INTERFACE
  ${EPIKV_TORCH_DIR}/include ${EPIKV_TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(torch_imported INTERFACE EPIKV_TORCH_VERSION="${EPIKV_TORCH_VERSION}")
file(GLOB _gomp ${EPIKV_TORCH_DIR}/lib/libgomp*.so*)
# Not libtorch.so: in CUDA wheels it is what loads CUDA's libraries; runtime/forward/device.cc does, if asked.
# Their 180 KB of static thread-local storage leave no room in the 100 KB stacks that civetweb gives
# its threads: /metrics would not start.
target_link_libraries(torch_imported INTERFACE
  -Wl,--no-as-needed ${EPIKV_TORCH_DIR}/lib/libtorch_cpu.so
  -Wl,--as-needed ${EPIKV_TORCH_DIR}/lib/libc10.so ${_gomp} Threads::Threads)
# at::parallel_for is a plain loop in files that are compiled without OpenMP. The team is LibTorch's
# own libgomp, linked above: GCC's calls are its. Thread sanitizer does not know its barriers.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT EPIKV_SANITIZE MATCHES "thread")
  target_compile_options(torch_imported INTERFACE -fopenmp)
endif()
target_link_options(torch_imported INTERFACE -Wl,-rpath,${EPIKV_TORCH_DIR}/lib)
add_library(torch::torch ALIAS torch_imported)

# The one precompiled header of all files that include torch (20 to 30 s each without it).
add_library(epikv_torch_pch OBJECT ${PROJECT_SOURCE_DIR}/cmake/torch_pch.cc)
target_link_libraries(epikv_torch_pch PUBLIC epikv_options torch::torch)
target_precompile_headers(epikv_torch_pch PRIVATE ${PROJECT_SOURCE_DIR}/cmake/torch_pch.h)

# A step makes hundreds of small tensors, and glibc's malloc shows in a small model's profile. First of a
# program's libraries, so that all of them use it; sanitizers bring their own.
function(epikv_use_mimalloc name)
  if(NOT EPIKV_SANITIZE)
    find_package(mimalloc REQUIRED)
    target_compile_definitions(${name} PRIVATE EPIKV_MIMALLOC)
    target_link_options(${name} BEFORE PRIVATE
      "LINKER:--push-state,--no-as-needed,$<TARGET_FILE:mimalloc>,--pop-state")
  endif()
endfunction()
