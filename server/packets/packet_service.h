#pragma once

#include <memory>
#include <optional>
#include <string>

#include "epikv/v1/packet.grpc.pb.h"
#include "epikv/v1/packet.pb.h"
#include "server/base/task_thread.h"
#include "server/call/call_scope.h"
#include "server/call/service.h"
#include "server/packets/packet_store.h"

namespace epikv {

v1::Packet ToProto(const PacketStore::Facts& facts);

// Who has a token is the tenant of his own requests and packets; an operator may speak for others.
// Without tokens everyone is who he says. field: of `tenant`, which is settled.
std::optional<grpc::Status> SettleTenant(const Identity& caller, absl::string_view field,
                                         std::string& tenant);

// What a server without packets answers.
grpc::Status PacketsOff();

// Lists and deletes packets; GenerationService makes them. Thread-safe; everything given to it
// outlives it, and it outlives its calls.
class PacketService final : public Service {
 public:
  PacketService(PacketStore& store, const Frontend& frontend);

 private:
  void List(const v1::ListPacketsRequest& request,
            const std::shared_ptr<PendingAnswer<v1::ListPacketsResponse>>& call);
  void Delete(const v1::DeletePacketRequest& request,
              const std::shared_ptr<PendingAnswer<v1::DeletePacketResponse>>& call);

  PacketStore& store_;
  TaskThread files_;  // where they are looked at
};

}  // namespace epikv
