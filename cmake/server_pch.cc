// Compiles server_pch.h once; see server/CMakeLists.txt.
