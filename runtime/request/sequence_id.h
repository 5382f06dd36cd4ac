#pragma once

#include <cstdint>

namespace epikv {

// One sequence that the engine has opened, unique for the life of an engine. A completion of
// several has its own.
enum class SequenceId : int64_t {};

}  // namespace epikv
