#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "epikv/v1/packet_file.pb.h"
#include "runtime/request/packet.h"

// Packets as files:
//   "epikvKV1", bytes of the head, the head (PacketHead), K rows, V rows
// Numbers are of 8 bytes, little-endian. A file's name is the SHA-256 digest of its bytes, and so
// is the packet's id: `sha256sum` tells whether a file is what its name says.

namespace epikv {

// A packet and what belongs to it.
struct NamedPacket {
  std::string id;  // "sha256:..."
  v1::PacketHead head;
  std::shared_ptr<const Packet> packet;
};

// head: whose it is and of which model; the rest is filled in.
NamedPacket NamePacket(v1::PacketHead head, std::shared_ptr<const Packet> packet);

// In `folder`, whole or not at all, on the disk when this returns. RESOURCE_EXHAUSTED: the disk is
// full. UNAVAILABLE: it fails otherwise.
absl::Status WritePacketFile(const std::string& folder, const NamedPacket& packet);

// The head alone. In both NOT_FOUND: there is no such file; FAILED_PRECONDITION: it is of another
// version of epikv; DATA_LOSS: it is not what its name says; UNAVAILABLE: it cannot be read.
absl::StatusOr<v1::PacketHead> ReadPacketHead(const std::string& folder, const std::string& id);
absl::StatusOr<NamedPacket> ReadPacketFile(const std::string& folder, const std::string& id);

// What a packet of this head takes in memory. DATA_LOSS, FAILED_PRECONDITION: as above.
absl::StatusOr<int64_t> PacketBytes(const std::string& id, const v1::PacketHead& head);

// Path of the file of this id, which is well-formed.
std::string PacketPath(const std::string& folder, const std::string& id);
// Of a file's name; empty: it is no packet's.
std::string PacketIdOf(const std::string& file_name);

}  // namespace epikv
