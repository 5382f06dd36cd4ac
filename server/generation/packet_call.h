#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "epikv/v1/packet.pb.h"
#include "runtime/base/reason.h"
#include "server/generation/collect_call.h"
#include "server/packets/packet_service.h"
#include "server/packets/packet_store.h"

namespace epikv {

// A call of CreatePacket: collects a result, and keeps what its request has cached.
class PacketCall final : public CollectCall<v1::GenerateResult> {
 public:
  // keeping: where packets are named and written, which takes a while.
  PacketCall(grpc::CallbackServerContext& context, const Frontend& frontend, LiveCalls& live,
             int64_t max_bytes, PacketStore& store, TaskThread& keeping, Use use)
      : CollectCall("PacketService/CreatePacket", context, frontend, live, max_bytes,
                    std::move(use)),
        store_(store),
        keeping_(keeping) {}

  void Ask(bool soft_tokens) { asked_.soft_tokens = soft_tokens; }
  PacketAsked asked() const override { return asked_; }
  // Once its request is known. head: whose it is, and of which model.
  void Expect(v1::PacketHead head, PacketStore::Room room) {
    head_ = std::move(head);
    room_ = std::move(room);
  }

 private:
  void Answer() override {
    const std::string& client = scope().caller().name;
    std::shared_ptr<const Packet> packet = TakePacket();
    if (packet == nullptr) {
      return Fail(ToGrpc(absl::ResourceExhaustedError("there was no memory for the packet")));
    }
    const int64_t bytes = packet->bytes();
    keeping_.Post(client, bytes, [this, packet = std::move(packet)]() mutable {
      absl::StatusOr<PacketStore::Facts> kept =
          store_.Put(std::move(head_), std::move(packet), std::move(room_));
      if (!kept.ok()) {
        AddPushback(scope().context(), RetryAfterOf(kept.status()));
        return Fail(ToGrpc(kept.status()));
      }
      v1::CreatePacketResponse response;
      *response.mutable_packet() = ToProto(*kept);
      *response.mutable_result() = std::move(result());
      EndWith(response);
    });
  }

  PacketStore& store_;
  TaskThread& keeping_;
  PacketAsked asked_ = {.keep = true};
  v1::PacketHead head_;
  PacketStore::Room room_{nullptr, 0};
};

}  // namespace epikv
