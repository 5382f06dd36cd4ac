# Toolchain: Debian's cross compiler, for a folder of Debian's arm64 packages (tests/aarch64.sh makes
# it). Programs run under an emulator of a processor with NEON and its dot product.

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

set(_root ${CMAKE_CURRENT_LIST_DIR}/../build/aarch64-root)
get_filename_component(_root ${_root} ABSOLUTE)
set(CMAKE_SYSROOT ${_root})
set(CMAKE_FIND_ROOT_PATH ${_root})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${_root})
set(ENV{PKG_CONFIG_LIBDIR} ${_root}/usr/lib/aarch64-linux-gnu/pkgconfig:${_root}/usr/share/pkgconfig)

# What LibTorch's libraries want besides, at link time and when they run.
set(_torch ${_root}/opt/torch/lib)
add_link_options(-Wl,-rpath-link,${_torch})
set(CMAKE_CROSSCOMPILING_EMULATOR
  qemu-aarch64 -cpu neoverse-n1 -L ${_root} -E LD_LIBRARY_PATH=${_torch})
