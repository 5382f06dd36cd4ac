#pragma once
// What every file with tensors needs, but not torch/script.h. Few files need that one, and with it
// the precompiled header is half as large again: loading it is most of a policy's compilation.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
