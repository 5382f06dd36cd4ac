#pragma once

#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "runtime/kv/kv_pool.h"
#include "runtime/kv/sequence_cache.h"
#include "runtime/model/manifest.h"
#include "runtime/request/packet.h"
#include "runtime/request/request.h"

// Packets, from a sequence's cache and into it. On the CPU; engine thread.

namespace epikv {

// What is cached of `tokens`, all that were. Requires: no scratch.
std::shared_ptr<const Packet> PacketOf(const SequenceCache& cache, const KvPool& pool,
                                       PositionMode positions, absl::Span<const int32_t> tokens);

// Caches a packet's tokens behind those that are cached. Their keys are turned by as much as they
// move (KV Packet, arXiv 2604.13226, section 3): in the model's dtype they are rounded once more,
// as int8 too. Requires: of the same model and format, and tables no finer than the cache's. Throws
// std::logic_error where lanes have no room.
void LoadPacket(const Packet& packet, const Manifest& manifest, PositionMode positions,
                SequenceCache& cache);

}  // namespace epikv
