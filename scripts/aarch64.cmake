# Cross-compiles the kernels for aarch64 with Debian's g++-aarch64-linux-gnu: make wheel-aarch64
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
