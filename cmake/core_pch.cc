// Compiles core_pch.h once; see runtime/CMakeLists.txt.
