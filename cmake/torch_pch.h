#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/library.h>
#include <torch/script.h>
