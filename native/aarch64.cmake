# For building on another machine: cmake --toolchain native/aarch64.cmake, with Debian's g++-aarch64-linux-gnu. The C++
# tests then run under qemu-user-static; so does the wheel (make wheel, make test-native-aarch64).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
find_program(JURYBOX_EMULATOR NAMES qemu-aarch64-static qemu-aarch64)
if(JURYBOX_EMULATOR)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${JURYBOX_EMULATOR};-L;/usr/aarch64-linux-gnu)
endif()
