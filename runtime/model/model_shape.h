#pragma once

#include "policies/spec.h"
#include "runtime/model/manifest.h"

namespace epikv {

// What policies and the KV cache may know of a model. Its artefacts are not there yet.
ModelShape ShapeOf(const Manifest& manifest);

}  // namespace epikv
