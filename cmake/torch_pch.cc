// Compiles torch_pch.h once; see torch.cmake.
