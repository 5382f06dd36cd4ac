#pragma once

#include <c10/core/Device.h>

#include <cstdint>

// A device whose memory the host cannot read: an address of it faults. It computes on the CPU, and
// refuses what a GPU refuses: operations over tensors of two devices, and calls of the flash kernel
// that break its contract (PyTorch 2.13, flash_attn/flash_api.cpp), but for float32.

namespace epikv {

// Registered when first asked for.
at::Device FakeDevice();

// Tensors that were copied from it to the host since the start; a number that was read is one.
int64_t CopiesFromFakeDevice();

// The next copy to the host fails, as it does where a kernel before it has.
void FailNextCopyFromFakeDevice();

// Calls of the flash kernel since the start.
int64_t FlashCallsOnFakeDevice();

}  // namespace epikv
