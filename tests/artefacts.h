#pragma once

#include <string>

#include "policies/spec.h"

namespace epikv {

// What an artefact of a policy that needs one would hold for a model of this shape (the `data` of
// policies/artefact.h), of numbers that mean nothing.
std::string ArtefactData(const PolicySpec& spec, const ModelShape& shape);

// The shape with such artefacts for every policy of the catalog that needs one.
ModelShape WithArtefacts(ModelShape shape, PolicyCatalog catalog);

}  // namespace epikv
